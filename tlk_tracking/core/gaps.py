"""What a window could not see, and which numbers that makes lower bounds (reasons -> Bound)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Bound(StrEnum):
    """What a number says of the truth: equal to it, at most it, at least it, or neither."""

    EXACT = "exact"
    LOWER = "lower"
    UPPER = "upper"
    UNKNOWN = "unknown"


class GapReason(StrEnum):
    """Why a window could not see something. The first five are reasons of one launch, in the order they apply."""

    RECORD_WITHOUT_LAUNCH = "record_without_launch"
    GRAPH_REPLAY = "graph_replay"
    FOREIGN_THREAD = "foreign_thread"
    MODE_PAUSED_INTERIOR = "mode_paused_interior"
    LAUNCHED_OUTSIDE_DISPATCHER = "launched_outside_dispatcher"
    LAUNCH_WITHOUT_RECORD = "launch_without_record"
    INVALID_TIME = "invalid_time"
    LINK_DISAGREEMENT = "link_disagreement"
    MODE_DISPLACED = "mode_displaced"
    CAPTURE_RAISED = "capture_raised"
    WINDOW_TRUNCATED = "window_truncated"
    WINDOW_SKIPPED = "window_skipped"
    UNREADABLE_EVENT = "unreadable_event"
    NO_DEVICE_EVIDENCE = "no_device_evidence"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Something that a window could not see: how often, and the evidence in one short sentence."""

    reason: GapReason
    count: int
    evidence: str


LAUNCH_GAPS = (
    GapReason.RECORD_WITHOUT_LAUNCH,
    GapReason.GRAPH_REPLAY,
    GapReason.FOREIGN_THREAD,
    GapReason.MODE_PAUSED_INTERIOR,
    GapReason.LAUNCHED_OUTSIDE_DISPATCHER,
)

# Which gap makes lower bounds of what.
LOSES_ANYTHING = frozenset(
    {
        GapReason.RECORD_WITHOUT_LAUNCH,
        GapReason.MODE_PAUSED_INTERIOR,
        GapReason.LAUNCH_WITHOUT_RECORD,
        GapReason.MODE_DISPLACED,
        GapReason.CAPTURE_RAISED,
        GapReason.WINDOW_TRUNCATED,
        GapReason.WINDOW_SKIPPED,
        GapReason.UNREADABLE_EVENT,
        GapReason.NO_DEVICE_EVIDENCE,
    }
)
LOSES_ATTRIBUTION = LOSES_ANYTHING | {
    GapReason.GRAPH_REPLAY,
    GapReason.FOREIGN_THREAD,
    GapReason.LAUNCHED_OUTSIDE_DISPATCHER,
    GapReason.LINK_DISAGREEMENT,
}
LOSES_CALLS = LOSES_ANYTHING | {GapReason.FOREIGN_THREAD}
LOSES_TIME = LOSES_ANYTHING | {GapReason.INVALID_TIME}


def bound_of(lossy: frozenset[GapReason], reasons: Iterable[GapReason]) -> Bound:
    """Return `lower` when one of the reasons makes this kind of number a lower bound, else `exact`."""
    return Bound.LOWER if lossy.intersection(reasons) else Bound.EXACT


def bound_of_unattributed(reasons: Iterable[GapReason]) -> Bound:
    """Return the bound of a count of launches without an ATen call.

    Lost attribution makes it too high and lost launches too low, so after a loss nothing is known.
    """
    present = frozenset(reasons)
    if present & LOSES_ANYTHING:
        return Bound.UNKNOWN
    return Bound.UPPER if present & LOSES_ATTRIBUTION else Bound.EXACT


def weakest(bounds: Iterable[Bound]) -> Bound:
    """Return the bound of a sum whose parts have these bounds."""
    found = set(bounds) - {Bound.EXACT}
    if not found:
        return Bound.EXACT
    return found.pop() if len(found) == 1 else Bound.UNKNOWN
