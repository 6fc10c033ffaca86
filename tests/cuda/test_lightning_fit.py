"""The main job on a GPU: a Lightning fit whose kernels are in its MLflow run."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pandas as pd
import pytest
import torch
from lightning.pytorch.loggers import MLFlowLogger
from plain_profiler import PlainRecord, Work, read_records, work_of
from recorded_window import count_work
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tlk_tracking import KernelAnnotation, load_run
from tlk_tracking.core.gaps import Bound
from tlk_tracking.core.records import Availability, StepOutcome
from tlk_tracking.delivery.outbox import Outbox

Check = Callable[[str, str, object, object], None]

BATCH, FEATURES = 32, 64
STEPS, FIRST, ACTIVE = 20, 13, 3
OUTBOX_NAME = "kernel_telemetry_outbox"
UPLOAD = "from tlk_tracking.cli import main; main()"
WINDOW = {"skip_first": 10, "warmup": 3, "active": ACTIVE, "max_windows": 1}


class Classifier(pl.LightningModule):
    """A small eager model: dropout, a logged loss, AdamW over all parameters at once."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x, label = batch
        loss = nn.functional.cross_entropy(self.net(x), label)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Compiled(Classifier):
    """Its network is compiled before the fit, and runs as generated code."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.compile(self.net)


class Queueing(Classifier):
    """Each step leaves the device some milliseconds of work behind."""

    def on_fit_start(self) -> None:
        self.big = torch.randn(8192, 8192, device=self.device, dtype=torch.bfloat16)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = super().training_step(batch, index)
        for _ in range(24):
            self.big @ self.big
        return loss


class Raising(Classifier):
    """Raises in the second recorded step, in forward, backward or the optimizer, or in an ATen call itself."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def _raise_if(self, where: str) -> None:
        if where == self.where and self.trainer.fit_loop.total_batch_idx == FIRST + 1:
            raise ArithmeticError(where)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = super().training_step(batch, index)
        self._raise_if("forward")
        if self.where == "aten" and self.trainer.fit_loop.total_batch_idx == FIRST + 1:
            torch.mm(
                self.net[0].weight, self.net[0].weight
            )  # 128x64 by 128x64: refused by the operator itself
        return _RaisesInBackward.apply(loss, lambda: self._raise_if("backward"))

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self._raise_if("optimizer")
        super().optimizer_step(*args, **kwargs)


class _RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, act: Callable[[], None]) -> Tensor:
        ctx.act = act
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]  # fixed arity
        ctx.act()
        return grad, None


