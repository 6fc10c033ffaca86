"""Relate device records to the ATen calls that launched them (EventColumns -> Correlation).

The rules are those of docs/attribution.md. No operator name and no kernel name decides a relation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

from tlk_tracking.annotation.schemas import MAX_DURATION_NS
from tlk_tracking.attribution.kineto.event_columns import (
    Bools,
    DeviceRecords,
    EventColumns,
    HostRanges,
    Int64s,
    rows_of,
)
from tlk_tracking.attribution.lost_launches import count_lost_launches
from tlk_tracking.attribution.nested_ranges import NONE, innermost, no_index, parents
from tlk_tracking.core.errors import TraceError
from tlk_tracking.core.gaps import LAUNCH_GAPS, Gap, GapReason

# Records and calls that share one correlation multiply; a trace that needs more pairs than this is none of ours.
MAX_RELATIONS = 20_000_000

DISPATCHER_OPERATOR = re.compile(r"[A-Za-z_]\w*::[A-Za-z_]\w*(?:\.\w+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """How often Kineto's own external-id link names the same ATen call as the markers do, per launch."""

    agreed: int
    disagreed: int
    not_audited: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Correlation:
    """What launched what, as columns over the records and the calls of the trace.

    Attributes:
        calls: one range per ATen call row (our markers, or innermost host ops), label = sequence.
        call_host_op: index into `EventColumns.host_ops` of each call row; None when the rows are our markers.
        call_step: for each call row its step, null (masked) outside every bracket.
        relation_sequence, relation_record: the relation pairs; sequence and record index, sorted.
        record_step: for each record its step (masked: none).
        record_call: index of the earliest runtime call with the record's correlation (masked: none).
        record_call_start_ns: start of that call (masked: none).
        record_gap: index into `LAUNCH_GAPS` (masked: no gap).
        record_time_valid: false where the duration is not positive or the start not after zero.
        step_labels: the steps that have a bracket, ascending; origin of the time axis is `first_bracket_ns`.
        gaps: every gap that the trace itself shows, with counts.
        empty_transfers: copy or set calls of zero bytes, which have no record.
        launching_calls: runtime calls that launch (not into a stream capture), in a bracket or not.
        runtime_calls_seen: whether the trace holds any runtime call at all: a device session ran.
    """

    calls: HostRanges
    call_host_op: Int64s | None
    call_step: np.ma.MaskedArray[tuple[int], np.dtype[np.int64]]
    relation_sequence: Int64s
    relation_record: Int64s
    record_step: np.ma.MaskedArray[tuple[int], np.dtype[np.int64]]
    record_call: np.ma.MaskedArray[tuple[int], np.dtype[np.int64]]
    record_call_start_ns: np.ma.MaskedArray[tuple[int], np.dtype[np.int64]]
    record_gap: np.ma.MaskedArray[tuple[int], np.dtype[np.int64]]
    record_time_valid: Bools
    step_labels: tuple[int, ...]
    first_bracket_ns: int | None
    gaps: tuple[Gap, ...]
    audit: Audit
    empty_transfers: int
    launching_calls: int
    runtime_calls_seen: bool


