"""Do the plan's contexts fit into the server's KV cache?"""

from __future__ import annotations

from replay.estimate import Work
from replay.probes.facts import ServerFacts
from replay.progress import Finding
from workloads.errors import UserError


def check_capacity(facts: ServerFacts, work: Work, *, lanes: int) -> list[Finding]:
    """The longest turn, and ``lanes`` contexts of median length, against the server's KV cache.

    Raises UserError when the longest turn can never be computed.
    """
    cache, longest, median = facts.kv_cache, work.longest, work.median
    if cache is None:
        why = "whether the plan's contexts fit is not checked"
        return [Finding("note", f"{facts.url}: does not show the size of its KV cache", why=why)]
    about = "" if cache.exact else "about "
    size = f"its KV cache holds {about}{cache.tokens:,} tokens" + (
        f" in each of {cache.engines} engines" if cache.engines > 1 else ""
    )
    if cache.tokens < longest and cache.exact:
        raise UserError(
            f"{facts.url}: {size}, the plan's longest turn takes {longest:,}: set workload.max_context to "
            f"{cache.tokens}, or give both servers more room (--gpu-memory-utilization, --kv-cache-dtype, more GPUs)"
        )
    mend = "use fewer lanes, a smaller workload.max_context, or more room for the KV cache, on both backends"
    findings = []
    if cache.tokens < longest:
        why = f"the plan's longest turn takes {longest:,}: it may never be computed"
        findings.append(Finding("warning", f"{facts.url}: {size}", mend, why=why))
    at_once = cache.tokens * cache.engines // max(median, 1)
    if at_once < lanes:
        findings.append(
            Finding(
                "note",
                f"{facts.url}: {size}: at most {at_once:,} contexts of the plan's median length ({median:,}) at once, "
                f"for {lanes} lanes",
                mend,
                why="above that, sessions push each other out of the prefix cache and running requests are preempted: "
                "their prompts are computed again",
            )
        )
    return findings or [
        Finding("ok", f"{facts.url}: {size}; longest turn {longest:,}, median {median:,}, {lanes} lanes")
    ]
