"""What HTML and Markdown share: templates, and the tables that are no plain field of the analysis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import jinja2

from reports.analysis import Analysis, BackendSummary, Row
from reports.counters import ServerCounters
from reports.coverage import CONCURRENCY, CONTEXT, Stratum
from reports.intervals import FEWEST_BEYOND
from reports.render import words

TEMPLATES = Path(__file__).parents[1]


def template_of(name: str) -> jinja2.Template:
    """A template by its path under reports/; values are escaped in templates named .html."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=jinja2.select_autoescape(["html"]),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters["cell"] = lambda text: str(text).replace("|", "\\|").replace("\n", " ")
    return environment.get_template(name)


def fill(template: str, analyses: Sequence[Analysis], **more: object) -> str:
    """The named template for the first analysis."""
    analysis, stamps = analyses[0], words.stamps(analyses)
    return template_of(template).render(
        a=analysis,
        w=words,
        stamps=stamps,
        tags=list(dict.fromkeys(stamp.split(":")[0] for stamp in stamps)),
        backend_table=_backend_table(analysis),
        path_tables=_path_tables(analysis),
        path_note=PATH_NOTE,
        counter_table=_counter_table(analysis),
        acceptance_table=_acceptance_table(analysis),
        block_columns=BLOCK_COLUMNS,
        block_table=_block_table(analysis),
        provenance=_provenance(analysis),
        speed_rows=_speed_rows(analysis.rows),
        no_interval=NO_INTERVAL,
        noise_multiple=f"{analysis.thresholds.noise_multiple:g}",
        **more,
    )


NO_INTERVAL = (
    f"A percentile has no interval where fewer than {FEWEST_BEYOND} values of a backend are expected beyond it (P90 "
    f"needs {FEWEST_BEYOND * 10} turns, P99 {FEWEST_BEYOND * 100}, over all of its blocks), or where the interval "
    "would reach beyond every value measured: so few carry none."
)

_SAME = {
    "ttfo": ("ttft", "= TTFT: no reasoning before the answer (equal to 0.1 %)"),
    "tpot": ("itl", "= ITL: first chunks hold one token (equal to 0.1 %)"),
}
"""Measures that are another by definition where nothing tells them apart: they are shown as one line then."""


def _speed_rows(rows: list[Row]) -> list[tuple[Row, str]]:
    """The rows to show, each with a note that stands instead of its figures, or none."""
    shown: list[tuple[Row, str]] = []
    for row in rows:
        other, note = _SAME.get(row.measure, ("", ""))
        if other and all(
            _alike(one, another)
            for one, another in zip(_of_measure(rows, row.measure), _of_measure(rows, other), strict=True)
        ):
            if row.percentile == _of_measure(rows, row.measure)[0].percentile:
                shown.append((row, note))
        else:
            shown.append((row, ""))
    return shown


def _of_measure(rows: list[Row], measure: str) -> list[Row]:
    return [row for row in rows if row.measure == measure]


def _alike(one: Row, another: Row) -> bool:
    """To a tenth of a per cent, and so to the last figure shown."""
    pairs = ((one.baseline.value, another.baseline.value), (one.candidate.value, another.candidate.value))
    return all(a is not None and b is not None and math.isclose(a, b, rel_tol=1e-3) for a, b in pairs)