def correlate(events: EventColumns, *, steps: frozenset[int] | None = None) -> Correlation:
    """Apply the correlation rules and name the gaps that the trace shows.

    `steps` are those that count, where the recording side knows them: what ran in another bracket (an abandoned
    one) ran outside every bracket. None takes what the trace has.

    Raises:
        TraceError: the trace asks for more than `MAX_RELATIONS` relations.
    """
    brackets = _brackets(events, steps)
    calls, host_ops = _call_ranges(events)
    runtime = events.runtime_calls
    records = events.records

    owner = innermost(calls, thread=runtime.thread, time_ns=runtime.start_ns)
    call_bracket = innermost(brackets, thread=None, time_ns=runtime.start_ns)
    has_id = runtime.correlation != 0
    by_correlation = np.flatnonzero(has_id)[
        np.lexsort((runtime.start_ns[has_id], runtime.correlation[has_id]))
    ]
    sorted_ids = runtime.correlation[by_correlation]
    first = np.searchsorted(sorted_ids, records.correlation, "left")
    stop = np.searchsorted(sorted_ids, records.correlation, "right")
    known = (records.correlation != 0) & (stop > first)
    earliest = _take(by_correlation, first, known)

    record_bracket = np.where(known, call_bracket[earliest], NONE) if len(runtime) else no_index(len(records))
    relation_record, relation_call = _relations(owner[by_correlation], sorted_ids, records.correlation)
    related = np.zeros(len(records), bool)
    related[relation_record] = True
    record_gap = _launch_gaps(
        events, calls=calls, known=known, earliest=earliest, related=related, in_step=record_bracket != NONE
    )
    time_valid = has_duration(records) & (records.start_ns > 0)
    audit = _audit(events, calls, relation_record=relation_record, relation_call=relation_call)
    lost, empty_transfers, launching = count_lost_launches(events, in_bracket=call_bracket != NONE)
    return Correlation(
        calls=calls,
        call_host_op=host_ops,
        call_step=_labels(brackets, innermost(brackets, thread=None, time_ns=calls.start_ns)),
        relation_sequence=calls.label[relation_call],
        relation_record=relation_record,
        record_step=_labels(brackets, record_bracket),
        record_call=np.ma.MaskedArray(earliest, ~known),
        record_call_start_ns=np.ma.MaskedArray(
            runtime.start_ns[earliest] if len(runtime) else np.zeros(len(records), np.int64), ~known
        ),
        record_gap=np.ma.MaskedArray(record_gap, record_gap == NONE),
        record_time_valid=time_valid,
        step_labels=tuple(np.unique(brackets.label).tolist()),
        first_bracket_ns=int(brackets.start_ns.min()) if len(brackets) else None,
        gaps=_gaps(events, record_gap, lost=lost, invalid=int((~time_valid).sum()), audit=audit),
        audit=audit,
        empty_transfers=empty_transfers,
        launching_calls=launching,
        runtime_calls_seen=len(runtime) > 0,
    )


def has_duration(records: DeviceRecords) -> Bools:
    """Tell which records have a duration that one can believe."""
    return (records.duration_ns > 0) & (records.duration_ns <= MAX_DURATION_NS)


def _brackets(events: EventColumns, steps: frozenset[int] | None) -> HostRanges:
    """Rule 5: our step brackets; else torch's `ProfilerStep#N`; else the whole trace is step 0."""
    markers = events.step_markers
    if steps is not None:
        # The numbers of `ProfilerStep#N` are not the Trainer's: where steps are known, nothing stands in for them.
        kept = np.isin(markers.label, np.array(sorted(steps), np.int64))
        return rows_of(markers, kept)
    if len(markers):
        return markers
    if len(events.profiler_steps):
        return events.profiler_steps
    columns = (events.runtime_calls, events.host_ops, events.op_markers)
    starts = [int(c.start_ns.min()) for c in columns if len(c)]
    # A damaged event may end before it starts.
    ends = [int(max(c.end_ns.max(), c.start_ns.max())) for c in columns if len(c)]
    if not starts:
        empty = np.empty(0, np.int64)
        return HostRanges(label=empty, thread=empty, start_ns=empty, end_ns=empty, external_id=empty)
    zero = np.zeros(1, np.int64)
    start, end = np.array([min(starts)]), np.array([max(ends) + 1])
    return HostRanges(label=zero, thread=zero + NONE, start_ns=start, end_ns=end, external_id=zero)


