"""Read Kineto's Chrome export into typed event columns (trace file -> EventColumns); the only reader of Kineto."""

from __future__ import annotations

import gc
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tlk_tracking.attribution.kineto.event_columns import (
    Bools,
    DeviceRecords,
    EventColumns,
    HostRanges,
    Ints,
    RuntimeCalls,
    rows_of,
)
from tlk_tracking.attribution.kineto.growing_columns import (
    CallColumns,
    Codes,
    IntColumn,
    RangeColumns,
    RecordColumns,
    TimedEvents,
    cut_name,
    read_times,
)
from tlk_tracking.attribution.kineto.trace_blocks import TraceBlocks, TraceEvent
from tlk_tracking.core.errors import TraceError
from tlk_tracking.core.records import MARKER_PREFIX, LaunchKind

KIND_OF_CATEGORY = {
    "kernel": LaunchKind.KERNEL,
    "gpu_memcpy": LaunchKind.MEMCPY,
    "gpu_memset": LaunchKind.MEMSET,
}
_CATEGORIES = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver", *KIND_OF_CATEGORY)
# Enough events to make a call of numpy cheap beside them, few enough to stay in the cache.
_EVENTS_AT_ONCE = 2048
_MARKER = re.compile(MARKER_PREFIX + "([0-9a-f]{8}::(?:op|step))::([0-9]{1,16})")
_MAX_NUMBER = 2**53
_PROFILER_STEP = re.compile(r"ProfilerStep#([0-9]{1,15})")


def read_trace(
    path: Path, *, session: str | None = None, progress: Callable[[int], None] | None = None
) -> EventColumns:
    """Read a Kineto trace (`.json` or `.json.gz`).

    Args:
        path: the trace file.
        session: id of the markers that are ours; None takes the only one in the trace.
        progress: called with the number of (uncompressed) bytes read so far.

    Raises:
        TraceError: the file is no trace, is cut short, or holds markers of several sessions and none was named.
    """
    blocks = TraceBlocks(path)
    columns = _Columns()
    with _collector_paused():
        for events in blocks:
            columns.extend(events)
            if progress is not None:
                progress(blocks.bytes_read)
    return columns.build(blocks, session)


@contextmanager
def _collector_paused() -> Iterator[None]:
    # Decoding makes very many small objects without cycles; the collector would walk them again and again.
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Names(Codes):
    """Number names as they come; a marker, whose name comes only once, goes to `kinds` and `numbers` and gets -1."""

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.numbers: list[int] = []

    def __missing__(self, name: object) -> int:
        if isinstance(name, str) and (marker := _MARKER.fullmatch(name)):
            kind, digits = marker.groups()
            number = int(digits)
            if number <= _MAX_NUMBER:
                self.kinds.append(kind)
                self.numbers.append(number)
                return -1
        return super().__missing__(name)


class _Columns:
    """Turn blocks of events into columns; nothing of a block is kept but its columns."""

    def __init__(self) -> None:
        self.names, self.annotation_names = _Names(), _Names()
        self.threads = Codes()
        self.host_ops, self.annotations, self.markers = RangeColumns(), RangeColumns(), RangeColumns()
        self.marker_kinds, self.marker_kind = Codes(), IntColumn()
        self.calls = CallColumns()
        self.records = RecordColumns()
        self.waiting: dict[str, list[TraceEvent]] = {category: [] for category in _CATEGORIES}
        self.unreadable = 0

    def extend(self, events: list[TraceEvent]) -> None:
        groups: defaultdict[str, list[TraceEvent]] = defaultdict(list)
        for event in events:
            if event.ph == "X":
                groups[event.cat].append(event)
        for category in _CATEGORIES:
            if category not in groups:
                continue
            waiting = self.waiting[category]
            waiting += groups[category]
            if len(waiting) >= _EVENTS_AT_ONCE:
                self._flush(category)

    def _flush(self, category: str) -> None:
        """Turn the waiting events of one category into columns."""
        timed = read_times(self.waiting[category])
        self.unreadable += len(self.waiting[category]) - len(timed.events)
        self.waiting[category] = []
        if category in ("cpu_op", "user_annotation"):
            self._extend_ranges(timed, category)
        elif category in KIND_OF_CATEGORY:
            self.records.extend(timed, KIND_OF_CATEGORY[category])
        else:
            self.calls.extend(timed, self.names, self.threads)

    def _extend_ranges(self, timed: TimedEvents, category: str) -> None:
        annotated = category == "user_annotation"
        names = self.annotation_names if annotated else self.names
        block = {
            "label": np.array([names[e.name] for e in timed.events], np.int64),
            "thread": np.array([self.threads[e.pid, e.tid] for e in timed.events], np.int64),
            "start_ns": timed.start_ns,
            "duration_ns": timed.duration_ns,
            "external_id": np.array(
                [(args.external_id or 0) if (args := e.args) else 0 for e in timed.events], np.int64
            ),
        }
        if names.numbers:
            is_marker = block["label"] < 0
            marked = {name: column[is_marker] for name, column in block.items()}
            self.markers.extend({**marked, "label": np.array(names.numbers, np.int64)})
            self.marker_kind.extend([self.marker_kinds[kind, annotated] for kind in names.kinds])
            names.kinds.clear()
            names.numbers.clear()
            block = {name: column[~is_marker] for name, column in block.items()}
        (self.annotations if annotated else self.host_ops).extend(block)

    def build(self, blocks: TraceBlocks, session: str | None) -> EventColumns:
        for category in _CATEGORIES:
            self._flush(category)
        session, ops, steps, foreign = _sort_markers(
            self.markers.take(),
            self.marker_kind.take(),
            tuple(self.marker_kinds),
            session=session,
            path=blocks.path,
        )
        # A range of another session is not ours: it is a host op like any other.
        foreign = replace(foreign, label=np.full(len(foreign), self.names["foreign marker"]))
        names, calls, records = (
            tuple(cut_name(str(name)) for name in self.names),
            self.calls.take(),
            self.records.take(),
        )
        # A trace without our brackets keeps all: its host ops are its calls, or say where it begins and ends.
        host_ops = (
            self.host_ops.take_where(_asked_for(names, calls, records))
            if session is not None and len(steps)
            else self.host_ops.take()
        )
        profiler_steps = _profiler_steps(self.annotations.take(), tuple(self.annotation_names))
        numbered = _numbered_apart(profiler_steps) if session is None else profiler_steps
        return EventColumns(
            session=session,
            header=blocks.header,
            names=names,
            thread_ids=tuple(_thread_id(key) for key in self.threads),
            op_markers=ops,
            step_markers=steps,
            profiler_steps=numbered,
            steps_renumbered=numbered is not profiler_steps,
            host_ops=_concatenated(host_ops, foreign),
            runtime_calls=calls,
            records=records,
            unreadable_events=self.unreadable + blocks.unreadable,
        )


