"""What others have published of the specialised decode path, as data, and whether an own figure may stand beside it.

A published row is a pair of figures under one setting. It is never combined with another row or with an own figure: a
ratio is one only within a row, and it is the source's. So nothing here divides.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from replay.records import Backend, Cell, Setup

Metric = Literal["total decode tokens/s", "P90 interactivity", "kernels per layer", "µs per layer"]
"""P90 interactivity is in tokens/s/user."""


class Setting(msgspec.Struct, kw_only=True, frozen=True):
    """Under what a figure was measured. Null: of a published row, its source does not state it; of an own figure, it
    is not known, or there is none."""

    model: str | None = None
    """Own: the model's name as served; with the name that the path's rule has for it, where there is one, after a space
    (a served name may be anything)."""
    gpu_kind: str | None = None
    """As declared ("GB300") or as NVML names it ("NVIDIA GB300")."""
    gpus: int | None = None
    """How many serve one backend."""
    layout: dict[str, int] = {}
    """Parallel layout, for instance {"tp": 16}. Own: an axis that is left out is 1, unless all are."""
    batch: int | None = None
    """Streams that decode together."""
    method: str | None = None
    """Of speculation."""
    draft_tokens: int | None = None
    """A step; 0: no speculation, which leaves method and acceptance_length without meaning."""
    acceptance_length: float | None = None
    """Synthetic: tokens that a step commits on average, whatever the target says."""
    input_tokens: int | None = None
    """Of a stream (ISL)."""
    output_tokens: int | None = None
    """Of a stream (OSL)."""


class Row(msgspec.Struct, kw_only=True, frozen=True):
    """One published pair of figures."""

    id: str
    metric: Metric
    setting: Setting
    specialised: float
    standard: float
    standard_derived: bool = False
    """The source prints the other figure and the ratio: ``standard`` is from these two, as rounded as they are."""
    ratio: float | None = None
    """As the source prints it; null if it prints none. It is the gain: specialised / standard of a rate, standard /
    specialised of a time."""
    source: str
    date: str | None = None
    """Year, month, day; null if it is not known."""
    note: str = ""
    not_comparable: str = ""
    """Why nothing may stand beside this row; empty if something may."""


class Beside(msgspec.Struct, kw_only=True, frozen=True):
    """A published row, seen from an own figure of the same metric."""

    row: Row
    differs: list[str]
    """Why the two may not stand side by side: the row's own reason, and each setting that differs ("batch: 1 here, 64
    published"). Empty if they may."""
    unstated: list[str]
    """Settings that the source does not state, and in which the two may differ."""


_BLOG = "vLLM blog, Kimi K3 megakernel"
_PULL_REQUEST = "vLLM pull request 61867"
_DATE = "2026-10-16"
_GPUS = "The row names TP16 and no GPUs: GB300 is what its authors say they validated on."
_TP16 = Setting(model="Kimi K3", gpu_kind="GB300", gpus=16, layout={"tp": 16})
_HEADLINE = msgspec.structs.replace(
    _TP16, batch=1, method="dspark", draft_tokens=7, acceptance_length=6.0, input_tokens=1, output_tokens=1000
)
_SYNTHETIC = (
    "A decode rate, prefill excluded: not TTFT, not output rate over the request. Synthetic acceptance fixes the "
    "tokens of a step: it is no acceptance rate on real prompts."
)
_LAYER = Setting(model="Kimi K3", gpu_kind="GB300")
_SHOWN = "From a kernel trace of one layer; the source does not state its batch or layout."

ROWS: tuple[Row, ...] = (
    Row(
        id="headline",
        metric="total decode tokens/s",
        setting=_HEADLINE,
        specialised=842,
        standard=488,
        ratio=1.73,
        source=_BLOG,
        date=_DATE,
        note=_SYNTHETIC,
    ),
    Row(
        id="headline-pr",
        metric="total decode tokens/s",
        setting=_HEADLINE,
        specialised=838,
        standard=489,
        source=_PULL_REQUEST,
        note=f"An earlier run of the same kind, not that of 842 and 488. {_SYNTHETIC}",
    ),
    Row(
        id="nospec-b1",
        metric="total decode tokens/s",
        setting=msgspec.structs.replace(_TP16, batch=1, draft_tokens=0),
        specialised=256.4,
        standard=136.4,
        standard_derived=True,
        ratio=1.88,
        source=_BLOG,
        date=_DATE,
        note=_GPUS,
    ),
    Row(
        id="nospec-b64",
        metric="total decode tokens/s",
        setting=msgspec.structs.replace(_TP16, batch=64, draft_tokens=0),
        specialised=3606.1,
        standard=2226.0,
        standard_derived=True,
        ratio=1.62,
        source=_BLOG,
        date=_DATE,
        note=f"A total over 64 requests. {_GPUS}",
    ),
    Row(
        id="agentx",
        metric="P90 interactivity",
        setting=Setting(model="Kimi K3"),
        specialised=403.2,
        standard=223.7,
        ratio=1.8,
        source=_BLOG,
        date=_DATE,
        note="AgentX replay at concurrency 1: the specialised figure on 16 GPUs, the standard one on 8.",
        not_comparable="16 GPUs against 8: the pair is not matched, so it does not isolate the decode path",
    ),
    Row(
        id="layer-kernels",
        metric="kernels per layer",
        setting=_LAYER,
        specialised=13,
        standard=23,
        source=_BLOG,
        date=_DATE,
        note=_SHOWN,
    ),
    Row(
        id="layer",
        metric="µs per layer",
        setting=_LAYER,
        specialised=69,
        standard=130,
        ratio=1.88,
        source=_BLOG,
        date=_DATE,
        note=_SHOWN,
    ),
)


