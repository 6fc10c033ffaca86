"""Measure what one plain torch.profiler session leaves behind in the steps after it: CUPTI stays attached.

    [TEARDOWN_CUPTI=1] python -m benchmarks.idle_after_profiler

Needs a GPU; nothing of this package records here. Prints medians of 150 launch-bound steps, in ms, as JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.models import LAUNCH_BOUND, training_step

STEPS = 150


def main() -> None:
    """Time steps twice before and twice after a session and print the better ones."""
    _, step = training_step(LAUNCH_BOUND, "cuda")
    for _ in range(20):
        step()
    before = min(_median_ms(step) for _ in range(2))
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]):
        for _ in range(3):
            step()
    time.sleep(1)
    after = min(_median_ms(step) for _ in range(2))
    print(
        json.dumps(
            {
                "teardown_cupti": os.environ.get("TEARDOWN_CUPTI"),
                "before_ms": before,
                "after_ms": after,
                "ratio": round(after / before, 4),
            }
        )
    )


def _median_ms(step: Callable[[], None]) -> float:
    times = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return round(1e3 * statistics.median(times), 3)


if __name__ == "__main__":
    main()