def _sort_markers(
    markers: HostRanges, code: Ints, kinds: tuple[Any, ...], *, session: str | None, path: Path
) -> tuple[str | None, HostRanges, HostRanges, HostRanges]:
    """Return our session, our op markers, our step markers, and `cpu_op` markers of other sessions.

    `code` tells of each marker which of the `kinds` it is: ("session::what", whether it is an annotation).
    """
    split = [(*text.split("::"), annotated) for text, annotated in kinds]
    if session is None:
        session = _only_session({own for own, _, _ in split}, path)
    chosen = (
        [own == session and what == "op" for own, what, _ in split],
        [own == session and what == "step" for own, what, _ in split],
        [own != session and not annotated for own, _, annotated in split],
    )
    op_rows, step_rows, foreign_rows = (np.flatnonzero(np.array(those, bool)[code]) for those in chosen)
    ops = rows_of(markers, op_rows[np.argsort(markers.label[op_rows], kind="stable")])
    repeated = ops.label[1:][np.diff(ops.label) == 0]
    if len(repeated):
        raise TraceError(
            f"{path.name}: the marker of ATen call {repeated[0]} of session {session} appears twice"
        )
    steps = rows_of(markers, step_rows[np.argsort(markers.start_ns[step_rows], kind="stable")])
    return session, ops, steps, rows_of(markers, foreign_rows)


def _asked_for(
    names: tuple[str, ...], calls: RuntimeCalls, records: DeviceRecords
) -> Callable[[HostRanges], Bools]:
    """Tell the host ops that a rule can ask for from the rest, which is three of four and most of the memory.

    Asked for are those in which a runtime call starts, those that a record's external id names, ranges of ours.
    """
    last = np.iinfo(np.int64).max
    starts = np.append(np.sort(calls.start_ns), last)
    ids = np.append(np.unique(records.external_id), last)
    is_ours = np.array([name.startswith(MARKER_PREFIX) for name in names], bool)

    def asked_for(ops: HostRanges) -> Bools:
        holds_call = starts[np.searchsorted(starts, ops.start_ns)] < ops.end_ns
        is_named = ids[np.searchsorted(ids, ops.external_id)] == ops.external_id
        return np.asarray(holds_call | is_named | is_ours[ops.label])

    return asked_for


def _only_session(sessions: set[str], path: Path) -> str | None:
    if len(sessions) > 1:
        some, more = sorted(sessions)[:3], len(sessions) - 3
        raise TraceError(
            f"{path.name} holds markers of the sessions {', '.join(some)}{f' and {more} more' * (more > 0)}; "
            "give the ops file of the one to import"
        )
    return next(iter(sessions), None)


def _profiler_steps(annotations: HostRanges, names: tuple[object, ...]) -> HostRanges:
    """Return the annotations that are steps of torch's own schedule, labelled with the step."""
    matches = ((code, _PROFILER_STEP.fullmatch(str(name))) for code, name in enumerate(names))
    step_of = {code: int(match[1]) for code, match in matches if match}
    steps = rows_of(annotations, np.isin(annotations.label, list(step_of)))
    return replace(steps, label=np.array([step_of[code] for code in steps.label.tolist()], np.int64))


def _numbered_apart(steps: HostRanges) -> HostRanges:
    """Number steps anew, in their order and up to the last one's number, where several that lie apart share one.

    Lightning counts batches of the sanity check and of training apart, in one session: 2, then 1, 2, 3, 4.
    """
    steps_in_order = rows_of(steps, np.argsort(steps.start_ns, kind="stable"))
    overlaps = steps_in_order.start_ns[1:] < steps_in_order.end_ns[:-1]
    if len(np.unique(steps.label)) == len(steps) or overlaps.any():
        return steps
    first = max(0, int(steps_in_order.label[-1]) + 1 - len(steps))
    return replace(steps_in_order, label=np.arange(first, first + len(steps)))


def _concatenated(first: HostRanges, second: HostRanges) -> HostRanges:
    if not len(second):
        return first
    return HostRanges(
        **{
            name: np.concatenate([getattr(first, name), getattr(second, name)])
            for name in HostRanges.__slots__
        }
    )


def _thread_id(key: object) -> int | None:
    thread = key[1] if isinstance(key, tuple) else None
    return thread if isinstance(thread, int) else None
