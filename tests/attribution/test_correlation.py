from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slow_correlation import Event, correlate_slowly
from synthetic_trace import (
    BACKWARD,
    FOREIGN,
    MAIN,
    SESSION,
    Layout,
    SyntheticTrace,
    one_step,
    ops_json,
)

from tlk_tracking.analysis.metrics import facts
from tlk_tracking.annotation.kernel_annotation import KernelAnnotation
from tlk_tracking.attribution import correlation
from tlk_tracking.attribution.annotate import import_trace
from tlk_tracking.core.errors import TraceError

SOAK = bool(os.environ.get("TLK_SOAK"))


def _annotate(trace: SyntheticTrace, folder: Path) -> KernelAnnotation:
    """Import the trace with its session named, so that it may hold ranges of another one."""
    ops = folder / "ops.json"
    ops.write_text(ops_json([]))
    return import_trace(trace.write(folder), ops=ops)


def _owners(annotation: KernelAnnotation) -> dict[str, list[int]]:
    """Return the ATen calls of each launch, by the launch's name."""
    owners: dict[str, list[int]] = {name: [] for name in annotation.launch_table["launch_name"].to_pylist()}
    names = annotation.launch_table["launch_name"].to_pylist()
    for row in annotation.relation_table.to_pylist():
        owners[names[row["launch"]]].append(row["sequence"])
    return owners


def _steps(annotation: KernelAnnotation) -> dict[str, int | None]:
    table = annotation.launch_table
    return dict(zip(table["launch_name"].to_pylist(), table["step"].to_pylist(), strict=True))


# Rule 2: the owner of a runtime call


def test_the_innermost_marker_owns_a_call(tmp_path: Path) -> None:
    trace = SyntheticTrace()
    trace.op(0, 100, 500)
    trace.op(1, 200, 400)
    trace.op(2, 250, 300)
    for number, start in enumerate((100, 200, 260, 300, 399, 400, 499)):
        trace.launch(number + 1, start, name=f"k{start}")
    trace.launch(50, 99, name="k99")
    trace.launch(51, 500, name="k500")
    assert _owners(import_trace(trace.write(tmp_path))) == {
        "k99": [], "k100": [0], "k200": [1], "k260": [2], "k300": [1], "k399": [1], "k400": [0], "k499": [0],
        "k500": [],
    }  # fmt: skip


def test_where_two_markers_start_together_the_one_that_ends_first_is_inner(tmp_path: Path) -> None:
    trace = SyntheticTrace()
    trace.op(0, 100, 500)
    trace.op(1, 100, 300)
    trace.launch(1, 100, name="both")
    trace.launch(2, 350, name="outer")
    assert _owners(import_trace(trace.write(tmp_path))) == {"both": [1], "outer": [0]}


def test_where_ranges_cross_the_one_that_started_last_is_inner(tmp_path: Path) -> None:
    """T40: ranges of others may cross; ours nest, and a trace in which they do not is still read by the rule."""
    trace = SyntheticTrace()
    trace.op(0, 100, 300)
    trace.op(1, 200, 400)
    trace.launch(1, 150, name="first")
    trace.launch(2, 250, name="both")
    trace.launch(3, 350, name="second")
    assert _owners(import_trace(trace.write(tmp_path))) == {"first": [0], "both": [1], "second": [1]}


def test_a_marker_never_owns_a_call_of_another_thread(tmp_path: Path) -> None:
    trace = SyntheticTrace()
    trace.op(0, 100, 500)
    trace.op(1, 100, 500, thread=BACKWARD)
    trace.launch(1, 200, thread=BACKWARD, name="backward")
    trace.launch(2, 200, thread=FOREIGN, name="foreign")
    assert _owners(import_trace(trace.write(tmp_path))) == {"backward": [1], "foreign": []}


def test_an_empty_marker_owns_nothing(tmp_path: Path) -> None:
    trace = SyntheticTrace()
    trace.op(0, 100, 100)
    trace.op(1, 300, 250)
    trace.launch(1, 100, name="a")
    trace.launch(2, 275, name="b")
    assert _owners(import_trace(trace.write(tmp_path))) == {"a": [], "b": []}


# Rules 3 and 4: records


