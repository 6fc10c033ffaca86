"""Fits of Lightning under DeepSpeed, ZeRO stages 2 and 3, on one GPU by Lightning alone and on two through torchrun.

DeepSpeed's engine wraps the module and runs backward and the optimizer's step itself; no op of its own is compiled.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest
import torch
from plain_profiler import Work, read_records
from rank_worlds import World, run_worlds
from recorded_window import count_work

from tlk_tracking import KernelAnnotation

Check = Callable[[str, str, object, object], None]

pytestmark = [
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed"),
    pytest.mark.timeout(400),
]

FIRST, ACTIVE, LAYERS = 13, 5, 6
STEPS = range(FIRST, FIRST + ACTIVE)
TELEMETRY = {
    "skip_first": 10,
    "warmup": 3,
    "active": ACTIVE,
    "max_windows": 1,
    "ranks": "all",
    "upload_timeout_s": 90,
}
PROGRAM = f"DeepSpeedStrategy and AdamW, {LAYERS} linear layers of 1024, ranks='all'"
STAGES = ("deepspeed2", "deepspeed3")


@pytest.fixture(scope="module", params=[1, 2], ids=["1 GPU", "2 GPUs"])
def size(request: pytest.FixtureRequest) -> int:
    wanted: int = request.param
    if torch.cuda.device_count() < wanted:
        pytest.skip(f"needs {wanted} GPUs")
    return wanted


@pytest.fixture(scope="module")
def world(size: int, _empty_mlflow_db: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Run each stage three times: with the callback, with a plain profiler, alone."""
    folder = tmp_path_factory.mktemp("deepspeed")
    fits = [
        {
            "name": f"{stage} {observe}", "observe": observe, "strategy": stage, "telemetry": TELEMETRY,
            "steps": 20, "width": 1024, "layers": LAYERS, "batch": 64,
        }
        for stage in STAGES
        for observe in ("telemetry", "profiler", "nothing")
    ]  # fmt: skip
    launcher = "subprocesses" if size == 1 else "torchrun"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # new experiments put their artifacts into ./mlruns
        uri = f"sqlite:///{shutil.copy(_empty_mlflow_db, folder / 'mlflow.db')}"
        yield run_worlds(folder, uri, {"world": (size, fits)}, launcher, device="cuda")["world"]


def annotations_of(world: World, stage: str) -> dict[int, KernelAnnotation]:
    """Return each rank's annotation of the only window of the only run."""
    (window,) = world.run(f"{stage} telemetry").windows
    return dict(window.ranks)


def calls_of(annotation: KernelAnnotation, step: int) -> list[tuple[str, str, str | None]]:
    """Return operator, phase and module of a step's calls."""
    calls = annotation.aten_calls
    return [
        (str(row.operator), str(row.phase), None if pd.isna(row.module) else str(row.module))
        for row in calls[calls["step"] == step].itertuples()
    ]


@pytest.mark.parametrize("stage", STAGES)
def test_the_fit_ends_well_with_the_weights_of_a_fit_without_the_callback(
    stage: str, world: World, size: int, check: Check
) -> None:
    alone, with_it = world.said(f"{stage} nothing"), world.said(f"{stage} telemetry")
    check(
        f"{size} GPU, {stage}: fits", PROGRAM,
        {rank: ("well", True, alone.get(rank, {}).get("sha256", "?")) for rank in range(size)},
        {rank: (one["ended"], one.get("finite"), one.get("sha256")) for rank, one in with_it.items()},
    )  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
def test_one_run_has_a_valid_annotation_of_every_rank(
    stage: str, world: World, size: int, check: Check
) -> None:
    run = world.run(f"{stage} telemetry")
    check(
        f"{size} GPU, {stage}: MLflow record", PROGRAM,
        {
            rank: {
                "steps": [(step, "complete") for step in STEPS], "world size": size,
                "strategy": "DeepSpeedStrategy", "disagreed": 0,
                # The engine makes a tensor of numbers on the device at each step, and on several ranks Lightning too.
                "unattributed": {("memcpy", "mode_paused_interior"): ACTIVE * size},
            }
            for rank in range(size)
        },
        {
            rank: {
                "steps": [(row.step, row.outcome.value) for row in one.manifest.window.steps],
                "world size": one.manifest.world_size,
                "strategy": one.manifest.environment.strategy,
                "disagreed": one.manifest.audit.disagreed,
                "unattributed": unattributed(one),
            }
            for rank, one in annotations_of(world, stage).items()
        },
    )  # fmt: skip
    assert run.rank_gaps == ()