def _backend_table(analysis: Analysis) -> list[tuple[str, list[str]]]:
    def line(b: BackendSummary) -> list[tuple[str, str]]:
        chunks = words.number(b.tokens_per_chunk.value)
        within = words.interval(b.tokens_per_chunk, "tok/s")
        under_test = "; ".join(f"{key}: {value or 'not set'}" for key, value in b.under_test.items())
        per_gpu = "per GPU" if b.gpu_count else "GPUs not declared"
        return [
            ("Decode backend", b.decode_backend),
            ("Under test", under_test or words.DASH),
            ("Started as", b.command or words.DASH),
            ("GPUs", "; ".join(filter(None, [b.gpus or "not declared", b.gpus_verified]))),
            ("Settings", words.settings(b.settings)),
            ("Blocks; turns sent; ok", f"{b.blocks}; {b.sent:,}; {b.ok:,}"),
            ("Attempts at blocks not finished", words.counted(b.cut_short)),
            ("Failures by class", words.counted(b.failures)),
            ("… of them context overflows", f"{b.context_overflows:,}"),
            ("Degraded plays (session trees with a failed turn)", _of(b.degraded_plays, b.plays)),
            ("Longest silence with requests in flight", words.seconds(b.longest_silence_s)),
            ("Ok, without a decode rate", words.counted(b.without_itl)),
            ("Recorded without output (one token asked)", f"{b.zero_output:,}"),
            ("Ok, without an answer (thinking only)", f"{b.without_answer:,}"),
            ("Decode throughput, tokens/s", words.number(b.output_tokens_per_s)),
            ("… per GPU", words.number(b.output_tokens_per_s_per_gpu) if b.gpu_count else per_gpu),
            ("Uncached-input throughput, tokens/s", words.number(b.uncached_input_tokens_per_s)),
            ("… per GPU", words.number(b.uncached_input_tokens_per_s_per_gpu) if b.gpu_count else per_gpu),
            ("Peak tokens in a second", words.count(b.peak_tokens_in_a_second)),
            ("Cached / ideal cached tokens", _of(b.cached_tokens, b.ideal_cached_tokens)),
            ("Hit rate, cached / input tokens", words.share(b.hit_rate)),
            ("Tokens per chunk", chunks + (f" ({within})" if within else "")),
            ("Token counts by", (b.count_source or "none") + f"; per chunk: {words.counted(b.token_sources)}"),
            ("Energy per output token, J", words.number(b.usage.energy_per_output_token_j)),
            ("Mean power of its GPUs, W", words.number(b.usage.mean_power_w)),
            ("Cost per million output tokens", words.number(b.usage.cost_per_million_output_tokens)),
        ]

    both = [line(backend) for backend in analysis.backends]
    rows = [(label, [one[index][1] for one in both]) for index, (label, _) in enumerate(both[0])]
    return [row for row in rows if row[0] not in _SHOWN_IF_KNOWN or set(row[1]) != {words.DASH}]


def _path_tables(analysis: Analysis) -> list[tuple[str, list[tuple[str, list[tuple[str, str, str]]]]]]:
    """The decode path by concurrency, and by context: (title, [(label, (amount, share, the rest) of each backend)])."""

    def table(labels: Sequence[str], of: list[list[Stratum]]) -> list[tuple[str, list[tuple[str, str, str]]]]:
        by_label = [{stratum.label: stratum for stratum in strata} for strata in of]
        return [
            (label, [words.stratum(mine.get(label)) for mine in by_label])
            for label in labels
            if any(label in mine for mine in by_label)
        ]

    totals = [[path.total] if path.total is not None else [] for path in analysis.paths]
    by_concurrency = [total + path.by_concurrency for total, path in zip(totals, analysis.paths, strict=True)]
    tables = [
        ("Decoding at once", table(("all", *CONCURRENCY), by_concurrency)),
        ("Context, tokens", table(CONTEXT, [path.by_context for path in analysis.paths])),
    ]
    return [(title, rows) for title, rows in tables if rows]


PATH_NOTE = (
    "Decoding at once: requests in the step that had their first token already. Shares are of the output tokens of "
    "decode steps, first tokens left out; those of the rest are by reason, and together they are the row. Context: a "
    "request’s tokens so far, prompt and output (k: 1,024), each chunk that the client received counted with the step "
    "whose tokens came last before it."
)

_SHOWN_IF_KNOWN = (
    "Under test",
    "Started as",
    "Energy per output token, J",
    "Mean power of its GPUs, W",
    "Cost per million output tokens",
)


