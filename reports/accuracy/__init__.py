"""Accuracy: whether the candidate's answers stayed as good, from the answers in RUN/evals. Judges, and asks nothing.

answers.py  the records, checked and as arrays of items x repeats
drop.py     the drop of the mean score: interval, and the upper bound that is held against the margin
harm.py     tests of "the candidate is worse", and Holm's adjustment
looks.py    several looks at one run without several chances
power.py    how many repeats a margin needs, and what a number of them can see
measure.py  all of these of one exam
verdict.py  PASS, FAIL or INCONCLUSIVE for every task and for the plan; reasons.py why, in sentences; result.py as data
"""
