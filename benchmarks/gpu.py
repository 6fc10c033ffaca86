"""Measure on a GPU what a window costs (JSON to the path given); about three minutes on an H200.

    python -m benchmarks.gpu RESULT.json [--device cpu] [--steps 10] [--rounds 4]

Blocks of plain, profiled and recorded steps alternate (A B C C B A), so that drift of the clocks hits all alike.
`--device cpu` tries the script where there is no GPU; its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.models import CPU_BOUND, DEVICE_BOUND, LAUNCH_BOUND, Size, training_step
from tlk_tracking.core.records import Environment
from tlk_tracking.delivery.outbox import Outbox
from tlk_tracking.recording.fit_recorder import FitFacts, FitRecorder
from tlk_tracking.recording.profiler_session import ProfilerSession
from tlk_tracking.recording.schedule import WindowSchedule
from tlk_tracking.recording.torch_private import dispatch_mode_stack

WARMUP = 3
PLAIN_STEPS_OF_A_WINDOW = 1000


def main() -> None:
    """Measure all rows and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    launch_bound, device_bound = (LAUNCH_BOUND, DEVICE_BOUND) if on_gpu else (CPU_BOUND, CPU_BOUND)
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name() if on_gpu else "none",
    }
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for name, size, steps in (
            ("launch_bound", launch_bound, options.steps),
            ("device_bound", device_bound, max(options.steps // 2, 3)),
        ):
            report[name] = _steps(size, options.device, work, steps=steps, rounds=options.rounds)
            _write(report, options.result)  # what is measured is kept, whatever comes after
        try:
            report["lightning"] = _fits(launch_bound, options.device, work)
        except ImportError as error:
            report["lightning"] = f"not measured: {error}"
    _write(report, options.result)
    print(json.dumps(report, indent=1))


def _steps(size: Size, device: str, work: Path, *, steps: int, rounds: int) -> dict[str, Any]:
    model, step = training_step(size, device)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(10):
        step()
    before = _plain(step, wait, 10 * steps)
    found: dict[str, list[float]] = {
        "plain": [],
        "profiled": [],
        "recorded": [],
        "open": [],
        "close": [],
        "kineto_close": [],
    }
    first_window = True
    for _ in range(rounds):
        for name in ("plain", "profiled", "recorded", "recorded", "profiled", "plain"):
            if name == "plain":
                found[name] += _plain(step, wait, steps)
            elif name == "profiled":
                found[name] += _profiled(step, wait, steps, device=device, work=work)
            else:
                times, opened, close, kineto = _recorded(step, wait, steps, model=model, work=work)
                found[name] += times
                if not first_window:  # the first one in a process also loads code
                    found["open"].append(opened)
                    found["close"].append(close)
                    found["kineto_close"].append(kineto)
                first_window = False
    after = _plain(step, wait, 10 * steps)
    medians = {name: statistics.median(times) for name, times in found.items()}
    ends = medians["open"] + medians["close"]
    extra = steps * max(medians["recorded"] - medians["plain"], 0.0) + ends
    # Scaled to a window of three steps, as the callback records by default; the close grows with the steps too.
    window = 3 * (medians["recorded"] - medians["plain"]) + medians["open"] + medians["close"] * 3 / steps
    return {
        "steps_of_a_block": steps,
        "seconds": {name: round(value, 6) for name, value in medians.items()},
        "recorded_over_profiled": round(medians["recorded"] / medians["profiled"], 4),
        "recorded_over_plain": round(medians["recorded"] / medians["plain"], 4),
        "close_over_kineto": round(medians["close"] / medians["kineto_close"], 4),
        "window_over_1000_steps": round(window / (PLAIN_STEPS_OF_A_WINDOW * medians["plain"]), 6),
        "block_as_one_window_over_1000_steps": round(extra / (PLAIN_STEPS_OF_A_WINDOW * medians["plain"]), 6),
        "idle_before_s": round(statistics.median(before), 6),
        "idle_after_s": round(statistics.median(after), 6),
        "idle_after_over_before": round(statistics.median(after) / statistics.median(before), 4),
        "samples": {name: [round(value, 6) for value in values] for name, values in found.items()},
    }


def _plain(step: Callable[[], None], wait: Callable[[], None], steps: int) -> list[float]:
    times = []
    wait()
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        wait()
        times.append(time.perf_counter() - begin)
    return times


def _profiled(
    step: Callable[[], None], wait: Callable[[], None], steps: int, *, device: str, work: Path
) -> list[float]:
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
    with profile(activities=activities) as running:
        step()
        times = _plain(step, wait, steps)
    running.export_chrome_trace(str(work / "plain_profiler.json"))
    del running
    gc.collect()
    return times


class _NoWorker:
    """Takes windows and does nothing: what happens off the training thread is not measured here."""

    def submit(self, window: object) -> None:
        """Leave the window in the outbox."""


def _recorded(
    step: Callable[[], None], wait: Callable[[], None], steps: int, *, model: torch.nn.Module, work: Path
) -> tuple[list[float], float, float, float]:
    """Return the times of recorded steps, of the window's beginning and end, and of Kineto's own part of the end."""
    schedule = WindowSchedule(
        every_n_steps=10**6, skip_first=0, warmup=WARMUP, active=steps, max_windows=1, min_interval_s=0.0,
        at_steps=(WARMUP,),
    )  # fmt: skip
    facts = FitFacts(
        token=f"{time.perf_counter_ns():032x}", base=dispatch_mode_stack(), synchronize=True, rank=0, world_size=1,
        recording_ranks="zero", destination=None, environment=Environment, root=model,
    )  # fmt: skip
    outbox = Outbox(work / "outbox")
    recorder = FitRecorder(schedule, facts, outbox=outbox, worker=_NoWorker(), global_step=lambda: 0)
    times, opened = [], 0.0
    with _timed_session() as kineto:
        for number in range(WARMUP + steps):
            begin = time.perf_counter()
            recorder.before_step(number)
            if number == WARMUP:  # that of the first recorded step also starts the session
                opened = time.perf_counter() - begin
                begin = time.perf_counter()
            recorder.begin_batch(number)
            step()
            wait()
            if number >= WARMUP:
                times.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        recorder.before_step(WARMUP + steps)
        close = time.perf_counter() - begin
    recorder.close()
    windows = outbox.raw_windows()
    if not windows:
        raise SystemExit("no window was recorded")
    for window in windows:
        outbox.remove(window)
    gc.collect()
    return times, opened, close, kineto.seconds


class _timed_session:  # noqa: N801 - used as a function
    """Add up the time of torch's own stop, export and release of a session's events."""

    def __enter__(self) -> _timed_session:
        self.seconds = 0.0
        self._real = {name: getattr(ProfilerSession, name) for name in ("stop", "forget")}
        for name, method in self._real.items():
            setattr(ProfilerSession, name, self._timed(method))
        return self

    def __exit__(self, *_: object) -> None:
        for name, method in self._real.items():
            setattr(ProfilerSession, name, method)

    def _timed(self, method: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any) -> None:
            begin = time.perf_counter()
            method(*args)
            self.seconds += time.perf_counter() - begin

        return run


def _fits(size: Size, device: str, work: Path) -> dict[str, Any]:
    """Fits with one window, ours and Lightning's own profiler's, and without either."""
    from benchmarks.fits import compare_fits

    return compare_fits(size, device, work / "fits")


def _write(report: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
