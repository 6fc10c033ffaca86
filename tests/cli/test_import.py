from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tlk_tracking import TlkError, import_trace, load_annotation, load_run
from tlk_tracking.cli import tlk
from tlk_tracking.cli.targets import open_target


def _tlk(*arguments: str | Path) -> Result:
    return CliRunner().invoke(tlk, [str(argument) for argument in arguments])


def _done(*arguments: str | Path) -> str:
    result = _tlk(*arguments)
    assert result.exit_code == 0, result.output + str(result.exception)
    return result.output


def _write_trace(path: Path, events: list[dict[str, object]], **header: object) -> Path:
    path.write_text(json.dumps({**header, "traceEvents": events}))
    return path


def _event(category: str, name: str, *, ts: float, dur: float, **args: object) -> dict[str, object]:
    thread = {"ph": "X", "pid": 1, "tid": 7 if category in ("kernel", "gpu_memcpy") else 1}
    return {**thread, "cat": category, "name": name, "ts": ts, "dur": dur, "args": args}


def _unmarked(path: Path, *, step: int | None, kernels: int = 1, **header: object) -> Path:
    """Write a trace as torch.profiler writes it: one step, one aten::mm, and its kernels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    events = [_event("cpu_op", "aten::mm", ts=20, dur=30, **{"External id": 1})]
    if step is not None:
        events.append(_event("user_annotation", f"ProfilerStep#{step}", ts=10, dur=100))
    for number in range(1, kernels + 1):
        launch = _event("cuda_runtime", "cudaLaunchKernel", ts=20 + number, dur=1, correlation=number)
        record = {"correlation": number, "device": 0, "stream": 7, "External id": 1}
        events += [launch, _event("kernel", "gemm", ts=40 + number, dur=2, **record)]
    return _write_trace(path, events, **header)


def test_a_trace_without_markers_is_imported_by_its_profiler_steps_and_host_ops(tmp_path: Path) -> None:
    _done("import", _unmarked(tmp_path / "t.json", step=5, kernels=3), "--out", tmp_path / "out")
    annotation = load_annotation(tmp_path / "out")
    assert annotation.complete_steps == (5,)
    assert [call.operator for call in annotation.iter_aten_calls()] == ["aten::mm"]
    assert [launch.launch_name for launch in annotation.iter_launches()] == ["gemm"] * 3
    assert annotation.manifest.counts["attributed"].value == 3


def test_what_a_trace_does_not_hold_is_said(tmp_path: Path) -> None:
    output = _done("import", _unmarked(tmp_path / "t.json", step=None), "--out", tmp_path / "out")
    assert [line for line in output.splitlines() if line.startswith("not in the trace")] == [
        "not in the trace: no markers: the innermost host ops are the call rows; their modules, phases and inputs "
        "are unknown",
        "not in the trace: no steps but 0: without ProfilerStep#N ranges the whole trace is step 0",
        "not in the trace: no word on torch, cuda, gpu_model, precision, strategy, compiled",
    ]


def test_traces_of_one_step_are_ranks_by_their_own_metadata(tmp_path: Path) -> None:
    traces = [
        _unmarked(tmp_path / f"{rank}.json", step=2, distributedInfo={"rank": rank, "world_size": 2})
        for rank in (1, 0)
    ]
    _done("import", *traces, "--out", tmp_path / "out")
    found = [(a.manifest.rank, a.manifest.world_size) for a in open_target(str(tmp_path / "out"))]
    sessions = {a.manifest.session for a in open_target(str(tmp_path / "out"))}
    assert found == [(0, 2), (1, 2)]
    assert len(sessions) == 1


def test_traces_without_metadata_get_the_ranks_that_are_given(tmp_path: Path) -> None:
    traces = [_unmarked(tmp_path / f"{name}.json", step=2, kernels=k) for name, k in (("a", 1), ("b", 2))]
    _done("import", *traces, "--rank", "3", "--rank", "0", "--out", tmp_path / "out")
    annotations = open_target(str(tmp_path / "out"))
    found = {a.manifest.rank: a.manifest.counts["launches"].value for a in annotations}
    assert found == {3: 1, 0: 2}


def test_a_rank_beyond_the_world_of_its_trace_makes_the_world_larger(tmp_path: Path) -> None:
    trace = _unmarked(tmp_path / "t.json", step=2, distributedInfo={"rank": 0, "world_size": 2})
    import_trace(trace, rank=5).save(tmp_path / "out")
    manifest = load_annotation(tmp_path / "out").manifest
    assert (manifest.rank, manifest.world_size, manifest.environment.world_size) == (5, 6, 2)


def test_traces_of_different_steps_are_windows(tmp_path: Path) -> None:
    traces = [_unmarked(tmp_path / f"{step}.json", step=step) for step in (9, 4)]
    _done("import", *traces, "--out", tmp_path / "out")
    annotations = open_target(str(tmp_path / "out"))
    assert [(a.manifest.window.first_step, a.manifest.global_step) for a in annotations] == [(4, 4), (9, 9)]


def test_the_same_files_are_the_same_window_and_others_are_not(tmp_path: Path) -> None:
    first, second = (_unmarked(tmp_path / f"{k}.json", step=2, kernels=k) for k in (1, 2))
    for trace, out in ((first, "a"), (first, "b"), (second, "c")):
        _done("import", trace, "--out", tmp_path / out)
    a, b, c = (load_annotation(tmp_path / out).manifest.session for out in "abc")
    assert (a == b, a == c) == (True, False)


def test_from_python_a_trace_has_the_session_that_the_command_gives_it(tmp_path: Path) -> None:
    first, second = (_unmarked(tmp_path / f"{k}.json", step=2, kernels=k) for k in (1, 2))
    sessions = [import_trace(trace).manifest.session for trace in (first, first, second)]
    _done("import", first, "--out", tmp_path / "out")
    assert sessions[:2] == [load_annotation(tmp_path / "out").manifest.session] * 2
    assert sessions[2] != sessions[0]


def test_a_folder_stands_for_the_traces_in_it_and_below(tmp_path: Path) -> None:
    """As torchtitan lays them out."""
    for step, rank in ((9, 0), (9, 1), (19, 0), (19, 1)):
        path = tmp_path / f"traces/iteration_{step + 1}/rank{rank}_trace.json"
        _unmarked(path, step=step, distributedInfo={"rank": rank, "world_size": 2})
    (tmp_path / "traces/iteration_10/rank0_memory_snapshot.pickle").touch()
    output = _done("import", tmp_path / "traces", "--out", tmp_path / "out")
    places = [(a.manifest.window.first_step, a.manifest.rank) for a in open_target(str(tmp_path / "out"))]
    assert places == [(9, 0), (9, 1), (19, 0), (19, 1)]
    assert [line.partition(":")[0] for line in output.splitlines()[:4]] == [
        f"iteration_{number}/rank{rank}_trace.json" for number in (10, 20) for rank in (0, 1)
    ]


def test_a_damaged_trace_of_a_folder_is_named_by_its_place(tmp_path: Path) -> None:
    for name in "ab":
        _unmarked(tmp_path / name / "rank0_trace.json", step=2)
    (tmp_path / "b/rank0_trace.json").write_text("{}")
    error = _tlk("import", tmp_path, "--out", tmp_path / "out").exception
    assert str(error).startswith("b/rank0_trace.json: rank0_trace.json is not a Chrome trace")


def test_a_folder_without_traces_is_refused(tmp_path: Path) -> None:
    result = _tlk("import", tmp_path, "--out", tmp_path / "out")
    assert str(result.exception) == f"{tmp_path} has no .json or .json.gz file in it or below"


def test_steps_that_share_a_number_are_numbered_in_their_order(tmp_path: Path) -> None:
    """Lightning's profiler counts the batches of its sanity check and of training apart, in one session."""
    steps = [
        _event("user_annotation", f"ProfilerStep#{step}", ts=100 * place, dur=90)
        for place, step in enumerate((2, 1, 2, 3), start=1)
    ]
    calls = [
        _event("cpu_op", "aten::mm", ts=100 * place + 20, dur=30, **{"External id": place})
        for place in (1, 2, 3, 4)
    ]
    trace = _write_trace(tmp_path / "t.json", [*steps, *calls])
    output = _done("import", trace, "--out", tmp_path / "out")
    annotation = load_annotation(tmp_path / "out")
    assert [call.step for call in annotation.iter_aten_calls()] == [0, 1, 2, 3]
    assert annotation.manifest.notes["renumbered_steps"] == 4
    assert "no number of its own for each step" in output