def setting(setup: Setup, backend: Backend, cell: Cell) -> Setting:
    """Under what one backend of a setup decodes a cell."""
    rule = next((each.path.model for each in setup.backends if each.path), None)
    speculation = setup.speculation
    return Setting(
        model=" ".join(str(name) for name in (backend.settings.get("model"), rule) if name) or None,
        gpu_kind=backend.gpus.kind if backend.gpus else None,
        gpus=backend.gpus.count if backend.gpus else None,
        layout=backend.gpus.layout if backend.gpus else {},
        batch=cell.batch,
        method=speculation.method,
        draft_tokens=speculation.draft_tokens,
        acceptance_length=speculation.acceptance_length,
        input_tokens=cell.input_tokens,
        output_tokens=cell.output_tokens,
    )


def beside(own: Setting, metric: Metric) -> list[Beside]:
    """The published rows of one metric, each with what keeps it from standing beside an own figure under ``own``.

    Models are the same if the published name is in the own one, case, spaces and punctuation aside, with no digit after
    it: "moonshotai/Kimi-K3" is Kimi K3, "kimi-k3.5" is not. GPUs are the same if the published kind is a word of the
    own one.
    """
    return [_seen(own, row) for row in ROWS if row.metric == metric]


def _seen(own: Setting, row: Row) -> Beside:
    differs = [row.not_comparable] if row.not_comparable else []
    unstated = []
    for name, here, published, same in _settings(own, row.setting):
        if published is None:
            unstated.append(name)
        elif not same:
            differs.append(f"{name}: {_word(here)} here, {_word(published)} published")
    return Beside(row=row, differs=differs, unstated=unstated)


_Value = str | float | None


def _settings(own: Setting, published: Setting) -> list[tuple[str, _Value, _Value, bool]]:
    """(name, own value, published value, whether they are the same) of each setting."""
    found: list[tuple[str, _Value, _Value, bool]] = [
        ("model", own.model, published.model, _same_model(own.model, published.model)),
        ("GPU kind", own.gpu_kind, published.gpu_kind, _same_gpu(own.gpu_kind, published.gpu_kind)),
        ("GPUs", own.gpus, published.gpus, own.gpus == published.gpus),
    ]
    layout = {axis.lower(): size for axis, size in own.layout.items()}
    for axis in {"tp": 1} | published.layout | {axis: size for axis, size in layout.items() if size > 1}:
        here, there = layout.get(axis, 1 if layout else None), published.layout.get(axis)
        found.append((axis, here, there, here == there))
    plain: list[tuple[str, _Value, _Value]] = [
        ("batch", own.batch, published.batch),
        ("draft tokens", own.draft_tokens, published.draft_tokens),
        ("input tokens", own.input_tokens, published.input_tokens),
        ("output tokens", own.output_tokens, published.output_tokens),
    ]
    if published.draft_tokens != 0:
        method = "none" if own.draft_tokens == 0 else own.method
        length = "none" if own.draft_tokens is not None and own.acceptance_length is None else own.acceptance_length
        plain += [
            ("method", method, published.method),
            ("synthetic acceptance length", length, published.acceptance_length),
        ]
    return found + [(name, here, there, here == there) for name, here, there in plain]


def _same_model(own: str | None, published: str | None) -> bool:
    here, there = (re.sub(r"[\W_]+", "", name or "").lower() for name in (own, published))
    return re.search(rf"{there}(?!\d)", here) is not None


def _same_gpu(own: str | None, published: str | None) -> bool:
    return re.search(rf"\b{re.escape(published or '')}\b", own or "", re.IGNORECASE) is not None


def _word(value: _Value) -> str:
    return "not known" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
