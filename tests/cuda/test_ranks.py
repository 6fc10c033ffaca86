"""Two ranks on two GPUs of one host with NCCL: fits of Lightning under DDP and FSDP, eager and compiled.

Every rank of a world is one process that runs all fits of its plan; each fit is run under the callback, under a plain
`torch.profiler` and alone.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import SUPPORT
from plain_profiler import Work, read_records
from recorded_window import count_work

from tlk_tracking import KernelAnnotation, load_run
from tlk_tracking.analysis.rank_summary import RankSummary, summarize_ranks
from tlk_tracking.core.records import StepOutcome
from tlk_tracking.delivery.outbox import Outbox

Check = Callable[[str, str, object, object], None]

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

FIRST, ACTIVE = 13, 5
STEPS = range(FIRST, FIRST + ACTIVE)
RANKS = (0, 1)
TELEMETRY = {
    "skip_first": 10,
    "warmup": 3,
    "active": ACTIVE,
    "max_windows": 1,
    "ranks": "all",
    "upload_timeout_s": 90,
}
KINDS = ["ddp eager", "ddp compiled", "fsdp eager", "fsdp compiled"]
FIT_LIMIT_S, RAISE_LIMIT_S = 400, 120
UPLOAD = "from tlk_tracking.cli import main; main()"


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A world that has ended, and what each rank said of each fit."""

    folder: Path
    uri: str
    exit_statuses: list[int | None]

    def said(self, name: str) -> list[dict[str, Any]]:
        return [json.loads((self.folder / f"{name}.rank_{rank}.json").read_text()) for rank in RANKS]

    def annotations(self, name: str) -> dict[int, KernelAnnotation]:
        """Return the annotation of each rank of the one window of a fit."""
        run_id = self.said(name)[0]["run_id"]
        (window,) = load_run(run_id, self.uri).windows
        return dict(window.ranks)

    def summary(self, name: str) -> RankSummary:
        return summarize_ranks(self.annotations(name).values())