def test_steps_within_each_other_keep_their_numbers(tmp_path: Path) -> None:
    steps = [_event("user_annotation", "ProfilerStep#5", ts=ts, dur=dur) for ts, dur in ((10, 100), (20, 50))]
    trace = _write_trace(tmp_path / "t.json", [*steps, _event("cpu_op", "aten::mm", ts=30, dur=5)])
    assert import_trace(trace).complete_steps == (5,)


def test_two_traces_for_one_place_are_refused_by_name(tmp_path: Path) -> None:
    traces = [_unmarked(tmp_path / f"{name}.json", step=2) for name in "ab"]
    result = _tlk("import", *traces, "--out", tmp_path / "out")
    assert isinstance(result.exception, TlkError)
    assert str(result.exception).startswith(
        "a.json and b.json are both rank 0 of the window that begins with"
    )
    assert not (tmp_path / "out").exists()


def test_a_rank_for_some_traces_only_is_refused(tmp_path: Path) -> None:
    traces = [_unmarked(tmp_path / f"{name}.json", step=2) for name in "ab"]
    result = _tlk("import", *traces, "--rank", "1", "--out", tmp_path / "out")
    assert str(result.exception) == ("1 --rank for 2 traces; give one for each, in their order, or none")


def test_a_trace_that_is_damaged_leaves_nothing_of_the_others(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text("no trace")
    result = _tlk(
        "import", _unmarked(tmp_path / "a.json", step=2), tmp_path / "b.json", "--out", tmp_path / "out"
    )
    assert isinstance(result.exception, TlkError)
    assert not (tmp_path / "out").exists()


def test_a_place_to_put_the_annotation_must_be_given(tmp_path: Path) -> None:
    result = _tlk("import", _unmarked(tmp_path / "t.json", step=2))
    assert (result.exit_code, "give --out DIR, --run RUN_ID or --experiment NAME" in result.output) == (
        2,
        True,
    )


def test_an_import_into_a_run_is_read_back_like_a_recorded_one(
    tmp_path: Path, data_folder: Path, mlflow_sqlite: str
) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(mlflow_sqlite)
    run_id = client.create_run("0").info.run_id
    trace = data_folder / "lightning_fit.trace.json.gz"
    ops = data_folder / "lightning_fit.ops.json"
    _done("import", trace, "--ops", ops, "--run", f"runs:/{run_id}", "--tracking-uri", mlflow_sqlite)
    _done("import", trace, "--ops", ops, "--out", tmp_path / "out")
    (annotation,) = load_run(run_id, mlflow_sqlite).annotations
    local = load_annotation(tmp_path / "out")
    assert annotation.manifest == local.manifest
    assert annotation.launch_table.equals(local.launch_table)
    assert client.get_run(run_id).info.status == "RUNNING"


def test_an_import_into_an_experiment_makes_one_ended_run(tmp_path: Path, mlflow_sqlite: str) -> None:
    from mlflow import MlflowClient

    traces = [_unmarked(tmp_path / f"{step}.json", step=step) for step in (2, 7)]
    where = ("--experiment", "old traces", "--run-name", "before", "--tracking-uri", mlflow_sqlite)
    output = _done("import", *traces, *where)
    client = MlflowClient(mlflow_sqlite)
    experiment = client.get_experiment_by_name("old traces")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "before")
    assert f"next: tlk show runs:/{run.info.run_id}" in output
    windows = load_run(run.info.run_id, mlflow_sqlite).windows
    assert [window.first_step for window in windows] == [2, 7]
    history = client.get_metric_history(run.info.run_id, "kernel_telemetry/launches")
    assert [metric.step for metric in history] == [2, 7]


