"""The effect, if there is one, is larger than what blocks differ by anyway."""

from __future__ import annotations

import math

from reports.gates.gate import Evidence, Gate, passing


def judge(evidence: Evidence) -> Gate:
    """Noise floor from the blocks' own P90 interactivity (reports.intervals.noise_floor). Fails when the interval
    excludes 1 but the ratio lies within the floor."""
    noise, effect = evidence.noise, evidence.interactivity
    if noise.relative is None:
        return Gate(
            id="noise_floor",
            title="Noise floor",
            status="unknown",
            number=None,
            limit=None,
            unit="share",
            explanation=f"Unknown: {noise.reason}.",
        )
    ratio = effect.ratio if effect else None
    below = False
    size = None
    if ratio is not None and ratio.value is not None:
        size = abs(math.log(ratio.value))
        excludes_one = ratio.low is not None and ratio.high is not None and not ratio.low <= 1 <= ratio.high
        below = excludes_one and size < math.log1p(noise.relative)
    return Gate(
        id="noise_floor",
        title="Noise floor",
        status=passing(not below),
        number=math.expm1(size) if size is not None else None,
        limit=noise.relative,
        unit="share",
        number_is="effect",
        limit_is="floor",
        explanation=(
            f"An effect of {math.expm1(size):.2%} lies below the floor of {noise.relative:.2%}: measure more blocks. "
            if below and size is not None
            else ""
        )
        + "An effect whose interval excludes 1 must be larger than the floor: "
        f"{evidence.thresholds.noise_multiple:g} standard errors of block-to-block noise "
        f"({noise.degrees} {'degree' if noise.degrees == 1 else 'degrees'} of freedom), backend and linear order "
        "removed.",
        numbers={"drift per block": noise.drift_per_block},
    )
