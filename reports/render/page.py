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
    analysis = analyses[0]
    return environment.get_template(template).render(
        a=analysis,
        w=words,
        tags=[stamp.split(":")[0] for stamp in analysis.stamps],
        backend_table=_backend_table(analysis),
        provenance=_provenance(analysis),
        noise_multiple=f"{analysis.limits.noise_multiple:g}",
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
            ("Failures by class", words.counted(b.failures)),
            ("Ok, without a decode rate", words.counted(b.without_itl)),
            ("Ok, without an answer (thinking only)", f"{b.without_answer:,}"),
            ("Decode throughput, tokens/s", words.number(b.output_tokens_per_s)),
            ("… per GPU", words.number(b.output_tokens_per_s_per_gpu) if b.gpu_count else per_gpu),
            ("Uncached-input throughput, tokens/s", words.number(b.uncached_input_tokens_per_s)),
            ("… per GPU", words.number(b.uncached_input_tokens_per_s_per_gpu) if b.gpu_count else per_gpu),
            ("Peak tokens in a second", f"{b.peak_tokens_in_a_second:,}"),
            ("Cached / ideal cached tokens", _of(b.cached_tokens, b.ideal_cached_tokens, b.achieved_cached_share)),
            ("Hit rate, cached / input tokens", words.share(b.hit_rate)),
            ("Tokens per chunk", chunks + (f" ({within})" if within else "")),
            ("Token counts by", (b.count_source or "none") + f"; per chunk: {words.counted(b.token_sources)}"),
        ]

    both = [line(backend) for backend in analysis.backends]
    return [(label, [one[index][1] for one in both]) for index, (label, _) in enumerate(both[0])]


def _of(part: int | None, whole: int | None, share: float | None) -> str:
    if part is None:
        return "not reported"
    return f"{part:,} / {whole:,} ({words.share(share)})"


def _provenance(analysis: Analysis) -> list[tuple[str, str]]:
    plan = analysis.plan
    cap = f"{plan.pause_cap_s:g} s at most" if plan.pause_cap_s is not None else "as recorded"
    return [
        (
            "Plan",
            f"{plan.sessions} sessions on {plan.lanes} lanes, {plan.mode} loop, end by {plan.end}, seed {plan.seed}",
        ),
        ("Pauses", f"{cap}; {plan.pause_removed_share:.1%} of recorded pause time taken out"),
        ("API", plan.api),
        ("Plan digest", analysis.plan_digest),
        ("Workload", f"{analysis.workload_source} ({analysis.workload_digest})"),
        ("Measured", f"{analysis.created_utc} with decodegate {analysis.decodegate_version}"),
        ("Client host", ", ".join(f"{key} {value}" for key, value in analysis.host.items()) or words.DASH),
        ("Versions", ", ".join(f"{key} {value}" for key, value in analysis.versions.items()) or words.DASH),
    ]
