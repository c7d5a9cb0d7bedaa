"""The emulator as a child process: ``python -m replay.emulator SETTINGS_JSON LOG_DIR PARENT_PID`` (see process.py)."""

from __future__ import annotations

import ctypes
import signal
import sys
from pathlib import Path

import msgspec
import uvloop

from replay.emulator.server import Ready, serve
from replay.emulator.settings import EmulatorSettings
from workloads.errors import UserError

PR_SET_PDEATHSIG = 1


def _announce(ready: Ready) -> None:
    print(msgspec.json.encode(ready).decode(), flush=True)


def main() -> None:
    """Serve until told to stop or until the parent dies."""
    settings, log_dir, parent = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGHUP)
    try:
        chosen = msgspec.json.decode(settings, type=EmulatorSettings)
        uvloop.run(serve(chosen, Path(log_dir), 0, _announce, int(parent)))
    except (UserError, msgspec.ValidationError) as error:
        sys.exit(f"emulator: {error}")


if __name__ == "__main__":
    main()
