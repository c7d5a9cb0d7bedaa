"""The step log without installing anything: a folder that, on a server's PYTHONPATH, is the plugin.

vLLM finds plugins through the metadata of installed packages, which Python looks for in every folder of its path. So
a folder with a copy of replay/step_log.py and a dist-info beside it does, whatever environment the server has. An
environment that has decodegate installed offers the plugin a second time, under the same name: vLLM loads one of them.
"""

from __future__ import annotations

import importlib.metadata
import shutil
from collections.abc import Mapping
from pathlib import Path

import replay.step_log

NAME = "decodegate"
"""Of the entry point, here and in pyproject.toml."""


def install(folder: Path) -> Path:
    """Write the plugin into ``folder``/plugin and return that folder."""
    plugin = folder / "plugin"
    version = importlib.metadata.version("decodegate")
    info = plugin / f"decodegate_step_log-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(replay.step_log.__file__, plugin / "decodegate_step_log.py")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: decodegate-step-log\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[vllm.stat_logger_plugins]\n{NAME} = decodegate_step_log:StepLog\n")
    return plugin


def environment(plugin: Path, steps: Path, given: Mapping[str, str]) -> dict[str, str]:
    """What to add to ``given``, a server's environment, so that it loads the plugin and logs its steps to ``steps``.

    VLLM_PLUGINS, where it is set, lists the only plugins that vLLM loads: ours is added to it.
    """
    plugin, steps = plugin.absolute(), steps.absolute()
    added = {
        "PYTHONPATH": ":".join(filter(None, [str(plugin), given.get("PYTHONPATH")])),
        "DECODEGATE_STEPS": str(steps),
    }
    if (allowed := given.get("VLLM_PLUGINS")) is not None:
        added["VLLM_PLUGINS"] = ",".join(filter(None, [*allowed.split(","), NAME]))
    return added
