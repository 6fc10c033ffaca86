"""Lay out what the correlation found as tables (EventColumns + Correlation + ATen rows -> Arrow tables)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tlk_tracking.annotation.schemas import ATEN_CALLS, KERNEL_LAUNCHES, LAUNCH_RELATIONS
from tlk_tracking.attribution.correlation import Correlation, has_duration
from tlk_tracking.attribution.fused_relations import FusedRelations
from tlk_tracking.attribution.kineto.event_columns import Bools, EventColumns, Int64s
from tlk_tracking.attribution.launch_places import place_launches
from tlk_tracking.core.gaps import LAUNCH_GAPS
from tlk_tracking.core.records import AttributionStatus, CallSource, Origin

_NO_THREAD = -(2**62)  # a thread whose id is no number; becomes null


def make_call_table(
    events: EventColumns, correlation: Correlation, calls: pa.Table | None
) -> tuple[pa.Table, CallSource, int]:
    """Return the ATen rows, what they are, and how many of them have no range in the trace."""
    ranges = correlation.calls
    threads = np.array([_NO_THREAD if t is None else t for t in events.thread_ids], np.int64)
    thread = threads[ranges.thread] if len(ranges) else np.empty(0, np.int64)
    if calls is not None:
        return _join_markers(calls, correlation, thread)
    unknown = {kind: pa.nulls(len(ranges), kind) for kind in set(ATEN_CALLS.types)}
    columns: dict[str, pa.Array] = {field.name: unknown[field.type] for field in ATEN_CALLS}
    columns["sequence"] = pa.array(ranges.label)
    columns["step"] = _masked(correlation.call_step)
    columns["thread"] = pa.array(thread, mask=thread == _NO_THREAD)
    if correlation.call_host_op is None:
        return pa.table(columns, schema=ATEN_CALLS), CallSource.MARKERS_ONLY, 0
    names = pa.array(events.names, pa.string()).take(
        pa.array(events.host_ops.label[correlation.call_host_op])
    )
    columns["operator"] = names.dictionary_encode()
    return pa.table(columns, schema=ATEN_CALLS), CallSource.HOST_OPS, 0


def _join_markers(
    calls: pa.Table, correlation: Correlation, thread: Int64s
) -> tuple[pa.Table, CallSource, int]:
    """Complete the dispatch mode's rows with what only the trace knows, and keep ranges that have no row."""
    ranges = correlation.calls
    sequence = calls["sequence"].to_numpy()
    place = np.searchsorted(ranges.label, sequence)
    marked = np.zeros(len(sequence), bool)
    inside = place < len(ranges)
    marked[inside] = ranges.label[place[inside]] == sequence[inside]
    index = pa.array(place, mask=~marked)
    from_trace = {
        "step": _masked(correlation.call_step).take(index),
        "thread": pa.array(thread, mask=thread == _NO_THREAD).take(index),
    }
    table = calls
    for name, column in from_trace.items():
        position = table.schema.get_field_index(name)
        table = table.set_column(
            position, ATEN_CALLS.field(name), pc.coalesce(table[name].combine_chunks(), column)
        )
    lonely = ~np.isin(ranges.label, sequence)
    if lonely.any():
        rows = np.flatnonzero(lonely)
        extra: dict[str, pa.Array] = {
            n: pa.nulls(len(rows), ATEN_CALLS.field(n).type) for n in ATEN_CALLS.names
        }
        extra["sequence"] = pa.array(ranges.label[rows])
        extra["step"] = _masked(correlation.call_step).take(pa.array(rows))
        extra["thread"] = pa.array(thread[rows], mask=thread[rows] == _NO_THREAD)
        table = pa.concat_tables(
            [table.unify_dictionaries(), pa.table(extra, schema=ATEN_CALLS)]
        ).unify_dictionaries()
        table = table.sort_by("sequence").combine_chunks()
    return table.cast(ATEN_CALLS), CallSource.DISPATCH_MODE, int((~marked).sum())


