"""The benchmarks are run by hand: here only that they can be."""

from __future__ import annotations

import subprocess
import sys


def test_benchmarks_load() -> None:
    asked = [sys.executable, "-m", "tests.benchmarks", "--help"]
    assert "step-log-vllm" in subprocess.run(asked, check=True, capture_output=True, text=True).stdout
