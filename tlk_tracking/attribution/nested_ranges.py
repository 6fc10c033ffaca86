"""Find which range holds a time, also where ranges cross (HostRanges + times -> indices)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from tlk_tracking.attribution.kineto.event_columns import EventColumns, HostRanges, Int64s, Ints, rows_of

_Found = TypeVar("_Found")

NONE = -1  # an index into nothing; only in index columns inside the pipeline


def innermost(ranges: HostRanges, *, thread: Ints | None, time_ns: Int64s) -> Int64s:
    """Return for each time the index of the innermost range `[start, end)` that contains it, or -1.

    Innermost is the latest start, then the earliest end. With `thread` only ranges of the same thread count;
    None looks at all threads.
    """
    if not len(ranges) or not len(time_ns):
        return no_index(len(time_ns))
    range_thread = np.zeros(len(ranges), np.int64) if thread is None else ranges.thread
    time_thread = np.zeros(len(time_ns), np.int64) if thread is None else thread
    order = np.lexsort((-ranges.end_ns, ranges.start_ns, range_thread))
    starts, threads = ranges.start_ns[order], range_thread[order]
    position = _last_started(starts, threads, time_ns=time_ns, time_thread=time_thread)
    ends = ranges.end_ns[order]
    over = np.flatnonzero((position != NONE) & (ends[position] <= time_ns))
    if len(over):
        # Where no range reaches into the next, none is open behind one that is over.
        nested = (threads[1:] == threads[:-1]) & (starts[1:] < ends[:-1])
        position[over] = (
            _first_open(threads, ends, position=position[over], time_ns=time_ns[over])
            if nested.any()
            else NONE
        )
    return np.where(position == NONE, NONE, order[position])


def named_ranges(
    events: EventColumns, read: Callable[[str], _Found | None]
) -> tuple[HostRanges, list[_Found]]:
    """Return the host ranges whose name `read` can read, and what it read of each."""
    known = {code: found for code, name in enumerate(events.names) if (found := read(name)) is not None}
    chosen = np.isin(events.host_ops.label, list(known))
    ranges = rows_of(events.host_ops, chosen)
    return ranges, [known[code] for code in ranges.label.tolist()]


def parents(ranges: HostRanges) -> Int64s:
    """Return the indices of ranges that hold another range of their thread."""
    parents: list[int] = []
    order = np.lexsort((-ranges.end_ns, ranges.start_ns, ranges.thread))
    columns = (order, ranges.thread[order], ranges.start_ns[order], ranges.end_ns[order])
    stack: list[tuple[int, int]] = []
    current = None
    for index, thread, start, end in zip(*(column.tolist() for column in columns), strict=True):
        if thread != current:
            current = thread
            stack.clear()
        while stack and stack[-1][1] <= start:
            stack.pop()
        if stack and end <= stack[-1][1]:
            parents.append(stack[-1][0])
        stack.append((index, end))
    return np.array(parents, np.int64)


def no_index(length: int) -> Int64s:
    """Return a column of indices that all lead nowhere."""
    return np.full(length, NONE, np.int64)


def _last_started(starts: Int64s, threads: Ints, *, time_ns: Int64s, time_thread: Ints) -> Int64s:
    """Return for each time the last range of its thread that began by then, or -1 (ranges sorted by both)."""
    ascending = np.sort(starts, kind="stable")

    def keys(thread: Ints, start: Int64s) -> Int64s:
        # One number that sorts by thread, then by start.
        key = np.searchsorted(ascending, start, "right")
        key += thread * np.int64(len(ascending) + 1)
        return key

    position = np.searchsorted(keys(threads, starts), keys(time_thread, time_ns), "right") - 1
    position[(position < 0) | (threads[position] != time_thread)] = NONE
    return position


def _first_open(threads: Ints, ends: Int64s, *, position: Int64s, time_ns: Int64s) -> Int64s:
    """Go from ranges that are over to the nearest range before them that is not, or -1.

    What ends no later than a range that is over is over too, so only the chain of ever later ends is looked at,
    in leaps of powers of two: a chain of a hundred thousand nested ranges is seventeen leaps.
    """
    leaps = [_previous_wider(threads, ends)]
    while (leaps[-1] != NONE).any():
        leap = leaps[-1]
        leaps.append(np.where(leap == NONE, NONE, leap[leap]))
    for leap in reversed(leaps):
        ahead = leap[position]
        position = np.where((ahead != NONE) & (ends[ahead] <= time_ns), ahead, position)
    return leaps[0][position]


def _previous_wider(threads: Ints, ends: Int64s) -> Int64s:
    """For each range the nearest one of its thread before it that ends later, or -1 (ranges sorted by start)."""
    result: list[int] = []
    stack: list[tuple[int, int]] = []
    current = None
    for index, (thread, end) in enumerate(zip(threads.tolist(), ends.tolist(), strict=True)):
        if thread != current:
            current = thread
            stack.clear()
        while stack and stack[-1][1] <= end:
            stack.pop()
        result.append(stack[-1][0] if stack else NONE)
        stack.append((index, end))
    return np.array(result, np.int64)
