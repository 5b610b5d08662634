"""Interleaved timing: machines are shared and noisy, so ways are run in turn and compared by medians and ratios."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping

from ckpt_planner.profiling.garbage import cheap_collections


def interleaved(
    ways: Mapping[str, Callable[[], object]],
    repeats: int = 7,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each way in each round by `clock`; one round to warm up is left out."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with cheap_collections():
        for turn in range(repeats + 1):
            for name, way in ways.items():
                gc.collect()
                begin = clock()
                way()
                if turn:
                    seconds[name].append(clock() - begin)
    return seconds


def ratio(seconds: Mapping[str, list[float]], of: str, to: str) -> float:
    """Median over the rounds of one way's time to another's in the same round."""
    return statistics.median(a / b for a, b in zip(seconds[of], seconds[to], strict=True))
