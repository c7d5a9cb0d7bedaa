"""Output parity: does the candidate emit what the baseline emits, but for noise? A baseline against itself sets the
floor, before the candidate is looked at.

Statistics, arrays in and findings out:

divergences.py  KL, forced tokens' logprobs and most probable tokens, position by position
outliers.py     positions farther apart than noise (P2, P4, P6, P7, D5)
ratio.py        mean KL by the floor's (P1), its drift, by context (P5) and by batch (P6)
agreement.py    most probable tokens that differ (P1)
survival.py     first divergence of free runs, and the gap at it (P3)
calibration.py  draws against their own logprobs (D3)
lengths.py      lengths and stops at the limit (L1)
repetition.py   loops (L2), runs of one token (D7)
acceptance.py   accepted drafts by position (S1)
shares.py       requests that went wrong (D4, D6)
power.py        how much has to be replayed to see a fault

From records to a verdict:

load.py         RUN/parity, positions in slices
compare.py      two arms, position by position
arms.py         what a check's judge looks at, and what judges share
checks/         one judge a check
faults.py       which check is to see which fault
verdict.py      PASS, FAIL or INCONCLUSIVE
result.py       a finding, a check's verdict, and all of it, as data
"""
