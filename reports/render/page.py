"""What HTML and Markdown share: templates, and the tables that are no plain field of the analysis."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jinja2

from reports.analysis import Analysis, BackendSummary
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
        noise_multiple=f"{analysis.thresholds.noise_multiple:g}",
        **more,
    )


def _backend_table(analysis: Analysis) -> list[tuple[str, list[str]]]:
    def line(b: BackendSummary) -> list[tuple[str, str]]:
        chunks = words.number(b.tokens_per_chunk.value)
        within = words.interval(b.tokens_per_chunk, "tok/s")
        per_gpu = "per GPU" if b.gpu_count else "GPUs not declared"
        return [
            ("Decode backend", b.decode_backend),
            ("GPUs", b.gpus or "not declared"),
            ("Settings", ", ".join(f"{key}={value}" for key, value in b.settings.items()) or words.DASH),
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
                words.number(b.window_s / 60),
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
    "minutes",
    "tokens/s",
    "peak tokens in 1 s",
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
