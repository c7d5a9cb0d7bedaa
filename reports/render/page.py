"""What HTML and Markdown share: templates, and the tables that are no plain field of the analysis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import jinja2

from reports.analysis import Analysis, BackendSummary, Row
from reports.intervals import FEWEST_BEYOND
from reports.render import words

TEMPLATES = Path(__file__).parents[1]


def fill(template: str, analyses: Sequence[Analysis], **more: object) -> str:
    """The named template for the first analysis; values are escaped in templates named .html."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=jinja2.select_autoescape(["html"]),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters["cell"] = lambda text: str(text).replace("|", "\\|").replace("\n", " ")
    analysis, stamps = analyses[0], words.stamps(analyses)
    return environment.get_template(template).render(
        a=analysis,
        w=words,
        stamps=stamps,
        tags=list(dict.fromkeys(stamp.split(":")[0] for stamp in stamps)),
        backend_table=_backend_table(analysis),
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
        per_gpu = "per GPU" if b.gpu_count else "GPUs not declared"
        return [
            ("Decode backend", b.decode_backend),
            ("GPUs", b.gpus or "not declared"),
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
        ]

    both = [line(backend) for backend in analysis.backends]
    return [(label, [one[index][1] for one in both]) for index, (label, _) in enumerate(both[0])]


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
