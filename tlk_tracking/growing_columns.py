"""Columns that grow block by block and are then taken, so that nothing is held twice (events -> arrays)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tlk_tracking.trace_blocks import TraceEvent

Int64s = npt.NDArray[np.int64]
Ints = npt.NDArray[np.signedinteger[Any]]
Bools = npt.NDArray[np.bool_]

# |ns| beyond this cannot be told from an overflow; Kineto's clocks stay far below.
_MAX_TIME_US = 2.0**61 / 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedEvents:
    """The events of a block whose times can be read, and their times in ns."""

    events: list[TraceEvent]
    start_ns: Int64s
    duration_ns: Int64s


def read_times(events: list[TraceEvent]) -> TimedEvents:
    """Read the times of events and leave out those that have none.

    DESIGN rule 8: round(ts_us * 1000); truncation would make one duration in 140 a nanosecond short.
    """
    start = np.array([e.ts for e in events], np.float64)  # None becomes nan
    duration = np.array([e.dur for e in events], np.float64)
    readable = (np.abs(start) < _MAX_TIME_US) & (np.abs(duration) < _MAX_TIME_US)
    if not readable.all():
        events, start, duration = list(compress(events, readable)), start[readable], duration[readable]
    return TimedEvents(
        events=events,
        start_ns=np.rint(start * 1000).astype(np.int64),
        duration_ns=np.rint(duration * 1000).astype(np.int64),
    )


class Codes(dict[object, int]):
    """Number distinct values in the order they are first seen."""

    def __missing__(self, value: object) -> int:
        code = self[value] = len(self)
        return code


class IntColumn:
    """Integers, each in the fewest bytes that hold all of them so far."""

    def __init__(self) -> None:
        self._range: np.iinfo[Any] = np.iinfo(np.int16)  # of whichever width
        self._values = bytearray()

    def extend(self, values: list[int] | Int64s) -> None:
        """Append the values of one block."""
        block = np.asarray(values, np.int64)
        low, high = int(block.min(initial=0)), int(block.max(initial=0))
        if low < self._range.min or high > self._range.max:
            held = np.frombuffer(self._values, self._range.dtype)
            wider = np.iinfo(np.int32)
            self._range = wider if wider.min <= low and high <= wider.max else np.iinfo(np.int64)
            self._values = bytearray(held.astype(self._range.dtype).data)
        self._values += block.astype(self._range.dtype).data

    def take(self) -> Ints:
        """Return the column and leave it empty."""
        values, self._values = self._values, bytearray()
        return np.frombuffer(values, self._range.dtype)


class CountColumn:
    """Integers from 0 on, or nothing; what is below 0 is unknown."""

    def __init__(self) -> None:
        self._blocks = [pa.nulls(0, pa.int64())]

    def extend(self, values: list[int | None]) -> None:
        """Append the values of one block."""
        self._blocks.append(pa.array(values, pa.int64()))

    def take(self) -> pa.Int64Array:
        """Return the column and leave it empty."""
        blocks, self._blocks = self._blocks, [pa.nulls(0, pa.int64())]
        values = pa.concat_arrays(blocks)
        return pc.if_else(pc.less(values, 0), pa.scalar(None, pa.int64()), values)


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
