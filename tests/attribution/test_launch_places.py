"""Where a launch was made: of its ATen call, or of the ranges around a launch that no call made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from synthetic_trace import BACKWARD, FOREIGN, MAIN, SESSION, WINDOW, SyntheticTrace, table_of

from tlk_tracking.annotation.schemas import ATEN_CALLS
from tlk_tracking.attribution.annotate import annotate, import_trace

Place = tuple[str | None, str | None, int | None]

NOWHERE: Place = (None, None, None)


class PlacedTrace(SyntheticTrace):
    """A trace of one step (0 to 1,000 µs) whose calls have places."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, Any]] = []
        self.step(5, 0, 1000)

    def placed_op(self, start: float, end: float, place: Place, *, thread: int = MAIN) -> None:
        """Add an ATen call and its range."""
        phase, module, module_call = place
        self.op(len(self.rows), start, end, thread=thread)
        row = {"sequence": len(self.rows), "operator": "aten.mm"}
        self.rows.append(row | {"phase": phase, "module": module, "module_call": module_call})

    def module(self, path: str, number: int, start: float, end: float, *, thread: int = MAIN) -> None:
        """Add our range around a module's call."""
        self.host(f"tlk::{SESSION}::module::{number}::{path}", start, end, thread=thread)

    def phase(self, name: str, start: float) -> None:
        """Add our moment at which a phase begins."""
        self.host(f"tlk::{SESSION}::phase::{name}", start, start)

    def node(self, start: float, end: float) -> None:
        """Add the engine's range around an autograd node."""
        self.host("autograd::engine::evaluate_function: MmBackward0", start, end, thread=BACKWARD)

    def places(self, folder: Path) -> list[Place]:
        """Return the places of the launches, in the order in which they ran."""
        calls = table_of(ATEN_CALLS, *self.rows)
        launches = annotate(self.write(folder), WINDOW, calls=calls).launch_table
        columns = [launches[name].to_pylist() for name in ("phase", "module", "module_call")]
        return list(zip(*columns, strict=True))


def test_a_launch_is_where_its_call_is(tmp_path: Path) -> None:
    trace = PlacedTrace()
    trace.phase("forward", 10)
    trace.module("other", 0, 90, 210)  # the row of the call knows better
    trace.placed_op(100, 200, ("optimizer", "head", 3))
    trace.launch(1, 110)
    assert trace.places(tmp_path) == [("optimizer", "head", 3)]


def test_a_launch_that_several_calls_share_is_where_all_of_them_are(tmp_path: Path) -> None:
    trace = PlacedTrace()
    trace.placed_op(100, 200, ("forward", "a", 0))
    trace.call(1, 110)
    trace.placed_op(300, 400, ("forward", "b", 0))
    trace.call(1, 310)
    trace.record(1, 320)
    assert trace.places(tmp_path) == [("forward", None, None)]


def test_a_launch_without_a_call_is_in_the_innermost_module_of_its_thread(tmp_path: Path) -> None:
    trace = PlacedTrace()
    trace.phase("forward", 10)
    trace.module("", 0, 100, 500)
    trace.module("block.0", 2, 150, 300)
    trace.module("elsewhere", 0, 100, 900, thread=FOREIGN)
    trace.launch(1, 200)
    trace.launch(2, 400)
    trace.launch(3, 600)
    assert trace.places(tmp_path) == [("forward", "block.0", 2), ("forward", "", 0), ("forward", None, None)]


def test_a_phase_lasts_until_the_next_one_on_the_same_thread(tmp_path: Path) -> None:
    trace = PlacedTrace()
    for number, (name, start) in enumerate(
        (("before_batch", 10), ("forward", 200), ("optimizer", 400)), start=1
    ):
        trace.phase(name, start)
        trace.launch(number, start + 100)
    trace.launch(4, 550, thread=FOREIGN)
    trace.launch(5, 5)
    assert trace.places(tmp_path) == [
        NOWHERE,
        ("before_batch", None, None),
        ("forward", None, None),
        ("optimizer", None, None),
        NOWHERE,
    ]


