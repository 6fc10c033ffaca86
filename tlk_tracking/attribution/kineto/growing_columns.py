"""Columns that grow block by block and are then taken, so that nothing is held twice (events -> arrays)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
import pyarrow as pa

from tlk_tracking.annotation.schemas import MAX_NAME_LENGTH
from tlk_tracking.attribution.kineto.event_columns import (
    Bools,
    DeviceRecords,
    HostRanges,
    Int64s,
    Ints,
    RuntimeCalls,
)
from tlk_tracking.attribution.kineto.trace_blocks import EventArgs, TraceEvent
from tlk_tracking.core.records import LaunchKind

# |ns| beyond this cannot be told from an overflow; Kineto's clocks stay far below.
_MAX_TIME_US = 2.0**61 / 1000
_ROWS_AT_ONCE = 1 << 16
_NO_ARGS = EventArgs()


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedEvents:
    """The events of a block whose times can be read, and their times in ns."""

    events: list[TraceEvent]
    start_ns: Int64s
    duration_ns: Int64s


def read_times(events: list[TraceEvent]) -> TimedEvents:
    """Read the times of events and leave out those that have none.

    A time is rounded to the nearest ns; truncation would make one duration in 140 a nanosecond short.
    """
    times = np.array([[e.ts for e in events], [e.dur for e in events]], np.float64)  # None becomes nan
    is_time = np.abs(times) < _MAX_TIME_US
    if not is_time.all():
        readable: Bools = np.asarray(is_time.all(axis=0))
        events, times = list(compress(events, readable)), times[:, readable]
    start_ns, duration_ns = np.rint(times * 1000).astype(np.int64)
    return TimedEvents(events=events, start_ns=start_ns, duration_ns=duration_ns)


def cut_name(name: str) -> str:
    """Return a name at most as long as an annotation may hold."""
    return name[:MAX_NAME_LENGTH]


class Codes(dict[object, int]):
    """Number distinct values in the order they are first seen."""

    def __missing__(self, value: object) -> int:
        code = self[value] = len(self)
        return code


class IntColumn:
    """Integers, each in the fewest bytes that hold all of them so far."""

    def __init__(self) -> None:
        self._dtype: np.dtype[np.signedinteger[Any]] = np.dtype(np.int16)  # of whichever width
        self._values = bytearray()

    def extend(self, values: list[int] | Int64s) -> None:
        """Append the values of one block."""
        block = np.asarray(values, np.int64)
        short = block.astype(self._dtype)
        while (short != block).any():
            held = np.frombuffer(self._values, self._dtype)
            self._dtype = np.dtype(np.int32 if self._dtype == np.int16 else np.int64)
            self._values = bytearray(held.astype(self._dtype).data)
            short = block.astype(self._dtype)
        self._values += short.data

    def take(self) -> Ints:
        """Return the column and leave it empty."""
        values, self._values = self._values, bytearray()
        return np.frombuffer(values, self._dtype)


class CountColumn(IntColumn):
    """Integers from 0 on, or nothing; what is below 0 is unknown."""

    def extend_known(self, values: list[int | None]) -> None:
        """Append the values of one block."""
        self.extend([-1 if value is None else value for value in values])

    def take_known(self) -> pa.Int64Array:
        """Return the column with nulls and leave it empty."""
        values = self.take()
        return pa.array(values.astype(np.int64), mask=values < 0)


class TextColumn:
    """Values that repeat, kept once each and written by `text` at the end; None is null."""

    def __init__(self, text: Callable[[Any], str] = str) -> None:  # takes whatever values were appended
        self._text = text
        self._codes = Codes({None: 0})
        self._column = IntColumn()

    def extend(self, values: list[Any]) -> None:  # any hashable values
        """Append the values of one block."""
        codes = self._codes
        self._column.extend([codes[value] for value in values])

    def take(self) -> pa.DictionaryArray:
        """Return the column as texts and leave it empty."""
        codes = self._column.take()
        texts = [self._text(value) for value in self._codes if value is not None]
        return pa.DictionaryArray.from_arrays(
            pa.array(codes.astype(np.int32) - 1, mask=codes == 0), pa.array(texts, pa.string())
        )


class RangeColumns:
    """Ranges on host threads."""

    def __init__(self) -> None:
        self._columns = {
            name: IntColumn() for name in ("label", "thread", "start_ns", "duration_ns", "external_id")
        }

    def extend(self, block: dict[str, Int64s]) -> None:
        """Append the ranges of one block: columns by name."""
        for name, column in self._columns.items():
            column.extend(block[name])

    def take(self) -> HostRanges:
        """Return the ranges and leave the columns empty."""
        return _ranges({name: column.take() for name, column in self._columns.items()})

    def take_where(self, chosen: Callable[[HostRanges], Bools]) -> HostRanges:
        """Return the chosen ranges and leave the columns empty; of millions no column is held twice."""
        columns = {name: column.take() for name, column in self._columns.items()}
        length = len(columns["label"])
        rows = np.zeros(length, bool)
        for begin in range(0, length, _ROWS_AT_ONCE):
            some = slice(begin, begin + _ROWS_AT_ONCE)
            rows[some] = chosen(_ranges({name: column[some] for name, column in columns.items()}))
        for name in columns:
            columns[name] = columns[name][rows]
        return _ranges(columns)


class CallColumns:
    """CUDA runtime and driver calls."""

    def __init__(self) -> None:
        self.name, self.thread, self.correlation = IntColumn(), IntColumn(), IntColumn()
        self.start, self.duration = IntColumn(), IntColumn()

    def extend(self, timed: TimedEvents, names: Codes, threads: Codes) -> None:
        """Append the calls of one block."""
        events = timed.events
        self.name.extend([names.setdefault(e.name, len(names)) for e in events])  # a call is never a marker
        self.thread.extend([threads[e.pid, e.tid] for e in events])
        self.correlation.extend([(e.args.correlation or 0) if e.args else 0 for e in events])
        self.start.extend(timed.start_ns)
        self.duration.extend(timed.duration_ns)

    def take(self) -> RuntimeCalls:
        """Return the calls and leave the columns empty."""
        start = self.start.take().astype(np.int64, copy=False)
        return RuntimeCalls(
            name=self.name.take(),
            thread=self.thread.take(),
            start_ns=start,
            end_ns=start + self.duration.take(),
            correlation=self.correlation.take(),
        )


class RecordColumns:
    """Device records."""

    def __init__(self) -> None:
        self.start, self.duration = IntColumn(), IntColumn()
        self.correlation, self.external_id = IntColumn(), IntColumn()
        self.kind, self.launch_name = TextColumn(), TextColumn(cut_name)
        self.device, self.stream, self.bytes = CountColumn(), CountColumn(), CountColumn()
        self.grid, self.block = TextColumn(_extent), TextColumn(_extent)

    def extend(self, timed: TimedEvents, kind: LaunchKind) -> None:
        """Append the records of one block, all of one kind."""
        events = timed.events
        args = [e.args or _NO_ARGS for e in events]
        self.start.extend(timed.start_ns)
        self.duration.extend(timed.duration_ns)
        self.correlation.extend([a.correlation or 0 for a in args])
        self.external_id.extend([a.external_id or 0 for a in args])
        self.kind.extend([kind] * len(events))
        self.launch_name.extend([e.name or None for e in events])
        self.device.extend_known([a.device for a in args])
        self.stream.extend_known([a.stream for a in args])
        self.bytes.extend_known([a.bytes for a in args])
        self.grid.extend([a.grid for a in args])
        self.block.extend([a.block for a in args])

    def take(self) -> DeviceRecords:
        """Return the records and leave the columns empty."""
        return DeviceRecords(
            start_ns=self.start.take().astype(np.int64, copy=False),
            duration_ns=self.duration.take().astype(np.int64, copy=False),
            correlation=self.correlation.take(),
            external_id=self.external_id.take(),
            kind=self.kind.take(),
            launch_name=self.launch_name.take(),
            device=self.device.take_known(),
            stream=self.stream.take_known(),
            bytes=self.bytes.take_known(),
            grid=self.grid.take(),
            block=self.block.take(),
        )


def _ranges(columns: dict[str, Ints]) -> HostRanges:
    start = columns["start_ns"].astype(np.int64, copy=False)
    return HostRanges(
        label=columns["label"],
        thread=columns["thread"],
        start_ns=start,
        end_ns=start + columns["duration_ns"],
        external_id=columns["external_id"],
    )


def _extent(size: tuple[int, int, int]) -> str:
    return f"{size[0]},{size[1]},{size[2]}"
