"""The eligibility table against vLLM 0.33.0's own conditions, one by one."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from replay.eligibility import (
    Deployment,
    captured_sizes,
    chip,
    consumes_key,
    read_config,
    refusals,
    rule,
    unchecked,
)
from replay.settings import from_command

K3: dict[str, Any] = {
    "model_type": "kimi_k3",
    "text_config": {
        "hidden_size": 7168,
        "dtype": "bfloat16",
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_router_activation_func": "sigmoid",
    },
}
DRAFTS = "-sc.method dspark -sc.num_speculative_tokens"
NVIDIA = f"-tp 8 {DRAFTS} 7"
AMD = f"-tp 8 {DRAFTS} 3"
DEEPSEEK = (
    f"-tp 4 {DRAFTS} 5 --attention-backend FLASHINFER_MLA_SPARSE_DSV41 --kv-cache-dtype fp8 "
    "--attention-config.indexer_kv_dtype mxfp4 --attention-config.indexer_sparse_logits true"
)


def deployment(
    options: str, gpu: str | None = "GB300", config: dict[str, Any] | None = K3, **environment: str
) -> Deployment:
    settings = from_command(["vllm", "serve", "m", *shlex.split(options)], environment)
    return Deployment(settings=settings, config=config, gpu=gpu, version="0.33.0")


def amd(options: str, gpu: str | None = "MI355X", **environment: str) -> Deployment:
    return deployment(options, gpu, **environment)


def deepseek(options: str, gpu: str | None = "NVIDIA GB300", **environment: str) -> Deployment:
    return deployment(options, gpu, {"model_type": "deepseek_v41"}, **environment)


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ("-tp 4", "tensor-parallel-size 4 is not supported: 8 or 16"),
        ("-pp 2", "pipeline-parallel-size must be 1, not 2"),
        ("--enable-expert-parallel", "leave --enable-expert-parallel out"),
        ("--enable-dbo", "leave --enable-dbo out"),
        ("--ubatch-size 2", "--ubatch-size at 0 (here 2)"),
        ("-dcp 4", "decode-context-parallel-size 4 is not supported: 1, or tensor-parallel-size (8)"),
        ("--enable-sleep-mode", "leave --enable-sleep-mode out"),
        ("--enable-lora", "leave --enable-lora out"),
        ("-cc.mode 1", "must not be STOCK_TORCH_COMPILE"),
        ("--enforce-eager", "FULL_AND_PIECEWISE (here NONE)"),
        ("-O1", "FULL_AND_PIECEWISE (here PIECEWISE)"),
        ("-cc.cudagraph_mode PIECEWISE", "FULL_AND_PIECEWISE (here PIECEWISE)"),
        ("-sc.method eagle3", "speculative-config.method eagle3 is not supported: dspark, or no speculation"),
        ("-sc.enable_adaptive_verification true", "leave speculative-config.enable_adaptive_verification out"),
        ("-sc.num_speculative_tokens 8", "num_speculative_tokens 8 is not supported: at most 7"),
        ("--mamba-cache-dtype float32", "the KDA conv state must be bfloat16"),
        ("--dtype float16", "the KDA conv state must be bfloat16"),
        ("--mamba-ssm-cache-dtype bfloat16", "mamba-ssm-cache-dtype bfloat16 is not supported: float32"),
        ("--use-replayssm", "leave --use-replayssm out"),
    ],
)
def test_one_wrong_setting_is_refused_for_one_reason(options: str, refusal: str) -> None:
    assert refusals(deployment(NVIDIA)) == []
    (found,) = refusals(deployment(f"{NVIDIA} {options}"))
    assert refusal in found


def test_refusals_by_hardware_model_version_and_environment() -> None:
    assert refusals(deployment(NVIDIA, "NVIDIA H200")) == [
        "GPU NVIDIA H200 is not supported: B200, GB200, B300 or GB300 (SM100/103)"
    ]
    other = json.loads(json.dumps(K3))
    other["text_config"]["num_experts"] = 256
    (found,) = refusals(deployment(NVIDIA, config=other))
    assert "896 experts" in found
    (found,) = refusals(deployment(NVIDIA, VLLM_USE_V2_MODEL_RUNNER="0"))
    assert "model runner V2" in found
    (found,) = refusals(deployment(NVIDIA, VLLM_KIMI_K3_AUX_ATTN_RES_STREAM="1"))
    assert "VLLM_KIMI_K3_AUX_ATTN_RES_STREAM" in found
    assert refusals(deployment("-tp 8", VLLM_KIMI_K3_AUX_ATTN_RES_STREAM="1")) == []
    old = Deployment(settings=deployment(NVIDIA).settings, config=K3, gpu="GB300", version="0.32.0")
    assert refusals(old) == ["vLLM 0.32.0 does not read decode_backend and would run standard decode: 0.33.0 or newer"]


def test_every_reason_is_given_not_only_the_first() -> None:
    assert len(refusals(deployment("-tp 4 -pp 2 --enable-lora", "H100"))) == 4


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ("-tp 16", "tensor-parallel-size 16 is not supported: 8"),
        ("-dp 2", "data-parallel-size must be 1, not 2"),
        ("--enable-eplb", "leave --enable-eplb out"),
        ("--kv-transfer-config.kv_connector NixlConnector", "MoRIIO consumer (here NixlConnector)"),
        ("--cpu-offload-gb 4", "leave --cpu-offload-gb"),
        ("-sc.num_speculative_tokens 8", "at most 7"),
        ("-cc.cudagraph_mode PIECEWISE", "PIECEWISE CUDA graphs run every decode step as standard"),
    ],
)
def test_kimi_k3_on_amd(options: str, refusal: str) -> None:
    assert refusals(amd(AMD)) == []
    assert refusals(amd(f"{AMD} --enforce-eager")) == []  # its kernels also run outside graphs
    (found,) = refusals(amd(f"{AMD} {options}"))
    assert refusal in found
    assert refusals(amd("-tp 8")) == ["decoding without speculation is not supported: give a speculative-config"]
    assert refusals(amd(AMD, "MI300X")) == ["GPU MI300X is not supported: MI355X (gfx950), not partitioned"]


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ("-tp 8", "tensor-parallel-size 8 is not supported: 4"),
        ("-dcp 4", "decode-context-parallel-size must be 1, not 4"),
        ("--kv-cache-dtype auto", "kv-cache-dtype auto is not supported: fp8"),
        ("--attention-config.indexer_sparse_logits false", "indexer_sparse_logits true (here false)"),
        ("--attention-backend FLASHMLA", "FLASHINFER_MLA_SPARSE_DSV41 (here FLASHMLA)"),
        ("-cc.cudagraph_mode FULL", "FULL_AND_PIECEWISE or FULL_DECODE_ONLY, not FULL"),
        ("-sc.method mtp", "needs DSpark"),
    ],
)
def test_deepseek_v41(options: str, refusal: str) -> None:
    assert refusals(deepseek(DEEPSEEK)) == []
    found = refusals(deepseek(f"{DEEPSEEK} {options}"))
    assert len(found) == 1
    assert refusal in found[0]
    assert any("VLLM_BATCH_INVARIANT" in why for why in refusals(deepseek(DEEPSEEK, VLLM_BATCH_INVARIANT="1")))
    assert any("flashinfer" in what for what in unchecked(deepseek(DEEPSEEK)))


def test_what_is_not_known_is_no_refusal_but_listed() -> None:
    assert unchecked(deployment(NVIDIA)) == []
    nameless = Deployment(settings={"model": "moonshotai/Kimi-K3", "tensor-parallel-size": "8"})
    assert refusals(nameless) == []
    assert {"GPU", "Kimi K3's mixture of experts", "dtype of the conv state", "version of vLLM"} == set(
        unchecked(nameless)
    )
    no_settings = Deployment(config=K3, gpu="GB300", version="0.33.0")
    assert refusals(no_settings) == []
    assert "tensor parallelism" in unchecked(no_settings)
    assert rule(no_settings) is None  # tokens a request takes are unknown
    assert unchecked(deployment(NVIDIA, "Teraflop 9000")) == ["GPU"]
    found = unchecked(deployment("-tp 8 -sc.model drafter"))
    assert found == ["speculation", "number of draft tokens"]
    assert rule(deployment("-tp 8 -sc.model drafter")) is None


# -- sizes


def found(deployed: Deployment) -> tuple[list[int], int, int]:
    path = rule(deployed)
    assert path is not None
    return path.sizes, path.tokens_per_request, path.max_requests


def test_sizes_without_drafts() -> None:
    usual = [1, 2, 3, 4, 5, 6, 7, 8, 16, 24, 32, 40, 48, 56, 64]
    assert found(deployment("-tp 8")) == (usual, 1, 64)
    assert found(deployment("-tp 8 --cudagraph-capture-sizes 1 2 12 64 128")) == (
        [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64],
        1,
        64,
    )
    assert found(deployment("-tp 8 --cudagraph-capture-sizes 1 2 4")) == ([1, 2, 3, 4], 1, 4)  # no larger graph


@pytest.mark.parametrize(
    ("drafts", "requests"),
    [(7, 8), (6, 8), (5, 10), (4, 12), (3, 16), (2, 19), (1, 32)],
)
def test_sizes_with_drafts(drafts: int, requests: int) -> None:
    """Whole requests of 1 + drafts tokens in at most 64. With 6 drafts 9 requests (63
    tokens) would be padded to 70, with 2 drafts 20 (60 tokens) to 66: both times the graph of captured size 64."""
    sizes, tokens, most = found(deployment(f"-tp 8 {DRAFTS} {drafts}"))
    assert tokens == 1 + drafts
    assert most == requests
    assert all(size % tokens == 0 and size <= 64 for size in sizes)
    assert tokens in sizes


def test_sizes_of_the_other_models() -> None:
    assert found(amd(f"-tp 8 {DRAFTS} 7")) == ([8], 8, 1)
    assert found(amd(f"-tp 8 {DRAFTS} 3")) == ([4, 8], 4, 2)
    sizes, tokens, most = found(deepseek(DEEPSEEK))
    assert (tokens, most, max(sizes)) == (6, 64, 384)


def test_default_capture_sizes() -> None:
    """As vLLM's own words give them (VllmConfig._set_cudagraph_sizes)."""
    assert captured_sizes(deployment("-tp 8"))[:6] == [1, 2, 4, 8, 16, 24]
    assert captured_sizes(deployment("-tp 8"))[-1] == 512
    assert captured_sizes(deployment("-tp 8 --max-num-seqs 5")) == [1, 2, 4, 5, 8]
    assert captured_sizes(deployment("-tp 8 --max-cudagraph-capture-size 16")) == [1, 2, 4, 8, 16]
    assert captured_sizes(deployment("-tp 8 --performance-mode interactivity"))[:33] == [*range(1, 33), 40]


