"""Lightning fits to measure, and how soon each way of recording has its artifact (JSON to the path given).

    python -m benchmarks.fits RESULT.json [--device cpu] [--rounds 5]

A fit without anything, one with KernelTelemetry and one with Lightning's PyTorchProfiler on the same steps take
turns; each in a short fit, which is over before what a worker needs is imported, and in a longer one. All seconds
are from the start of `Trainer.fit`. An MLflow run and its sqlite database are there before the clock starts.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import MLFlowLogger
from lightning.pytorch.profilers import PyTorchProfiler
from torch.utils.data import DataLoader

from benchmarks.models import CPU_BOUND, LAUNCH_BOUND, Encoder, Size
from tlk_tracking.callbacks import KernelTelemetry
from tlk_tracking.delivery.outbox import DEFAULT_FOLDER, Outbox
from tlk_tracking.delivery.worker import WindowWorker

WARMUP, ACTIVE = 3, 3
_LOOK_EVERY_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """A fit of `steps` batches whose window's warm-up begins at `window_at`."""

    steps: int
    window_at: int


LENGTHS = {
    "short": Length(steps=60, window_at=10),
    "long": Length(steps=300, window_at=200),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """One fit: how long it took, when it began (`time.time`), and its run."""

    seconds: float
    began_s: float
    run_id: str
    logger: MLFlowLogger


class _Module(LightningModule):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.model = Encoder(size)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = (self.model(batch) - batch).pow(2).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, foreach=True, fused=False)


def fit(
    size: Size, *, steps: int, folder: Path, device: str, callbacks: list[Callback], profiler: Any = None
) -> Fit:
    """Train for `steps` batches."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("lightning.pytorch", "mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    batches = [torch.randn(size.batch, size.length, size.width) for _ in range(4)] * (steps // 4 + 1)
    logger = MLFlowLogger("benchmark", tracking_uri=_tracking_uri(folder), artifact_location=None)
    run_id = logger.run_id  # the run and its database are made before the clock starts
    assert run_id is not None
    trainer = Trainer(
        max_steps=steps, logger=logger, callbacks=callbacks, profiler=profiler, default_root_dir=folder,
        accelerator="gpu" if device == "cuda" else "cpu", devices=1, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=steps,
    )  # fmt: skip
    module = _Module(size)
    loader = DataLoader(batches, batch_size=None, shuffle=False)
    began_s, begin = time.time(), time.perf_counter()
    trainer.fit(module, loader)
    seconds = time.perf_counter() - begin
    return Fit(seconds=seconds, began_s=began_s, run_id=run_id, logger=logger)


def compare_fits(size: Size, device: str, work: Path, *, rounds: int = 5) -> dict[str, Any]:
    """Return the medians of each contender's marks in a short and in a long fit, and what the worker spends."""
    if device == "cpu":
        torch.set_num_threads(1)  # threads that wait for each other on a shared core take 30 times as long
    contenders = {"plain": _plain, "kernel_telemetry": _telemetry, "pytorch_profiler": _pytorch_profiler}
    found: dict[str, Any] = {}
    for name, length in LENGTHS.items():
        for contender in contenders.values():  # loads code
            contender(size, LENGTHS["short"], work, device)
        marks: dict[str, list[dict[str, float]]] = {contender: [] for contender in contenders}
        for number in range(rounds):
            for contender in contenders if number % 2 else reversed(contenders):
                marks[contender].append(contenders[contender](size, length, work, device))
        medians = {contender: _medians(rows) for contender, rows in marks.items()}
        found[name] = {
            "steps": length.steps,
            "seconds": medians,
            "ratios": _ratios(medians["kernel_telemetry"], medians["pytorch_profiler"]),
            "samples": marks,
        }
    found["worker"] = _worker_stages(size, work, device, rounds=rounds)
    return found


def _plain(size: Size, length: Length, work: Path, device: str) -> dict[str, float]:
    return {"fit": fit(size, steps=length.steps, folder=work, device=device, callbacks=[]).seconds}


def _telemetry(size: Size, length: Length, work: Path, device: str) -> dict[str, float]:
    """Our window: when its raw trace, its annotation and all of it in MLflow are there, and each hook's seconds."""
    hooks: dict[str, float] = {}
    callback = _timed(hooks)(
        skip_first=length.window_at, warmup=WARMUP, active=ACTIVE, max_windows=1, min_interval_s=0.0
    )
    with _Watch(Outbox(work / DEFAULT_FOLDER)) as watch:
        done = fit(size, steps=length.steps, folder=work, device=device, callbacks=[callback])
    if set(watch.seen) != {"raw_trace", "annotation", "in_mlflow"}:
        raise SystemExit(f"the window did not reach its run, only {sorted(watch.seen)}")
    seen = {name: at - done.began_s for name, at in watch.seen.items()}
    return {"fit": done.seconds, **seen, **{f"hook_{name}": seconds for name, seconds in hooks.items()}}


