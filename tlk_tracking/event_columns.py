"""What is read of a Kineto trace, as columns: ranges on host threads, runtime calls, device records."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from tlk_tracking.growing_columns import Bools, Int64s, Ints
from tlk_tracking.records import MARKER_PREFIX
from tlk_tracking.trace_blocks import TraceHeader

# At millions of rows each temporary column would count: long columns are worked on in slices.
_ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRanges:
    """Ranges of one kind on host threads: equal-length columns, one row a range.

    `label` is an op marker's sequence, a step bracket's step, or an index into `EventColumns.names`;
    `external_id` is 0 where Kineto gave none.
    """

    label: Ints
    thread: Ints
    start_ns: Int64s
    end_ns: Int64s
    external_id: Ints

    def __len__(self) -> int:
        return len(self.label)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeCalls:
    """CUDA runtime and driver API calls: equal-length columns; `correlation` is 0 where there is none."""

    name: Ints
    thread: Ints
    start_ns: Int64s
    end_ns: Int64s
    correlation: Ints

    def __len__(self) -> int:
        return len(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRecords:
    """Kernels, copies and sets on devices: equal-length columns; ids are 0 where there is none.

    The Arrow arrays are passed through to the launch table, null where Kineto said nothing.
    """

    start_ns: Int64s
    duration_ns: Int64s
    correlation: Ints
    external_id: Ints
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


def without_idle_host_ops(events: EventColumns) -> EventColumns:
    """Leave out the host ops that no rule asks for: three of four, and most of the memory of a long trace.

    Asked for are those in which a runtime call starts, those that a record's external id names, and ranges of
    ours. A trace without our brackets keeps all of them: they are its calls, or say where it begins and ends.
    """
    if events.session is None or not len(events.step_markers):
        return events
    ops, names = events.host_ops, events.names
    call_starts = np.append(np.sort(events.runtime_calls.start_ns), np.iinfo(np.int64).max)
    named = np.append(np.unique(events.records.external_id), np.iinfo(np.int64).max)
    is_ours = np.array([name.startswith(MARKER_PREFIX) for name in names], bool)
    kept = np.zeros(len(ops), bool)
    for begin in range(0, len(ops), _ROWS_AT_ONCE):
        rows = slice(begin, begin + _ROWS_AT_ONCE)
        next_call = call_starts[np.searchsorted(call_starts, ops.start_ns[rows])]
        external_id = ops.external_id[rows]
        kept[rows] = (
            (next_call < ops.end_ns[rows])
            | (named[np.searchsorted(named, external_id)] == external_id)
            | is_ours[ops.label[rows]]
        )
    return replace(events, host_ops=rows_of(ops, kept))


def rows_of(ranges: HostRanges, index: Bools | Int64s) -> HostRanges:
    """Return the chosen rows, in the order of `index`."""
    return HostRanges(**{name: getattr(ranges, name)[index] for name in HostRanges.__slots__})