@pytest.fixture(scope="module", params=["torchtitan", "tensorboard_trace_handler"])
def profiler_traces(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of traces that torch.profiler itself wrote on the CPU: two windows of two steps."""
    import torch
    from torch.profiler import tensorboard_trace_handler

    folder = tmp_path_factory.mktemp("profiler_traces")
    layer = torch.nn.Linear(8, 8)

    def export(profiler: torch.profiler.profile) -> None:
        place = folder / f"iteration_{profiler.step_num}"
        place.mkdir()
        profiler.export_chrome_trace(str(place / "rank0_trace.json"))

    handler = tensorboard_trace_handler(str(folder), use_gzip=True)
    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=2),
        on_trace_ready=export if request.param == "torchtitan" else handler,
        record_shapes=True,
        profile_memory=True,
        with_stack=True,
        with_modules=True,
        # Without it the second window begins with a warning, which as an error ends the process in torch 2.13.
        acc_events=True,
    )
    with profiler:
        for _ in range(8):
            layer(torch.ones(4, 8)).sum().backward()
            profiler.step()
    return folder


def test_torch_profilers_own_traces_are_imported(profiler_traces: Path, tmp_path: Path) -> None:
    _done("import", profiler_traces, "--out", tmp_path / "out")
    annotations = open_target(str(tmp_path / "out"))
    assert [a.complete_steps for a in annotations] == [(2, 3), (6, 7)]
    operators = {call.operator for a in annotations for call in a.iter_aten_calls() if call.step is not None}
    assert {"aten::add_", "aten::as_strided"} <= operators


PROFILED_FIT = """
import sys
import torch
from PACKAGE import LightningModule, Trainer
from PACKAGE.profilers import PyTorchProfiler

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
    def training_step(self, batch, index):
        return self.layer(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

profiler = PyTorchProfiler(dirpath=sys.argv[1], filename="fit", export_to_chrome=True)
trainer = Trainer(max_steps=8, accelerator="cpu", profiler=profiler, logger=False, enable_checkpointing=False)
trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(32, 8), batch_size=4))
"""


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_traces_of_lightnings_profiler_are_imported(package: str, tmp_path: Path) -> None:
    pytest.importorskip(package.partition(".")[0])
    program = [sys.executable, "-c", PROFILED_FIT.replace("PACKAGE", package), str(tmp_path / "traces")]
    subprocess.run(program, check=True, capture_output=True, timeout=150, cwd=tmp_path)
    (trace,) = (tmp_path / "traces").glob("*.json")
    _done("import", trace, "--out", tmp_path / "out")
    annotation = load_annotation(tmp_path / "out")
    operators = {call.operator for call in annotation.iter_aten_calls() if call.step is not None}
    assert annotation.complete_steps == (2, 3, 4)
    assert {"aten::add_", "aten::as_strided"} <= operators
