from __future__ import annotations

import json
from pathlib import Path

import pytest
from captured_window import annotate_captured
from click.testing import CliRunner
from paths import CAPTURED

from tlk_tracking.cli import tlk


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return saved annotations of windows that a GPU recorded."""
    found = {}
    for name in ("modules", "compiled"):
        found[name] = tmp_path_factory.mktemp(name) / "annotation"
        annotate_captured(CAPTURED, name).save(found[name])
    return found


def show(*arguments: str) -> str:
    done = CliRunner().invoke(tlk, ["show", *arguments])
    assert done.exit_code == 0, done.output
    return done.output


def rows(folder: Path, by: str) -> list[dict[str, object]]:
    return list(json.loads(show(str(folder), "--by", by, "--json"))["rows"])


def test_modules_come_with_the_modules_inside_them(folders: dict[str, Path]) -> None:
    found = {row["key"]["module"]: row for row in rows(folders["modules"], "module")}  # type: ignore[index]  # an object
    assert list(found)[:2] == ["", "block"]
    assert found["block"]["launches"] < found["block"]["launches_with_children"]  # type: ignore[operator]  # numbers
    assert found["head"]["launches"] == found["head"]["launches_with_children"]


def test_the_model_itself_has_a_name_on_the_terminal(folders: dict[str, Path]) -> None:
    text = show(str(folders["modules"]), "--by", "module")
    assert "(the model itself)" in text
    assert text.count("+ children") == 3
    assert "≥" not in text


def test_operators_are_told_apart_by_their_inputs(folders: dict[str, Path]) -> None:
    keys = [row["key"] for row in rows(folders["modules"], "operator")]
    products = [key for key in keys if key["operator"] == "aten.addmm"]  # type: ignore[index]  # an object
    assert len(products) == 3
    assert "f32[32,64]" in show(str(folders["modules"]), "--by", "operator", "--top", "100")


@pytest.mark.parametrize("by", ["module", "operator"])
def test_a_gap_of_attribution_makes_the_rows_lower_bounds(by: str, folders: dict[str, Path]) -> None:
    said = json.loads(show(str(folders["compiled"]), "--by", by, "--json"))
    assert said["bounds"]["launches"] == "lower"
    assert said["lower_bound_reasons"] == ["launched_outside_dispatcher"]
    assert "≥ is a lower bound" in show(str(folders["compiled"]), "--by", by)


def test_phases_are_exact_where_each_launch_has_one(folders: dict[str, Path]) -> None:
    said = json.loads(show(str(folders["compiled"]), "--by", "phase", "--json"))
    assert set(said["bounds"].values()) == {"exact"}
    assert sum(row["launches"] for row in said["rows"]) == 66


def test_kernels_are_exact_whoever_launched_them(folders: dict[str, Path]) -> None:
    said = json.loads(show(str(folders["compiled"]), "--by", "kernel", "--json"))
    assert set(said["bounds"].values()) == {"exact"}
    assert sum(row["launches"] for row in said["rows"]) == 66


def test_the_rows_of_phases_sum_to_the_launches(folders: dict[str, Path]) -> None:
    found = rows(folders["modules"], "phase")
    total = json.loads(show(str(folders["modules"]), "--json"))["counts"]["launches"]
    assert sum(row["launches"] for row in found) == total  # type: ignore[misc]  # numbers


def test_the_first_rows_only_and_how_many_more(folders: dict[str, Path]) -> None:
    assert "more rows (--top" in show(str(folders["modules"]), "--by", "operator", "--top", "2")