def test_several_records_of_one_correlation_share_its_owner_and_each_is_a_launch(tmp_path: Path) -> None:
    trace = SyntheticTrace()
    trace.op(0, 100, 200)
    trace.call(7, 150, name="cudaGraphLaunch")
    for number in range(3):
        trace.record(7, 160 + number, name=f"k{number}")
    annotation = import_trace(trace.write(tmp_path))
    assert _owners(annotation) == {"k0": [0], "k1": [0], "k2": [0]}
    assert facts(annotation)["max_records_per_launch"] == 3


def test_several_owners_of_one_correlation_each_get_a_relation(tmp_path: Path) -> None:
    """T12: no last-wins map; the record is one launch, in the step of its earliest call."""
    trace = SyntheticTrace()
    trace.step(1, 0, 250)
    trace.step(2, 250, 500)
    trace.op(0, 100, 200)
    trace.op(1, 300, 400)
    trace.call(7, 350)
    trace.call(7, 150)
    trace.call(7, 160)  # a second call of the same owner adds no second relation
    trace.record(7, 360, name="k")
    annotation = import_trace(trace.write(tmp_path))
    assert (_owners(annotation), _steps(annotation)) == ({"k": [0, 1]}, {"k": 1})
    counts = facts(annotation)["counts"]
    assert (counts["launches"], counts["attributed"], counts["relations"]) == (1, 1, 2)


def test_a_call_in_no_marker_beside_one_in_a_marker_takes_nothing_away(tmp_path: Path) -> None:
    trace = SyntheticTrace()
    trace.op(0, 100, 200)
    trace.call(7, 50)
    trace.call(7, 150)
    trace.record(7, 160, name="k")
    annotation = import_trace(trace.write(tmp_path))
    assert (_owners(annotation), facts(annotation)["gaps"]) == ({"k": [0]}, {})


def test_a_launch_belongs_to_the_call_not_to_what_runs_when_it_runs(tmp_path: Path) -> None:
    trace = one_step()
    trace.call(50, 150)
    trace.record(50, 350, name="late")  # while another thread is in marker 1, and after its own marker ended
    assert _owners(import_trace(trace.write(tmp_path)))["late"] == [0]


# Rule 5: steps


def test_a_launch_belongs_to_the_step_of_its_call_on_whatever_thread(tmp_path: Path) -> None:
    trace = SyntheticTrace()
    trace.step(1, 0, 100)
    trace.step(2, 100, 200)
    trace.launch(1, 50, thread=BACKWARD, name="in_1")
    trace.launch(2, 99, name="still_in_1")  # runs in step 2
    trace.launch(3, 100, name="in_2")
    trace.launch(4, 200, name="after")
    trace.record(99, 150, name="no_call")
    annotation = import_trace(trace.write(tmp_path))
    assert _steps(annotation) == {"in_1": 1, "still_in_1": 1, "in_2": 2, "after": None, "no_call": None}
    assert facts(annotation)["by_step"] == {"1": 2, "2": 1}
    assert facts(annotation)["counts"]["outside_steps"] == 2


def test_a_bracket_that_was_closed_and_reopened_is_one_step(tmp_path: Path) -> None:
    trace = SyntheticTrace()
    trace.step(1, 0, 100)
    trace.launch(1, 50, name="before")
    trace.launch(2, 150, name="validation")
    trace.step(1, 200, 300)
    trace.launch(3, 250, name="after")
    annotation = import_trace(trace.write(tmp_path))
    assert _steps(annotation) == {"before": 1, "validation": None, "after": 1}
    assert facts(annotation)["by_step"] == {"1": 2}


def test_a_call_row_is_in_the_step_in_which_it_began(tmp_path: Path) -> None:
    trace = SyntheticTrace()
    trace.step(1, 0, 100)
    trace.op(0, 50, 150)
    trace.op(1, 100, 110)
    annotation = import_trace(trace.write(tmp_path))
    assert annotation.call_table["step"].to_pylist() == [1, None]
    assert facts(annotation)["counts"]["aten_calls"] == 1