def run_world(
    folder: Path, fits: list[dict[str, Any]], uri: str, *, limit_s: float, **environment: str
) -> World:
    """Run a world of two ranks to its end; what still runs after `limit_s` is killed and has no exit status."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    plan = {
        "folder": str(folder), "uri": uri, "world_size": len(RANKS), "fits": fits, "port": port, "device": "cuda",
    }  # fmt: skip
    (folder / "plan.json").write_text(json.dumps(plan))
    path = os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])])
    processes = []
    for rank in RANKS:
        with (folder / f"rank_{rank}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(SUPPORT / "rank_fits.py"), str(folder / "plan.json"), str(rank)],
                    cwd=folder,
                    env={**os.environ, "PYTHONPATH": path, **environment},
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )
    deadline = time.monotonic() + limit_s
    statuses: list[int | None] = []
    for process in processes:
        try:
            statuses.append(process.wait(timeout=max(0.1, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            statuses.append(None)
    return World(folder=folder, uri=uri, exit_statuses=statuses)


@pytest.fixture(scope="module")
def world(_empty_mlflow_db: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Run every kind of fit three times on two ranks: with the callback, with a plain profiler, alone."""
    folder = tmp_path_factory.mktemp("ranks")
    fits = [
        {
            "name": f"{kind} {observe}", "observe": observe, "strategy": kind.split()[0],
            "compiled": kind.endswith("compiled"), "telemetry": TELEMETRY,
            "steps": 20, "width": 1024, "layers": 6, "batch": 64,
        }
        for kind in KINDS
        for observe in ("telemetry", "profiler", "nothing")
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # new experiments put their artifacts into ./mlruns
        uri = f"sqlite:///{shutil.copy(_empty_mlflow_db, folder / 'mlflow.db')}"
        yield run_world(folder, fits, uri, limit_s=FIT_LIMIT_S)


def plain_work(world: World, kind: str, rank: int) -> dict[int, Counter[Work]]:
    counted: dict[int, Counter[Work]] = {}
    for record in read_records(world.folder / f"{kind} profiler.rank_{rank}.trace.json"):
        if record.step is not None:
            counted.setdefault(record.step, Counter())[record.work] += 1
    return dict(sorted(counted.items()))


def seen_work(annotation: KernelAnnotation) -> dict[int, Counter[Work]]:
    launches = annotation.launches[annotation.launches["step"].notna()]
    return {int(step): count_work(rows) for step, rows in launches.groupby("step")}


def test_both_ranks_end_well(world: World, check: Check) -> None:
    said = {name: [one["ended"] for one in world.said(name)] for name in (f"{k} telemetry" for k in KINDS)}
    check(
        "2 GPUs: fits", "Lightning DDP and FSDP, eager and compiled, ranks='all'",
        ([0, 0], {name: ["well", "well"] for name in said}), (world.exit_statuses, said),
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_each_step_of_each_rank_launches_what_a_plain_profiler_sees(
    kind: str, world: World, check: Check
) -> None:
    annotations = world.annotations(f"{kind} telemetry")
    plain = {rank: plain_work(world, kind, rank) for rank in RANKS}
    seen = {rank: seen_work(annotation) for rank, annotation in annotations.items()}

    def totals(work: dict[int, dict[int, Counter[Work]]]) -> dict[int, dict[int, int]]:
        return {rank: {step: one.total() for step, one in steps.items()} for rank, steps in work.items()}

    check(
        f"2 GPUs, {kind}: launches by rank and step",
        "6 linear layers of 1024; plain torch.profiler on each rank over the same steps of a second fit",
        totals(plain), totals(seen),
    )  # fmt: skip
    names = {
        rank: [Counter(work.name for work in counted.elements()) for counted in steps.values()]
        for rank, steps in seen.items()
    }
    assert names == {
        rank: [Counter(work.name for work in counted.elements()) for counted in steps.values()]
        for rank, steps in plain.items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_communication_is_found_by_its_call_in_the_right_rank(kind: str, world: World, check: Check) -> None:
    """Kernel names are the other source here: what NCCL runs begins with nccl."""
    annotations = world.annotations(f"{kind} telemetry")
    summary = world.summary(f"{kind} telemetry")
    expected, observed = {}, {}
    for rank in RANKS:
        nccl = sum(
            count
            for step in plain_work(world, kind, rank).values()
            for work, count in step.items()
            if work.name.startswith("nccl")
        )
        expected[rank] = {"NCCL kernels a step": nccl / ACTIVE, "devices": [rank]}
        launches = annotations[rank].launches
        found = launches[launches["launch_name"].astype(str).str.startswith("nccl")]
        communication = summary.ranks[rank].communication
        assert communication is not None
        kernels = sum(
            count for (table, name), (count, _) in summary.ranks[rank].cells.items()
            if table == "communication" and name.startswith("nccl")
        )  # fmt: skip
        observed[rank] = {
            "NCCL kernels a step": kernels, "devices": sorted(found["device"].dropna().astype(int).unique().tolist()),
        }  # fmt: skip
        assert 0 <= communication.overlapped_ms <= communication.time_ms
    check(
        f"2 GPUs, {kind}: communication", "kernels of c10d calls against NCCL's kernels in the plain trace",
        expected, observed,
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_the_overlapped_share_is_what_counting_microseconds_gives(
    kind: str, world: World, check: Check, note: Callable[[str, str, object], None]
) -> None:
    shares: dict[int, tuple[float, float]] = {}
    for rank, annotation in world.annotations(f"{kind} telemetry").items():
        communication = world.summary(f"{kind} telemetry").ranks[rank].communication
        assert communication is not None
        shares[rank] = (slow_overlap_ms(annotation), communication.overlapped_ms)
    check(
        f"2 GPUs, {kind}: overlapped communication, ms a step", "every interval against every other, in Python",
        {rank: round(slow, 4) for rank, (slow, _) in shares.items()},
        {rank: round(fast, 4) for rank, (_, fast) in shares.items()},
    )  # fmt: skip
    parts = world.summary(f"{kind} telemetry").ranks
    note(
        f"2 GPUs, {kind}: communication", "time in ms a step and share overlapped by compute, by rank",
        {
            part.rank: (round(part.communication.time_ms, 3), round(part.communication.overlapped_share or 0, 3))
            for part in parts if part.communication is not None
        },
    )  # fmt: skip


def slow_overlap_ms(annotation: KernelAnnotation) -> float:
    calls = annotation.aten_calls.set_index("sequence")["operator"].astype(str)
    communicating = {
        launch
        for sequence, launch in annotation.relations[["sequence", "launch"]].itertuples(index=False)
        if sequence in calls.index and calls[sequence].split(".")[0] in ("c10d", "_c10d_functional")
    }
    in_steps = annotation.launches["step"].isin(annotation.complete_steps)
    inside = set(annotation.launches["launch"][in_steps])
    rows = [
        (row.launch, row.stream, row.start_ns, row.start_ns + round(row.duration * 1000), row.kind)
        for row in annotation.launches.itertuples()
    ]
    total = 0
    for launch, stream, start, end, _ in rows:
        if launch in communicating and launch in inside:
            pieces = sorted(
                (max(start, s), min(end, e))
                for other, on, s, e, kind in rows
                if other not in communicating and kind == "kernel" and on != stream and s < end and e > start
            )
            reached = start
            for s, e in pieces:
                total += max(0, e - max(s, reached))
                reached = max(reached, e)
    return total / 1e6 / len(annotation.complete_steps)


@pytest.mark.parametrize("kind", KINDS)
def test_lightnings_word_on_sigterm_has_a_row_of_its_own(kind: str, world: World, check: Check) -> None:
    expected, observed = {}, {}
    for rank, annotation in world.annotations(f"{kind} telemetry").items():
        calls = annotation.aten_calls
        said = calls[(calls["operator"] == "c10d.broadcast_") & calls["step"].isin(annotation.complete_steps)]
        launched = annotation.relations[annotation.relations["sequence"].isin(said["sequence"])]
        expected[rank] = {
            "calls": [(step, "before_batch", None) for step in STEPS], "launches of each": [1] * ACTIVE,
        }  # fmt: skip
        observed[rank] = {
            "calls": [
                (int(row.step), str(row.phase), None if row.module != row.module else str(row.module))
                for row in said.itertuples()
            ],
            "launches of each": launched.groupby("sequence").size().tolist(),
        }  # fmt: skip
    check(
        f"2 GPUs, {kind}: Lightning's broadcast at each batch",
        "the model has no buffer, so that DDP broadcasts nothing itself", expected, observed,
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_the_run_has_both_ranks_and_the_metrics_of_rank_0(kind: str, world: World, check: Check) -> None:
    from mlflow import MlflowClient

    run = MlflowClient(world.uri).get_run(world.said(f"{kind} telemetry")[0]["run_id"])
    annotations = world.annotations(f"{kind} telemetry")
    own = seen_work(annotations[0])
    tags = {key for key in run.data.tags if key.startswith("tlk.lower_bound/rank_")}
    check(
        f"2 GPUs, {kind}: MLflow record", "metrics and tags read from sqlite",
        {
            "ranks": [0, 1], "launches": round(sum(step.total() for step in own.values()) / ACTIVE, 6),
            "tags": ["tlk.lower_bound/rank_0", "tlk.lower_bound/rank_1"], "missing": [],
        },
        {
            "ranks": sorted(annotations), "launches": round(run.data.metrics["kernel_telemetry/launches"], 6),
            "tags": sorted(tags), "missing": list(world.summary(f"{kind} telemetry").missing),
        },
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_step_costs(kind: str, world: World, note: Callable[[str, str, object], None]) -> None:
    costs = {
        observe: [one.get("median_ms") for one in world.said(f"{kind} {observe}")]
        for observe in ("nothing", "profiler", "telemetry")
    }
    note(
        f"2 GPUs, {kind}: a step's time",
        f"median ms of {ACTIVE} steps on rank 0 and 1, device at rest",
        costs,
    )
    assert all(value is not None for values in costs.values() for value in values)


def raise_in_a_window(folder: Path, uri: str, **environment: str) -> tuple[World, float]:
    """Let rank 1 raise in the second recorded step; return what was left, and how long it took in seconds."""
    fit = {
        "name": "raises", "telemetry": TELEMETRY, "steps": 20, "width": 256, "layers": 3, "batch": 16,
        "fault": {"rank": 1, "kind": "raise", "step": FIRST + 1},
    }  # fmt: skip
    started = time.monotonic()
    world = run_world(folder, [fit], uri, limit_s=RAISE_LIMIT_S, **environment)
    took_s = time.monotonic() - started
    waiting = Outbox(folder / "raises" / "kernel_telemetry_outbox")
    for _ in range(20):
        if not (waiting.raw_windows() or waiting.entries()):
            break
        subprocess.run([sys.executable, "-c", UPLOAD, "upload", "--outbox", str(waiting.root)], check=False)
    return world, took_s


def outcomes(annotation: KernelAnnotation) -> dict[int, str]:
    return {row.step: StepOutcome(row.outcome).value for row in annotation.manifest.window.steps}


def says_so(annotation: KernelAnnotation) -> bool:
    return "capture_raised" in {gap.reason.value for gap in annotation.manifest.gaps}


def test_one_rank_raises_in_a_window_and_both_end(mlflow_sqlite: str, tmp_path: Path, check: Check) -> None:
    """NCCL is asked to give up a collective whose peer does not come: only so does the other rank get an error."""
    world, took_s = raise_in_a_window(tmp_path, mlflow_sqlite, TORCH_NCCL_ASYNC_ERROR_HANDLING="2")
    annotations = world.annotations("raises")
    steps = {rank: outcomes(one) for rank, one in annotations.items()}
    check(
        "2 GPUs: rank 1 raises in the second recorded step",
        "DDP, TORCH_NCCL_ASYNC_ERROR_HANDLING=2, a process group that waits 25 s",
        {
            "ended in time": True, "rank 1": "ArithmeticError", "rank 0 raised": True, "ranks": [0, 1],
            "rank 1's steps": {FIRST: "complete", FIRST + 1: "raised"}, "rank 0's last step": "raised",
            "say so": {0: True, 1: True},
        },
        {
            "ended in time": took_s < RAISE_LIMIT_S, "rank 1": world.said("raises")[1]["ended"],
            "rank 0 raised": world.said("raises")[0]["ended"] != "well", "ranks": sorted(annotations),
            "rank 1's steps": steps[1], "rank 0's last step": list(steps[0].values())[-1],
            "say so": {rank: says_so(one) for rank, one in annotations.items()},
        },
    )  # fmt: skip


def test_a_rank_that_nccl_ends_is_missing_by_name(
    mlflow_sqlite: str, tmp_path: Path, check: Check, note: Callable[[str, str, object], None]
) -> None:
    """Unasked, torch's watchdog ends the process of a rank whose peer does not come: nothing of it is saved."""
    from mlflow import MlflowClient

    # Its own debug dump can take minutes before that.
    world, took_s = raise_in_a_window(tmp_path, mlflow_sqlite, TORCH_NCCL_DUMP_ON_TIMEOUT="0")
    client = MlflowClient(mlflow_sqlite)
    experiments = [one.experiment_id for one in client.search_experiments()]
    (run,) = client.search_runs(experiments)
    (window,) = load_run(run.info.run_id, mlflow_sqlite).windows
    annotations = dict(window.ranks)
    check(
        "2 GPUs: rank 1 raises, and torch's watchdog ends rank 0",
        "DDP, TORCH_NCCL_DUMP_ON_TIMEOUT=0, a process group that waits 25 s",
        {
            "ended in time": True, "rank 0 was ended": True, "ranks": [1], "missing": [0],
            "rank 1's steps": {FIRST: "complete", FIRST + 1: "raised"}, "says so": True,
        },
        {
            "ended in time": took_s < RAISE_LIMIT_S,
            "rank 0 was ended": world.exit_statuses[0] not in (0, None),
            "ranks": sorted(annotations),
            "missing": list(summarize_ranks(annotations.values()).missing),
            "rank 1's steps": outcomes(annotations[1]), "says so": says_so(annotations[1]),
        },
    )  # fmt: skip
    launches = annotations[1].launches
    note(
        "2 GPUs: launches without an ATen call", "DDP, rank 1, the steps before it raised: kind, gap, count",
        dict(
            Counter(
                (str(row.kind), str(row.gap))
                for row in launches[launches["step"] == FIRST].itertuples()
                if row.attribution_status != "attributed"
            )
        ),
    )  # fmt: skip
