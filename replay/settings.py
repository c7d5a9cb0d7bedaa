"""What a vLLM server was told, as a flat map from a setting's name to its value as text; and what differs between two.

A setting is named as `vllm serve` names it: by its long option ("tensor-parallel-size"), with what stands inside a JSON
option after a dot ("compilation-config.cudagraph_mode"). Options of equal meaning get one name (_SAME_OPTION). Besides:
"model"; "env.NAME" for the environment; "image" for a container's image; "launcher" for the words before the options,
which tell one build of vLLM from another.

Read from the command of a server that we start, or from /server_info of one that runs. A setting that is not in the map
was not set, and is at vLLM's default. Keys and passwords are never taken up, so they are never shown, nor compared.
"""

from __future__ import annotations

import fnmatch
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import yaml

from replay import experiment, records, redaction
from workloads.errors import UserError

_SHORT = {
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-dcp": "decode-context-parallel-size",
    "-pcp": "prefill-context-parallel-size",
    "-dpn": "data-parallel-rank",
    "-dpr": "data-parallel-start-rank",
    "-dpl": "data-parallel-size-local",
    "-dpa": "data-parallel-address",
    "-dpp": "data-parallel-rpc-port",
    "-dpb": "data-parallel-backend",
    "-dph": "data-parallel-hybrid-lb",
    "-dpe": "data-parallel-external-lb",
    "-dpm": "data-parallel-multi-port-external-lb",
    "-ep": "enable-expert-parallel",
    "-n": "nnodes",
    "-r": "node-rank",
    "-q": "quantization",
    "-asc": "api-server-count",
    "-sc": "speculative-config",
    "-dc": "diffusion-config",
    "-cc": "compilation-config",
    "-ac": "attention-config",
    "-O": "optimization-level",
}

_SAME_OPTION = {
    "device-memory-utilization": "gpu-memory-utilization",
    "spec-method": "speculative-config.method",
    "spec-model": "speculative-config.model",
    "spec-tokens": "speculative-config.num_speculative_tokens",
    "cudagraph-capture-sizes": "compilation-config.cudagraph_capture_sizes",
    "max-cudagraph-capture-size": "compilation-config.max_cudagraph_capture_size",
    "attention-backend": "attention-config.backend",
    "moe-backend": "kernel-config.moe_backend",
    "linear-backend": "kernel-config.linear_backend",
    "enable-flashinfer-autotune": "kernel-config.enable_flashinfer_autotune",
    "enable-return-routed-experts": "aux-output-config.enable_return_routed_experts",
    "cache-dtype": "kv-cache-dtype",
    "policy": "scheduling-policy",
    "uva.cpu_offload_gb": "cpu-offload-gb",
    "prefetch.offload_group_size": "offload-group-size",
}
"""One name for options of equal meaning; the last ones are names in /server_info."""

_SAME_VALUE = {
    "compilation-config.cudagraph_mode": {
        "0": "NONE",
        "1": "PIECEWISE",
        "2": "FULL",
        "2, 0": "FULL_DECODE_ONLY",
        "2, 1": "FULL_AND_PIECEWISE",
    },
    "compilation-config.mode": {
        "0": "NONE",
        "1": "STOCK_TORCH_COMPILE",
        "2": "DYNAMO_TRACE_ONCE",
        "3": "VLLM_COMPILE",
    },
}
"""Names of values that may be given by number."""

_SEVERAL = {
    *("lora-modules", "api-key", "allowed-media-domains", "served-model-name", "sleep-preserve-parameter-names"),
    *("logits-processors", "ignore-patterns", "numa-bind-nodes", "numa-bind-cpus", "kv-cache-dtype-skip-layers"),
    *("cpu-offload-params", "offload-params", "lora-target-modules", "collect-detailed-traces"),
    "cudagraph-capture-sizes",
}
"""Options that take all the words up to the next option."""

_FLAG = re.compile(
    r"(no|enable|disable(?!-access-log-for)|use|trust|skip|return|exclude|enforce|fully|specialize|interleave|async)-"
    r"|(aggregate|scheduler-reserve|ray-workers-use|kv-sharing|swa|dcp-q|fail-on|cohere-is|mm-(encoder-only|device-do))"
    r"|(log-error-stack|sleep-mode-offload-cudagraph|long-prefill-token-threshold-adaptive|jit-monitor-verbose)"
    r"|(allow-(credentials|deprecated)|data-parallel-(hybrid|external|multi-port-external)-lb|language-model-only)"
    r"|(headless|grpc|tokens-only|numa-bind|cudagraph-metrics|kv-cache-metrics)$"
)
"""Options without a value. Needed only where the model's name follows one."""

