from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from annotations import real, repeated, with_durations, with_environment, with_gap
from click.testing import CliRunner, Result
from synthetic_trace import SyntheticTrace

from tlk_tracking.annotation.kernel_annotation import KernelAnnotation
from tlk_tracking.attribution.annotate import import_trace
from tlk_tracking.cli import tlk
from tlk_tracking.core.errors import ComparisonError, ConfigurationError, TlkError
from tlk_tracking.core.gaps import GapReason

ROW_FIELDS = {
    "table",
    "key",
    "measure",
    "baseline",
    "baseline_bound",
    "candidate",
    "candidate_bound",
    "verdict",
    "reason",
}


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    for name in ("eager_transformer", "compiled_transformer", "ddp_rank1"):
        real(name).save(tmp_path / name)
    return {path.name: str(path) for path in tmp_path.iterdir()}


def _run(*arguments: str) -> Result:
    result = CliRunner().invoke(tlk, ["compare", *arguments])
    if isinstance(result.exception, TlkError):
        raise result.exception
    return result


def _saved(annotation: KernelAnnotation, folder: Path) -> str:
    annotation.save(folder)
    return str(folder)


def test_json_is_strict_and_has_the_fields_of_the_design(folders: dict[str, str]) -> None:
    result = _run(folders["eager_transformer"], folders["compiled_transformer"], "--json")
    said = json.loads(result.stdout, parse_constant=lambda name: pytest.fail(f"{name} is no strict JSON"))
    assert result.exit_code == 0
    assert set(said) == {"context", "rows"}
    assert {frozenset(row) for row in said["rows"]} == {frozenset(ROW_FIELDS)}
    assert said["context"] == [
        {"field": "gaps", "baseline": [], "candidate": ["launched_outside_dispatcher"]}
    ]
    assert said["rows"][1] == {
        "table": "total",
        "key": None,
        "measure": "launches",
        "baseline": 138.0,
        "baseline_bound": "exact",
        "candidate": 117.0,
        "candidate_bound": "exact",
        "verdict": "DECREASED",
        "reason": None,
    }
    assert {row["table"] for row in said["rows"]} == {"total", "phase", "call", "kernel"}


def test_with_several_candidates_each_row_names_its_own(folders: dict[str, str]) -> None:
    one, other = folders["eager_transformer"], folders["compiled_transformer"]
    said = json.loads(_run(one, other, one, "--json").stdout)
    assert {row["target"] for row in said["rows"]} == {other, f"{one} (3)"}
    assert {each["target"] for each in said["context"]} == {other}


def test_the_table_fits_100_columns_and_counts_what_it_hides(folders: dict[str, str]) -> None:
    text = _run(folders["eager_transformer"], folders["compiled_transformer"], "--top", "3").stdout
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "launches                                            138              117" in text
    assert "4 rows not shown: 4 UNDECIDED" in text
    assert "≥ 63" in text
    assert "50 rows: the candidate's value is only a lower bound (launched_outside_dispatcher)" in text


def test_csv_has_every_row_and_no_formula(folders: dict[str, str], tmp_path: Path) -> None:
    text = _run(folders["eager_transformer"], folders["compiled_transformer"], "--csv").stdout
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == len(
        json.loads(_run(folders["eager_transformer"], folders["compiled_transformer"], "--json").stdout)[
            "rows"
        ]
    )
    assert {row["measure"] for row in rows} >= {"launches", "device_time_ms", "aten_calls"}


def test_an_annotation_of_another_rank_than_zero_is_compared(folders: dict[str, str]) -> None:
    said = json.loads(_run(folders["eager_transformer"], folders["ddp_rank1"], "--json").stdout)
    assert {"field": "rank", "baseline": 0, "candidate": 1} in said["context"]


def test_windows_in_one_folder_are_pooled(tmp_path: Path) -> None:
    for first_step in (100, 200, 300):
        window = repeated(
            real("eager_transformer"), steps=3, noise=0.01, seed=first_step, first_step=first_step
        )
        window.save(tmp_path / "run" / window.folder_name)
    other = _saved(repeated(real("eager_transformer"), steps=9, noise=0.01), tmp_path / "other")
    said = json.loads(_run(str(tmp_path / "run"), other, "--json").stdout)
    verdicts = {row["measure"]: row["verdict"] for row in said["rows"] if row["table"] == "total"}
    assert verdicts["device_time_ms"] == "UNCHANGED"
    said = json.loads(_run(str(tmp_path / "run"), str(tmp_path / "run"), "--window", "200", "--json").stdout)
    reasons = {row["measure"]: row["reason"] for row in said["rows"] if row["table"] == "total"}
    assert reasons["device_time_ms"] == (
        "the baseline has 3 of 8 steps; 2 more windows of 3 steps needed; "
        "the candidate has 3 of 8 steps; 2 more windows of 3 steps needed"
    )


