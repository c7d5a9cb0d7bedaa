"""No server went away in the middle of a block."""

from __future__ import annotations

from reports.gates.gate import Evidence, Gate, passing


def judge(evidence: Evidence) -> Gate:
    """Attempts at blocks that ended because the server was gone. An attempt that is measured again counts against its
    backend as a failed turn does: only what it survived would be judged otherwise."""
    lost = {name: evidence.run.cut_short(name).get("server gone", 0) for name in evidence.names}
    gone = sum(lost.values())
    blamed = ", ".join(f"{name} {count} x" for name, count in lost.items() if count)
    return Gate(
        id="server_survived",
        title="Servers survived",
        status=passing(not gone),
        number=gone,
        limit=0,
        unit="blocks",
        explanation=f"The server was gone in the middle of a block: {blamed}. Measuring the block again does not undo "
        "that."
        if gone
        else "No attempt at a block ended because its server was gone.",
        numbers={f"{name}: attempts": count for name, count in lost.items()},
    )