_ENVIRONMENT = re.compile(
    r"(VLLM|NCCL|RCCL|NVSHMEM|CUDA|HIP|ROCM|ROCR|HSA|TORCH|TORCHINDUCTOR|PYTORCH|TRITON|FLASHINFER|OMP)_|LD_PRELOAD$"
)
"""Variables of the environment that can change how a server runs; others are not taken up."""

IGNORED = (
    # where the server is found, and what it calls itself
    *("host", "port", "uds", "root-path", "served-model-name", "ssl-*", "enable-ssl-refresh", "allowed-*", "allow-*"),
    *("enable-request-id-headers", "disable-fastapi-docs", "enable-offline-docs", "shutdown-timeout", "instance-id"),
    # what it writes about itself
    *("*log-level", "log-*", "*-log-file", "max-log-len", "logging-config*", "enable-log-*", "disable-log-requests"),
    *("disable-uvicorn-access-log", "disable-access-log-for-endpoints", "aggregate-engine-logging"),
    *("otlp-traces-endpoint", "profiler-config*", "env.VLLM_LOGGING_*", "env.VLLM_LOG_*", "env.NCCL_DEBUG*"),
    *("env.VLLM_NO_USAGE_STATS", "env.VLLM_USAGE_*", "env.VLLM_DO_NOT_TRACK", "env.VLLM_SERVER_DEV_MODE"),
    # which of equal machines, GPUs and cores it runs on; how many is its layout
    *("master-addr", "master-port", "node-rank", "data-parallel-address", "data-parallel-rpc-port", "device-ids"),
    *("env.CUDA_VISIBLE_DEVICES", "env.HIP_VISIBLE_DEVICES", "env.ROCR_VISIBLE_DEVICES", "env.CUDA_DEVICE_ORDER"),
    *("env.VLLM_PORT", "env.VLLM_HOST_IP", "env.VLLM_DP_MASTER_*", "env.VLLM_CPU_OMP_THREADS_BIND"),
    # where it keeps files
    *("download-dir", "env.*_CACHE_DIR", "env.*_CACHE_PATH", "env.*_CACHE_ROOT", "env.FLASHINFER_WORKSPACE_BASE"),
    *("env.VLLM_CONFIG_ROOT", "env.VLLM_ASSETS_CACHE", "env.VLLM_RPC_BASE_PATH", "env.VLLM_OBJECT_STORAGE_SHM_*"),
)
"""Settings that never count as a difference: patterns of names."""

VOLATILE = (
    *("instance-id", "*-port", "*-master-ip", "*-port-list", "world-size", "rank", "data-parallel-rank*"),
    *("data-parallel-index", "placement-group", "ray-runtime-env", "assigned-physical-gpu-ids", "-*"),
    *("num-gpu-blocks", "num-cpu-blocks", "kv-cache-size-tokens", "kv-cache-max-concurrency"),
    *("compilation-config.cache_dir", "compilation-config.local_cache_dir", "compilation-config.debug_dump_path"),
    *("compilation-config.*compilation_time", "compilation-config.traced_files", "env.VLLM_OBJECT_STORAGE_SHM_*"),
    *("compilation-config.static_*", "compilation-config.enabled_custom_ops*", "compilation-config.disabled_custom_*"),
    *("system.env_vars", "system.cpu_info", "system.gpu_topo", "system.is_*", "system.conda_packages"),
)
"""What /server_info shows that is no setting: ids, ports, paths, times, sizes found by measuring. Patterns of names;
"-*" is what vLLM keeps to itself."""

_NESTED = {
    *("compilation_config", "attention_config", "speculative_config", "additional_config", "kernel_config"),
    *("kv_transfer_config", "kv_events_config", "ec_transfer_config", "ec_manager_config", "structured_outputs_config"),
    *("profiler_config", "reasoning_config", "weight_transfer_config", "diffusion_config", "watermark_config"),
    *(
        "aux_output_config",
        "engram_config",
        "mamba_config",
        "logging_config",
        "quant_config",
        "eplb_config",
        "fault_tolerance_config",
    ),
}
"""Parts of /server_info that `vllm serve` takes as JSON; the fields of the others are options of their own."""