def test_a_window_that_a_target_lacks_is_an_error_that_says_which_it_has(folders: dict[str, str]) -> None:
    with pytest.raises(ComparisonError, match=r"has no such window and rank; it has .* \[\(2, 0\)\]"):
        _run(folders["eager_transformer"], folders["eager_transformer"], "--window", "7")


@pytest.mark.parametrize(
    ("before", "after", "exit_code"),
    [
        ("eager_transformer", "eager_transformer", 0),
        ("eager_transformer", "compiled_transformer", 0),
        ("compiled_transformer", "eager_transformer", 1),
    ],
)
def test_fail_on_regression_is_exit_code_1_when_launches_surely_grew(
    folders: dict[str, str], before: str, after: str, exit_code: int
) -> None:
    result = _run(folders[before], folders[after], "--fail-on", "regression")
    assert result.exit_code == exit_code
    assert ("regression: " in result.stderr) == bool(exit_code)


def test_a_regression_within_the_threshold_passes(folders: dict[str, str]) -> None:
    targets = (folders["compiled_transformer"], folders["eager_transformer"], "--fail-on", "regression")
    assert _run(*targets, "--max-launch-increase", "17").exit_code == 1
    assert _run(*targets, "--max-launch-increase", "18").exit_code == 0


def test_a_slower_device_is_a_regression_once_there_are_enough_steps(tmp_path: Path) -> None:
    window = repeated(real("eager_transformer"), steps=9, noise=0.01)
    before = _saved(window, tmp_path / "before")
    after = _saved(with_durations(window, lambda _: 1.5), tmp_path / "after")
    assert _run(before, after, "--fail-on", "regression").exit_code == 1
    assert _run(before, after, "--fail-on", "regression", "--max-time-increase", "60").exit_code == 0
    assert _run(after, before, "--fail-on", "regression").exit_code == 0


def test_fail_on_undecided_is_exit_code_1_when_a_checked_row_is(folders: dict[str, str]) -> None:
    targets = (folders["eager_transformer"], folders["eager_transformer"])
    assert _run(*targets, "--fail-on", "undecided").exit_code == 1
    assert _run(*targets, "--fail-on", "regression").stderr == ("4 of the checked rows are UNDECIDED\n")


@pytest.mark.parametrize("condition", ["regression", "undecided"])
def test_a_check_of_nothing_does_not_pass(tmp_path: Path, condition: str) -> None:
    trace = SyntheticTrace()
    trace.step(5, 0, 1000)
    trace.op(0, 100, 200)
    blind = _saved(import_trace(trace.write(tmp_path)), tmp_path / "blind")
    result = _run(blind, blind, "--fail-on", condition)
    assert (result.exit_code, result.stderr) == (
        1,
        f"nothing could be checked: no launches or times are known on both sides ({blind} (2))\n",
    )
    assert _run(blind, blind).exit_code == 0


def test_a_loss_in_the_candidate_hides_no_regression_and_one_in_the_baseline_makes_none(
    tmp_path: Path,
) -> None:
    plain = _saved(real("compiled_transformer"), tmp_path / "plain")
    more = _saved(with_gap(real("eager_transformer"), GapReason.LAUNCH_WITHOUT_RECORD), tmp_path / "more")
    lossy = _saved(
        with_gap(real("compiled_transformer"), GapReason.LAUNCH_WITHOUT_RECORD), tmp_path / "lossy"
    )
    exact = _saved(real("eager_transformer"), tmp_path / "exact")
    assert _run(plain, more, "--fail-on", "regression").exit_code == 1
    assert _run(lossy, exact, "--fail-on", "regression").exit_code == 0


def test_across_devices_judges_times_of_two_gpu_models(tmp_path: Path) -> None:
    window = repeated(real("eager_transformer"), steps=9, noise=0.01)
    here = _saved(window, tmp_path / "here")
    there = _saved(
        with_environment(with_durations(window, lambda _: 2.0), gpu_model="NVIDIA A100"), tmp_path / "there"
    )
    assert _run(here, there, "--fail-on", "regression").exit_code == 0
    assert _run(here, there, "--fail-on", "regression", "--across-devices").exit_code == 1


@pytest.mark.parametrize("arguments", [[], ["only_one"]])
def test_a_comparison_needs_two_targets(arguments: list[str]) -> None:
    assert _run(*arguments).exit_code == 2


def test_a_page_that_cannot_be_written_is_an_error_that_names_the_file(
    folders: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot write .*No such file"):
        _run(folders["ddp_rank1"], folders["ddp_rank1"], "--html", str(tmp_path / "nowhere" / "page.html"))