def make_launch_tables(
    events: EventColumns, correlation: Correlation, calls: pa.Table, *, fused: FusedRelations | None = None
) -> tuple[pa.Table, pa.Table]:
    """Return the launch table, in the order in which the records ran, and the relation table."""
    records = events.records
    # Rows in the order in which they ran; ties keep the trace's order.
    order = np.argsort(records.start_ns, kind="stable")
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order))
    index = pa.array(order)
    attributed = np.zeros(len(records), np.int32)
    attributed[correlation.relation_record] = 1
    statuses = pa.array([AttributionStatus.UNATTRIBUTED.value, AttributionStatus.ATTRIBUTED.value])
    gap_names = pa.array([reason.value for reason in LAUNCH_GAPS])
    started = records.start_ns > 0
    call_start = correlation.record_call_start_ns
    latency = records.start_ns - np.ma.getdata(call_start)
    in_time = started & ~np.ma.getmaskarray(call_start) & (latency >= 0)
    origin_ns = correlation.first_bracket_ns
    places = place_launches(events, correlation, calls)

    def sorted_column(values: npt.NDArray[Any], known: Bools) -> pa.Array:
        # Sorted before it becomes Arrow's, which then holds no second copy.
        return pa.array(values[order], mask=~known[order])

    launches = pa.table(
        {
            "launch": np.arange(len(order)),
            "launch_name": records.launch_name.take(index),
            "device": records.device.take(index),
            "stream": records.stream.take(index),
            "duration": sorted_column(records.duration_ns / 1000, has_duration(records)),
            "runtime_correlation": sorted_column(records.correlation, records.correlation != 0),
            "attribution_status": pa.DictionaryArray.from_arrays(attributed[order], statuses),
            "kind": records.kind.take(index),
            "step": _masked(correlation.record_step[order]),
            "start_ns": sorted_column(records.start_ns - (origin_ns or 0), started & (origin_ns is not None)),
            "time_valid": correlation.record_time_valid[order],
            "launch_latency_ns": sorted_column(latency, in_time),
            "gap": pa.DictionaryArray.from_arrays(_masked(correlation.record_gap[order]), gap_names),
            "bytes": records.bytes.take(index),
            "grid": records.grid.take(index),
            "block": records.block.take(index),
            "graph_launch": places.graph_launch.take(index),
            "phase": places.phase.take(index),
            "module": places.module.take(index),
            "module_call": places.module_call.take(index),
        }
    ).cast(KERNEL_LAUNCHES)
    return launches, _relation_table(correlation, fused, number=number)


def _relation_table(correlation: Correlation, fused: FusedRelations | None, *, number: Int64s) -> pa.Table:
    origins = list(Origin)
    record, sequence = correlation.relation_record, correlation.relation_sequence
    origin = np.full(len(record), origins.index(Origin.DISPATCH), np.int32)
    if fused is not None:
        record = np.concatenate([record, np.array(fused.record, np.int64)])
        sequence = np.concatenate([sequence, np.array(fused.sequence, np.int64)])
        codes = [origins.index(Origin(name)) for name in fused.origin]
        origin = np.concatenate([origin, np.array(codes, np.int32)])
    launch = number[record]
    order = np.lexsort((sequence, launch))
    texts = pa.DictionaryArray.from_arrays(origin[order], pa.array([one.value for one in origins]))
    return pa.table([pa.array(sequence[order]), pa.array(launch[order]), texts], schema=LAUNCH_RELATIONS)


def unavailable_launch() -> pa.Table:
    """The disclosure row: no fact but that device telemetry is unavailable."""
    row = dict.fromkeys(KERNEL_LAUNCHES.names) | {
        "launch": 0,
        "attribution_status": AttributionStatus.UNAVAILABLE.value,
    }
    return pa.Table.from_pylist([row], schema=KERNEL_LAUNCHES)


def _masked(values: np.ma.MaskedArray[tuple[int], np.dtype[np.int64]]) -> pa.Int64Array:
    return pa.array(np.ma.getdata(values), mask=np.ma.getmaskarray(values))
