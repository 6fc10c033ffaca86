"""The work of an import grows with the trace and no faster, and no event outlives its block: counted, not timed."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
from synthetic_trace import SyntheticTrace

from tlk_tracking.attribution.annotate import import_trace
from tlk_tracking.attribution.kineto.kineto_events import read_trace
from tlk_tracking.attribution.kineto.trace_blocks import TraceBlocks

EVENTS_OF_A_CALL = 5
SMALL, MIDDLE, LARGE = 1200, 2400, 4800


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Traces of one step with so many ATen calls, each of which launches a kernel."""
    written = {}
    for calls in (SMALL, MIDDLE, LARGE):
        trace = SyntheticTrace()
        trace.step(0, 0, calls * 10)
        for number in range(calls):
            at = number * 10
            trace.host("aten::mm", at + 1, at + 8, external_id=2 * number + 1)
            trace.host("aten::empty", at + 1, at + 2, external_id=2 * number + 2)
            trace.op(number, at + 2, at + 7)
            trace.call(number + 1, at + 3)
            trace.record(number + 1, at + 5, duration=3, external_id=2 * number + 1)
        written[calls] = trace.write(tmp_path_factory.mktemp(f"of_{calls}"))
    import_trace(written[SMALL])  # loads what is loaded lazily, so that it is not counted below
    return written


def _counted_calls(action: Callable[[], object]) -> int:
    """Return how many functions the action calls, Python's and C's."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


def _peak_bytes(action: Callable[[], object]) -> int:
    gc.collect()
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_twice_the_events_are_twice_the_calls(traces: dict[int, Path]) -> None:
    small, middle, large = (_counted_calls(lambda path=path: import_trace(path)) for path in traces.values())
    assert large - middle <= 2.05 * (middle - small)


def test_an_event_costs_few_calls(traces: dict[int, Path]) -> None:
    small, large = (_counted_calls(lambda n=n: import_trace(traces[n])) for n in (SMALL, LARGE))
    # One of five events is a marker, whose name is parsed; the others are taken in handfuls.
    assert large - small <= 3 * (LARGE - SMALL) * EVENTS_OF_A_CALL


def test_each_byte_is_read_once_and_each_event_decoded_once(traces: dict[int, Path]) -> None:
    blocks = TraceBlocks(traces[LARGE])
    events = sum(len(block) for block in blocks)
    assert (blocks.bytes_read, events) == (traces[LARGE].stat().st_size, LARGE * EVENTS_OF_A_CALL + 1)


def test_what_is_read_holds_no_object_of_an_event(traces: dict[int, Path]) -> None:
    held = []
    for calls in (SMALL, LARGE):
        gc.collect()
        before = sys.getallocatedblocks()
        columns = read_trace(traces[calls])
        gc.collect()
        held.append(sys.getallocatedblocks() - before)
        assert len(columns.op_markers) == calls
        del columns
    assert abs(held[1] - held[0]) < LARGE - SMALL


def test_memory_grows_by_the_columns_alone(traces: dict[int, Path]) -> None:
    middle, large = (_peak_bytes(lambda n=n: read_trace(traces[n])) for n in (MIDDLE, LARGE))
    # Some 20 bytes a range, 60 a record and twice that while columns are taken; a decoded event is over 500.
    assert large - middle <= 120 * (LARGE - MIDDLE) * EVENTS_OF_A_CALL