def unattributed(annotation: KernelAnnotation) -> dict[tuple[str, str], int]:
    launches = in_steps(annotation)
    rows = launches[launches["attribution_status"] != "attributed"]
    return dict(Counter((str(row.kind), str(row.gap)) for row in rows.itertuples()))


def in_steps(annotation: KernelAnnotation) -> pd.DataFrame:
    return annotation.launches[annotation.launches["step"].notna()]


@pytest.mark.parametrize("stage", STAGES)
def test_each_step_of_each_rank_launches_what_a_plain_profiler_sees(
    stage: str, world: World, size: int, check: Check
) -> None:
    plain: dict[int, dict[int, Counter[Work]]] = {}
    seen: dict[int, dict[int, Counter[Work]]] = {}
    for rank, annotation in annotations_of(world, stage).items():
        plain[rank] = {step: Counter() for step in STEPS}
        for record in read_records(world.folder / f"{stage} profiler.rank_{rank}.trace.json"):
            if record.step is not None:
                plain[rank][record.step][record.work] += 1
        seen[rank] = {int(step): count_work(rows) for step, rows in in_steps(annotation).groupby("step")}
    check(
        f"{size} GPU, {stage}: launches by rank and step",
        "plain torch.profiler on each rank over the same steps of a second fit",
        totals(plain), totals(seen),
    )  # fmt: skip
    assert names(seen) == names(plain)


def totals(work: dict[int, dict[int, Counter[Work]]]) -> dict[int, dict[int, int]]:
    return {rank: {step: one.total() for step, one in steps.items()} for rank, steps in work.items()}


def names(work: dict[int, dict[int, Counter[Work]]]) -> dict[int, list[Counter[str]]]:
    return {
        rank: [Counter(record.name for record in one.elements()) for one in steps.values()]
        for rank, steps in work.items()
    }


@pytest.mark.parametrize("stage", STAGES)
def test_layers_and_phases_are_known_inside_the_engine(
    stage: str, world: World, size: int, check: Check
) -> None:
    """A layer's forward is one addmm, its backward one mm for the weight and, but for the first, one for the input.

    Of all calls of a step only AdamW's is a lerp.
    """
    layers = [f"net.{layer}" for layer in range(LAYERS)]
    forward = Counter(("aten.addmm", "forward", layer) for layer in layers)
    backward = Counter(
        ("aten.mm", "backward", layer) for layer in layers for _ in range(1 if layer == "net.0" else 2)
    )
    observed = {}
    for rank, annotation in annotations_of(world, stage).items():
        calls = {step: calls_of(annotation, step) for step in STEPS}
        observed[rank] = {
            "layers": all(
                Counter(call for call in step if call[0] in ("aten.addmm", "aten.mm")) == forward + backward
                for step in calls.values()
            ),
            "optimizer": sorted({call[1:] for step in calls.values() for call in step if "lerp" in call[0]}),
        }
    check(
        f"{size} GPU, {stage}: modules and phases", PROGRAM,
        {rank: {"layers": True, "optimizer": [("optimizer", None)]} for rank in range(size)}, observed,
    )  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
def test_where_the_engine_communicates(
    stage: str, world: World, size: int, note: Callable[[str, str, object], None]
) -> None:
    by_phase = {
        rank: Counter(
            f"{phase} {operator}"
            for operator, phase, _ in calls_of(annotation, FIRST)
            if operator.startswith("c10d")
        )
        for rank, annotation in annotations_of(world, stage).items()
    }
    note(f"{size} GPU, {stage}: calls of process groups in one step, by phase", PROGRAM, by_phase)
    assert sorted(by_phase) == list(range(size))
