"""What the training thread of a Lightning fit pays: an idle step, and the end of a window (a fit on the CPU).

python -m benchmarks.training_thread FOLDER ROUNDS
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS, FIRST, WARMUP, ACTIVE = 40, 20, 2, 3
IDLE_BEFORE, IDLE_AFTER, CALLS = 10, 30, 10_000


def measure_training_thread(folder: Path, *, rounds: int) -> dict[str, Any]:
    """Run the fits in a process of their own: they need torch and Lightning."""
    command = [sys.executable, "-m", "benchmarks.training_thread", str(folder), str(rounds)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent.parent
    )
    if done.returncode:
        raise SystemExit(f"the fits failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Fit once a round and print the medians as JSON."""
    import torch
    from torch.utils._python_dispatch import _len_torch_dispatch_stack

    from benchmarks.fits import fit
    from benchmarks.models import CPU_BOUND
    from tlk_tracking.callbacks import KernelTelemetry
    from tlk_tracking.recording.profiler_session import ProfilerSession

    folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
    idle: dict[str, list[float]] = {"before": [], "after": []}
    closes: list[float] = []
    own: list[float] = []
    on: set[str] = set()

    class Timed(KernelTelemetry):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            step = trainer.fit_loop.total_batch_idx
            begin = time.process_time()
            super().on_train_batch_end(trainer, *args)
            if step == FIRST + ACTIVE - 1:
                closes.append(time.process_time() - begin)
            if not self._fit.is_open:
                on.update(_what_is_on(torch, _len_torch_dispatch_stack()))
            if step in (IDLE_BEFORE, IDLE_AFTER):
                cost = _seconds_of_hooks(super(), trainer, args)
                idle["before" if step == IDLE_BEFORE else "after"].append(cost)

    def timed(method: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any) -> None:
            begin = time.process_time()
            method(*args)
            own[-1] += time.process_time() - begin

        return run

    # Kineto's own part: to stop, to export, and to free its events.
    for name in ("stop", "forget"):
        setattr(ProfilerSession, name, timed(getattr(ProfilerSession, name)))
    for _ in range(rounds):
        own.append(0.0)
        callback = Timed(at_steps=[FIRST], warmup=WARMUP, active=ACTIVE, max_windows=1)
        fit(CPU_BOUND, steps=STEPS, folder=folder / "fit", device="cpu", callbacks=[callback])
    shares = [close / kineto for close, kineto in zip(closes, own, strict=True)]
    print(
        json.dumps(
            {
                "idle_step_us_before": round(statistics.median(idle["before"]) * 1e6, 2),
                "idle_step_us_after": round(statistics.median(idle["after"]) * 1e6, 2),
                "on_between_windows": sorted(on),
                "window_end_cpu_s": round(statistics.median(closes), 4),
                "kineto_stop_export_free_cpu_s": round(statistics.median(own), 4),
                "window_end_over_kineto": round(statistics.median(shares), 3),
            }
        )
    )


def _seconds_of_hooks(callback: Any, trainer: Any, args: tuple[Any, ...]) -> float:
    """Return the CPU time of both hooks of one idle step: each of its calls does what an idle step does."""
    module, _outputs, batch, index = args
    begin = time.process_time()
    for _ in range(CALLS):
        callback.on_train_batch_start(trainer, module, batch, index)
        callback.on_train_batch_end(trainer, *args)
    return (time.process_time() - begin) / CALLS


def _what_is_on(torch: Any, modes: int) -> set[str]:
    found = {"dispatch mode"} if modes else set()
    found |= {"profiler"} if torch.autograd.profiler._is_profiler_enabled else set()
    module = torch.nn.modules.module
    hooks = (module._global_forward_hooks, module._global_forward_pre_hooks, module._global_backward_hooks)
    return found | ({"module hook"} if any(hooks) else set())


if __name__ == "__main__":
    main()
