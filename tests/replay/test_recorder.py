"""Appending records: what does not fit on the disk is an error, never a part."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import pytest

from replay.recorder import Recorder
from replay.records import HealthSample


def test_a_write_that_is_cut_is_an_error(tmp_path: Path) -> None:
    sample = HealthSample(
        t_ns=1, loop_lag_ms_max=0.0, loop_lag_ms_p99=0.0, in_flight=0, lanes_in_session=0, cpu_share=0.0, rss_bytes=1
    )
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with Recorder(tmp_path, 0) as recorder:
            recorder.health(sample)
            size = (tmp_path / "w0.health.jsonl").stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + size // 2, limits[1]))
            with pytest.raises(OSError, match="No space left on device"):
                recorder.health(sample)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
