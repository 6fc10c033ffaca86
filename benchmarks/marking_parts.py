"""Take apart what marking the calls of a step costs, beside a dispatch mode that does nothing.

    python -m benchmarks.marking_parts RESULT.json [--device cpu] [--steps 20] [--rounds 5]

The variants take turns step by step (A B C C B A) in one session of a plain `torch.profiler`. An empty mode is the
least that any tool pays which sees the calls from Python: what we add to it is ours.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.models import CPU_BOUND, LAUNCH_BOUND, training_step
from tlk_tracking.core.records import Phase, StepOutcome
from tlk_tracking.recording.call_markers import CallMarkers
from tlk_tracking.recording.module_tracker import ModuleTracker
from tlk_tracking.recording.step_brackets import StepBrackets
from tlk_tracking.recording.torch_private import NamedRange, dispatch_mode_stack, session_options

Variant = Callable[[torch.nn.Module], AbstractContextManager[object]]


class EmptyMode(TorchDispatchMode):
    """What torch's documentation shows: pass the call on."""

    # Any: every call of torch passes here, with any arguments.
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class RangeMode(TorchDispatchMode):
    """A numbered range around each call, and no word of what the call was."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves its modes untyped
        self._next = itertools.count().__next__

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with NamedRange(f"tlk/1/benchmark::op::{self._next()}"):
            return func(*args, **(kwargs or {}))


class Marks:
    """Our own markers around one step at a time."""

    def __init__(self, model: torch.nn.Module, *, modules: bool) -> None:
        self._tracker = ModuleTracker("benchmark", root=model) if modules else None
        self.calls = CallMarkers("benchmark", locate=None if self._tracker is None else self._tracker.locate)
        self._brackets = StepBrackets(
            "benchmark", calls=self.calls, base=dispatch_mode_stack(), modules=self._tracker
        )

    def __enter__(self) -> None:
        self._brackets.open(0, phase=Phase.FORWARD)

    def __exit__(self, *error: object) -> None:
        self._brackets.close(StepOutcome.COMPLETE)
        for part in (self.calls, self._tracker):
            if part is not None and part.fault is not None:
                raise part.fault


VARIANTS: dict[str, Variant] = {
    "profiler alone": lambda model: nullcontext(),
    "an empty dispatch mode": lambda model: EmptyMode(),  # type: ignore[no-untyped-call]  # torch's own
    "a mode with numbered ranges": lambda model: RangeMode(),
    "rows of calls, without modules": lambda model: Marks(model, modules=False),
    "rows of calls, with modules": lambda model: Marks(model, modules=True),
}


def main() -> None:
    """Measure each variant and write the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    model, step = training_step(LAUNCH_BOUND if on_gpu else CPU_BOUND, options.device)
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    for _ in range(10):
        step()
    calls = _count_calls(model, step)
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(options.rounds):
        for name, each in _steps_in_turn(model, step, wait, options.steps, on_gpu=on_gpu).items():
            times[name] += each
    medians = {name: statistics.median(each) for name, each in times.items()}
    alone = medians["profiler alone"]
    report = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name() if on_gpu else "none",
        "calls_of_a_step": calls,
        "variants": {
            name: {
                "ms": round(1e3 * median, 3),
                "over_profiler": round(median / alone, 3),
                "extra_us_a_call": round(1e6 * (median - alone) / calls, 2),
            }
            for name, median in medians.items()
        },
    }
    options.result.write_text(json.dumps(report, indent=1))
    print(json.dumps(report, indent=1))


def _steps_in_turn(
    model: torch.nn.Module, step: Callable[[], None], wait: Callable[[], None], steps: int, *, on_gpu: bool
) -> dict[str, list[float]]:
    """Time steps of one profiler session, the variants in turn."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    variants = {name: make(model) for name, make in VARIANTS.items()}
    clock = time.perf_counter if on_gpu else time.process_time  # a CPU may be shared with other work
    order = [*variants, *reversed(variants)]
    with profile(activities=activities, experimental_config=session_options()) as running:
        for _ in range(1 + steps // 2):
            for name in order:
                with variants[name]:
                    begin = clock()
                    step()
                    wait()
                    times[name].append(clock() - begin)
    del running
    gc.collect()
    return {
        name: each[2:] for name, each in times.items()
    }  # what is new to a variant is learnt in the first ones


def _count_calls(model: torch.nn.Module, step: Callable[[], None]) -> int:
    marks = Marks(model, modules=False)
    with marks:
        step()
    return len(marks.calls.noted().rows)


if __name__ == "__main__":
    main()