_WHY = (
    ("image", "another build of vLLM and its kernels"),
    ("launcher", "another build of vLLM, or another way to start it"),
    ("system.*", "another build or machine"),
    ("model", "another model"),
    ("tensor-parallel-size", "another split of the weights: each GPU does another share of a step"),
    ("pipeline-parallel-size", "another split of the layers over the GPUs"),
    ("data-parallel-size*", "another number of engines shares the requests"),
    ("*context-parallel-size", "another split of the KV cache over the GPUs"),
    ("enable-expert-parallel", "another split of the experts over the GPUs"),
    ("kv-cache-dtype*", "other attention kernels, and room for another number of tokens"),
    ("compilation-config.*capture_size*", "other batch sizes have CUDA graphs, and steps are padded to other sizes"),
    ("compilation-config.cudagraph_mode", "other steps run in CUDA graphs"),
    ("enforce-eager", "no CUDA graphs on one side"),
    ("optimization-level", "other compilation and CUDA-graph modes"),
    ("speculative-config*", "another number of tokens comes out of a step"),
    ("*-parser*", "replies are cut into other chunks, and may end elsewhere"),
    ("enable-prefix-caching", "prompts are computed anew on one side"),
    ("prefix*", "another share of the prompts comes from the cache"),
    ("max-num-seqs", "another number of requests can run at once"),
    ("max-num-batched-tokens", "prompts are cut into other pieces"),
    ("max-model-len", "other requests fit, and the KV cache is divided otherwise"),
    ("gpu-memory-utilization", "room for another number of tokens in the KV cache"),
    ("quantization*", "other weights, and other kernels"),
    ("dtype", "other weights, and other kernels"),
    ("attention-config*", "other attention kernels"),
    ("kernel-config*", "other kernels"),
    ("stream-interval", "tokens are sent in other chunks"),
    ("async-scheduling", "scheduling is hidden behind the GPU's work on one side"),
    ("scheduling-policy", "requests run in another order"),
)
"""Why a difference matters: patterns of names, the first that fits."""

_AXES = {
    "tp": "tensor-parallel-size",
    "pp": "pipeline-parallel-size",
    "dp": "data-parallel-size",
    "dcp": "decode-context-parallel-size",
    "pcp": "prefill-context-parallel-size",
}


# -- from a command


