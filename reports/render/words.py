"""Numbers and short phrases as people read them, the same in HTML and Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence

from reports.analysis import Analysis
from reports.coverage import PathCoverage, Stratum
from reports.gates.gate import Gate
from reports.intervals import Estimate

DASH = "–"
_SHORT_S = 180.0
_SAME_SHARE = 1e-9


def number(value: float | None, digits: int = 3) -> str:
    """Significant digits, thousands separated; a dash for null."""
    if value is None:
        return DASH
    if value == 0:
        return "0"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{places}f}"


def count(value: int | None) -> str:
    """Thousands separated; a dash for null."""
    return f"{value:,}" if value is not None else DASH


def share(value: float | None) -> str:
    """As per cent with two decimals below 10 %, one above."""
    if value is None:
        return DASH
    return f"{value:.1%}" if abs(value) >= 0.1 else f"{value:.2%}"


def seconds(value: float | None) -> str:
    """In ms below 10 s."""
    if value is None:
        return DASH
    return f"{number(value * 1e3)} ms" if abs(value) < 10 else f"{number(value)} s"


def duration(value: float) -> str:
    """In seconds below three minutes, in minutes above."""
    return f"{number(value)} s" if value < _SHORT_S else f"{number(value / 60)} min"


def settings(values: dict[str, str | int | float | bool | None]) -> str:
    """What is set, in words: "draft tokens 2, profile toy"; nulls and empties are left out."""
    words = {True: "on", False: "off"}
    return (
        ", ".join(
            f"{key.replace('_', ' ')} "
            + (words[value] if isinstance(value, bool) else value if isinstance(value, str) else _plain(value))
            for key, value in values.items()
            if value is not None and value != ""
        )
        or DASH
    )


def _plain(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def degrees(count: int) -> str:
    """ "1 degree of freedom"."""
    return f"{count} {'degree' if count == 1 else 'degrees'} of freedom"


def between(low: str, high: str) -> str:
    """ "low to high", the unit once where both have the same."""
    figure, _, unit = low.rpartition(" ")
    return f"{figure} to {high}" if figure and high.endswith(f" {unit}") else f"{low} to {high}"


def amount(value: float | None, unit: str) -> str:
    """A level in its unit: "s" or "tok/s"."""
    return seconds(value) if unit == "s" else number(value)


def level(estimate: Estimate, unit: str) -> str:
    """Value, or why there is none."""
    return amount(estimate.value, unit) if estimate.value is not None else estimate.reason.split(":")[0] or DASH


def interval(estimate: Estimate, unit: str) -> str:
    """ "low to high"; empty without an interval."""
    if estimate.low is None and estimate.high is None:
        return ""
    high = amount(estimate.high, unit) if estimate.high is not None else "not reached"
    return between(amount(estimate.low, unit), high)


def ratio(estimate: Estimate) -> str:
    """With three decimals."""
    return f"{estimate.value:.3f}" if estimate.value is not None else DASH


def ratio_interval(estimate: Estimate) -> str:
    """With three decimals; empty without an interval."""
    if estimate.low is None or estimate.high is None:
        return ""
    return f"{estimate.low:.3f} to {estimate.high:.3f}"


def signed(value: float | None, unit: str) -> str:
    """A difference with its sign."""
    if value is None:
        return DASH
    return ("+" if value > 0 else "") + amount(value, unit)


def signed_interval(estimate: Estimate, unit: str) -> str:
    """A difference's interval."""
    if estimate.low is None or estimate.high is None:
        return ""
    return between(signed(estimate.low, unit), signed(estimate.high, unit))


def gate_number(gate: Gate) -> str:
    """A gate's number in its unit, behind its word."""
    return f"{gate.number_is} {_gate_amount(gate, gate.number)}".strip()


def gate_limit(gate: Gate) -> str:
    """A gate's limit in its unit, behind its word."""
    return f"{gate.limit_is} {_gate_amount(gate, gate.limit)}".strip()


def _gate_amount(gate: Gate, value: float | None) -> str:
    if value is None:
        return DASH
    match gate.unit:
        case "share":
            return share(value)
        case "ms" | "s":
            return f"{number(value)} {gate.unit}"
        case "turns" | "blocks":
            return f"{value:g} {gate.unit}"
        case _:
            return number(value)


def gate_details(gate: Gate) -> list[str]:
    """A gate's tests, or else its further numbers; those in seconds or milliseconds have their unit in the key."""
    return gate.tests or [_detail(gate, key, value) for key, value in gate.numbers.items()]


def _detail(gate: Gate, key: str, value: float | None) -> str:
    for unit in ("ms", "s"):
        if key.endswith(f", {unit}"):
            return f"{key.removesuffix(f', {unit}')} {number(value)} {unit}"
    return f"{key} {share(value) if gate.unit == 'share' else number(value)}"


def counted(counts: dict[str, int]) -> str:
    """ "3 x http 503, 1 x stalled"; "none" for nothing."""
    return ", ".join(f"{count:,} x {name}" for name, count in counts.items()) or "none"


def path_unit(path: PathCoverage) -> str:
    """What amounts and shares of a path's strata are of."""
    return "steps" if path.total is not None and path.total.tokens is None else "tokens"


def path_summary(path: PathCoverage) -> str:
    """A backend's shares of decode steps and tokens, in a sentence."""
    total = path.total
    if total is None:
        return "unknown."
    steps = f"{share(total.share_of_steps)} of {total.steps:,} decode steps" if total.steps is not None else ""
    tokens = f"{share(total.share_of_tokens)} of {total.tokens:,} decode tokens" if total.tokens is not None else ""
    said = f"{path.counted}: {' and '.join(filter(None, [steps, tokens]))}."
    if path.at_least is not None and path.at_most is not None and path.at_most - path.at_least > _SAME_SHARE:
        said += f" The true share lies between {share(path.at_least)} and {share(path.at_most)}."
    return said


def stratum(found: Stratum | None) -> tuple[str, str, str]:
    """Tokens (or steps), the share that is counted, and the others by reason; dashes for none."""
    if found is None:
        return DASH, DASH, DASH
    amount = found.tokens if found.tokens is not None else found.steps
    return count(amount), share(found.share), ", ".join(f"{why} {share(x)}" for why, x in found.reasons.items()) or DASH


def stamps(analyses: Sequence[Analysis]) -> list[str]:
    """The stamps of all runs that a page shows, each once."""
    return list(dict.fromkeys(stamp for analysis in analyses for stamp in analysis.stamps))


def headline(analysis: Analysis) -> str:
    """The one number with its interval, in a sentence's half."""
    effect = analysis.headlines[0].effect
    if effect is None or effect.ratio.value is None:
        return "P90 interactivity, candidate / baseline: nothing to compare"
    within = f" (95 % interval {ratio_interval(effect.ratio)})" if effect.ratio.low is not None else " (no interval)"
    return f"P90 interactivity, candidate / baseline: {ratio(effect.ratio)}{within}"