def _counter_table(analysis: Analysis) -> list[tuple[str, list[str]]]:
    """Rows of both servers' own counters, those that neither has left out; none if /metrics was read of neither."""

    def line(c: ServerCounters, blocks: int) -> list[tuple[str, str | None]]:
        def each(counts: dict[str, int]) -> str | None:
            parts = [f"{name.replace('_', ' ')} {count:,}" for name, count in counts.items() if count]
            return (", ".join(parts) or "none") if counts else None

        def whole(value: int | None) -> str | None:
            return words.count(value) if value is not None else None

        ours = (sum(w.generated_for_us for w in c.work), sum(w.prompts_for_us for w in c.work)) if c.blocks else None
        return [
            ("Blocks with a reading at both edges", f"{c.blocks} of {blocks}"),
            ("Tokens generated, by the server", whole(c.generation_tokens)),
            ("… by our requests, at most", whole(ours[0]) if ours else None),
            ("Prompt tokens, by the server", whole(c.prompt_tokens)),
            ("… of our requests, at most", whole(ours[1]) if ours else None),
            ("Prompt tokens by source", each(c.prompt_tokens_by_source)),
            (
                "Prefix-cache hits / queries, tokens",
                _of(c.prefix_cache_hits, c.prefix_cache_queries) if c.prefix_cache_queries is not None else None,
            ),
            ("Preemptions", whole(c.preemptions)),
            ("Requests ended, by reason", each(c.finished)),
            ("Requests waiting, mean", words.number(c.waiting_mean) if c.waiting_mean is not None else None),
            ("… the most", whole(c.waiting_max)),
            ("Requests running, the most", whole(c.running_max)),
            ("KV cache in use, the most", words.share(c.kv_use_max) if c.kv_use_max is not None else None),
            ("Drafts", whole(c.drafts)),
            ("Accepted / draft tokens", _of(c.accepted_tokens, c.draft_tokens) if c.drafts is not None else None),
            (
                "Acceptance length, 1 + accepted / drafts",
                words.number(c.acceptance_length, 4) if c.acceptance_length is not None else None,
            ),
            ("TTFT in the server, mean", words.seconds(c.ttft_mean_s) if c.ttft_mean_s is not None else None),
            ("ITL in the server, mean", words.seconds(c.itl_mean_s) if c.itl_mean_s is not None else None),
        ]

    if not any(c.blocks for c in analysis.counters):
        return []
    sides = [line(c, b.blocks) for c, b in zip(analysis.counters, analysis.backends, strict=True)]
    rows = [(one[0], [one[1], another[1]]) for one, another in zip(*sides, strict=True)]
    return [(label, [value or "absent" for value in values]) for label, values in rows if any(values)]


def _acceptance_table(analysis: Analysis) -> list[tuple[str, list[str]]]:
    """Rows of (draft position from 1, accepted share of drafts by backend); none without speculation."""
    positions = [c.acceptance_by_position for c in analysis.counters]
    return [
        (str(number + 1), [words.share(each[number]) if number < len(each) else "absent" for each in positions])
        for number in range(max(map(len, positions), default=0))
    ]


def _block_table(analysis: Analysis) -> list[tuple[str, list[str]]]:
    """Rows of (block, cells) under BLOCK_COLUMNS."""
    return [
        (
            b.name,
            [
                words.duration(b.window_s),
                words.number(b.output_tokens_per_s),
                words.count(b.peak_tokens_in_a_second),
                words.count(b.peak_in_flight),
                words.seconds(b.longest_silence_s),
                words.seconds(b.pool_wait_p99_s),
                f"{words.count(b.warmup_requests)} of {words.count(b.warmup_planned)}, {words.seconds(b.warmup_s)}",
                f"{words.count(b.plays_ended)} / {words.count(b.plays_cut)}",
                words.count(b.most_plays_of_a_session),
                _of(b.degraded_plays, b.plays),
            ],
        )
        for b in analysis.blocks
    ]


BLOCK_COLUMNS = [
    "length",
    "tokens/s",
    "peak tokens in a second",
    "peak in flight",
    "longest silence",
    "connection wait P99",
    "warm-up",
    "plays ended / cut",
    "most plays of a session",
    "degraded plays",
]


def _of(part: int | None, whole: int | None) -> str:
    if part is None or whole is None:
        return "not reported"
    return f"{part:,} / {whole:,}" + (f" ({words.share(part / whole)})" if whole else "")


def _provenance(analysis: Analysis) -> list[tuple[str, str]]:
    plan = analysis.plan
    cap = f"{plan.pause_cap_s:g} s at most" if plan.pause_cap_s is not None else "as recorded"
    pauses, idle = (
        ("Shared idle time", "time with no session active") if plan.mode == "open" else ("Pauses", "pause time")
    )
    return [
        (
            "Plan",
            f"{plan.sessions} sessions on {plan.lanes} lanes, {plan.mode} loop, end by {plan.end}, seed {plan.seed}",
        ),
        (
            pauses,
            f"{cap}; {plan.pause_removed_share:.1%} of recorded {idle} taken out",
        ),
        ("API", plan.api),
        ("Plan digest", analysis.plan_digest),
        ("Workload", f"{analysis.workload_source} ({analysis.workload_digest})"),
        ("Measured", f"{analysis.created_utc} with decodegate {analysis.decodegate_version}"),
        ("Client host", ", ".join(f"{key} {value}" for key, value in analysis.host.items()) or words.DASH),
        ("Versions", ", ".join(f"{key} {value}" for key, value in analysis.versions.items()) or words.DASH),
    ]
