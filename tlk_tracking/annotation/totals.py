"""Count an annotation's tables and say of each number what it is worth (tables + gaps -> Totals)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tlk_tracking.core.gaps import (
    LOSES_ANYTHING,
    LOSES_ATTRIBUTION,
    LOSES_CALLS,
    LOSES_TIME,
    Bound,
    GapReason,
    bound_of,
    bound_of_unattributed,
)
from tlk_tracking.core.records import AttributionStatus, Availability, LaunchKind, Origin

COUNTS = (
    "aten_calls",
    "aten_calls_with_launches",
    "launches",
    "kernels",
    "memcpys",
    "memsets",
    "attributed",
    "unattributed",
    "outside_steps",
    "relations",
    "max_records_per_launch",
)
TIMES = ("device_time_us", "device_busy_us")
_ATTRIBUTION_COUNTS = frozenset({"attributed", "relations", "aten_calls_with_launches"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounded:
    """A number and what it says of the truth; None is unknown."""

    value: float | int | None
    bound: Bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """The counts and times of one annotation, over launches inside a step.

    `counts` has the keys `COUNTS`, `times` (µs) the keys `TIMES`; `by_step` is launches of each step,
    `streams` the streams of each device; both are None when device telemetry is unavailable.
    """

    counts: dict[str, Bounded]
    times: dict[str, Bounded]
    by_step: dict[int, int] | None
    streams: dict[int, list[int]] | None


def count_totals(
    *,
    calls: pa.Table,
    launches: pa.Table,
    relations: pa.Table,
    steps: tuple[int, ...],
    availability: Availability,
    reasons: frozenset[GapReason],
) -> Totals:
    """Count the tables of one annotation; `steps` have a bracket and were not abandoned."""
    values: dict[str, float | int | None] = dict.fromkeys((*COUNTS, *TIMES))
    values["aten_calls"] = len(calls) - calls["step"].null_count
    by_step: dict[int, int] | None = None
    streams: dict[int, list[int]] | None = None
    if availability is not Availability.UNAVAILABLE:
        inside = pc.is_valid(launches["step"])
        values |= _count_launches(launches, inside)
        values |= _sum_times(launches, pc.and_(inside, launches["time_valid"]))
        dispatched = relations_of_calls(relations)
        related = dispatched["sequence"].filter(pc.take(inside, dispatched["launch"])).to_numpy()
        values |= {"relations": len(related), "aten_calls_with_launches": len(np.unique(related))}
        by_step = dict.fromkeys(steps, 0) | _occurrences(launches["step"].drop_null())
        streams = _streams(launches.select(["device", "stream"]).filter(inside))
    return Totals(
        counts={
            name: Bounded(value=values[name], bound=_bound(name, values[name], reasons)) for name in COUNTS
        },
        times={
            name: Bounded(value=values[name], bound=_bound(name, values[name], reasons)) for name in TIMES
        },
        by_step=by_step,
        streams=streams,
    )


def relations_of_calls(relations: pa.Table) -> pa.Table:
    """Return the relations that are of ATen calls, without those of fused nodes."""
    return relations.filter(pc.equal(relations["origin"].cast(pa.string()), Origin.DISPATCH.value))


def _bound(name: str, value: float | int | None, reasons: frozenset[GapReason]) -> Bound:
    if value is None:
        return Bound.UNKNOWN
    if name == "unattributed":
        return bound_of_unattributed(reasons)
    if name in TIMES:
        return bound_of(LOSES_TIME, reasons)
    if name == "aten_calls":
        return bound_of(LOSES_CALLS, reasons)
    return bound_of(LOSES_ATTRIBUTION if name in _ATTRIBUTION_COUNTS else LOSES_ANYTHING, reasons)


def _count_launches(launches: pa.Table, inside: pa.ChunkedArray) -> dict[str, int]:
    kinds = _occurrences(launches["kind"].filter(inside))
    status = _occurrences(launches["attribution_status"].filter(inside))
    correlations = launches["runtime_correlation"].filter(inside).drop_null().to_numpy()
    return {
        "launches": sum(kinds.values()),
        "kernels": kinds.get(LaunchKind.KERNEL, 0),
        "memcpys": kinds.get(LaunchKind.MEMCPY, 0),
        "memsets": kinds.get(LaunchKind.MEMSET, 0),
        "attributed": status.get(AttributionStatus.ATTRIBUTED, 0),
        "unattributed": status.get(AttributionStatus.UNATTRIBUTED, 0),
        "outside_steps": len(launches) - sum(kinds.values()),
        "max_records_per_launch": int(np.unique(correlations, return_counts=True)[1].max(initial=0)),
    }


def _sum_times(launches: pa.Table, timed: pa.ChunkedArray) -> dict[str, float]:
    duration_us = launches["duration"].filter(timed).to_numpy()
    duration_ns = np.rint(duration_us * 1000).astype(np.int64)
    start_ns = launches["start_ns"].filter(timed).to_numpy()
    device = pc.fill_null(launches["device"].filter(timed), -1).to_numpy()
    busy = sum(union_ns(start_ns[device == d], duration_ns[device == d]) for d in np.unique(device))
    return {"device_time_us": sum_ns(duration_ns) / 1000, "device_busy_us": busy / 1000}


def sum_ns(durations: npt.NDArray[np.int64]) -> int:
    """Return the sum of non-negative durations, exact also where it exceeds 64 bits."""
    if len(durations) * int(durations.max(initial=0)) < 2**63:
        return int(durations.sum())
    return sum(durations.tolist())


def union_ns(start_ns: npt.NDArray[np.int64], duration_ns: npt.NDArray[np.int64]) -> int:
    """Return how long at least one of the intervals is running, in ns."""
    order = np.argsort(start_ns, kind="stable")
    start, end = start_ns[order], (start_ns + duration_ns)[order]
    reached = np.maximum.accumulate(end)
    begin = np.maximum(start[1:], reached[:-1])
    return int(np.maximum(end[1:] - begin, 0).sum() + (end[:1] - start[:1]).sum())


def _streams(within: pa.Table) -> dict[int, list[int]]:
    known = within.drop_null()
    pairs = np.column_stack((known["device"].to_numpy(), known["stream"].to_numpy()))
    streams: dict[int, list[int]] = {}
    for device, stream in np.unique(pairs, axis=0).tolist():
        streams.setdefault(device, []).append(stream)
    return streams


def _occurrences(column: pa.ChunkedArray) -> dict[Any, int]:  # of whatever the column holds
    pairs = pc.value_counts(column.unify_dictionaries()).to_pylist()
    return {pair["values"]: pair["counts"] for pair in pairs}
