"""What the emulated hardware takes for a step: data, and the one formula that turns it into seconds.

Every row names where it comes from. Whatever nobody has published is listed, with its reason, in ``assumed``.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from workloads.errors import UserError

DecodeBackend = Literal["auto", "latency_specialized"]

BLOG = "vLLM blog 2026-10-16, Kimi K3 megakernel (reference/decode-path.md)"


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """One known speed: total decode tokens per second of the deployment, prefill excluded."""

    decode_backend: DecodeBackend
    rows: int
    """Requests in the batch."""
    draft_tokens: int = 0
    acceptance_length: float = 1.0
    """Tokens that one step yields per request."""
    tokens_per_s: float
    source: str

    @property
    def step_s(self) -> float:
        """Seconds of one step: each yields ``rows x acceptance_length`` tokens."""
        return self.rows * self.acceptance_length / self.tokens_per_s


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """One emulated deployment."""

    name: str
    summary: str
    steps: tuple[StepRow, ...]
    """For each backend: one request and 64 without drafts, and one request with drafts."""
    prefill_tokens_per_s: float
    prompt_step_overhead_s: float
    """Added to every step that holds prompt tokens."""
    context_s_per_token: float
    """Added to a decode step for each token of context that a request holds beyond ``context_free_tokens``."""
    context_free_tokens: int
    """The published rows hold contexts of up to about this length, so their context cost is already inside."""
    block_size: int
    kv_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    captured_sizes: tuple[int, ...]
    """Token counts for which the specialised path has a captured graph."""
    assumed: dict[str, str]
    """Field -> why this value, for all that is not published."""


class StepTime(msgspec.Struct, frozen=True):
    """Seconds of a decode step on one backend, as a plane through the profile's three rows:

    ``first_s + per_draft_s * drafts + per_token_s * (tokens - verify)``

    with ``verify = 1 + drafts`` tokens per request and ``tokens`` = verify tokens of all requests. Linear in the rows
    (weights are read once, every row adds its own work) and in the drafts. Exact at the three rows; in between and
    beyond it is an assumption, as nothing is published there.
    """

    first_s: float
    per_draft_s: float
    per_token_s: float

    def seconds(self, tokens: int, verify: int) -> float:
        """Seconds of a step over ``tokens`` tokens, ``verify`` for each request (its longest, if uneven)."""
        return self.first_s + self.per_draft_s * (verify - 1) + self.per_token_s * (tokens - verify)


def step_time(profile: Profile, decode_backend: DecodeBackend) -> StepTime:
    """Fit StepTime to the profile's rows of one backend."""
    rows = [row for row in profile.steps if row.decode_backend == decode_backend]
    one = next(row for row in rows if row.rows == 1 and not row.draft_tokens)
    many = next(row for row in rows if row.rows > 1 and not row.draft_tokens)
    drafted = next(row for row in rows if row.rows == 1 and row.draft_tokens)
    return StepTime(
        first_s=one.step_s,
        per_draft_s=(drafted.step_s - one.step_s) / drafted.draft_tokens,
        per_token_s=(many.step_s - one.step_s) / (many.rows - 1),
    )


def _rows(
    standard: tuple[float, float, float], specialised: tuple[float, float, float], source: str
) -> tuple[StepRow, ...]:
    """Rows of both backends from their tokens/s: one request, 64 requests, one request at DL=7 and AL=6."""
    both: tuple[tuple[DecodeBackend, tuple[float, float, float]], ...] = (
        ("auto", standard),
        ("latency_specialized", specialised),
    )
    return tuple(
        row
        for backend, (one, many, drafted) in both
        for row in (
            StepRow(decode_backend=backend, rows=1, tokens_per_s=one, source=source),
            StepRow(decode_backend=backend, rows=64, tokens_per_s=many, source=source),
            StepRow(
                decode_backend=backend,
                rows=1,
                draft_tokens=7,
                acceptance_length=6.0,
                tokens_per_s=drafted,
                source=source,
            ),
        )
    )


