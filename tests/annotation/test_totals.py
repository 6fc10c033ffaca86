from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_trace import table_of

from tlk_tracking.annotation.schemas import ATEN_CALLS, KERNEL_LAUNCHES, LAUNCH_RELATIONS
from tlk_tracking.annotation.totals import COUNTS, TIMES, Bounded, Totals, count_totals, union_ns
from tlk_tracking.core.gaps import Bound, GapReason, bound_of_unattributed
from tlk_tracking.core.records import Availability

LAUNCH = {
    "attribution_status": "attributed", "kind": "kernel", "step": 1, "device": 0, "stream": 7, "duration": 2.0,
    "start_ns": 0, "time_valid": True, "runtime_correlation": 1,
}  # fmt: skip
CALL = {"sequence": 0, "step": 1}
RELATION = {"sequence": 0, "launch": 0, "origin": "dispatch"}


def _totals(
    *launches: dict[str, Any],
    calls: list[dict[str, Any]] | None = None,
    relations: list[dict[str, Any]] | None = None,
    steps: tuple[int, ...] = (1,),
    availability: Availability = Availability.RECORDED,
    reasons: frozenset[GapReason] = frozenset(),
) -> Totals:
    return count_totals(
        calls=table_of(ATEN_CALLS, *(calls or [])),
        launches=table_of(KERNEL_LAUNCHES, *({"launch": n} | row for n, row in enumerate(launches))),
        relations=table_of(LAUNCH_RELATIONS, *(relations or [])),
        steps=steps,
        availability=availability,
        reasons=reasons,
    )


def _values(totals: Totals) -> dict[str, float | None]:
    return {name: number.value for name, number in (*totals.counts.items(), *totals.times.items())}


def test_every_number_is_of_launches_inside_a_step() -> None:
    totals = _totals(
        LAUNCH,
        LAUNCH | {"step": 2, "kind": "memcpy", "start_ns": 1000, "runtime_correlation": 2},
        LAUNCH | {"step": 2, "kind": "memset", "start_ns": 9000, "attribution_status": "unattributed"},
        LAUNCH | {"step": None, "start_ns": 20_000, "stream": 99},
        LAUNCH | {"step": None, "attribution_status": "unattributed"},
        calls=[CALL, {"sequence": 1, "step": 2}, {"sequence": 2, "step": None}, {"sequence": 3, "step": 2}],
        relations=[
            RELATION,
            {"sequence": 1, "launch": 0, "origin": "dispatch"},
            {"sequence": 1, "launch": 1, "origin": "dispatch"},
            {"sequence": 2, "launch": 3, "origin": "dispatch"},
        ],
        steps=(1, 2, 3),
    )
    assert _values(totals) == {
        "aten_calls": 3, "aten_calls_with_launches": 2, "launches": 3, "kernels": 1, "memcpys": 1, "memsets": 1,
        "attributed": 2, "unattributed": 1, "outside_steps": 2, "relations": 3, "max_records_per_launch": 2,
        "device_time_us": 6, "device_busy_us": 5,
    }  # fmt: skip
    assert (totals.by_step, totals.streams) == ({1: 1, 2: 2, 3: 0}, {0: [7]})


def test_busy_time_is_the_union_on_each_device_summed_over_devices() -> None:
    rows = [
        LAUNCH | {"device": device, "stream": stream, "start_ns": start, "duration": 3.0}
        for device, stream, start in ((0, 7, 0), (0, 8, 2000), (1, 7, 2000), (1, 7, 10_000))
    ]
    totals = _totals(*rows)
    assert (totals.times["device_time_us"].value, totals.times["device_busy_us"].value) == (12, 5 + 6)
    assert totals.streams == {0: [7, 8], 1: [7]}


def test_a_launch_without_a_valid_time_is_counted_and_in_no_time() -> None:
    totals = _totals(LAUNCH, LAUNCH | {"duration": None, "time_valid": False})
    assert (totals.counts["launches"].value, totals.times["device_time_us"].value) == (2, 2)


def test_nodes_of_compiled_graphs_are_in_no_count_of_calls() -> None:
    fused = RELATION | {"origin": "inductor_kernel"}
    totals = _totals(LAUNCH | {"attribution_status": "unattributed"}, calls=[CALL], relations=[fused])
    names = ("relations", "aten_calls_with_launches", "attributed")
    assert [totals.counts[name].value for name in names] == [0, 0, 0]


def test_no_launches_are_true_zeros() -> None:
    totals = _totals(availability=Availability.EMPTY)
    assert _values(totals) == dict.fromkeys((*COUNTS, *TIMES), 0)
    assert (totals.by_step, totals.streams) == ({1: 0}, {})


def test_what_is_unavailable_is_unknown_and_never_0() -> None:
    totals = _totals(
        {"attribution_status": "unavailable"},
        calls=[CALL],
        availability=Availability.UNAVAILABLE,
        reasons=frozenset({GapReason.NO_DEVICE_EVIDENCE}),
    )
    unknown = Bounded(value=None, bound=Bound.UNKNOWN)
    assert totals.counts == dict.fromkeys(COUNTS, unknown) | {
        "aten_calls": Bounded(value=1, bound=Bound.LOWER)
    }
    assert (totals.times, totals.by_step, totals.streams) == (dict.fromkeys(TIMES, unknown), None, None)


@pytest.mark.parametrize("device", [None, 0])
def test_a_device_that_kineto_did_not_name_is_one_device(device: int | None) -> None:
    totals = _totals(LAUNCH | {"device": device}, LAUNCH | {"device": device, "start_ns": 1000})
    assert totals.times["device_busy_us"].value == 3


@pytest.mark.parametrize(
    ("reasons", "bound"),
    [
        ((), Bound.EXACT),
        ((GapReason.INVALID_TIME,), Bound.EXACT),
        ((GapReason.GRAPH_REPLAY,), Bound.UPPER),
        ((GapReason.LINK_DISAGREEMENT, GapReason.FOREIGN_THREAD), Bound.UPPER),
        ((GapReason.GRAPH_REPLAY, GapReason.LAUNCH_WITHOUT_RECORD), Bound.UNKNOWN),
        ((GapReason.MODE_PAUSED_INTERIOR,), Bound.UNKNOWN),
    ],
)
def test_unattributed_is_too_high_where_attribution_is_lost_and_unknown_where_launches_are(
    reasons: tuple[GapReason, ...], bound: Bound
) -> None:
    assert bound_of_unattributed(reasons) is bound


def test_very_long_times_add_up() -> None:
    year_us = 365 * 24 * 3600 * 1e6
    totals = _totals(*[LAUNCH | {"duration": year_us}] * 1000)
    assert totals.times["device_time_us"].value == 1000 * year_us


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(-50, 50), st.integers(1, 20)), max_size=12))
def test_the_union_of_intervals_is_counted_once(intervals: list[tuple[int, int]]) -> None:
    covered = {moment for start, length in intervals for moment in range(start, start + length)}
    starts, lengths = (np.array([pair[part] for pair in intervals], np.int64) for part in (0, 1))
    assert union_ns(starts, lengths) == len(covered)
