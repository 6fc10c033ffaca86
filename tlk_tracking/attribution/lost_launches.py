"""Count the runtime calls that launched and have no device record (EventColumns -> counts)."""

from __future__ import annotations

import re

import numpy as np

from tlk_tracking.attribution.kineto.event_columns import Bools, EventColumns

LAUNCH_APIS = re.compile(
    r"(?:cudaLaunchKernel|cudaLaunchKernelExC|cudaLaunchCooperativeKernel|cudaLaunchCooperativeKernelMultiDevice"
    r"|cudaGraphLaunch|cuLaunchKernel|cuLaunchKernelEx|cuLaunchCooperativeKernel|cuLaunchGrid|cuLaunchGridAsync"
    r"|cuLaunch|cuGraphLaunch)(?:_v\d+)?(?:_ptsz)?"
)
TRANSFER_APIS = re.compile(r"(?:cudaMemcpy|cudaMemset|cuMemcpy|cuMemset)\w*")
BEGIN_CAPTURE_APIS = re.compile(r"(?:cudaStreamBeginCapture|cuStreamBeginCapture)\w*")
END_CAPTURE_APIS = re.compile(r"(?:cudaStreamEndCapture|cuStreamEndCapture)\w*")


def count_lost_launches(events: EventColumns, *, in_bracket: Bools) -> tuple[int, int, int]:
    """Return launching calls in a bracket without a record, empty transfers, and all launching calls.

    A transfer without a record had nothing to copy or set; where launches were lost, it may be lost as well.
    """
    runtime = events.runtime_calls
    if not len(runtime):
        return 0, 0, 0
    has_record = np.isin(runtime.correlation, events.records.correlation) & (runtime.correlation != 0)
    launches = _matches(events, LAUNCH_APIS)[runtime.name]
    transfers = _matches(events, TRANSFER_APIS)[runtime.name]
    known_api = np.zeros(len(events.names), bool)
    known_api[runtime.name[has_record]] = True
    other = known_api[runtime.name] & ~launches & ~transfers
    captured = _under_capture(events) & ~has_record
    missing = in_bracket & ~has_record & ~captured
    lost = int((missing & (launches | other)).sum())
    quiet = int((missing & transfers).sum())
    launching = int(((launches | transfers | other) & ~captured).sum())
    return (lost + quiet, 0, launching) if lost else (0, quiet, launching)


def _under_capture(events: EventColumns) -> Bools:
    """Mark runtime calls that a stream capture of their own thread encloses; they launch nothing yet."""
    runtime = events.runtime_calls
    begins, ends = _matches(events, BEGIN_CAPTURE_APIS), _matches(events, END_CAPTURE_APIS)
    captured = np.zeros(len(runtime), bool)
    if not begins.any():
        return captured
    order = np.lexsort((runtime.start_ns, runtime.thread))
    for rows in np.split(order, np.flatnonzero(np.diff(runtime.thread[order])) + 1):
        depth = np.cumsum(begins[runtime.name[rows]].astype(np.int64) - ends[runtime.name[rows]])
        # A capture that began before the trace ends without a beginning.
        captured[rows] = depth > np.minimum(np.minimum.accumulate(depth), 0)
    return captured


def _matches(events: EventColumns, pattern: re.Pattern[str]) -> Bools:
    return np.array([pattern.fullmatch(name) is not None for name in events.names], bool)