def test_other_models_have_no_rule_and_ignore_the_key() -> None:
    assert rule(deployment(NVIDIA, config={"model_type": "llama"})) is None
    assert rule(Deployment(settings={"model": "meta/llama"})) is None
    assert consumes_key("llama", "0.33.0") is False
    assert consumes_key("llama", None) is False
    assert consumes_key("kimi_k3", "0.33.0+cpu") is True
    assert consumes_key("kimi_k3", "0.32.0") is False
    assert consumes_key("kimi_k3", "0.32.1.dev5+gabc") is None
    assert consumes_key("kimi_k3", None) is None
    assert consumes_key(None, "0.33.0") is None
    assert consumes_key(None, "0.32.0") is False
    assert consumes_key("deepseek_v41", "0.34.1") is True
    assert consumes_key("deepseek_v41", "0.34.1", "MI355X") is False


def test_facts_are_read(tmp_path: Path) -> None:
    assert read_config(str(tmp_path)) is None
    (tmp_path / "config.json").write_text(json.dumps(K3))
    assert read_config(str(tmp_path)) == K3
    names = {"NVIDIA GB300": "SM103", "B200": "SM100", "NVIDIA H100 80GB HBM3": "SM90", "AMD Instinct MI355X": "gfx950"}
    assert {name: chip(name) for name in names} == names
    assert chip("toy") is None