def from_command(words: Sequence[str], environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The settings that a `vllm serve` command gives, in whatever spelling, also inside docker or podman run.

    ``environment``: what is added to the server's environment. A file named by --config is read (options of the command
    go over it). Raises UserError when the file cannot be read, or an option lacks its value.
    """
    found: dict[str, Any] = {}
    environment = dict(environment or {})
    words = list(words)
    container = next((n for n in range(len(words) - 1) if _is_container(words[n], words[n + 1])), None)
    if container is not None:
        found["image"], inside, words = _container(words[container + 2 :])
        environment |= inside
    launcher, options = _launcher(words, in_container=container is not None)
    while launcher and "=" in launcher[0] and not launcher[0].startswith("-"):  # NAME=value vllm serve ...
        name, _, value = launcher.pop(0).partition("=")
        environment[name] = value
    if launcher:
        found["launcher"] = " ".join(launcher)
    found |= _options(options, read_files=container is None)
    found |= {f"env.{name}": value for name, value in environment.items() if _ENVIRONMENT.match(name)}
    return _flat(found)


def _is_container(word: str, following: str) -> bool:
    return PurePath(word).name in ("docker", "podman", "nerdctl") and following == "run"


_SWITCHES = re.compile(r"-[ditqP]+$|--(detach|interactive|tty|rm|init|privileged|read-only|publish-all|quiet|replace)$")
"""Options of docker run without a value."""


def _container(words: list[str]) -> tuple[str, dict[str, str], list[str]]:
    """(image, environment set by options, words behind the image) of what follows docker run."""
    environment: dict[str, str] = {}
    n = 0
    while n < len(words) and words[n].startswith("-"):
        word, n = words[n], n + 1
        if _SWITCHES.match(word):
            continue
        if word.startswith("--"):
            name, glued, value = word.partition("=")
        else:
            name, glued, value = word[:2], word[2:], word[2:]
        if not glued:
            value, n = (words[n] if n < len(words) else ""), n + 1
        if name in ("-e", "--env") and "=" in value:
            variable, _, value = value.partition("=")
            environment[variable] = value
    if n >= len(words):
        raise UserError("the command runs a container but names no image")
    return words[n], environment, words[n + 1 :]


def _launcher(words: list[str], *, in_container: bool) -> tuple[list[str], list[str]]:
    """(words up to vLLM's own, its options) of a command."""
    for n, word in enumerate(words):
        if word == "serve" and n and PurePath(words[n - 1]).name == "vllm":
            return words[:n], words[n + 1 :]
        if word.startswith("vllm.entrypoints."):
            return words[: n + 1], words[n + 1 :]
    if in_container:  # the image's entry point is vllm serve, or vllm
        return [], words[1:] if words[:1] == ["serve"] else words
    return words[:1], words[1:]  # somebody's own script


def _options(words: list[str], *, read_files: bool = True) -> dict[str, Any]:
    """Option -> value, as data."""
    found: dict[str, Any] = {}
    dotted: dict[str, dict[str, Any]] = {}
    """Options with a dot, by their spelling before it. vLLM makes one JSON option of each and puts it behind all
    others, where it replaces a JSON option that was given as a whole."""
    n = 0

    def following() -> str:
        nonlocal n
        if n >= len(words) or _is_option(words[n]):
            raise UserError(f"the server's command gives no value for {word}")
        n += 1
        return words[n - 1]

    while n < len(words):
        word, n = words[n], n + 1
        if not _is_option(word):
            found.setdefault("model", word)
            continue
        text, glued, value = word.partition("=")
        if re.match(r"-O.", text) and not text.startswith("-O."):  # -O3
            text, glued, value = "-O", "=", text[2:]
        head, _, path = text.partition(".")
        name = _name(head)
        if path:
            value = value if glued else following()
            data: Any = value.split(",") if path.endswith("+") else _data(value)
            name = "compilation-config" if head == "-O" else name
            spelled = head.replace("_", "-") if head.startswith("--") else head
            _merge(dotted.setdefault(f"{spelled} {name}", {}), path.removesuffix("+").split("."), data)
        elif glued:
            found[name] = _data(value)
        elif name in _SEVERAL:
            values = []
            while n < len(words) and not _is_option(words[n]):
                values.append(_data(following()))
            found[name] = values
        elif n < len(words) and not _is_option(words[n]) and not _FLAG.match(name):
            found[name] = _data(following())
        elif name.startswith("no-"):
            found[name.removeprefix("no-")] = False
        else:
            found[name] = True
    found |= {key.partition(" ")[2]: data for key, data in dotted.items()}
    if read_files and "config" in found:
        found = _config_file(Path(str(found.pop("config")))) | found
    return found


def _is_option(word: str) -> bool:
    return word.startswith("-") and not re.fullmatch(r"-(\d.*)?", word)


def _name(option: str) -> str:
    """The name of an option as written on a command line or in an experiment file."""
    return _SHORT.get(option) or option.lstrip("-").replace("_", "-")


def _merge(tree: dict[str, Any], path: list[str], data: Any) -> None:
    """Put ``data`` into the tree; lists grow, maps are joined, anything else is replaced."""
    for part in path[:-1]:
        below = tree.get(part)
        tree[part] = below if isinstance(below, dict) else {}
        tree = tree[part]
    known = tree.get(path[-1])
    if isinstance(known, dict) and isinstance(data, dict):
        for key, value in data.items():
            _merge(known, [key], value)
    elif isinstance(known, list) and isinstance(data, list):
        tree[path[-1]] = known + data
    else:
        tree[path[-1]] = data


def _config_file(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"the server's command names --config {path}, which cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"the server's command names --config {path}, which is not a map of options")
    return {_name(str(key)): value for key, value in data.items()}


# -- from a running server


def from_server_info(info: Mapping[str, Any]) -> dict[str, str]:
    """The settings that GET /server_info?config_format=json shows, without those that are VOLATILE.

    They have the names that `vllm serve` gives them, where it has one, but are more than a command gives: vLLM fills in
    its defaults and what follows from other settings. Compare them with another server's of their kind only. "system."
    are versions and GPUs.
    """
    config = info.get("vllm_config")
    if not isinstance(config, dict):
        raise UserError("/server_info shows no vllm_config: ask for it with config_format=json")
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict) and name not in _NESTED:
            for field, data in value.items():
                found.setdefault(field.replace("_", "-"), data)
        else:
            found[name.replace("_", "-")] = value
    found["enable-lora"] = config.get("lora_config") is not None
    for prefix, shown in (("env", info.get("vllm_env")), ("system", info.get("system_env"))):
        if isinstance(shown, dict):
            found |= {f"{prefix}.{name}": value for name, value in shown.items()}
    found = {name: value for name, value in found.items() if value is not None}
    return {name: value for name, value in _flat(found).items() if value != "null" and not _fits(name, VOLATILE)}


# -- data and text


def _data(text: str) -> Any:
    """A word of a command line as data: JSON maps and lists, numbers with a suffix, or the word."""
    text = text.strip()
    if text.startswith(("{", "[")):
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt])", text):
        return round(float(match[1]) * 1000 ** (" kmgt".index(match[2])))
    if match := re.fullmatch(r"(\d+)([KMGT])", text):
        return int(match[1]) * 1024 ** (" KMGT".index(match[2]))
    if re.fullmatch(r"-?(\d+\.\d*|\.\d+)", text):
        return float(text)
    return text


