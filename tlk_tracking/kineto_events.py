"""Read Kineto's Chrome export into typed event columns (trace file -> EventColumns); the only reader of Kineto."""

from __future__ import annotations

import gc
import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from tlk_tracking.errors import TraceError
from tlk_tracking.event_columns import DeviceRecords, EventColumns, HostRanges, RuntimeCalls, rows_of
from tlk_tracking.growing_columns import (
    Bools,
    Codes,
    CountColumn,
    Int64s,
    IntColumn,
    Ints,
    TextColumn,
    TimeColumn,
)
from tlk_tracking.records import MARKER_PREFIX, LaunchKind
from tlk_tracking.trace_blocks import EventArgs, TraceBlocks, TraceEvent

KIND_OF_CATEGORY = {
    "kernel": LaunchKind.KERNEL,
    "gpu_memcpy": LaunchKind.MEMCPY,
    "gpu_memset": LaunchKind.MEMSET,
}
_MARKER = re.compile(MARKER_PREFIX + "([0-9a-f]{8}::(?:op|step))::([0-9]{1,16})")
_MAX_NUMBER = 2**53
_PROFILER_STEP = re.compile(r"ProfilerStep#([0-9]{1,15})")
_NO_ARGS = EventArgs()


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
    """Number names as they come; a marker gets -1 - its place among the markers, whose names all differ."""

    def __init__(self) -> None:
        self.marker_kinds = Codes()
        self.marker_kind = array("q")
        self.marker_number = array("q")

    def __missing__(self, name: object) -> int:
        if isinstance(name, str) and (marker := _MARKER.fullmatch(name)) and int(marker[2]) <= _MAX_NUMBER:
            kind, number = marker.groups()
            self.marker_kind.append(self.marker_kinds[kind])
            self.marker_number.append(int(number))
            return -len(self.marker_number)
        return super().__missing__(name)


class _HostColumns:
    """Ranges of one category on host threads; the label is what `_Names` gives their name."""

    def __init__(self) -> None:
        self.label, self.thread, self.external_id = IntColumn(), IntColumn(), IntColumn()
        self.start, self.duration = TimeColumn(), TimeColumn()
        self.unreadable = 0

    def extend(self, events: list[TraceEvent], names: _Names, threads: Codes) -> None:
        self.label.extend([names[e.name] for e in events])
        self.thread.extend([threads[e.pid, e.tid] for e in events])
        self.external_id.extend([(e.args.external_id or 0) if e.args else 0 for e in events])
        self.start.extend([e.ts for e in events])
        self.duration.extend([e.dur for e in events])

    def take(self) -> tuple[HostRanges, HostRanges]:
        """Return ranges with a name, and markers."""
        start, end, readable = _take_times(self.start, self.duration)
        columns: dict[str, Ints] = {
            "label": self.label.take(), "thread": self.thread.take(), "external_id": self.external_id.take(),
            "start_ns": start, "end_ns": end,
        }  # fmt: skip
        del start, end
        self.unreadable = int((~readable).sum())
        named = columns["label"] >= 0
        markers = {name: column[readable & ~named] for name, column in columns.items()}
        named &= readable
        for name in columns:  # one by one: there may be millions of rows
            columns[name] = columns[name][named]
        return HostRanges(**columns), HostRanges(**markers)


class _CallColumns:
    """CUDA runtime and driver calls."""

    def __init__(self) -> None:
        self.name, self.thread, self.correlation = IntColumn(), IntColumn(), IntColumn()
        self.start, self.duration = TimeColumn(), TimeColumn()
        self.unreadable = 0

    def extend(self, events: list[TraceEvent], names: _Names, threads: Codes) -> None:
        self.name.extend([names.setdefault(e.name, len(names)) for e in events])  # a call is never a marker
        self.thread.extend([threads[e.pid, e.tid] for e in events])
        self.correlation.extend([(e.args.correlation or 0) if e.args else 0 for e in events])
        self.start.extend([e.ts for e in events])
        self.duration.extend([e.dur for e in events])

    def take(self) -> RuntimeCalls:
        start, end, readable = _take_times(self.start, self.duration)
        self.unreadable = int((~readable).sum())
        return RuntimeCalls(
            name=self.name.take()[readable],
            thread=self.thread.take()[readable],
            start_ns=start[readable],
            end_ns=end[readable],
            correlation=self.correlation.take()[readable],
        )


class _RecordColumns:
    """Device records."""

    def __init__(self) -> None:
        self.start, self.duration = TimeColumn(), TimeColumn()
        self.correlation, self.external_id = IntColumn(), IntColumn()
        self.kind, self.launch_name = TextColumn(), TextColumn()
        self.device, self.stream, self.bytes = CountColumn(), CountColumn(), CountColumn()
        self.grid, self.block = TextColumn(_extent), TextColumn(_extent)
        self.unreadable = 0

    def extend(self, events: list[TraceEvent], kind: LaunchKind) -> None:
        args = [e.args or _NO_ARGS for e in events]
        self.start.extend([e.ts for e in events])
        self.duration.extend([e.dur for e in events])
        self.correlation.extend([a.correlation or 0 for a in args])
        self.external_id.extend([a.external_id or 0 for a in args])
        self.kind.extend([kind.value] * len(events))
        self.launch_name.extend([e.name or None for e in events])
        self.device.extend([a.device for a in args])
        self.stream.extend([a.stream for a in args])
        self.bytes.extend([a.bytes for a in args])
        self.grid.extend([a.grid for a in args])
        self.block.extend([a.block for a in args])

    def take(self) -> DeviceRecords:
        start, start_readable = self.start.take()
        duration, duration_readable = self.duration.take()
        readable = start_readable & duration_readable
        self.unreadable = int((~readable).sum())
        return DeviceRecords(
            start_ns=start[readable],
            duration_ns=duration[readable],
            correlation=self.correlation.take()[readable],
            external_id=self.external_id.take()[readable],
            **{
                name: getattr(self, name).take().filter(pa.array(readable))
                for name in ("kind", "launch_name", "device", "stream", "bytes", "grid", "block")
            },
        )


