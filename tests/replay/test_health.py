"""The client's own health."""

from __future__ import annotations

import asyncio
import time

from replay import health
from replay.records import HealthSample


def test_a_last_sample_is_handed_over_on_cancellation_with_the_lag_that_was_going_on() -> None:
    samples: list[HealthSample] = []

    async def short() -> None:
        watching = asyncio.create_task(health.watch(samples.append, lambda: (3, 2)))
        await asyncio.sleep(0.05)
        time.sleep(0.1)  # the loop stands still, and nothing runs before the end
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    asyncio.run(short())
    (last,) = samples
    assert last.loop_lag_ms_max >= 80
    assert (last.in_flight, last.lanes_in_session) == (3, 2)
