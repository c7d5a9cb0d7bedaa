"""Every planned block was measured to its end."""

from __future__ import annotations

from reports.gates.gate import Evidence, Gate, passing


def judge(evidence: Evidence) -> Gate:
    """Finished blocks against the manifest's order. A part of an experiment is no experiment: which blocks are missing
    may depend on how they went."""
    planned = list(enumerate(evidence.run.manifest.order, 1))
    finished = {(loaded.block.index, loaded.block.backend) for loaded in evidence.run.blocks}
    missing = [f"{index:02d}-{name}" for index, name in planned if (index, name) not in finished]
    return Gate(
        id="blocks_finished",
        title="All planned blocks finished",
        status=passing(not missing),
        number=len(planned) - len(missing),
        limit=len(planned),
        unit="blocks",
        explanation="Every block of the planned order was measured to its end."
        if not missing
        else f"Missing: {', '.join(missing)}. Finish the run with compare --resume.",
    )