def _flat(found: Mapping[str, Any]) -> dict[str, str]:
    """Maps opened, names and values made one, secrets left out, in order of names."""
    flat: dict[str, str] = {}
    for name, value in found.items():
        for key, text in _leaves(name, value):
            one = _SAME_OPTION.get(key, key)
            if not redaction.is_secret(one):
                names = _SAME_VALUE.get(one)
                flat[one] = names.get(text, text.upper()) if names else text
    return dict(sorted(flat.items()))


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inside in value.items():
            yield from _leaves(f"{name}.{str(key).replace('-', '_')}", inside)
    else:
        yield name, _text(value)


def _text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        return str(int(value))
    if isinstance(value, list | tuple):
        if any(isinstance(item, dict | list | tuple) for item in value):
            return json.dumps(value, sort_keys=True)
        return ", ".join(_text(item) for item in value)
    return redaction.without_password(str(value))


# -- what differs


def differences(
    baseline: Mapping[str, str], candidate: Mapping[str, str], under_test: Sequence[str]
) -> list[records.Difference]:
    """Settings that differ, in order of names, without those that are IGNORED.

    ``under_test``: names of settings that are meant to; a name covers what is below it.
    """
    return [
        records.Difference(
            key=key,
            baseline=baseline.get(key),
            candidate=candidate.get(key),
            under_test=any(covers(name, key) for name in under_test),
        )
        for key in sorted({*baseline, *candidate})
        if baseline.get(key) != candidate.get(key) and not _fits(key, IGNORED)
    ]


def covers(name: str, key: str) -> bool:
    """Whether a name, in any spelling of an option, is that of this setting or of one above it."""
    option = _option(name)
    return key == option or key.startswith(option + ".")


def _option(written: str) -> str:
    """A setting's name from any spelling of its option."""
    if written.startswith(("env.", "system.")):
        return written
    head, dot, path = written.partition(".")
    name = _name(head) + dot + path.replace("-", "_")
    return _SAME_OPTION.get(name, name)


def refusal(found: Sequence[records.Difference]) -> str | None:
    """Why two servers that differ so cannot be compared: each difference that is not under test, with both values, what
    it changes and what to do. None if there is none."""
    lines = []
    for difference in found:
        if difference.under_test:
            continue
        why = next((f": {words}" for pattern, words in _WHY if fnmatch.fnmatchcase(difference.key, pattern)), "")
        lines.append(f"  {difference.key}: {difference.values}{why}")
    if not lines:
        return None
    return (
        "baseline and candidate differ in settings that are not under test (baseline against candidate):\n"
        + "\n".join(lines)
        + "\nMake them equal, or name what is meant to differ in serving.under_test"
    )


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


# -- how the GPUs are used


def layout(settings: Mapping[str, str]) -> dict[str, int]:
    """Sizes of the parallel layout: tp, pp, dp, dcp, pcp; 1 where a setting is not given.

    Raises UserError if one is not a number.
    """
    sizes = {}
    for axis, option in _AXES.items():
        text = settings.get(option, "1")
        if not text.isdecimal():
            raise UserError(f"{option}: {text} is not a number")
        sizes[axis] = int(text)
    return sizes


def most_requests(settings: Mapping[str, str]) -> int | None:
    """How many requests run at once; None if that is not known."""
    text = settings.get("max-num-seqs", "")
    return int(text) * layout(settings)["dp"] if text.isdecimal() else None


def layout_problems(gpus: experiment.Gpus | records.Gpus, settings: Mapping[str, str]) -> list[str]:
    """Where what is declared of the GPUs does not go with what the server was told; empty if it does."""
    sizes = layout(settings)
    problems = []
    for axis, declared in gpus.layout.items():
        told = sizes.get(axis.lower())
        if told is None:
            problems.append(f"gpus.layout: {axis} is not one of {', '.join(_AXES)}")
        elif told != declared:
            problems.append(f"gpus.layout says {axis} {declared}, but {_AXES[axis.lower()]} is {told}")
    factors = [axis for axis in ("tp", "pp", "dp", "pcp") if sizes[axis] > 1 or axis in ("tp", "dp")]
    used = math.prod(sizes[axis] for axis in factors)
    if used != gpus.count:
        words = " x ".join(f"{_AXES[axis]} {sizes[axis]}" for axis in factors)
        problems.append(f"gpus.count says {gpus.count}, but {words} uses {used}")
    return problems
