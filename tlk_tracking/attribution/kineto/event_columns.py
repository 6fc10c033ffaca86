"""What is read of a Kineto trace, as columns: ranges on host threads, runtime calls, device records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tlk_tracking.attribution.kineto.trace_blocks import TraceHeader

Int64s = npt.NDArray[np.int64]
Ints = npt.NDArray[np.signedinteger[Any]]  # of any width
Bools = npt.NDArray[np.bool_]


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
        steps_renumbered: their numbers are not those of the trace, which has the same number for several.
        host_ops: `cpu_op` events other than our own ranges; where we have step brackets only those that a rule
            can ask for (see `kineto_events`).
        unreadable_events: events of the file that could not be read.
    """

    session: str | None
    header: TraceHeader
    names: tuple[str, ...]
    thread_ids: tuple[int | None, ...]
    op_markers: HostRanges
    step_markers: HostRanges
    profiler_steps: HostRanges
    steps_renumbered: bool
    host_ops: HostRanges
    runtime_calls: RuntimeCalls
    records: DeviceRecords
    unreadable_events: int


def rows_of(ranges: HostRanges, index: Bools | Int64s) -> HostRanges:
    """Return the chosen rows, in the order of `index`."""
    return HostRanges(**{name: getattr(ranges, name)[index] for name in HostRanges.__slots__})
