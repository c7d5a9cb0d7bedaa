"""Nobody else used the servers."""

from __future__ import annotations

from reports.gates.gate import Evidence, Gate


def judge(evidence: Evidence) -> Gate:
    """Tokens that the server counted inside a block, generated and of prompts, beyond those that our own requests
    account for, as a share of the latter: the worst block. Others' requests slow ours, and not in both backends alike.
    Unknown without the server's counters (/metrics)."""
    limit = evidence.thresholds.foreign_tokens
    shares: list[float] = []
    problems: list[str] = []
    blind: list[str] = []
    numbers: dict[str, float | None] = {}
    for name in evidence.names:
        excess = [
            (counted / ours - 1, f"{block.block}: {counted:,} {what} tokens by the server's count, {ours:,} of ours")
            for block in evidence.counters[name].work
            for counted, ours, what in (
                (block.generated, block.generated_for_us, "output"),
                (block.prompts, block.prompts_for_us, "prompt"),
            )
            if counted is not None and ours
        ]
        if not excess:
            blind.append(name)
        numbers[f"{name}: beyond ours, worst block"] = max((share for share, _ in excess), default=None)
        shares += [share for share, _ in excess]
        problems += [f"Somebody else used the server of {name}: {told}." for share, told in excess if share > limit]
    if problems:
        problems[-1] += " Keep other clients away while it is measured."
    return Gate(
        id="server_to_itself",
        title="Servers to ourselves",
        status="fail" if problems else "unknown" if blind else "pass",
        required=False,
        number=max(shares, default=None),
        limit=limit,
        unit="share",
        explanation=f"Whether somebody else used the server of {' and '.join(blind)} is not known: no token counts "
        "were read from its /metrics at the edges of a block."
        if blind
        else "Tokens by the servers' own counters, beyond those of our requests: the worst block.",
        numbers=numbers,
        problems=problems,
    )