def test_starts_are_counted_from_the_first_bracket(tmp_path: Path) -> None:
    trace = one_step()
    trace.events.reverse()  # the order of the file means nothing
    assert import_trace(trace.write(tmp_path)).launch_table["start_ns"].to_pylist() == [130_000, 330_000]


def test_the_whole_trace_as_a_step_holds_also_what_ends_before_it_starts(tmp_path: Path) -> None:
    trace = SyntheticTrace()
    trace.op(0, 100, 200)
    trace.op(1, 500, 300)
    trace.launch(1, 150)
    trace.launch(2, 600, name="last")
    annotation = import_trace(trace.write(tmp_path))
    assert annotation.call_table["step"].to_pylist() == [0, 0]
    assert _steps(annotation)["last"] == 0


# Bounds on what a trace can ask for


def test_a_hundred_thousand_nested_ranges_take_no_quadratic_time(tmp_path: Path) -> None:
    """Each call comes after ever more ranges that are over; the chain of those is leapt along, not walked."""
    depth = 20_000
    trace = SyntheticTrace()
    for number in range(depth):
        trace.op(number, number, 3 * depth - number)
    for number in range(depth):
        trace.call(number + 1, 2 * depth + number)
    trace.record(1, 4 * depth, name="first")
    trace.record(depth, 4 * depth, name="last")
    annotation = import_trace(trace.write(tmp_path))
    assert _owners(annotation) == {"first": [depth - 1], "last": [0]}


def test_every_event_may_have_a_thread_of_its_own(tmp_path: Path) -> None:
    trace = SyntheticTrace()
    for number in range(20_000):
        trace.op(number, 100, 200, thread=number)
        trace.call(number + 1, 150, thread=number)
    trace.record(777, 160, name="k")
    trace.call(30_000, 50, name="cudaStreamBeginCapture")
    assert _owners(import_trace(trace.write(tmp_path))) == {"k": [776]}


def test_calls_and_records_of_one_correlation_cannot_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(correlation, "MAX_RELATIONS", 9_999)
    trace = SyntheticTrace()
    for number in range(100):
        trace.op(number, 10 * number, 10 * number + 5)
        trace.call(7, 10 * number + 1)
        trace.record(7, 2000 + number)
    with pytest.raises(TraceError, match="10000 times"):
        import_trace(trace.write(tmp_path))


# Against a slow reading of the rules

_THREADS = st.sampled_from([MAIN, BACKWARD, FOREIGN])
_STARTS = st.integers(-3, 40)
_LENGTHS = st.integers(-2, 25)
_CORRELATIONS = st.sampled_from([None, 0, 1, 2, 3, 4, 2**40])
_EXTERNAL_IDS = st.sampled_from([0, 0, 1, 2, 3, 4, 5])
_HOST_NAMES = st.sampled_from(
    ["aten::mm", "lib::op.out", "triton_kernel", "autograd::engine: X", "tlk::ffffffff::op::0"]
)
_API_NAMES = st.sampled_from(
    [
        "cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync",
        "cudaStreamBeginCapture", "cudaStreamEndCapture", "cudaMalloc", "new_api",
    ]
)  # fmt: skip


def _event(cat: str, name: str, start: int, length: int, thread: int, args: dict[str, Any]) -> Event:
    return {
        "ph": "X", "cat": cat, "name": name, "pid": 9, "tid": thread, "ts": float(start), "dur": length,
        "args": args,
    }  # fmt: skip


def _distinct(events: list[Event], *keys: str) -> list[Event]:
    """Keep the first of the events that are alike in `keys`: which of those is meant, no rule says."""
    return list({tuple(event[key] for key in keys): event for event in reversed(events)}.values())