def _call_ranges(events: EventColumns) -> tuple[HostRanges, Int64s | None]:
    """Our markers; a trace without any: its innermost host ops (those without a child, and those that launch)."""
    if events.session is not None:
        return events.op_markers, None
    ops = events.host_ops
    order = np.lexsort((-ops.end_ns, ops.start_ns))
    has_child = np.zeros(len(ops), bool)
    has_child[parents(ops)] = True
    owns = innermost(ops, thread=events.runtime_calls.thread, time_ns=events.runtime_calls.start_ns)
    keep = ~has_child
    launching = np.isin(events.runtime_calls.correlation, events.records.correlation) & (
        events.runtime_calls.correlation != 0
    )
    keep[owns[(owns != NONE) & launching]] = True
    rows = order[keep[order]]
    return replace(rows_of(ops, rows), label=np.arange(len(rows))), rows


def _relations(owner: Int64s, call_ids: Int64s, record_ids: Int64s) -> tuple[Int64s, Int64s]:
    """Rules 3 and 4: each record shares the owners of all runtime calls with its correlation; pairs are distinct.

    `owner` and `call_ids` are columns over runtime calls with an id, sorted by it.
    """
    owned = owner != NONE
    ids, owners = call_ids[owned], owner[owned]
    order = np.lexsort((owners, ids))
    ids, owners = ids[order], owners[order]
    fresh = np.ones(len(ids), bool)
    fresh[1:] = (np.diff(ids) != 0) | (np.diff(owners) != 0)
    ids, owners = ids[fresh], owners[fresh]
    first = np.searchsorted(ids, record_ids, "left")
    count = np.searchsorted(ids, record_ids, "right") - first
    total = int(count.sum())
    if total > MAX_RELATIONS:
        raise TraceError(f"the trace relates calls and records {total} times, more than {MAX_RELATIONS}")
    record = np.repeat(np.arange(len(record_ids)), count)
    within = np.arange(total) - np.repeat(np.cumsum(count) - count, count)
    return record, owners[np.repeat(first, count) + within]


def _launch_gaps(
    events: EventColumns, *, calls: HostRanges, known: Bools, earliest: Int64s, related: Bools, in_step: Bools
) -> Int64s:
    """Return for each record the first reason of `LAUNCH_GAPS` that fits, or -1."""
    records, runtime = events.records, events.runtime_calls
    gap = no_index(len(records))
    gap[~known] = LAUNCH_GAPS.index(GapReason.RECORD_WITHOUT_LAUNCH)
    open_rows = np.flatnonzero(known & in_step & ~related)
    if not len(open_rows):
        return gap
    ids, counts = np.unique(records.correlation, return_counts=True)
    several = counts[np.searchsorted(ids, records.correlation[open_rows])] > 1
    thread, time_ns = runtime.thread[earliest[open_rows]], runtime.start_ns[earliest[open_rows]]
    foreign = ~np.isin(thread, np.concatenate([calls.thread, events.step_markers.thread]))
    host_op = innermost(events.host_ops, thread=thread, time_ns=time_ns)
    is_operator = np.array([DISPATCHER_OPERATOR.fullmatch(name) is not None for name in events.names], bool)
    paused = np.zeros(len(open_rows), bool)
    inside = host_op != NONE
    paused[inside] = is_operator[events.host_ops.label[host_op[inside]]]
    gap[open_rows] = np.select(
        [several, foreign, paused],
        [
            LAUNCH_GAPS.index(GapReason.GRAPH_REPLAY),
            LAUNCH_GAPS.index(GapReason.FOREIGN_THREAD),
            LAUNCH_GAPS.index(GapReason.MODE_PAUSED_INTERIOR),
        ],
        LAUNCH_GAPS.index(GapReason.LAUNCHED_OUTSIDE_DISPATCHER),
    )
    return gap


def _audit(
    events: EventColumns, calls: HostRanges, *, relation_record: Int64s, relation_call: Int64s
) -> Audit:
    """Rule 6: follow record -> external id -> host op or own range -> marker, and compare."""
    records = events.records
    linked, found = _linked_calls(events, calls)
    audited = found & (records.external_id != 0)
    pair_agrees = relation_call == linked[relation_record]
    agrees = np.zeros(len(records), bool)
    agrees[relation_record[pair_agrees]] = True
    related = np.zeros(len(records), bool)
    related[relation_record] = True
    agrees |= ~related & (linked == NONE)
    return Audit(
        agreed=int((audited & agrees).sum()),
        disagreed=int((audited & ~agrees).sum()),
        not_audited=int((~audited).sum()),
    )


