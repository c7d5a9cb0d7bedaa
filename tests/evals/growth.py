"""How processor time grows with size: a ratio, which says the same on slow and on busy machines."""

from __future__ import annotations

import time
from collections.abc import Callable


def growth(run: Callable[[int], object]) -> float:
    """Time of ``run`` at eight times the size, over its time: about 8 if it is linear, 64 if quadratic."""

    def seconds(size: int) -> float:
        best = float("inf")
        for _ in range(3):
            started = time.process_time()
            run(size)
            best = min(best, time.process_time() - started)
        return best

    return seconds(16_000) / max(seconds(2_000), 0.002)
