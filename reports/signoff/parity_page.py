"""Output parity in words: what HTML and Markdown share."""

from __future__ import annotations

from reports.parity.result import CheckVerdict, NamedCurve, Parity, Reproducer
from reports.render import words
from reports.signoff.grid import Grid, Row, plain


def parity_facts(parity: Parity) -> list[tuple[str, str]]:
    """What was measured, and in which order it was fixed."""
    found, order = parity.thresholds, parity.order
    itself = [each.found for each in parity.itself]
    repeats = [
        f"{round((each.statistic or 0.0) * each.n):,} outliers in {each.n:,} positions of the candidate against itself"
        for each in itself
    ]
    return [
        ("Verdict", parity.outcome),
        ("Battery", f"{parity.budget}; arms {', '.join(parity.arms)}; {parity.positions:,} positions recorded"),
        ("Plan", f"registered {order.registered_utc}, SHA-256 {order.plan_sha256}"),
        ("Floor fixed", order.floor_fixed_utc or "never"),
        ("First request to the candidate", order.first_candidate_request_utc or "none yet"),
        ("Outlier", f"beyond {found.tau:.3g} nats, by {found.by}, from {found.positions:,} positions of A1-A2"),
        ("Does the candidate repeat itself", ", ".join(repeats) or "not known: B1 and B2 have no checks in common"),
    ]


def checks(parity: Parity) -> Grid:
    """One row a check."""
    head = ["", "check", "of", "statistic", "floor", "at most", "n", "p", "what was found"]
    return Grid(head, [_check(each) for each in parity.checks], right=(3, 4, 5, 6, 7))


def _check(check: CheckVerdict) -> Row:
    found = check.finding
    held = any(each.held and each.found == found for each in check.measures)
    below = [*check.reasons, *([_reproducer(check.reproducer)] if check.reproducer is not None else [])]
    return Row(
        [
            (check.outcome, ""),
            (f"{check.id} {check.title}", ""),
            (check.of or words.DASH, ""),
            (_number(found.statistic if found is not None else None), ""),
            (_number(found.floor if found is not None else None), ""),
            (
                _number(found.bound if found is not None else None),
                f"limit {found.limit:.3g}" if held and found is not None and found.limit is not None else "",
            ),
            (words.count(found.n) if found is not None else words.DASH, found.unit if found is not None else ""),
            (_number(check.holm_p), ""),
            (check.said if check.outcome != "not run" else "", "\n".join(below)),
        ],
        "fail-row" if check.outcome == "FAIL" else "",
    )


def _reproducer(found: Reproducer) -> str:
    where = f", position {found.position}" if found.position is not None else ""
    seed = f", seed {found.seed}" if found.seed is not None else ""
    return (
        f"Smallest reproducer: {found.check} case {found.case} on {found.arm}, prompt {found.prompt_digest} "
        f"({found.prompt_tokens:,} tokens){seed}, temperature {found.temperature:g}, batch {found.batch}{where}."
    )


def strata(parity: Parity) -> Grid:
    """KL and outliers by batch size, context and the like."""
    head = ["check", "by", "", "positions", "mean KL", "floor", "outliers", "floor", "p"]
    rows = [
        [
            check.id,
            each.by,
            each.name,
            words.count(each.n),
            _number(each.kl),
            _number(each.floor_kl),
            words.count(each.outliers),
            words.count(each.floor_outliers),
            _number(each.holm_p),
        ]
        for check in parity.checks
        for each in check.strata
    ]
    return plain(head, rows, right=(3, 4, 5, 6, 7, 8))


def divergences(parity: Parity) -> Grid:
    """Survival of pairs of free replies, in a row each."""
    head = ["pair", "replies", "pairs", "differ", "half differ after, tokens", "first difference at"]
    rows = [
        [
            each.pair,
            each.variant,
            words.count(each.pairs),
            words.count(each.diverged),
            words.count(_median(each)),
            words.count(each.steps[0] if each.steps else None),
        ]
        for each in parity.curves
    ]
    return plain(head, rows, right=(2, 3, 4, 5))


def _median(curve: NamedCurve) -> int | None:
    below = (step for step, left in zip(curve.steps, curve.survival, strict=True) if left <= 0.5)
    return next(below, None)


def fault(parity: Parity) -> Grid:
    """The fault that was put before the baseline."""
    found = parity.fault
    head = ["", "fault", "number", "expected", "seen by", "at n"]
    if found is None:
        return plain(head, [])
    row = [
        "held" if found.holds else "did not hold",
        found.fault,
        words.count(found.number),
        ", ".join(found.expected) or "no check",
        ", ".join(found.seen) or "no check",
        f"{found.n:,} {found.unit}" if found.n is not None else words.DASH,
    ]
    return plain(head, [row], right=(2, 5))


def _number(value: float | None) -> str:
    return words.DASH if value is None else f"{value:.3g}"
