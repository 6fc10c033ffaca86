from __future__ import annotations

from typing import Any

import pyarrow as pa
from synthetic_trace import table_of

from tlk_tracking.annotation.module_summary import summarize_modules
from tlk_tracking.annotation.schemas import ATEN_CALLS, KERNEL_LAUNCHES
from tlk_tracking.core.gaps import GapReason


def _calls(*rows: tuple[int | None, str | None]) -> pa.Table:
    found = ({"sequence": n, "step": step, "module": path} for n, (step, path) in enumerate(rows))
    return table_of(ATEN_CALLS, *found)


def _launches(*rows: tuple[int | None, str | None, float | None]) -> pa.Table:
    found = (
        {"launch": n, "step": step, "module": path, "duration": time, "time_valid": time is not None}
        for n, (step, path, time) in enumerate(rows)
    )
    return table_of(KERNEL_LAUNCHES, *found)


def _rows(
    *, calls: pa.Table, launches: pa.Table | None, steps: tuple[int, ...] = (5, 6), **more: Any
) -> list[Any]:
    table = summarize_modules(
        calls=calls, launches=launches, complete_steps=steps, reasons=more.get("reasons", frozenset())
    )
    return [tuple(row.values())[: more.get("columns", 8)] for row in table.to_pylist()]


def test_a_module_has_its_own_numbers_and_those_with_the_modules_inside_it() -> None:
    calls = _calls((5, "a.0"), (5, "a.0"), (6, "a"), (6, "b"))
    launches = _launches((5, "a.0", 10.0), (6, "a.0", 20.0), (6, "a", 4.0), (6, "b", 6.0))
    # module, then calls, launches and µs a step, each alone and with children, then the share
    assert _rows(calls=calls, launches=launches) == [
        ("", 0.0, 2.0, 0.0, 2.0, 0.0, 20.0, 1.0),
        ("a", 0.5, 1.5, 0.5, 1.5, 2.0, 17.0, 0.85),
        ("a.0", 1.0, 1.0, 1.0, 1.0, 15.0, 15.0, 0.75),
        ("b", 0.5, 0.5, 0.5, 0.5, 3.0, 3.0, 0.15),
    ]


def test_a_name_that_begins_alike_is_no_child() -> None:
    rows = _rows(calls=_calls((5, "layer"), (5, "layer2.x")), launches=_launches(), steps=(5,), columns=3)
    assert rows == [("", 0.0, 2.0), ("layer", 1.0, 1.0), ("layer2", 0.0, 1.0), ("layer2.x", 1.0, 1.0)]


def test_what_has_no_module_or_no_complete_step_is_in_no_row_but_in_the_whole_of_the_shares() -> None:
    calls = _calls((5, None), (9, "a"), (None, "a"))
    launches = _launches((5, None, 30.0), (5, "a", 10.0), (9, "a", 10.0), (None, "a", 10.0))
    assert _rows(calls=calls, launches=launches, steps=(5,)) == [
        ("", 0.0, 0.0, 0.0, 1.0, 0.0, 10.0, 0.25),
        ("a", 0.0, 0.0, 1.0, 1.0, 10.0, 10.0, 0.25),
    ]


def test_a_launch_of_invalid_time_counts_without_time() -> None:
    rows = _rows(calls=_calls(), launches=_launches((5, "", None)), steps=(5,))
    assert rows == [("", 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, None)]


def test_without_device_telemetry_only_calls_are_known() -> None:
    assert _rows(calls=_calls((5, "a")), launches=None, steps=(5,)) == [
        ("", 0.0, 1.0, None, None, None, None, None),
        ("a", 1.0, 1.0, None, None, None, None, None),
    ]


def test_a_gap_of_attribution_makes_every_row_a_lower_bound() -> None:
    table = summarize_modules(
        calls=_calls((5, "")),
        launches=_launches(),
        complete_steps=(5,),
        reasons=frozenset({GapReason.GRAPH_REPLAY, GapReason.INVALID_TIME}),
    )
    assert table.select(["lower_bound", "reasons"]).to_pylist() == [
        {"lower_bound": True, "reasons": "graph_replay invalid_time"}
    ]


def test_where_no_module_is_known_there_is_no_row() -> None:
    assert _rows(calls=_calls((5, None)), launches=_launches((5, None, 1.0))) == []
