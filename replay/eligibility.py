"""Which decode steps the specialised path can take: the rules of vLLM 0.33.0 for the models that have it, as a table.

Read in its sources (vllm/models/kimi_k3/nvidia/specialized_decode/runtime: __init__ `unsupported`, decode `plan`,
providers `BATCHES`; kimi_k3/amd/specialized_decode/runtime/__init__; deepseek_v41/nvidia/specialized_decode/__init__)
and put into words of our own. What cannot be known before the start (loaded weights, NVLink, DeepGEMM) is said to be
unchecked; a server that we start tells by refusing.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from replay.records import PathRule

SOURCE = "vLLM 0.33.0"
_FIRST_VERSION = (0, 33)
"""Older vLLM does not read decode_backend."""


class Deployment(msgspec.Struct, kw_only=True, frozen=True):
    """What is known of a server before it starts. Null is unknown."""

    settings: dict[str, str] | None = None
    """As replay/settings.py gives them."""
    config: dict[str, Any] | None = None
    """The model's config.json."""
    gpu: str | None = None
    """As declared ("GB300") or as NVML names it ("NVIDIA GB300")."""
    version: str | None = None
    """vLLM's."""


Test = Callable[[Deployment], bool | None]
"""True: met. False: refused. None: not known."""


class Need(NamedTuple):
    """One condition on a deployment."""

    what: str
    met: Test
    refusal: str
    """What is wrong and what would be right; %(name)s is the setting of that name."""


class Model(NamedTuple):
    """A model with the switch, on one make of GPU."""

    name: str
    model_types: tuple[str, ...]
    """In config.json."""
    spelled: str
    """Pattern of its name, for a deployment whose config.json is not at hand."""
    amd: bool
    most_tokens: int
    """Of a step, after padding."""
    needs: tuple[Need, ...]
    unseen: tuple[str, ...] = ()
    """What it needs besides, and only shows when it starts."""


# -- facts about a deployment

_DEFAULTS = {
    "tensor-parallel-size": "1",
    "pipeline-parallel-size": "1",
    "data-parallel-size": "1",
    "decode-context-parallel-size": "1",
    "prefill-context-parallel-size": "1",
    "ubatch-size": "0",
    "kv-cache-dtype": "auto",
    "mamba-cache-dtype": "auto",
    "mamba-ssm-cache-dtype": "auto",
    "dtype": "auto",
    "attention-config.backend": "not set",
    "attention-config.indexer_kv_dtype": "auto",
    "attention-config.indexer_sparse_logits": "false",
    "compilation-config.mode": "not set",
    "speculative-config.method": "not set",
    "cpu-offload-gb": "0",
    "offload-group-size": "0",
}
"""vLLM's, of the settings below; switches are off."""

_CHIPS = (
    (r"G?B300", "SM103"),
    (r"G?B[12]00", "SM100"),
    (r"(H100|H200|H800|H20|GH200)", "SM90"),
    (r"L(4|40S?)", "SM89"),
    (r"A(100|800)", "SM80"),
    (r"MI35[05]X?", "gfx950"),
    (r"MI3(00[AX]?|08X|25X)", "gfx942"),
    (r"CPU", "CPU"),
)
"""(pattern of a GPU's name, its architecture)."""


def chip(gpu: str | None) -> str | None:
    """Architecture of a GPU by its name ("SM103", "gfx950"); None if it is not one of those known here."""
    found = (arch for pattern, arch in _CHIPS if gpu and re.search(rf"\b{pattern}\b", gpu, re.IGNORECASE))
    return next(found, None)


