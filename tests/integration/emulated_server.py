"""Plays ``vllm serve`` with the embedded emulator, so that comparisons of servers that we start take seconds:

python -m tests.integration.emulated_server serve MODEL --port N [what to play] [options of vLLM, which are ignored]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import uvloop

from replay.emulator.server import serve
from replay.emulator.settings import EmulatorSettings
from replay.emulator.speculation import Speculation

ROOT = Path(__file__).parents[2]
DEATH = "(EngineCore pid=8) ERROR 11-30 12:00:00 [core.py:1] torch.OutOfMemoryError: CUDA out of memory."


def program(folder: Path) -> str:
    """Make a program called vllm in ``folder``, as commands name it; returns its path."""
    path = folder / "vllm"
    run = f"TMPDIR={folder} PYTHONPATH={ROOT} exec {sys.executable} -m tests.integration.emulated_server"
    path.write_text(f'#!/bin/sh\n{run} "$@"\n')
    path.chmod(0o755)
    return str(path)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("serve")
    parser.add_argument("model")
    parser.add_argument("--port", type=int)
    parser.add_argument("--served-model-name")
    parser.add_argument("--additional-config", type=json.loads, default={})
    parser.add_argument("--speculative-config", type=json.loads)
    parser.add_argument("--play-speed", type=float, default=100.0, help="times faster than the emulated hardware")
    parser.add_argument("--play-reads-key", action="store_true", help="refuse a decode_backend that does not exist")
    parser.add_argument("--play-die", type=Path, help="die, saying why, as soon as there is this file")
    args, _ = parser.parse_known_args()

    chosen = args.additional_config.get("decode_backend", "auto")
    if args.play_reads_key and chosen not in ("auto", "latency_specialized"):
        sys.exit("ValueError: Supported decode_backend values are auto/latency_specialized")
    if args.play_die is not None:
        threading.Thread(target=_die, args=(args.play_die,), daemon=True).start()
    settings = EmulatorSettings(
        decode_backend="latency_specialized" if chosen == "latency_specialized" else "auto",
        speculation=_drafts(args.speculative_config),
        time_scale=args.play_speed,
        model=args.served_model_name or args.model,
    )
    with tempfile.TemporaryDirectory() as log:
        uvloop.run(serve(settings, Path(log) / "truth", args.port, print))


def _drafts(config: dict[str, Any] | None) -> Speculation | None:
    if config is None:
        return None
    length = config["synthetic_acceptance_length"]
    return Speculation(draft_tokens=config["num_speculative_tokens"], acceptance_length=length)


def _die(when: Path) -> None:
    while not when.exists():
        time.sleep(0.02)
    print(DEATH, file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    main()
