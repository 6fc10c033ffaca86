"""Columns that grow block by block and are then taken, so that nothing is held twice (values -> arrays)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Int64s = npt.NDArray[np.int64]
Ints = npt.NDArray[np.signedinteger[Any]]
Bools = npt.NDArray[np.bool_]

# |ns| beyond this cannot be told from an overflow; Kineto's clocks stay far below.
MAX_TIME_US = 2.0**61 / 1000
ROWS_AT_ONCE = 1 << 16


class Codes(dict[object, int]):
    """Number distinct values in the order they are first seen."""

    def __missing__(self, value: object) -> int:
        code = self[value] = len(self)
        return code


class IntColumn:
    """Integers; four bytes each until one of them needs eight."""

    def __init__(self) -> None:
        self._dtype: type[np.int32 | np.int64] = np.int32
        self._values = bytearray()

    def extend(self, values: list[int]) -> None:
        """Append the values of one block."""
        try:
            self._values += np.array(values, self._dtype).data
        except OverflowError:
            self._values = bytearray(np.frombuffer(self._values, self._dtype).astype(np.int64).data)
            self._dtype = np.int64
            self._values += np.array(values, np.int64).data

    def take(self) -> Ints:
        """Return the column and leave it empty."""
        values, self._values = self._values, bytearray()
        return np.frombuffer(values, self._dtype)


class TimeColumn:
    """Times in microseconds as Kineto writes them, None where it wrote none; they become nanoseconds."""

    def __init__(self) -> None:
        self._values = bytearray()

    def extend(self, values: list[float | None]) -> None:
        """Append the values of one block."""
        self._values += np.array(values, np.float64).data

    def take(self) -> tuple[Int64s, Bools]:
        """Return the nanoseconds and which of them could be read, and leave the column empty.

        DESIGN rule 8: round(ts_us * 1000); truncation would make one duration in 140 a nanosecond short.
        """
        microseconds, self._values = np.frombuffer(self._values, np.float64), bytearray()
        readable = np.zeros(len(microseconds), bool)
        nanoseconds = microseconds.view(np.int64)
        for begin in range(0, len(microseconds), ROWS_AT_ONCE):
            rows = slice(begin, begin + ROWS_AT_ONCE)
            readable[rows] = np.abs(microseconds[rows]) < MAX_TIME_US
            nanoseconds[rows] = np.rint(np.where(readable[rows], microseconds[rows], 0) * 1000)
        return nanoseconds, readable


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
            pa.array(codes - 1, mask=codes == 0), pa.array(texts, pa.string())
        )
