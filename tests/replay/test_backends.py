"""What the manifest says of a backend before any server runs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from replay.experiment import experiment_of
from replay.matching import declared


def files(*command: str) -> dict[str, str]:
    """Of a candidate that is started with this command; the baseline runs elsewhere."""
    candidate: dict[str, Any] = {"serve": {"command": list(command)}}
    backends = {"baseline": {"url": "http://a"}, "candidate": candidate}
    whole = experiment_of({"model": "m", "workload": {"demo": True}, "backends": backends})
    baseline, candidate_ = declared(whole).backends
    assert baseline.files == {}
    return candidate_.files


def model(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).write_text(json.dumps({"of": folder.name, "is": name}))
    return folder


def test_a_served_folder_is_known_by_its_small_files(tmp_path: Path) -> None:
    own = model(tmp_path / "k3", "config.json", "tokenizer_config.json", "model.safetensors.index.json", "README.md")
    draft = model(tmp_path / "draft", "config.json", "model-00001-of-00001.safetensors")
    drafts = json.dumps({"model": str(draft), "num_speculative_tokens": 7})
    found = files("vllm", "serve", str(own), "--speculative-config", drafts)
    assert found == {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in {
            "config.json": own / "config.json",
            "model.safetensors.index.json": own / "model.safetensors.index.json",
            "tokenizer_config.json": own / "tokenizer_config.json",
            "draft/config.json": draft / "config.json",
        }.items()
    }
    assert files("vllm", "serve", "--model", str(own)).keys() == {name for name in found if "/" not in name}


def test_a_model_elsewhere_has_no_files_here(tmp_path: Path) -> None:
    own = model(tmp_path / "k3", "config.json")
    assert files("vllm", "serve", "moonshotai/Kimi-K3") == {}
    assert files("docker", "run", "--gpus", "all", "vllm/vllm-openai", "--model", str(own)) == {}