@st.composite
def _traces(draw: st.DrawFn) -> list[Event]:
    def ranges(name: str, cats: list[str], **size: int) -> list[Event]:
        drawn = draw(
            st.lists(st.tuples(_STARTS, _LENGTHS, _THREADS, _EXTERNAL_IDS, st.sampled_from(cats)), **size)
        )
        return [
            _event(cat, f"{name}{number}", start, length, thread, {"External id": external})
            for number, (start, length, thread, external, cat) in enumerate(drawn)
        ]

    ours = ["cpu_op", "user_annotation"]
    ops = ranges(f"tlk::{SESSION}::op::", ours, min_size=1, max_size=6)
    steps = ranges("", ours, max_size=3)
    prefix = draw(st.sampled_from([f"tlk::{SESSION}::step::", "ProfilerStep#"]))
    for step in steps:
        step["name"] = f"{prefix}{draw(st.integers(0, 2))}"
        step["cat"] = "user_annotation" if prefix == "ProfilerStep#" else step["cat"]
    host = ranges("", ["cpu_op"], max_size=5)
    for op in host:
        op["name"] = draw(_HOST_NAMES)
    noise = ranges(f"tlk::{SESSION}::op::", ["gpu_user_annotation", "overhead"], max_size=2)
    calls = [
        _event(
            draw(st.sampled_from(["cuda_runtime", "cuda_driver"])),
            name,
            start,
            1,
            thread,
            {"correlation": number},
        )
        for name, start, thread, number in draw(
            st.lists(st.tuples(_API_NAMES, _STARTS, _THREADS, _CORRELATIONS), max_size=10)
        )
    ]
    records = [
        _event(
            cat, f"record_{number}", start, length, stream,
            {"correlation": correlation, "External id": external, "device": stream % 2, "stream": stream},
        )
        for number, (cat, start, length, stream, correlation, external) in enumerate(
            draw(
                st.lists(
                    st.tuples(
                        st.sampled_from(["kernel", "gpu_memcpy", "gpu_memset"]), _STARTS, _LENGTHS,
                        st.integers(1, 3), _CORRELATIONS, _EXTERNAL_IDS,
                    ),
                    max_size=8,
                )
            )
        )
    ]  # fmt: skip
    for event in (*calls, *records):
        if event["args"]["correlation"] is None:
            del event["args"]["correlation"]
    events = [
        *ops, *_distinct(steps, "ts", "dur"), *_distinct(host, "tid", "ts", "dur"), *noise,
        *_distinct(calls, "ts"), *records,
    ]  # fmt: skip
    return draw(st.permutations(events))


def _measured(annotation: KernelAnnotation) -> tuple[dict[str, tuple[Any, ...]], dict[int, int | None]]:
    table, owners = annotation.launch_table, _owners(annotation)
    launches = {
        row["launch_name"]: (row["step"], tuple(owners[row["launch_name"]]), row["gap"], row["time_valid"])
        for row in table.select(
            ["launch_name", "step", "gap", "time_valid", "attribution_status"]
        ).to_pylist()
        if row["attribution_status"] == ("attributed" if owners[row["launch_name"]] else "unattributed")
    }
    calls = annotation.call_table
    return launches, dict(zip(calls["sequence"].to_pylist(), calls["step"].to_pylist(), strict=True))


@pytest.mark.timeout(3600 if SOAK else 180)
@settings(
    max_examples=20_000 if SOAK else 250,
    deadline=None,
    derandomize=not SOAK,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(events=_traces())
def test_the_correlation_is_that_of_a_slow_reading_of_the_rules(events: list[Event]) -> None:
    trace = SyntheticTrace(events=events)
    with tempfile.TemporaryDirectory() as folder:
        annotation = _annotate(trace, Path(folder))
    slow = correlate_slowly(events, SESSION)
    said = facts(annotation)
    assert annotation.manifest.notes == slow.notes
    if not slow.launches:
        expected = "unavailable" if slow.notes["launching_calls"] else "empty"
        no_session = not any(event["cat"].startswith("cuda_") for event in events)
        assert said["availability"] == ("unavailable" if no_session else expected)
        return
    assert _measured(annotation) == (slow.launches, slow.calls)
    assert {name: said[name] for name in slow.facts} == slow.facts


@pytest.mark.parametrize("layout", Layout)
def test_the_order_of_a_file_means_nothing(tmp_path: Path, layout: Layout) -> None:
    trace = one_step()
    trace.launch(50, 150, name="a", external_id=2)
    trace.launch(51, 550, name="b")
    expected = facts(import_trace(trace.write(tmp_path, layout)))
    generator = np.random.default_rng(0)
    for _ in range(5):
        generator.shuffle(trace.events)
        assert facts(import_trace(trace.write(tmp_path, layout))) == expected