class PlainProfiler(pl.Callback):
    """torch.profiler alone over the steps of our window, one `ProfilerStep#N` from batch end to batch end."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace
        self.profiler: torch.profiler.profile | None = None
        self.range: torch.profiler.record_function | None = None

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        done = trainer.fit_loop.total_batch_idx
        if self.range is not None:
            self.range.__exit__(None, None, None)
            self.range = None
        if done == FIRST - 1:
            torch.cuda.synchronize()
            activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            self.profiler = torch.profiler.profile(activities=activities)
            self.profiler.start()
        if done == FIRST + ACTIVE - 1:
            torch.cuda.synchronize()
            assert self.profiler is not None
            self.profiler.stop()
            self.profiler.export_chrome_trace(str(self.trace))
            self.profiler = None
        elif self.profiler is not None:
            self.range = torch.profiler.record_function(f"ProfilerStep#{done + 1}")
            self.range.__enter__()


def fit(model: pl.LightningModule, callback: pl.Callback, folder: Path, uri: str) -> str:
    """Train for some steps on random batches; return the MLflow run's id."""
    pl.seed_everything(7)
    logger = MLFlowLogger(experiment_name="cuda", tracking_uri=uri)
    trainer = pl.Trainer(
        accelerator="gpu", devices=1, max_steps=STEPS, logger=logger, callbacks=[callback],
        log_every_n_steps=1, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    rows = STEPS * BATCH
    data = TensorDataset(torch.randn(rows, FEATURES), torch.randint(10, (rows,)))
    trainer.fit(model, DataLoader(data, batch_size=BATCH))
    return str(logger.run_id)


def telemetry(**arguments: Any) -> pl.Callback:
    from tlk_tracking.callbacks import KernelTelemetry

    return KernelTelemetry(**(WINDOW | {"min_interval_s": 0.0} | arguments))


def send_what_is_left(folder: Path) -> None:
    """Send a window for which a fit that raised did not wait."""
    from click.testing import CliRunner

    from tlk_tracking.cli import tlk

    done = CliRunner().invoke(tlk, ["upload", "--outbox", str(folder / "kernel_telemetry_outbox")])
    assert done.exit_code == 0, done.output


def only_annotation(run_id: str, uri: str) -> KernelAnnotation:
    (annotation,) = load_run(run_id, uri).annotations
    return annotation


def work_by_step(launches: pd.DataFrame) -> dict[int, Counter[Work]]:
    """Count equal launches of each step, as `plain_profiler.work_of` counts records."""
    inside = launches[launches["step"].notna()]
    return {int(step): count_work(rows) for step, rows in inside.groupby("step")}


def plain_by_step(records: Iterable[PlainRecord]) -> dict[int, Counter[Work]]:
    counted: dict[int, Counter[Work]] = {}
    for record in records:
        if record.step is not None:
            counted.setdefault(record.step, Counter())[record.work] += 1
    return counted


@pytest.fixture(scope="module")
def main_job(_empty_mlflow_db: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Fit once with the callback; return run id and tracking URI."""
    folder = tmp_path_factory.mktemp("main_job")
    uri = f"sqlite:///{shutil.copy(_empty_mlflow_db, folder / 'mlflow.db')}"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # new experiments put their artifacts into ./mlruns
        return fit(Classifier(), telemetry(), folder, uri), uri


@pytest.fixture(scope="module")
def plain_records(
    _empty_mlflow_db: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PlainRecord, ...]:
    """Fit once more with a plain profiler; return its records."""
    folder = tmp_path_factory.mktemp("plain")
    uri = f"sqlite:///{shutil.copy(_empty_mlflow_db, folder / 'mlflow.db')}"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        fit(Classifier(), PlainProfiler(folder / "plain.json"), folder, uri)
    return read_records(folder / "plain.json")


def test_each_step_launches_what_a_plain_profiler_sees(
    main_job: tuple[str, str], plain_records: tuple[PlainRecord, ...], check: Check
) -> None:
    annotation = only_annotation(*main_job)
    plain, seen = plain_by_step(plain_records), work_by_step(annotation.launches)
    check(
        "main job: launches by step",
        "Lightning fit, MLP, AdamW; plain torch.profiler over the same steps of a second fit",
        {step: work.total() for step, work in plain.items()},
        {step: work.total() for step, work in seen.items()},
    )
    assert seen == plain
    assert list(seen) == [FIRST, FIRST + 1, FIRST + 2]


def test_every_launch_of_an_eager_fit_has_its_call(main_job: tuple[str, str], check: Check) -> None:
    annotation = only_annotation(*main_job)
    counts = annotation.manifest.counts
    check(
        "main job: attribution",
        "the same fit; Kineto's own external-id link as second opinion",
        {"unattributed": 0, "outside_steps": 0, "disagreed": 0, "bounds": {"exact"}},
        {
            "unattributed": counts["unattributed"].value,
            "outside_steps": counts["outside_steps"].value,
            "disagreed": annotation.manifest.audit.disagreed,
            "bounds": {number.bound.value for number in counts.values()},
        },
    )
    assert annotation.manifest.audit.agreed == len(annotation.launches)
    assert annotation.manifest.availability is Availability.RECORDED
    assert not annotation.manifest.lower_bound
    assert [row.outcome for row in annotation.manifest.window.steps] == [StepOutcome.COMPLETE] * ACTIVE


def test_the_copies_of_the_batch_are_inside_its_bracket(main_job: tuple[str, str], check: Check) -> None:
    launches = only_annotation(*main_job).launches
    copies = launches[launches["launch_name"].astype(str).str.contains("HtoD")]
    sizes = {int(step): sorted(rows["bytes"].tolist()) for step, rows in copies.groupby("step")}
    batch = [BATCH * 8, BATCH * FEATURES * 4]  # int64 labels, float32 features
    check(
        "main job: batch copies",
        "H2D copies of a batch of 32 x 64 float32 and 32 int64, in bytes",
        dict.fromkeys(range(FIRST, FIRST + ACTIVE), batch),
        {step: [size for size in found if size in batch] for step, found in sizes.items()},
    )


def test_the_run_has_every_tag_and_every_artifact(main_job: tuple[str, str], check: Check) -> None:
    from mlflow import MlflowClient

    run_id, uri = main_job
    client = MlflowClient(uri)
    run = client.get_run(run_id)
    keys = {key for key in run.data.metrics if key.startswith("kernel_telemetry/")}
    folder = f"kernel_telemetry/{only_annotation(run_id, uri).folder_name}"
    files = {entry.path.removeprefix(f"{folder}/") for entry in client.list_artifacts(run_id, folder)}
    wanted = {f"tlk.lower_bound/{key}" for key in keys}
    wanted |= {f"tlk.lower_bound/artifact/{name}" for name in files}
    wanted |= {"tlk.lower_bound", "tlk.lower_bound_reasons", "tlk.availability", "tlk.schema_version"}
    check(
        "main job: MLflow record",
        "tags for every metric and artifact of the run, read from sqlite",
        {"missing tags": [], "metrics at most 40": True, "tags that say lower bound": []},
        {
            "missing tags": sorted(wanted - set(run.data.tags)),
            "metrics at most 40": 0 < len(keys) <= 40,
            "tags that say lower bound": sorted(
                key for key, value in run.data.tags.items() if key.startswith("tlk.") and value == "true"
            ),
        },
    )
    assert {
        "annotation.json", "aten_calls.parquet", "kernel_launches.parquet", "launch_relations.parquet",
        "launch_summary.csv", "module_summary.csv",
    } <= files  # fmt: skip
    assert run.data.tags["tlk.availability"] == "recorded"


def test_the_metrics_are_the_plain_profilers_counts(
    main_job: tuple[str, str], plain_records: tuple[PlainRecord, ...], check: Check
) -> None:
    from mlflow import MlflowClient

    records = [record for record in plain_records if record.step is not None]
    kinds = Counter(record.work.kind for record in records)
    copied = sum(record.work.bytes or 0 for record in records if record.work.kind == "memcpy")
    metrics = MlflowClient(main_job[1]).get_run(main_job[0]).data.metrics
    names = {"kernels": "kernel", "memcpys": "memcpy", "memsets": "memset"}
    check(
        "main job: metrics",
        "counts a step and copied bytes a step, as logged",
        {name: round(kinds[kind] / ACTIVE, 6) for name, kind in names.items()}
        | {"memcpy_bytes": round(copied / ACTIVE, 6)},
        {name: round(metrics[f"kernel_telemetry/{name}"], 6) for name in (*names, "memcpy_bytes")},
    )
    assert metrics["kernel_telemetry/launches"] == pytest.approx(len(records) / ACTIVE)


@pytest.mark.parametrize("synchronize", [True, False])
def test_work_queued_in_warm_up_is_in_no_total(
    synchronize: bool, tmp_path: Path, mlflow_sqlite: str, check: Check
) -> None:
    trace = tmp_path / "plain.json"
    fit(Queueing(), PlainProfiler(trace), tmp_path, mlflow_sqlite)
    plain = plain_by_step(read_records(trace))
    run_id = fit(Queueing(), telemetry(synchronize=synchronize), tmp_path, mlflow_sqlite)
    annotation = only_annotation(run_id, mlflow_sqlite)
    launches = annotation.launches
    leaked = launches[launches["gap"] == "record_without_launch"]
    complete = {step: work.total() for step, work in plain.items()}
    counted = {int(step): len(rows) for step, rows in launches[launches["step"].notna()].groupby("step")}
    if synchronize:
        check(
            "profiler warm-up, synchronize=True",
            "each step leaves 24 large products queued",
            {"by step": complete, "leaked": 0, "launches": Bound.EXACT.value},
            {
                "by step": counted,
                "leaked": len(leaked),
                "launches": annotation.manifest.counts["launches"].bound.value,
            },
        )
        return
    # Work of the warm-up may run on in the window, and the last step's own after it: what is not all there is not
    # called exact.
    first = min(complete)
    whole = counted == complete and not len(leaked)
    check(
        "profiler warm-up, synchronize=False",
        "each step leaves 24 large products queued, the warm-up's too; counts of a plain profiler that waits",
        {
            "first step": complete[first],
            "leaked with a step": 0,
            "launches": (Bound.EXACT if whole else Bound.LOWER).value,
            "more than there were": [],
        },
        {
            "first step": counted[first],
            "leaked with a step": int(leaked["step"].notna().sum()),
            "launches": annotation.manifest.counts["launches"].bound.value,
            "more than there were": [step for step in counted if counted[step] > complete[step]],
        },
    )


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer", "aten"])
def test_a_fit_that_raises_keeps_its_window_and_the_next_one_is_good(
    where: str, main_job: tuple[str, str], tmp_path: Path, mlflow_sqlite: str, check: Check
) -> None:
    from mlflow import MlflowClient

    raised = RuntimeError if where == "aten" else ArithmeticError
    with pytest.raises(raised):
        fit(Raising(where), telemetry(), tmp_path, mlflow_sqlite)
    # A fit that raised waits 5 s at the most; a worker that is slower to start leaves the window in the outbox.
    waiting = Outbox(tmp_path / OUTBOX_NAME)
    while (
        waiting.raw_windows() or waiting.entries()
    ):  # it may be sending right now: then upload leaves it alone
        subprocess.run([sys.executable, "-c", UPLOAD, "upload", "--outbox", str(waiting.root)], check=False)
    send_what_is_left(tmp_path)
    client = MlflowClient(mlflow_sqlite)
    (run,) = client.search_runs([client.get_experiment_by_name("cuda").experiment_id])
    annotation = only_annotation(run.info.run_id, mlflow_sqlite)
    outcomes = {row.step: row.outcome.value for row in annotation.manifest.window.steps}
    good = work_by_step(only_annotation(*main_job).launches)
    second = work_by_step(
        only_annotation(fit(Classifier(), telemetry(), tmp_path, mlflow_sqlite), mlflow_sqlite).launches
    )
    calls = annotation.aten_calls
    check(
        f"teardown when capture raises: {where}",
        "raises in the second recorded step; then a second fit",
        {
            "steps": {FIRST: "complete", FIRST + 1: "raised"},
            "gap": ["capture_raised"],
            "calls that raised": ["aten.mm"] if where == "aten" else [],
            "second fit's launches": {step: work.total() for step, work in good.items()},
            "run": "FAILED",
        },
        {
            "steps": outcomes,
            "gap": [gap.reason.value for gap in annotation.manifest.gaps if gap.reason == "capture_raised"],
            "calls that raised": calls[calls["outcome"] == "raised"]["operator"].astype(str).tolist(),
            "second fit's launches": {step: work.total() for step, work in second.items()},
            "run": run.info.status,
        },
    )
    assert second == good
    assert torch.autograd.profiler._is_profiler_enabled is False


def test_what_a_plain_profiler_sees_repeats(
    plain_records: tuple[PlainRecord, ...], tmp_path: Path, mlflow_sqlite: str
) -> None:
    """The ground the other tests stand on: two plain runs of one fit count the same."""
    fit(Classifier(), PlainProfiler(tmp_path / "again.json"), tmp_path, mlflow_sqlite)
    assert work_of(read_records(tmp_path / "again.json")) == work_of(plain_records)


def test_modules_of_a_fit_are_known_on_the_gpu(main_job: tuple[str, str], check: Check) -> None:
    launches = only_annotation(*main_job).launches
    known = launches[launches["phase"].isin(["forward", "backward"])]
    found = {
        phase: sorted(str(module) for module in rows["module"].dropna().unique())
        for phase, rows in known.groupby("phase", observed=True)
    }
    check(
        "modules of a fit",
        "the same fit; named_modules() of the LightningModule that launch anything",
        {"backward": ["net.0", "net.1", "net.2", "net.3"], "forward": ["net.0", "net.1", "net.2", "net.3"]},
        dict(sorted(found.items())),
    )


def test_a_fit_of_a_compiled_model_has_its_nodes_in_the_run(
    tmp_path: Path, mlflow_sqlite: str, check: Check
) -> None:
    torch._dynamo.reset()
    run_id = fit(Compiled(), telemetry(fused=True), tmp_path, mlflow_sqlite)
    torch._dynamo.reset()
    annotation = only_annotation(run_id, mlflow_sqlite)
    launches = annotation.launches
    generated = launches[launches["launch_name"].astype(str).str.startswith("triton_")]
    relations = annotation.relations
    related = set(relations[relations["origin"] == "inductor_kernel"]["launch"])
    check(
        "a fit of a compiled model, fused=True",
        "Lightning fit; launches whose kernels Inductor named, read back from MLflow",
        {"some": True, "without nodes": 0, "without module": 0, "unknown phase": 0},
        {
            "some": len(generated) > 0,
            "without nodes": len(set(generated["launch"]) - related),
            "without module": int(generated["module"].isna().sum()),
            "unknown phase": int(launches["phase"].isna().sum()),
        },
    )