class _Columns:
    """Turn blocks of events into columns; nothing of a block is kept but its columns."""

    def __init__(self) -> None:
        self.names = _Names()
        self.threads = Codes()
        self.host_ops = _HostColumns()
        self.annotations = _HostColumns()
        self.calls = _CallColumns()
        self.records = _RecordColumns()

    def extend(self, events: list[TraceEvent]) -> None:
        groups: defaultdict[str, list[TraceEvent]] = defaultdict(list)
        for event in events:
            if event.ph == "X":
                groups[event.cat].append(event)
        for category, group in groups.items():
            if category == "cpu_op":
                self.host_ops.extend(group, self.names, self.threads)
            elif category == "user_annotation":
                self.annotations.extend(group, self.names, self.threads)
            elif category in ("cuda_runtime", "cuda_driver"):
                self.calls.extend(group, self.names, self.threads)
            elif category in KIND_OF_CATEGORY:
                self.records.extend(group, KIND_OF_CATEGORY[category])

    def build(self, blocks: TraceBlocks, session: str | None) -> EventColumns:
        host_ops, ranges = self.host_ops.take()
        annotations, annotated = self.annotations.take()
        calls, records = self.calls.take(), self.records.take()
        session, ops, steps, is_foreign = _sort_markers(
            _concatenated(ranges, annotated), self.names, session=session, path=blocks.path
        )
        # A range of another session is not ours: it is a host op like any other.
        foreign = rows_of(ranges, is_foreign[: len(ranges)])
        foreign = replace(foreign, label=np.full(len(foreign), self.names["foreign marker"], np.int32))
        return EventColumns(
            session=session,
            header=blocks.header,
            names=tuple(str(name) for name in self.names),
            thread_ids=tuple(_thread_id(key) for key in self.threads),
            op_markers=ops,
            step_markers=steps,
            profiler_steps=_profiler_steps(annotations, tuple(self.names)),
            host_ops=_concatenated(host_ops, foreign),
            runtime_calls=calls,
            records=records,
            unreadable_events=blocks.unreadable
            + sum(c.unreadable for c in (self.host_ops, self.annotations, self.calls, self.records)),
        )


def _sort_markers(
    markers: HostRanges, names: _Names, *, session: str | None, path: Path
) -> tuple[str | None, HostRanges, HostRanges, Bools]:
    """Return our session, our op markers, our step markers, and which markers are of another session."""
    place = -1 - markers.label
    kind = np.frombuffer(names.marker_kind, np.int64)[place]
    kinds = [str(kind).split("::") for kind in names.marker_kinds]
    if session is None:
        session = _only_session({kinds[k][0] for k in np.unique(kind).tolist()}, path)
    is_op, is_step = (
        np.isin(kind, [code for code, found in enumerate(kinds) if found == [session, what]])
        for what in ("op", "step")
    )
    number = np.frombuffer(names.marker_number, np.int64)[place]
    op_rows = np.flatnonzero(is_op)
    op_rows = op_rows[np.argsort(number[op_rows], kind="stable")]
    repeated = number[op_rows[1:]][np.diff(number[op_rows]) == 0]
    if len(repeated):
        raise TraceError(
            f"{path.name}: the marker of ATen call {repeated[0]} of session {session} appears twice"
        )
    step_rows = np.flatnonzero(is_step)
    step_rows = step_rows[np.argsort(markers.start_ns[step_rows], kind="stable")]
    ops, steps = (replace(rows_of(markers, rows), label=number[rows]) for rows in (op_rows, step_rows))
    return session, ops, steps, ~(is_op | is_step)


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


def _take_times(start: TimeColumn, duration: TimeColumn) -> tuple[Int64s, Int64s, Bools]:
    """Return starts and ends in ns, and where both could be read."""
    start_ns, start_readable = start.take()
    end_ns, duration_readable = duration.take()
    end_ns += start_ns
    return start_ns, end_ns, start_readable & duration_readable


def _concatenated(first: HostRanges, second: HostRanges) -> HostRanges:
    if not len(second):
        return first
    return HostRanges(
        **{
            name: np.concatenate([getattr(first, name), getattr(second, name)])
            for name in HostRanges.__slots__
        }
    )


def _extent(size: tuple[int, int, int]) -> str:
    return f"{size[0]},{size[1]},{size[2]}"


def _thread_id(key: object) -> int | None:
    thread = key[1] if isinstance(key, tuple) else None
    return thread if isinstance(thread, int) else None