def read_config(model: str) -> dict[str, Any] | None:
    """config.json of a model that is a folder of this machine, else None."""
    try:
        data = json.loads((Path(model) / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _setting(deployment: Deployment, name: str) -> str:
    assert deployment.settings is not None
    return deployment.settings.get(name, _DEFAULTS.get(name, "false"))


def _is(name: str, *values: str) -> Test:
    """The setting is one of these."""

    def met(deployment: Deployment) -> bool | None:
        return None if deployment.settings is None else _setting(deployment, name) in values

    return met


def _off(*names: str) -> Test:
    """No setting of these names, or below them, is switched on."""

    def met(deployment: Deployment) -> bool | None:
        if deployment.settings is None:
            return None
        return all(
            value in ("false", "0", "null", "")
            for key, value in deployment.settings.items()
            if any(key == name or key.startswith(name + ".") for name in names)
        )

    return met


def _all(*tests: Test) -> Test:
    """All are met; False if one is not, even when others are not known."""

    def met(deployment: Deployment) -> bool | None:
        found = [test(deployment) for test in tests]
        return False if False in found else None if None in found else True

    return met


def _either(*tests: Test) -> Test:
    """One is met."""

    def met(deployment: Deployment) -> bool | None:
        found = [test(deployment) for test in tests]
        return True if True in found else None if None in found else False

    return met


def _not(test: Test) -> Test:
    def met(deployment: Deployment) -> bool | None:
        found = test(deployment)
        return None if found is None else not found

    return met


def _gpu(*chips: str) -> Test:
    def met(deployment: Deployment) -> bool | None:
        seen = chip(deployment.gpu)
        return None if seen is None else seen in chips

    return met


def _text(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config.json."""
    inside = config.get("text_config")
    return inside if isinstance(inside, dict) else config


def _model(**wanted: Any) -> Test:
    """The language model's config has these values; what it leaves out is not known."""

    def met(deployment: Deployment) -> bool | None:
        if deployment.config is None:
            return None
        text = _text(deployment.config)
        found = [text[name] == value for name, value in wanted.items() if name in text]
        return False if False in found else True if len(found) == len(wanted) else None

    return met


def _dcp_is_one_or_tp(deployment: Deployment) -> bool | None:
    if deployment.settings is None:
        return None
    dcp = _setting(deployment, "decode-context-parallel-size")
    return dcp in ("1", _setting(deployment, "tensor-parallel-size"))


def _conv_state_is_bf16(deployment: Deployment) -> bool | None:
    """KDA's conv state has the model's dtype unless --mamba-cache-dtype says another."""
    if deployment.settings is None:
        return None
    dtype = _setting(deployment, "mamba-cache-dtype")
    if dtype == "auto":
        dtype = _setting(deployment, "dtype")
    if dtype == "auto":
        text = _text(deployment.config or {})
        dtype = text.get("dtype") or text.get("torch_dtype") or (deployment.config or {}).get("dtype") or "auto"
    return None if dtype == "auto" else str(dtype).removeprefix("torch.") == "bfloat16"


def _decode_graphs(deployment: Deployment) -> str:
    """CUDA-graph mode, as far as the settings decide it."""
    if _setting(deployment, "enforce-eager") == "true":
        return "NONE"
    by_level = {"0": "NONE", "1": "PIECEWISE"}.get(_setting(deployment, "optimization-level"), "FULL_AND_PIECEWISE")
    assert deployment.settings is not None
    return deployment.settings.get("compilation-config.cudagraph_mode", by_level)


def _graphs(*modes: str) -> Test:
    def met(deployment: Deployment) -> bool | None:
        return None if deployment.settings is None else _decode_graphs(deployment) in modes

    return met


def speculates(deployment: Deployment) -> bool | None:
    """Whether drafts are verified; None if the settings are unknown."""
    if deployment.settings is None:
        return None
    return any(key.startswith("speculative-config.") for key in deployment.settings)


def draft_tokens(deployment: Deployment) -> int | None:
    """Draft tokens a step; 0 without speculation; None if unknown (vLLM may take them from the drafter's config)."""
    if deployment.settings is None:
        return None
    if not speculates(deployment):
        return 0
    text = deployment.settings.get("speculative-config.num_speculative_tokens", "")
    return int(text) if text.isdecimal() else None


def _few_drafts(deployment: Deployment) -> bool | None:
    drafts = draft_tokens(deployment)
    return None if drafts is None else drafts <= 7


def _dspark(deployment: Deployment) -> bool | None:
    """Drafts by DSpark; None where vLLM finds the method out from the drafter."""
    if not speculates(deployment):
        return None if deployment.settings is None else False
    method = _setting(deployment, "speculative-config.method")
    return None if method == "not set" else method == "dspark"


def _dsv41_attention(deployment: Deployment) -> bool | None:
    """The backend by its name; /server_info shows its class instead, which tells nothing here."""
    if deployment.settings is None:
        return None
    backend = _setting(deployment, "attention-config.backend")
    return None if "." in backend else backend == "FLASHINFER_MLA_SPARSE_DSV41"


def _v2_runner(deployment: Deployment) -> bool | None:
    """vLLM takes it by itself, unless it is told not to."""
    if deployment.settings is None:
        return None
    return deployment.settings.get("env.VLLM_USE_V2_MODEL_RUNNER", "1") not in ("0", "false")


# -- the table

_TP = "tensor-parallel-size %(tensor-parallel-size)s is not supported: "
_NO_PP = Need(
    "pipeline parallelism",
    _is("pipeline-parallel-size", "1"),
    "pipeline-parallel-size must be 1, not %(pipeline-parallel-size)s",
)
_NO_DP = Need(
    "data parallelism", _is("data-parallel-size", "1"), "data-parallel-size must be 1, not %(data-parallel-size)s"
)
_NO_PCP = Need(
    "prefill context parallelism",
    _is("prefill-context-parallel-size", "1"),
    "prefill-context-parallel-size must be 1, not %(prefill-context-parallel-size)s",
)
_NO_EP = Need("expert parallelism", _off("enable-expert-parallel"), "leave --enable-expert-parallel out")
_NO_DBO = Need(
    "dual-batch overlap (DBO)",
    _all(_off("enable-dbo"), _is("ubatch-size", "0", "1")),
    "leave --enable-dbo out, and --ubatch-size at 0 (here %(ubatch-size)s)",
)
_DCP = Need(
    "decode context parallelism",
    _dcp_is_one_or_tp,
    "decode-context-parallel-size %(decode-context-parallel-size)s is not supported: 1, or tensor-parallel-size "
    "(%(tensor-parallel-size)s)",
)
_NO_SLEEP = Need("sleep mode", _off("enable-sleep-mode"), "leave --enable-sleep-mode out")
_NO_LORA = Need("LoRA", _off("enable-lora"), "leave --enable-lora out")
_V2 = Need("model runner", _v2_runner, "needs model runner V2: leave VLLM_USE_V2_MODEL_RUNNER out, or set it to 1")
_NO_COMPILE = Need(
    "compilation mode",
    _not(_is("compilation-config.mode", "STOCK_TORCH_COMPILE")),
    "compilation-config.mode must not be STOCK_TORCH_COMPILE (1)",
)
_NO_ADAPTIVE = Need(
    "adaptive verification",
    _off("speculative-config.enable_adaptive_verification"),
    "leave speculative-config.enable_adaptive_verification out: every request must verify the same number of tokens",
)
_SEVEN = Need(
    "number of draft tokens",
    _few_drafts,
    "speculative-config.num_speculative_tokens %(speculative-config.num_speculative_tokens)s is not supported: "
    "at most 7",
)
_CONV_STATE = Need(
    "dtype of the conv state",
    _conv_state_is_bf16,
    "the KDA conv state must be bfloat16: --mamba-cache-dtype bfloat16 (here %(mamba-cache-dtype)s, with dtype "
    "%(dtype)s)",
)
_RECURRENT_STATE = Need(
    "dtype of the recurrent state",
    _is("mamba-ssm-cache-dtype", "auto", "float32"),
    "mamba-ssm-cache-dtype %(mamba-ssm-cache-dtype)s is not supported: float32",
)
_NO_REPLAYSSM = Need("ReplaySSM and RecoverSSM", _off("use-replayssm"), "leave --use-replayssm out")

MODELS = (
    Model(
        name="Kimi K3 on NVIDIA",
        model_types=("kimi_k3", "kimi_linear"),
        spelled=r"kimi[-_ ]?k3",
        amd=False,
        most_tokens=64,
        needs=(
            Need("GPU", _gpu("SM100", "SM103"), "GPU %(gpu)s is not supported: B200, GB200, B300 or GB300 (SM100/103)"),
            Need(
                "Kimi K3's mixture of experts",
                _model(
                    hidden_act="situ",
                    activation_situ_beta=4.0,
                    activation_situ_linear_beta=25.0,
                    num_experts=896,
                    num_experts_per_token=16,
                    num_expert_group=1,
                    topk_group=1,
                    moe_router_activation_func="sigmoid",
                ),
                "config.json does not describe Kimi K3's mixture of experts (896 experts, top 16, one group, sigmoid, "
                "SiTU)",
            ),
            Need("tensor parallelism", _is("tensor-parallel-size", "8", "16"), _TP + "8 or 16"),
            _NO_PP,
            _NO_EP,
            _NO_DBO,
            _DCP,
            _NO_SLEEP,
            _NO_LORA,
            _V2,
            _NO_COMPILE,
            Need(
                "FULL CUDA graphs for decode steps",
                _graphs("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"),
                "decode steps need FULL CUDA graphs: compilation-config.cudagraph_mode FULL_AND_PIECEWISE (here "
                "%(graphs)s), without --enforce-eager",
            ),
            Need(
                "speculation",
                _either(_not(speculates), _dspark),
                "speculative-config.method %(speculative-config.method)s is not supported: dspark, or no speculation",
            ),
            _NO_ADAPTIVE,
            _SEVEN,
            _CONV_STATE,
            _RECURRENT_STATE,
            _NO_REPLAYSSM,
            Need(
                "AttnRes aux stream",
                _either(_not(speculates), _off("env.VLLM_KIMI_K3_AUX_ATTN_RES_STREAM")),
                "leave VLLM_KIMI_K3_AUX_ATTN_RES_STREAM out, or speculation",
            ),
        ),
    ),
    Model(
        name="Kimi K3 on AMD",
        model_types=("kimi_k3", "kimi_linear"),
        spelled=r"kimi[-_ ]?k3",
        amd=True,
        most_tokens=8,
        needs=(
            Need("GPU", _gpu("gfx950"), "GPU %(gpu)s is not supported: MI355X (gfx950), not partitioned"),
            Need(
                "Kimi K3's shapes",
                _model(hidden_size=7168, num_experts=896),
                "config.json does not describe Kimi K3 (hidden size 7168, 896 experts)",
            ),
            Need("tensor parallelism", _is("tensor-parallel-size", "8"), _TP + "8"),
            _NO_PP,
            _NO_DP,
            _NO_PCP,
            _NO_EP,
            Need("expert balancing (EPLB)", _off("enable-eplb"), "leave --enable-eplb out"),
            _DCP,
            _NO_DBO,
            _NO_LORA,
            Need(
                "KV transfer",
                _either(
                    _off("kv-transfer-config"),
                    _all(
                        _is("kv-transfer-config.kv_connector", "MoRIIOConnector"),
                        _is("kv-transfer-config.kv_role", "kv_consumer"),
                        _off("kv-transfer-config.kv_connector_module_path"),
                    ),
                ),
                "no KV transfer but a MoRIIO consumer (here %(kv-transfer-config.kv_connector)s)",
            ),
            Need(
                "capture of routed experts",
                _off("aux-output-config.enable_return_routed_experts"),
                "leave --enable-return-routed-experts out",
            ),
            _NO_SLEEP,
            Need(
                "offloading of weights",
                _all(_is("cpu-offload-gb", "0"), _is("offload-group-size", "0")),
                "leave --cpu-offload-gb and --offload-group-size out",
            ),
            Need("weight updates", _off("weight-transfer-config"), "leave --weight-transfer-config out"),
            Need("speculation", speculates, "decoding without speculation is not supported: give a speculative-config"),
            _SEVEN,
            _NO_ADAPTIVE,
            Need(
                "dynamic speculation",
                _off("speculative-config.num_speculative_tokens_per_batch_size"),
                "leave speculative-config.num_speculative_tokens_per_batch_size out",
            ),
            _CONV_STATE,
            _NO_REPLAYSSM,
            _V2,
            _NO_COMPILE,
            Need(
                "CUDA graphs that are not PIECEWISE alone",
                _graphs("NONE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"),
                "PIECEWISE CUDA graphs run every decode step as standard: compilation-config.cudagraph_mode "
                "FULL_AND_PIECEWISE",
            ),
        ),
        unseen=("weights as the kernels read them, with the AITER_MXFP4_BF16 experts",),
    ),
    Model(
        name="DeepSeek V4.1 on NVIDIA",
        model_types=("deepseek_v41",),
        spelled=r"deepseek[-_ ]?v4[-_.]?1",
        amd=False,
        most_tokens=384,
        needs=(
            Need("GPU", _gpu("SM103"), "GPU %(gpu)s is not supported: GB300 or B300 (SM103)"),
            _V2,
            Need("tensor parallelism", _is("tensor-parallel-size", "4"), _TP + "4"),
            _NO_PP,
            _NO_DP,
            _NO_EP,
            Need(
                "decode context parallelism",
                _is("decode-context-parallel-size", "1"),
                "decode-context-parallel-size must be 1, not %(decode-context-parallel-size)s",
            ),
            _NO_PCP,
            _NO_DBO,
            Need(
                "speculation",
                _dspark,
                "needs DSpark: speculative-config.method dspark (here %(speculative-config.method)s)",
            ),
            _NO_ADAPTIVE,
            Need(
                "attention backend",
                _dsv41_attention,
                "needs --attention-backend FLASHINFER_MLA_SPARSE_DSV41 (here %(attention-config.backend)s)",
            ),
            Need(
                "dtype of the KV cache",
                _is("kv-cache-dtype", "fp8", "fp8_e4m3"),
                "kv-cache-dtype %(kv-cache-dtype)s is not supported: fp8",
            ),
            Need(
                "indexer",
                _all(
                    _is("attention-config.indexer_kv_dtype", "mxfp4"),
                    _is("attention-config.indexer_sparse_logits", "true"),
                ),
                "needs attention-config.indexer_kv_dtype mxfp4 (here %(attention-config.indexer_kv_dtype)s) and "
                "attention-config.indexer_sparse_logits true (here %(attention-config.indexer_sparse_logits)s)",
            ),
            Need(
                "FULL CUDA graphs for decode steps only",
                _graphs("FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"),
                "compilation-config.cudagraph_mode must be FULL_AND_PIECEWISE or FULL_DECODE_ONLY, not %(graphs)s",
            ),
            _NO_COMPILE,
            _NO_SLEEP,
            _NO_LORA,
            Need("KV transfer", _off("kv-transfer-config"), "leave --kv-transfer-config out"),
            Need("batch invariance", _off("env.VLLM_BATCH_INVARIANT"), "leave VLLM_BATCH_INVARIANT out"),
        ),
        unseen=(
            "DeepGEMM and NVLink multicast for the fused all-reduce",
            "flashinfer-python 0.7.2: with another, parts of a step run as standard, with a warning in the log",
        ),
    ),
)
"""Models whose code reads decode_backend. DeepSeek V4.1 on AMD does not. (MiniMax M3 on AMD has a specialised decode of
its own, switched on by --monokernel.)"""


# -- asked of the table


def model_of(deployment: Deployment) -> Model | None:
    """The row for a deployment, by its config.json or else by its model's name; None: no rule is known for it."""
    amd = (chip(deployment.gpu) or "").startswith("gfx")
    config, name = deployment.config, (deployment.settings or {}).get("model", "")
    for model in MODELS:
        known = (
            config.get("model_type") in model.model_types if config else re.search(model.spelled, name, re.IGNORECASE)
        )
        if known and model.amd == amd:
            return model
    return None


def consumes_key(model_type: str | None, version: str | None, gpu: str | None = None) -> bool | None:
    """Whether this model (model_type of its config.json) in this vLLM reads decode_backend at all. A server that does
    not runs standard decode, whatever the key says. None: not known."""
    amd = (chip(gpu) or "").startswith("gfx")
    if model_type is not None and not any(model_type in m.model_types and m.amd == amd for m in MODELS):
        return False
    numbers = re.match(r"(\d+)\.(\d+)", version or "")
    if numbers is None:
        return None
    if (int(numbers[1]), int(numbers[2])) < _FIRST_VERSION:
        return None if "dev" in (version or "") else False  # a build from between two releases may have it
    return None if model_type is None else True


def refusals(deployment: Deployment) -> list[str]:
    """Why this deployment is refused at its start, or never runs specialised: each reason, with what would be right."""
    model = model_of(deployment)
    if model is None:
        return []
    words: dict[str, str] = defaultdict(lambda: "not set", _DEFAULTS)
    words |= (deployment.settings or {}) | {"gpu": deployment.gpu or "unknown"}
    if deployment.settings is not None:
        words["graphs"] = _decode_graphs(deployment)
    found = [need.refusal % words for need in model.needs if need.met(deployment) is False]
    if consumes_key(model.model_types[0], deployment.version, deployment.gpu) is False:
        found.append(
            f"vLLM {deployment.version} does not read decode_backend and would run standard decode: 0.33.0 or newer"
        )
    return found


def unchecked(deployment: Deployment) -> list[str]:
    """What the path needs and could not be checked, in a few words each."""
    model = model_of(deployment)
    if model is None:
        return []
    unknown = [need.what for need in model.needs if need.met(deployment) is None]
    if deployment.version is None:
        unknown.append("version of vLLM")
    return unknown + list(model.unseen)


def rule(deployment: Deployment) -> PathRule | None:
    """Which decode steps can run specialised, and why none can if the deployment is refused.

    None if no rule is known for the model, or if it is not known how many tokens a request takes in a step.
    """
    model, drafts = model_of(deployment), draft_tokens(deployment)
    if model is None or drafts is None:
        return None
    tokens = 1 + drafts
    sizes = _sizes(model, tokens, captured_sizes(deployment))
    return PathRule(
        model=model.name,
        source=SOURCE,
        sizes=sizes,
        tokens_per_request=tokens,
        max_requests=max(sizes, default=0) // tokens,
        graphs_only=not model.amd,
        problems=refusals(deployment),
    )


def _sizes(model: Model, tokens: int, captured: Sequence[int]) -> list[int]:
    """Batch sizes, in tokens, of whole requests of ``tokens`` each.

    Graphs of verify steps are captured at the next multiple of a request's tokens. Kimi K3 on NVIDIA has kernels for 1
    to 8, 16, 32 and 64 tokens and for each captured size up to 64; no graph holds more than the largest captured size.
    Kimi K3 on AMD has kernels for each multiple up to 8, also outside graphs.
    """
    if model.amd:
        return list(range(tokens, model.most_tokens + 1, tokens))
    graphs = {math.ceil(size / tokens) * tokens for size in captured}
    sizes = {size for size in graphs if size <= model.most_tokens}
    if model.most_tokens == 64 and sizes:
        sizes |= {size for size in (*range(1, 9), 16, 32, 64) if size <= max(graphs)}
    return sorted(size for size in sizes if size % tokens == 0)


def captured_sizes(deployment: Deployment) -> list[int]:
    """Batch sizes, in tokens, for which CUDA graphs are captured: as set, or vLLM's default, up to 512."""
    settings = deployment.settings or {}
    if given := _numbers(settings.get("compilation-config.cudagraph_capture_sizes", "")):
        return given
    tokens = 1 + (draft_tokens(deployment) or 0)
    most_requests = _numbers(settings.get("max-num-seqs", ""))
    most = _numbers(settings.get("compilation-config.max_cudagraph_capture_size", ""))
    limit = most[0] if most else min(most_requests[0] * tokens * 2 if most_requests else 512, 512)
    few = range(1, 33) if settings.get("performance-mode") == "interactivity" else (1, 2, 4)
    sizes = {*few, *range(8, 256, 8), *range(256, 513, 16)}
    if not most:  # whole requests, so that the usual numbers of them need no padding
        counts = {1, 2, 4, *range(8, 256, 8), *most_requests}
        sizes |= {n * tokens for n in counts if not most_requests or n <= most_requests[0]}
    return sorted(size for size in sizes if size <= limit)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", text)]
