"""A vLLM plugin for tests: each engine step that has something to do takes VLLM_DECODEGATE_TEST_SLEEP_MS longer.

On a server's PYTHONPATH this folder is the plugin, as in replay/step_plugin.py.
"""

from __future__ import annotations

import os
import time
from typing import Any


def register() -> None:
    """The entry point: called in every process of vLLM, and in the engine's before it looks its step function up."""
    seconds = float(os.environ.get("VLLM_DECODEGATE_TEST_SLEEP_MS", "0")) / 1e3
    if not seconds:
        return
    from vllm.v1.engine.core import EngineCore

    step = EngineCore.step

    def slow_step(self: Any) -> Any:
        if self.scheduler.has_requests():
            time.sleep(seconds)
        return step(self)

    EngineCore.step = slow_step