def _pytorch_profiler(size: Size, length: Length, work: Path, device: str) -> dict[str, float]:
    """The same steps by PyTorchProfiler: when trace and summary are there, and both sent as a user would."""
    with tempfile.TemporaryDirectory(dir=work) as folder:
        schedule = torch.profiler.schedule(
            skip_first=length.window_at, wait=0, warmup=WARMUP, active=ACTIVE, repeat=1
        )
        profiler = PyTorchProfiler(dirpath=folder, filename="profile", schedule=schedule)
        done = fit(size, steps=length.steps, folder=work, device=device, callbacks=[], profiler=profiler)
        [trace], [summary] = list(Path(folder).glob("*.json")), list(Path(folder).glob("*.txt"))
        begin = time.perf_counter()
        for file in (trace, summary):
            done.logger.experiment.log_artifact(done.run_id, str(file))
        sending = time.perf_counter() - begin
        return {
            "fit": done.seconds,
            "raw_trace": trace.stat().st_mtime - done.began_s,
            "trace_and_summary": summary.stat().st_mtime - done.began_s,
            "in_mlflow": done.seconds + sending,
        }


class _Watch:
    """Look from a thread into an outbox, and note when its one window comes how far (`time.time`)."""

    def __init__(self, outbox: Outbox) -> None:
        self.seen: dict[str, float] = {}
        self._outbox = outbox
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(_LOOK_EVERY_S):
            self._note()
        self._note()

    def _note(self) -> None:
        raw, entries = self._outbox.raw_windows(), self._outbox.entries()
        if raw or entries:
            self.seen.setdefault("raw_trace", time.time())
        if entries:
            self.seen.setdefault("annotation", time.time())
        elif "annotation" in self.seen and not raw:
            self.seen.setdefault("in_mlflow", time.time())


def _timed(hooks: dict[str, float]) -> type[KernelTelemetry]:
    """Return the callback with each of its hooks' seconds added up by name."""

    class Timed(KernelTelemetry):
        pass

    for name in ("setup", "on_train_start", "on_train_batch_start", "on_train_batch_end", "teardown"):
        setattr(Timed, name, _adding_up(getattr(KernelTelemetry, name), hooks, name))
    return Timed


def _adding_up(hook: Callable[..., None], hooks: dict[str, float], name: str) -> Callable[..., None]:
    def run(*args: Any, **kwargs: Any) -> None:
        begin = time.perf_counter()
        hook(*args, **kwargs)
        hooks[name] = hooks.get(name, 0.0) + time.perf_counter() - begin

    return run


class _NoWorker(WindowWorker):
    """Leaves windows in the outbox."""

    def start(self) -> None:
        """Start nothing."""

    def submit(self, window: object) -> None:
        """Leave it."""


class _LeaveWindow(KernelTelemetry):
    def _make_worker(self, outbox: Outbox, destination: Any) -> WindowWorker:
        return _NoWorker(outbox, destination, upload_timeout_s=0.0)


def _worker_stages(size: Size, work: Path, device: str, *, rounds: int) -> dict[str, Any]:
    """Do a worker's work one stage after another, each time in a fresh process."""
    rows = []
    length = LENGTHS["short"]
    for _ in range(rounds):
        outbox = Outbox(work / "stages")
        callback = _LeaveWindow(
            skip_first=length.window_at, warmup=WARMUP, active=ACTIVE, max_windows=1, outbox=outbox.root
        )
        fit(size, steps=length.window_at + WARMUP + ACTIVE, folder=work, device=device, callbacks=[callback])
        command = [sys.executable, "-m", "benchmarks.worker_stages", str(outbox.root), _tracking_uri(work)]
        begin = time.time()
        done = subprocess.run(
            [*command, repr(begin)], capture_output=True, text=True, check=False,
            cwd=Path(__file__).parent.parent,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"the stages failed:\n{done.stderr[-2000:]}")
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    return {clock: _medians([row[clock] for row in rows]) for clock in ("seconds", "cpu_seconds")}


def _medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(row[name] for row in rows), 4) for name in rows[0]}


def _ratios(ours: dict[str, float], theirs: dict[str, float]) -> dict[str, float]:
    """Return how many times as long the profiler takes to each kind of artifact."""
    pairs = {
        "on_disk": (ours["annotation"], theirs["trace_and_summary"]),
        "in_mlflow": (ours["in_mlflow"], theirs["in_mlflow"]),
        "fit": (ours["fit"], theirs["fit"]),
    }
    return {name: round(their / our, 3) for name, (our, their) in pairs.items()}


def _tracking_uri(folder: Path) -> str:
    return f"sqlite:///{folder / 'mlflow.db'}"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        size = LAUNCH_BOUND if options.device == "cuda" else CPU_BOUND
        found = compare_fits(size, options.device, Path(folder), rounds=options.rounds)
    options.result.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for length in LENGTHS:
        found[length].pop("samples")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
