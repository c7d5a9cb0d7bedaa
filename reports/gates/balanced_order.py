"""A drift over the experiment hits both backends alike."""

from __future__ import annotations

from reports.gates.gate import Evidence, Gate, passing


def judge(evidence: Evidence) -> Gate:
    """Mean position of the candidate's finished blocks less the baseline's. In A B B A it is 0 and a linear drift
    cancels; in A B it is 1 and the whole drift of a block would be taken for an effect."""
    baseline, candidate = evidence.names
    places = {
        name: [block.index for block in evidence.blocks if block.backend == name] for name in (baseline, candidate)
    }
    both = all(len(found) >= 2 for found in places.values())
    if all(places.values()):
        means = {name: sum(found) / len(found) for name, found in places.items()}
        imbalance = means[candidate] - means[baseline]
    else:
        imbalance = None
    order = " ".join("A" if block.backend == baseline else "B" for block in evidence.blocks)
    return Gate(
        id="balanced_order",
        title="Balanced order",
        status=passing(both and imbalance is not None and abs(imbalance) < 1e-9),
        number=imbalance,
        limit=0,
        unit="blocks",
        explanation=f"Order of finished blocks: {order or 'none'} (A {baseline}, B {candidate}): "
        + (
            f"{baseline} has {len(places[baseline])}, {candidate} {len(places[candidate])}. "
            if not both or imbalance is None
            else f"{candidate} comes {abs(imbalance):g} {'later' if imbalance > 0 else 'earlier'} on average. "
            if abs(imbalance) >= 1e-9
            else "balanced. "
        )
        + "There must be at least two of each, at the same mean position.",
    )