def test_a_launch_in_an_autograd_node_is_where_all_calls_of_the_node_are(tmp_path: Path) -> None:
    trace = PlacedTrace()
    trace.node(100, 300)
    trace.placed_op(110, 150, ("backward", "head", 1), thread=BACKWARD)
    trace.launch(1, 200, thread=BACKWARD)
    trace.node(400, 500)  # its calls disagree
    trace.placed_op(410, 420, ("backward", "a", 0), thread=BACKWARD)
    trace.placed_op(430, 440, ("backward", "b", 0), thread=BACKWARD)
    trace.launch(2, 450, thread=BACKWARD)
    trace.node(600, 700)  # it has none
    trace.launch(3, 650, thread=BACKWARD)
    assert trace.places(tmp_path) == [
        ("backward", "head", 1),
        ("backward", None, None),
        ("backward", None, None),
    ]


def test_a_module_that_runs_again_in_backward_is_closer_than_the_node(tmp_path: Path) -> None:
    trace = PlacedTrace()
    trace.node(100, 500)
    trace.placed_op(110, 150, ("backward", "head", 1), thread=BACKWARD)
    trace.module("block", 4, 200, 300, thread=BACKWARD)
    trace.launch(1, 250, thread=BACKWARD)
    assert trace.places(tmp_path) == [("backward", "block", 4)]


def test_a_module_around_a_whole_backward_is_not_where_its_nodes_launch(tmp_path: Path) -> None:
    trace = PlacedTrace()
    trace.module("penalty", 0, 50, 500, thread=BACKWARD)
    trace.node(100, 300)
    trace.launch(1, 200, thread=BACKWARD)
    assert trace.places(tmp_path) == [("backward", None, None)]


def test_a_launch_outside_every_step_is_nowhere(tmp_path: Path) -> None:
    trace = PlacedTrace()
    trace.phase("forward", 10)
    trace.module("late", 0, 1100, 1300)
    trace.launch(1, 1200)
    trace.record(2, 1300)  # no call at all
    assert trace.places(tmp_path) == [NOWHERE, NOWHERE]


def test_records_of_one_replay_have_one_graph_launch(tmp_path: Path) -> None:
    trace = SyntheticTrace()
    trace.step(5, 0, 1000)
    trace.call(7, 300, name="cudaGraphLaunch")
    trace.call(3, 100, name="cudaGraphLaunch_ptsz")
    trace.launch(5, 200)
    trace.record(7, 320)
    for start in (110, 120):
        trace.record(3, start)
    launches = import_trace(trace.write(tmp_path)).launch_table
    assert launches["graph_launch"].to_pylist() == [0, 0, None, 1]
    assert launches["runtime_correlation"].to_pylist() == [3, 3, 5, 7]


def test_a_trace_without_our_markers_has_no_places(tmp_path: Path) -> None:
    trace = SyntheticTrace()
    trace.host("aten::mm", 100, 200)
    trace.launch(1, 110)
    launches = import_trace(trace.write(tmp_path)).launch_table
    assert [launches[name].null_count for name in ("phase", "module", "module_call")] == [1, 1, 1]


def test_a_range_that_only_looks_like_ours_says_nothing(tmp_path: Path) -> None:
    trace = PlacedTrace()
    trace.host(f"tlk::{SESSION}::phase::lunch", 10, 10)
    trace.host(f"tlk::{SESSION}::module::first::head", 90, 210)
    trace.host("tlk::99999999::module::0::head", 90, 210)
    trace.launch(1, 110)
    assert trace.places(tmp_path) == [NOWHERE]


def test_a_module_may_have_any_name(tmp_path: Path) -> None:
    trace = PlacedTrace()
    trace.module("a::b\n<i>", 0, 90, 210)
    trace.launch(1, 110)
    assert trace.places(tmp_path) == [(None, "a::b\n<i>", 0)]
