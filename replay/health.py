"""The client's own health: how late its event loop runs, and what else it was doing. Recorded, judged by reports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import psutil

from replay.records import HealthSample

_TICK_S = 0.01
_SAMPLE_S = 1.0


async def watch(sample: Callable[[HealthSample], None], state: Callable[[], tuple[int, int]]) -> None:
    """Run until cancelled; hands over a sample about every second, and a last one when cancelled: what is measured may
    be over before the first second.

    ``state`` returns (requests in flight, busy lanes). Lag is how late a 10 ms timer fires; timers themselves count in
    whole milliseconds under uvloop, so up to 1 ms of it means nothing.
    """
    process = psutil.Process()
    lags: list[float] = []
    started_ns = before_ns = time.monotonic_ns()
    cpu_s = time.process_time()

    def hand_over() -> None:
        nonlocal lags, started_ns, cpu_s
        now_ns, used_s = time.monotonic_ns(), time.process_time()
        lags.sort()
        in_flight, lanes_in_session = state()
        sample(
            HealthSample(
                t_ns=now_ns,
                loop_lag_ms_max=round(lags[-1], 3),
                loop_lag_ms_p99=round(lags[int(0.99 * (len(lags) - 1))], 3),
                in_flight=in_flight,
                lanes_in_session=lanes_in_session,
                cpu_share=round((used_s - cpu_s) / (max(now_ns - started_ns, 1) / 1e9), 4),
                rss_bytes=process.memory_info().rss,
            )
        )
        lags, started_ns, cpu_s = [], now_ns, used_s

    try:
        while True:
            before_ns = time.monotonic_ns()
            await asyncio.sleep(_TICK_S)
            lags.append(_lag_ms(before_ns))
            if time.monotonic_ns() - started_ns >= _SAMPLE_S * 1e9:
                hand_over()
    except asyncio.CancelledError:
        lags.append(_lag_ms(before_ns))
        hand_over()
        raise


def _lag_ms(before_ns: int) -> float:
    """How late a timer is that was set then."""
    return max(0.0, (time.monotonic_ns() - before_ns) / 1e6 - _TICK_S * 1e3)