def _linked_calls(events: EventColumns, calls: HostRanges) -> tuple[Int64s, Bools]:
    """Return for each record the call row that its external id leads to (-1: none), and whether the id was found."""
    wanted = events.records.external_id
    ids, threads, starts = [], [], []
    for source in (events.host_ops, events.op_markers, events.step_markers):
        chosen = (source.external_id != 0) & np.isin(source.external_id, wanted)
        ids.append(source.external_id[chosen])
        threads.append(source.thread[chosen])
        starts.append(source.start_ns[chosen])
    # An id that two ranges carry names neither of them.
    unique, index, counts = np.unique(np.concatenate(ids), return_index=True, return_counts=True)
    unique, rows = unique[counts == 1], index[counts == 1]
    linked = innermost(calls, thread=np.concatenate(threads)[rows], time_ns=np.concatenate(starts)[rows])
    place = np.searchsorted(unique, wanted)
    found = np.zeros(len(wanted), bool)
    inside = place < len(unique)
    found[inside] = unique[place[inside]] == wanted[inside]
    result = no_index(len(wanted))
    result[found] = linked[place[found]]
    return result, found


def _gaps(
    events: EventColumns, record_gap: Int64s, *, lost: int, invalid: int, audit: Audit
) -> tuple[Gap, ...]:
    found = [
        (reason, int((record_gap == index).sum()), _EVIDENCE[reason])
        for index, reason in enumerate(LAUNCH_GAPS)
    ]
    found += [
        (GapReason.LAUNCH_WITHOUT_RECORD, lost, _EVIDENCE[GapReason.LAUNCH_WITHOUT_RECORD]),
        (GapReason.INVALID_TIME, invalid, _EVIDENCE[GapReason.INVALID_TIME]),
        (GapReason.LINK_DISAGREEMENT, audit.disagreed, _EVIDENCE[GapReason.LINK_DISAGREEMENT]),
        (GapReason.UNREADABLE_EVENT, events.unreadable_events, _EVIDENCE[GapReason.UNREADABLE_EVENT]),
    ]
    return tuple(Gap(reason=r, count=n, evidence=text) for r, n, text in found if n)


_EVIDENCE = {
    GapReason.RECORD_WITHOUT_LAUNCH: "device records whose runtime call is not in the trace: "
    "queued before the window, or the call was lost",
    GapReason.GRAPH_REPLAY: "records in a step that share one correlation with others, outside every ATen call",
    GapReason.FOREIGN_THREAD: "records launched in a step from a thread that has no range of ours",
    GapReason.MODE_PAUSED_INTERIOR: "records launched in a step by a dispatcher operator that the dispatch mode "
    "did not see",
    GapReason.LAUNCHED_OUTSIDE_DISPATCHER: "records launched in a step outside every ATen call: generated code of "
    "a compiled model, a hand-written kernel, an extension",
    GapReason.LAUNCH_WITHOUT_RECORD: "launching runtime calls in a step that have no device record",
    GapReason.INVALID_TIME: "device records whose duration is not positive or whose start is not after zero",
    GapReason.LINK_DISAGREEMENT: "records for which Kineto's external id leads to another ATen call than the marker",
    GapReason.UNREADABLE_EVENT: "events of the trace that could not be read",
}


def _labels(ranges: HostRanges, index: Int64s) -> np.ma.MaskedArray[tuple[int], np.dtype[np.int64]]:
    labels = ranges.label[index] if len(ranges) else np.zeros(len(index), np.int64)
    return np.ma.MaskedArray(labels, index == NONE)


def _take(values: Int64s, index: Int64s, known: Bools) -> Int64s:
    """Return values[index] where known, else 0 (a harmless index; the caller masks it)."""
    taken = np.zeros(len(index), np.int64)
    taken[known] = values[index[known]]
    return taken
