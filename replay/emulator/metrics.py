"""The /metrics page, in vLLM's names (reference/real-stack.md, section 4)."""

from __future__ import annotations

import msgspec

from replay.emulator.scheduler import Scheduler


def page(scheduler: Scheduler, model: str) -> str:
    """Return the Prometheus text of an engine's totals and state."""
    counts, cache = scheduler.counts, scheduler.cache
    labels = f'engine="0",model_name={msgspec.json.encode(model).decode()}'
    lines: list[str] = []

    def family(name: str, kind: str, values: dict[str, float]) -> None:
        suffix = "_total" if kind == "counter" else ""
        lines.append(f"# TYPE vllm:{name}{suffix} {kind}")
        lines.extend(
            f"vllm:{name}{suffix}{{{labels}{',' + extra if extra else ''}}} {value}" for extra, value in values.items()
        )

    family("num_requests_running", "gauge", {"": len(scheduler.running)})
    family("num_requests_waiting", "gauge", {"": len(scheduler.waiting)})
    family("kv_cache_usage_perc", "gauge", {"": cache.used / cache.capacity})
    family("num_preemptions", "counter", {"": 0})
    family("prefix_cache_queries", "counter", {"": counts.cache_queries})
    family("prefix_cache_hits", "counter", {"": counts.cache_hits})
    family("prompt_tokens", "counter", {"": counts.prompt_tokens + counts.cache_hits})
    family("prompt_tokens_cached", "counter", {"": counts.cache_hits})
    family("generation_tokens", "counter", {"": counts.generation_tokens})
    # vLLM counts no aborted request here.
    reasons = {f'finished_reason="{reason}"': counts.finished[reason] for reason in ("stop", "length", "error")}
    family("request_success", "counter", dict(reasons))
    family(
        "cache_config_info",
        "gauge",
        {
            f'block_size="{scheduler.profile.block_size}",enable_prefix_caching="{scheduler.caching}",'
            f'num_gpu_blocks="{cache.capacity}"': 1
        },
    )
    if scheduler.drafts:
        per_position = counts.accepted_per_position
        family("spec_decode_num_drafts", "counter", {"": counts.drafts})
        family("spec_decode_num_draft_tokens", "counter", {"": counts.draft_tokens})
        family("spec_decode_num_accepted_tokens", "counter", {"": sum(per_position)})
        family(
            "spec_decode_num_accepted_tokens_per_pos",
            "counter",
            {f'position="{position}"': count for position, count in enumerate(per_position)},
        )
    return "\n".join([*lines, ""])
