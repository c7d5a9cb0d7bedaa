"""Where the handed-out material lies, if it is here at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("DECODEGATE_SHARED", Path(__file__).parents[2] / "shared"))
TRACES = SHARED / "traces" / "kv-cache-tester.tar.xz"

needs_shared = pytest.mark.skipif(
    not TRACES.exists(),
    reason=f"needs the recorded sessions at {TRACES} (set DECODEGATE_SHARED to their folder's parent)",
)
