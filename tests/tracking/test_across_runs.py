from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from annotations import real, repeated, with_gap
from click.testing import CliRunner
from paths import EXAMPLES

from tlk_tracking.analysis.comparison_rows import Row
from tlk_tracking.analysis.step_tables import TableName
from tlk_tracking.analysis.verdicts import Verdict
from tlk_tracking.annotation.kernel_annotation import KernelAnnotation
from tlk_tracking.cli import tlk
from tlk_tracking.core.errors import ComparisonError, TrackingError
from tlk_tracking.core.gaps import GapReason
from tlk_tracking.tracking.across_runs import HISTORY_COLUMNS, compare_runs, kernel_history
from tlk_tracking.tracking.mlflow_tracking import log_annotation


def _runs(uri: str, experiment: str, *contents: list[KernelAnnotation]) -> list[str]:
    """Make one run for each list of annotations; return their ids in order."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name(experiment)
    experiment_id = client.create_experiment(experiment) if found is None else found.experiment_id
    ids = []
    for number, windows in enumerate(contents):
        # Start times of their own, so that the order of runs is known.
        run = client.create_run(
            experiment_id, start_time=1_700_000_000_000 + number, run_name=f"run {number}"
        )
        ids.append(run.info.run_id)
        for window in windows:
            log_annotation(window, run.info.run_id, uri)
    return ids


def _total(rows: tuple[Row, ...], measure: str) -> Row:
    (row,) = [row for row in rows if row.table is TableName.TOTAL and row.measure == measure]
    return row


def test_runs_of_two_experiments_are_compared(mlflow_sqlite: str) -> None:
    (eager,) = _runs(mlflow_sqlite, "one", [real("eager_transformer")])
    (compiled,) = _runs(mlflow_sqlite, "other", [real("compiled_transformer")])
    comparison = compare_runs(eager, compiled, tracking_uri=mlflow_sqlite)
    assert [comparison.baseline.label, comparison.candidates[0].label] == [eager, compiled]
    row = _total(comparison.rows, "launches")
    assert (row.baseline, row.candidate, row.verdict) == (138, 117, Verdict.DECREASED)


def test_windows_of_a_run_are_pooled_and_its_ranks_are_not_unless_asked_for(mlflow_sqlite: str) -> None:
    windows = [
        repeated(real("eager_transformer"), steps=3, noise=0.01, seed=step, first_step=step)
        for step in (10, 20, 30)
    ]
    run, other = _runs(mlflow_sqlite, "ranks", windows, [real("ddp_rank0"), real("ddp_rank1")])
    pooled = compare_runs(run, other, tracking_uri=mlflow_sqlite)
    assert (pooled.baseline.steps, pooled.candidates[0].steps) == (9, 2)
    assert [rank for _, _, rank in pooled.candidates[0].windows] == [0]
    asked = compare_runs(other, other, ranks=(0, 1), tracking_uri=mlflow_sqlite)
    assert [rank for _, _, rank in asked.baseline.windows] == [0, 1]
    chosen = compare_runs(run, run, windows=(20,), tracking_uri=mlflow_sqlite)
    assert chosen.baseline.steps == 3


def test_a_run_without_telemetry_is_an_error_that_names_it(mlflow_sqlite: str) -> None:
    run, empty = _runs(mlflow_sqlite, "some", [real("ddp_rank0")], [])
    with pytest.raises(TrackingError, match=empty[:4]):
        compare_runs(run, empty, tracking_uri=mlflow_sqlite)


def test_a_runs_target_and_a_folder_are_compared_on_the_command_line(
    mlflow_sqlite: str, tmp_path: Path
) -> None:
    (run,) = _runs(mlflow_sqlite, "mixed", [real("eager_transformer")])
    real("compiled_transformer").save(tmp_path / "folder")
    result = CliRunner().invoke(
        tlk, ["compare", f"runs:/{run}", str(tmp_path / "folder"), "--json", "--tracking-uri", mlflow_sqlite]
    )
    assert result.exit_code == 0
    rows = json.loads(result.stdout)["rows"]
    assert next(row["verdict"] for row in rows if row["measure"] == "launches") == "DECREASED"


def test_the_example_compares_two_folders_of_annotations(
    mlflow_sqlite: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("eager_transformer", "compiled_transformer"):
        window = real(name)
        window.save(tmp_path / name / window.folder_name)
    example = runpy.run_path(str(EXAMPLES / "compare_runs.py"))
    example["main"](tmp_path / "eager_transformer", tmp_path / "compiled_transformer")
    said = capsys.readouterr().out
    assert "gaps: [] -> ['launched_outside_dispatcher']" in said
    assert "  DECREASED launches               138 -> 117" in said
    assert (tmp_path / "comparison.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_the_history_of_a_metric_is_a_row_a_run_with_its_bound(mlflow_sqlite: str) -> None:
    lossy = with_gap(real("compiled_transformer"), GapReason.LAUNCH_WITHOUT_RECORD)
    first, second, _ = _runs(mlflow_sqlite, "steps", [real("eager_transformer")], [lossy], [])
    frame = kernel_history("steps", measure="launches", tracking_uri=mlflow_sqlite)
    assert list(frame.columns) == list(HISTORY_COLUMNS)
    assert frame.drop(columns="start_time").to_dict("records") == [
        {
            "run_id": first,
            "run_name": "run 0",
            "status": "RUNNING",
            "availability": "recorded",
            "measure": "launches",
            "value": 138.0,
            "lower_bound": False,
            "reasons": "",
        },
        {
            "run_id": second,
            "run_name": "run 1",
            "status": "RUNNING",
            "availability": "recorded",
            "measure": "launches",
            "value": 117.0,
            "lower_bound": True,
            "reasons": "launch_without_record,launched_outside_dispatcher",
        },
    ]


def test_the_history_of_a_row_key_is_the_sum_of_the_rows_that_have_it(mlflow_sqlite: str) -> None:
    _runs(mlflow_sqlite, "rows", [real("eager_transformer")], [real("compiled_transformer")])

    def history(table: str, measure: str, **key: object) -> list[tuple[float, bool]]:
        frame = kernel_history("rows", table=table, key=key, measure=measure, tracking_uri=mlflow_sqlite)
        return list(zip(frame["value"], frame["lower_bound"], strict=True))

    eager, compiled = real("eager_transformer"), real("compiled_transformer")
    calls = [float((one.aten_calls["operator"] == "aten.addmm").sum()) / 2 for one in (eager, compiled)]
    assert history("call", "aten_calls", operator="aten.addmm") == [(calls[0], False), (calls[1], False)]
    assert [bound for _, bound in history("call", "launches", operator="aten.addmm")] == [False, True]
    name = str(eager.launches["launch_name"].iloc[0])
    of_name = float((eager.launches["launch_name"] == name).sum()) / 2
    assert history("kernel", "launches", kernel=name)[0] == (of_name, False)
    assert history("phase", "launches", phase="backward") == [(92.0, False), (75.0, True)]


def test_a_field_that_a_run_does_not_know_has_no_value(mlflow_sqlite: str) -> None:
    _runs(mlflow_sqlite, "modules", [real("eager_transformer")])
    frame = kernel_history("modules", table="module", key={"module": "encoder"}, tracking_uri=mlflow_sqlite)
    assert frame["value"].isna().tolist() == [True]
    assert frame["lower_bound"].tolist() == [True]


def test_an_experiment_whose_runs_have_no_telemetry_has_an_empty_history(mlflow_sqlite: str) -> None:
    _runs(mlflow_sqlite, "nothing", [])
    frame = kernel_history("nothing", tracking_uri=mlflow_sqlite)
    assert (len(frame), list(frame.columns)) == (0, list(HISTORY_COLUMNS))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"measure": "speed"}, "there is no metric 'speed'"),
        ({"table": "total", "key": {"a": 1}}, "there is no table 'total' with keys"),
        ({"table": "call", "key": {"phase": "forward"}}, "needs an operator"),
    ],
)
def test_a_history_of_something_unknown_is_an_error(
    mlflow_sqlite: str, asked: dict[str, object], said: str
) -> None:
    _runs(mlflow_sqlite, "any", [real("ddp_rank0")])
    with pytest.raises(ComparisonError, match=said):
        kernel_history("any", tracking_uri=mlflow_sqlite, **asked)  # type: ignore[arg-type]  # wrong on purpose


def test_history_on_the_command_line_shows_values_with_their_bound(mlflow_sqlite: str) -> None:
    _runs(mlflow_sqlite, "shown", [real("eager_transformer")], [real("compiled_transformer")])
    arguments = ["history", "shown", "--metric", "attributed_launches", "--tracking-uri", mlflow_sqlite]
    text = CliRunner().invoke(tlk, arguments).stdout
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "≥ 63" in text
    said = json.loads(CliRunner().invoke(tlk, [*arguments, "--json"]).stdout)
    assert [(row["value"], row["lower_bound"]) for row in said] == [(138.0, False), (63.0, True)]
    lines = CliRunner().invoke(tlk, [*arguments, "--csv"]).stdout.splitlines()
    assert lines[0] == ",".join(HISTORY_COLUMNS)
    assert len(lines) == 3


def test_two_hundred_runs_of_a_server_are_summarized_by_one_paged_search(mlflow_server: str) -> None:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, RunTag

    client = MlflowClient(tracking_uri=mlflow_server)
    experiment_id = client.create_experiment("many runs")
    for number in range(200):
        run = client.create_run(experiment_id, start_time=1_700_000_000_000 + number)
        client.log_batch(
            run.info.run_id,
            metrics=[Metric("kernel_telemetry/launches", float(number), 0, 0)],
            tags=[
                RunTag("tlk.schema_version", "1"),
                RunTag("tlk.lower_bound/kernel_telemetry/launches", "false"),
            ],
        )
    frame = kernel_history("many runs", tracking_uri=mlflow_server)
    assert frame["value"].tolist() == [float(number) for number in range(200)]
    assert not frame["lower_bound"].any()
