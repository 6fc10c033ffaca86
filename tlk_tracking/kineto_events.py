"""Read Kineto's Chrome export into typed event columns (trace file -> EventColumns); the only reader of Kineto."""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tlk_tracking.errors import TraceError
from tlk_tracking.records import MARKER_PREFIX, SESSION_PATTERN, LaunchKind
from tlk_tracking.trace_blocks import TraceBlocks, TraceEvent, TraceHeader

Int64s = npt.NDArray[np.int64]

KIND_OF_CATEGORY = {
    "kernel": LaunchKind.KERNEL,
    "gpu_memcpy": LaunchKind.MEMCPY,
    "gpu_memset": LaunchKind.MEMSET,
}
# |ns| beyond this cannot be told from an overflow; Kineto's clocks stay far below.
_MAX_TIME_US = 2.0**62 / 1000
_PROFILER_STEP = re.compile(r"ProfilerStep#(\d{1,18})")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRanges:
    """Ranges of one kind on host threads: equal-length columns, one row a range.

    `label` is an op marker's sequence, a step bracket's step, or an index into `EventColumns.names`;
    `external_id` is 0 where Kineto gave none.
    """

    label: Int64s
    thread: Int64s
    start_ns: Int64s
    end_ns: Int64s
    external_id: Int64s

    def __len__(self) -> int:
        return len(self.label)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeCalls:
    """CUDA runtime and driver API calls: equal-length columns; `correlation` is 0 where there is none."""

    name: Int64s
    thread: Int64s
    start_ns: Int64s
    end_ns: Int64s
    correlation: Int64s

    def __len__(self) -> int:
        return len(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRecords:
    """Kernels, copies and sets on devices: equal-length columns; ids are 0 where there is none.

    The Arrow arrays are passed through to the launch table, null where Kineto said nothing.
    """

    start_ns: Int64s
    duration_ns: Int64s
    correlation: Int64s
    external_id: Int64s
    kind: pa.DictionaryArray
    launch_name: pa.DictionaryArray
    device: pa.Int64Array
    stream: pa.Int64Array
    bytes: pa.Int64Array
    grid: pa.DictionaryArray
    block: pa.DictionaryArray

    def __len__(self) -> int:
        return len(self.start_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class EventColumns:
    """All that is read of one trace.

    Attributes:
        session: id that the trace's own markers carry; None when it has none.
        names: texts that `host_ops.label` and `runtime_calls.name` point to.
        thread_ids: for each `thread` value the thread id in the trace, None when it is not a number.
        op_markers: our ranges around ATen calls, sorted by sequence.
        step_markers: our step brackets, sorted by start; one step may have several.
        profiler_steps: `ProfilerStep#N` ranges of torch's own schedule.
        host_ops: `cpu_op` events other than our own ranges.
        unreadable_events: events of the file that could not be read.
    """

    session: str | None
    header: TraceHeader
    names: tuple[str, ...]
    thread_ids: tuple[int | None, ...]
    op_markers: HostRanges
    step_markers: HostRanges
    profiler_steps: HostRanges
    host_ops: HostRanges
    runtime_calls: RuntimeCalls
    records: DeviceRecords
    unreadable_events: int


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
            columns.take(events)
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


class _Codes(dict[object, int]):
    """Number distinct values in the order they are first seen."""

    def __missing__(self, value: object) -> int:
        code = self[value] = len(self)
        return code


@dataclass(slots=True)
class _Ranges:
    """Columns of host ranges, appended to block by block."""

    label: list[Int64s] = field(default_factory=list)
    thread: list[Int64s] = field(default_factory=list)
    start_ns: list[Int64s] = field(default_factory=list)
    end_ns: list[Int64s] = field(default_factory=list)
    external_id: list[Int64s] = field(default_factory=list)

    def take(self, events: list[TraceEvent], labels: list[int], threads: _Codes) -> None:
        start = _nanoseconds([e.ts for e in events])
        self.label.append(np.array(labels, np.int64))
        self.thread.append(np.array([threads[e.pid, e.tid] for e in events], np.int64))
        self.start_ns.append(start)
        self.end_ns.append(start + _nanoseconds([e.dur for e in events]))
        self.external_id.append(
            np.array([(e.args.external_id or 0) if e.args else 0 for e in events], np.int64)
        )

    def build(self) -> HostRanges:
        return HostRanges(
            **{name: _joined(getattr(self, name)) for name in self.__slots__}  # the same five names
        )


class _Columns:
    """Turn blocks of events into columns; nothing of a block is kept but its columns."""

    def __init__(self) -> None:
        self.names = _Codes()
        self.threads = _Codes()
        self.host_ops = _Ranges()
        self.profiler_steps = _Ranges()
        self.markers = _Ranges()
        self.marker_sessions: list[str] = []
        self.marker_is_op: list[bool] = []
        self.calls: dict[str, list[Int64s]] = {
            n: [] for n in ("name", "thread", "start", "end", "correlation")
        }
        self.record_ids: dict[str, list[Int64s]] = {
            n: [] for n in ("start", "duration", "correlation", "external_id")
        }
        self.record_facts: dict[str, list[object]] = {
            n: [] for n in ("kind", "name", "device", "stream", "bytes", "grid", "block")
        }
        self.unreadable = 0

    def take(self, events: list[TraceEvent]) -> None:
        groups: dict[str, list[TraceEvent]] = {}
        for event in events:
            if event.ph == "X":
                if event.cat in groups:
                    groups[event.cat].append(event)
                else:
                    groups[event.cat] = [event]
        self._take_host([*groups.get("cpu_op", ())], annotations=False)
        self._take_host([*groups.get("user_annotation", ())], annotations=True)
        self._take_calls([*groups.get("cuda_runtime", ()), *groups.get("cuda_driver", ())])
        for category, kind in KIND_OF_CATEGORY.items():
            self._take_records(groups.get(category, []), kind)

    def _timed(self, events: list[TraceEvent]) -> list[TraceEvent]:
        timed = [
            e
            for e in events
            if e.ts is not None
            and e.dur is not None
            and -_MAX_TIME_US < e.ts < _MAX_TIME_US
            and -_MAX_TIME_US < e.dur < _MAX_TIME_US
        ]
        self.unreadable += len(events) - len(timed)
        return timed

    def _take_host(self, events: list[TraceEvent], *, annotations: bool) -> None:
        plain: list[TraceEvent] = []
        markers: list[TraceEvent] = []
        labels: list[int] = []
        for event in self._timed(events):
            marker = _parse_marker(event.name) if event.name.startswith(MARKER_PREFIX) else None
            if marker is None:
                plain.append(event)
            else:
                session, is_op, number = marker
                self.marker_sessions.append(session)
                self.marker_is_op.append(is_op)
                markers.append(event)
                labels.append(number)
        self.markers.take(markers, labels, self.threads)
        if annotations:
            steps = [(e, m) for e in plain if (m := _PROFILER_STEP.fullmatch(e.name))]
            self.profiler_steps.take([e for e, _ in steps], [int(m[1]) for _, m in steps], self.threads)
        else:
            self.host_ops.take(plain, [self.names[e.name] for e in plain], self.threads)

    def _take_calls(self, events: list[TraceEvent]) -> None:
        events = self._timed(events)
        start = _nanoseconds([e.ts for e in events])
        self.calls["name"].append(np.array([self.names[e.name] for e in events], np.int64))
        self.calls["thread"].append(np.array([self.threads[e.pid, e.tid] for e in events], np.int64))
        self.calls["start"].append(start)
        self.calls["end"].append(start + _nanoseconds([e.dur for e in events]))
        self.calls["correlation"].append(
            np.array([(e.args.correlation or 0) if e.args else 0 for e in events], np.int64)
        )

    def _take_records(self, events: list[TraceEvent], kind: LaunchKind) -> None:
        events = self._timed(events)
        args = [e.args for e in events]
        self.record_ids["start"].append(_nanoseconds([e.ts for e in events]))
        self.record_ids["duration"].append(_nanoseconds([e.dur for e in events]))
        for column in ("correlation", "external_id"):
            self.record_ids[column].append(
                np.array([(getattr(a, column) or 0) if a else 0 for a in args], np.int64)
            )
        facts = self.record_facts
        facts["kind"].extend([kind.value] * len(events))
        facts["name"].extend([e.name or None for e in events])
        for column in ("device", "stream", "bytes"):
            facts[column].extend([getattr(a, column) if a else None for a in args])
        facts["grid"].extend([_extent(a.grid) if a else None for a in args])
        facts["block"].extend([_extent(a.block) if a else None for a in args])

    def build(self, blocks: TraceBlocks, session: str | None) -> EventColumns:
        ours = _only_session(self.marker_sessions, blocks.path) if session is None else session
        markers = self.markers.build()
        is_ours = np.array([s == ours for s in self.marker_sessions], bool)
        is_op = np.array(self.marker_is_op, bool)
        # A range of another session is not ours: it is a host op like any other.
        foreign = _rows(markers, ~is_ours)
        foreign = HostRanges(
            **{**_fields(foreign), "label": np.full(len(foreign), self.names["foreign marker"])}
        )
        ops = _rows(markers, is_ours & is_op)
        steps = _rows(markers, is_ours & ~is_op)
        ops = _rows(ops, np.argsort(ops.label, kind="stable"))
        repeated = ops.label[1:][np.diff(ops.label) == 0]
        if len(repeated):
            raise TraceError(
                f"{blocks.path.name}: the marker of ATen call {repeated[0]} of session {ours} appears twice"
            )
        facts = self.record_facts
        return EventColumns(
            session=ours if len(ops) + len(steps) or session is not None else None,
            header=blocks.header,
            names=tuple(str(name) for name in self.names),
            thread_ids=tuple(_thread_id(key) for key in self.threads),
            op_markers=ops,
            step_markers=_rows(steps, np.argsort(steps.start_ns, kind="stable")),
            profiler_steps=self.profiler_steps.build(),
            host_ops=_concatenated(self.host_ops.build(), foreign),
            runtime_calls=RuntimeCalls(
                name=_joined(self.calls["name"]),
                thread=_joined(self.calls["thread"]),
                start_ns=_joined(self.calls["start"]),
                end_ns=_joined(self.calls["end"]),
                correlation=_joined(self.calls["correlation"]),
            ),
            records=DeviceRecords(
                start_ns=_joined(self.record_ids["start"]),
                duration_ns=_joined(self.record_ids["duration"]),
                correlation=_joined(self.record_ids["correlation"]),
                external_id=_joined(self.record_ids["external_id"]),
                kind=_text(facts["kind"]),
                launch_name=_text(facts["name"]),
                device=pa.array(facts["device"], pa.int64()),
                stream=pa.array(facts["stream"], pa.int64()),
                bytes=pa.array(facts["bytes"], pa.int64()),
                grid=_text(facts["grid"]),
                block=_text(facts["block"]),
            ),
            unreadable_events=self.unreadable + blocks.unreadable,
        )


def _parse_marker(name: str) -> tuple[str, bool, int] | None:
    parts = name.split("::")
    if len(parts) != 4 or not SESSION_PATTERN.fullmatch(parts[1]) or parts[2] not in ("op", "step"):
        return None
    number = parts[3]
    if not (number.isascii() and number.isdigit() and len(number) < 19):
        return None
    return parts[1], parts[2] == "op", int(number)


def _only_session(sessions: list[str], path: Path) -> str | None:
    counted = Counter(sessions)
    if len(counted) > 1:
        raise TraceError(
            f"{path.name} holds markers of the sessions {', '.join(sorted(counted))}; "
            "give the ops file of the one to import"
        )
    return next(iter(counted), None)


def _nanoseconds(microseconds: list[float | None]) -> Int64s:
    # DESIGN rule 8: round(ts_us * 1000); truncation would make one duration in 140 a nanosecond short.
    return np.rint(np.array(microseconds, np.float64) * 1000).astype(np.int64)


def _joined(parts: list[Int64s]) -> Int64s:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _fields(ranges: HostRanges) -> dict[str, Int64s]:
    return {name: getattr(ranges, name) for name in HostRanges.__slots__}


def _rows(ranges: HostRanges, index: npt.NDArray[np.bool_] | Int64s) -> HostRanges:
    return HostRanges(**{name: column[index] for name, column in _fields(ranges).items()})


def _concatenated(first: HostRanges, second: HostRanges) -> HostRanges:
    if not len(second):
        return first
    return HostRanges(
        **{name: np.concatenate([column, getattr(second, name)]) for name, column in _fields(first).items()}
    )


def _text(values: list[object]) -> pa.DictionaryArray:
    return pa.array(values, pa.string()).dictionary_encode()


def _extent(size: tuple[int, int, int] | None) -> str | None:
    return None if size is None else f"{size[0]},{size[1]},{size[2]}"


def _thread_id(key: object) -> int | None:
    thread = key[1] if isinstance(key, tuple) else None
    return thread if isinstance(thread, int) else None