CAPTURED_SIZES = (*range(1, 9), 16, 32, 64)

_KIMI_ASSUMED = {
    "steps between and beyond the rows": "a plane through the rows, see StepTime",
    "prefill_tokens_per_s": "no prefill rate is published for this model",
    "prompt_step_overhead_s": "scheduling and sampling of a first token; a guess",
    "context_s_per_token": "an FP8 latent cache (24 layers x 576 bytes a token) read at 8 TB/s, on both backends alike",
    "context_free_tokens": "the published rows ran with outputs of 1k tokens",
    "block_size": "the block of public agent traces, so that their sharing can be reached",
    "kv_blocks": "memory left beside the weights is not published",
    "max_model_len": "the longest context of public agent traces fits",
    "max_num_seqs": "vLLM's usual order of magnitude",
    "max_num_batched_tokens": "from the public agent recipe for this model on B300",
}

KIMI_K3_TP16 = Profile(
    name="kimi-k3-tp16",
    summary="Kimi K3 on 16 GB300, TP16: published decode rows",
    steps=_rows((136.4, 2226.0, 488.0), (256.4, 3606.1, 842.0), BLOG),
    prefill_tokens_per_s=60_000.0,
    prompt_step_overhead_s=0.0005,
    context_s_per_token=1.7e-9,
    context_free_tokens=1024,
    block_size=64,
    kv_blocks=65_536,
    max_model_len=1_048_576,
    max_num_seqs=256,
    max_num_batched_tokens=16_384,
    captured_sizes=CAPTURED_SIZES,
    assumed=_KIMI_ASSUMED,
)

TP8_SLOWER = 1.5

KIMI_K3_TP8 = Profile(
    name="kimi-k3-tp8",
    summary="Kimi K3 on 8 GB300, TP8: no published row, derived from TP16",
    steps=tuple(
        StepRow(
            decode_backend=row.decode_backend,
            rows=row.rows,
            draft_tokens=row.draft_tokens,
            acceptance_length=row.acceptance_length,
            tokens_per_s=row.tokens_per_s / TP8_SLOWER,
            source=f"assumed: kimi-k3-tp16 / {TP8_SLOWER}",
        )
        for row in KIMI_K3_TP16.steps
    ),
    prefill_tokens_per_s=30_000.0,
    prompt_step_overhead_s=0.0005,
    context_s_per_token=1.7e-9,
    context_free_tokens=1024,
    block_size=64,
    kv_blocks=24_576,
    max_model_len=1_048_576,
    max_num_seqs=256,
    max_num_batched_tokens=16_384,
    captured_sizes=CAPTURED_SIZES,
    assumed={
        **_KIMI_ASSUMED,
        "steps": f"TP16's rows, {TP8_SLOWER} times slower: half of a step as work that doubles with half the GPUs",
        "prefill_tokens_per_s": "half of TP16's assumed rate",
    },
)

TOY = Profile(
    name="toy",
    summary="no real hardware: quick enough for demos and tests",
    steps=_rows((250.0, 5000.0, 900.0), (450.0, 8000.0, 1550.0), "assumed: invented for demos and tests"),
    prefill_tokens_per_s=400_000.0,
    prompt_step_overhead_s=0.0002,
    context_s_per_token=1e-9,
    context_free_tokens=1024,
    block_size=64,
    kv_blocks=16_384,
    max_model_len=131_072,
    max_num_seqs=256,
    max_num_batched_tokens=16_384,
    captured_sizes=CAPTURED_SIZES,
    assumed={"everything": "invented for demos and tests"},
)

PROFILES = {profile.name: profile for profile in (KIMI_K3_TP16, KIMI_K3_TP8, TOY)}


def find(name: str) -> Profile:
    """Return the profile of that name. Raises UserError naming the known ones."""
    if name not in PROFILES:
        raise UserError(f"unknown emulator profile {name!r}; known: {', '.join(PROFILES)}")
    return PROFILES[name]
