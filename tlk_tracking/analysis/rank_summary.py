"""Put the ranks of one window side by side (annotations of one window -> RankSummary)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tlk_tracking.analysis.rank_work import RankPart, is_communication, part_rank
from tlk_tracking.annotation.kernel_annotation import KernelAnnotation
from tlk_tracking.annotation.manifest import Manifest
from tlk_tracking.core.errors import ComparisonError
from tlk_tracking.core.gaps import Bound, weakest
from tlk_tracking.core.places import window_folder
from tlk_tracking.core.records import RecordingRanks, WindowSource

MEASURES = ("launches", "device_time_ms")
TABLES = ("total", "phase", "operator", "kernel", "communication")
_ROWS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """One number of all ranks, a complete step; a rank without such a row has 0.

    Attributes:
        table: one of TABLES; `kernel` is without communication.
        key: the phase, operator or kernel; None for the total.
        largest_on: the rank with the largest value; None where all have the same.
    """

    table: str
    key: str | None
    measure: str
    minimum: float
    median: float
    maximum: float
    largest_on: int | None
    bound: Bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """Device time of an operator or of a compute kernel on one rank, and the median of all ranks, a complete step."""

    table: str
    key: str
    time_ms: float
    median_ms: float

    @property
    def excess_ms(self) -> float:
        """How much more than the median it is."""
        return self.time_ms - self.median_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowest:
    """The rank that computes longest; the others wait for it in their communication.

    Attributes:
        excess_ms: how much longer than the median rank, a complete step.
        steps_slowest: in how many of the `steps` that all ranks recorded it was the slowest too.
        waits_least: the rank with the least time in communication: it comes last to where all ranks meet. That it is
            another one means that its host, not its device, is late.
        rows: the operators and kernels that take it longer than the median rank, most first; they overlap.
    """

    rank: int
    compute_time_ms: float
    excess_ms: float
    steps_slowest: int
    steps: int
    waits_least: int
    rows: tuple[Excess, ...]
    bound: Bound


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """All ranks of one window.

    Attributes:
        ranks: those that are there, ascending.
        missing: those that were to record the window and are not there.
        spread: by table and falling range of values.
        slowest: None with one rank, or where it is not known which time is communication.
    """

    first_step: int
    world_size: int
    ranks: tuple[RankPart, ...]
    missing: tuple[int, ...]
    spread: tuple[Spread, ...]
    slowest: Slowest | None


def same_window(annotations: Iterable[KernelAnnotation], one: KernelAnnotation) -> list[KernelAnnotation]:
    """Return the annotations of the window of `one`.

    Ranks of a fit share the session; imported traces may have one each, and then the first step must do.
    """
    window = one.manifest.window.first_step
    at_step = [each for each in annotations if each.manifest.window.first_step == window]
    ranks = {each.manifest.rank for each in at_step}
    if one.manifest.source is WindowSource.IMPORT and len(ranks) == len(at_step):
        return at_step
    return [each for each in at_step if each.manifest.session == one.manifest.session]


def missing_annotations(annotations: Iterable[KernelAnnotation]) -> tuple[str, ...]:
    """Return `window_…/rank_…` of every annotation that others of its window say was to be recorded."""
    windows: dict[tuple[int, str], list[Manifest]] = {}
    for annotation in annotations:
        manifest = annotation.manifest
        windows.setdefault((manifest.window.first_step, manifest.session), []).append(manifest)
    return tuple(
        window_folder(first_step, session, rank)
        for (first_step, session), manifests in sorted(windows.items(), key=lambda item: item[0])
        for rank in missing_ranks(
            manifests[0].recording_ranks,
            world_size=manifests[0].world_size,
            there={each.rank for each in manifests},
        )
    )


def missing_ranks(
    chosen: RecordingRanks | None, *, world_size: int, there: Collection[int]
) -> tuple[int, ...]:
    """Return the ranks that should have recorded a window and are not `there`; none where that is unknown."""
    if chosen is None:
        return ()
    expected = range(world_size) if chosen == "all" else chosen
    return tuple(rank for rank in expected if rank not in there)


def summarize_ranks(annotations: Iterable[KernelAnnotation]) -> RankSummary:
    """Summarize the ranks of one window; each annotation is read once and not kept.

    Raises:
        ComparisonError: there is no annotation, a rank comes twice, or they are of several windows.
    """
    parts: list[RankPart] = []
    chosen, world_size, first_steps = None, 1, set()
    for annotation in annotations:
        manifest = annotation.manifest
        parts.append(part_rank(annotation))
        chosen = manifest.recording_ranks if chosen is None else chosen
        world_size = max(world_size, manifest.world_size)
        first_steps.add(manifest.window.first_step)
    parts.sort(key=lambda part: part.rank)
    there = [part.rank for part in parts]
    if len(first_steps) != 1 or len(set(there)) != len(there):
        raise ComparisonError(
            f"the ranks {there} of the windows {sorted(first_steps)} are not the ranks of one window"
        )
    counted = [part for part in parts if part.launches is not None]
    spread = _spread(counted)
    return RankSummary(
        first_step=first_steps.pop(),
        world_size=world_size,
        ranks=tuple(parts),
        missing=missing_ranks(chosen, world_size=world_size, there=set(there)),
        spread=spread,
        slowest=_slowest(counted),
    )


def say_missing(summary: RankSummary) -> str | None:
    """Return a sentence about the ranks that are not there; None when all are."""
    if not summary.missing:
        return None
    ranks = ", ".join(str(rank) for rank in summary.missing[:_ROWS])
    more = f" and {len(summary.missing) - _ROWS} more" if len(summary.missing) > _ROWS else ""
    return f"missing: rank {ranks}{more} was to record this window, and its annotation is not there"


def say_slowest(summary: RankSummary) -> str | None:
    """Return a sentence about the slowest rank; None where it is not known."""
    slowest = summary.slowest
    if slowest is None:
        return None
    text = (
        f"rank {slowest.rank} computes longest, {slowest.excess_ms:,.4g} ms a step more than the median rank "
        f"({slowest.steps_slowest} of {slowest.steps} steps)"
    )
    if slowest.waits_least != slowest.rank:
        text += f"; rank {slowest.waits_least} waits least in communication: its host comes last"
    return text


def _spread(parts: Sequence[RankPart]) -> tuple[Spread, ...]:
    if not parts:
        return ()
    ranks = [part.rank for part in parts]
    values: dict[tuple[str, str | None], npt.NDArray[np.float64]] = {
        ("total", None): np.array([[part.launches, part.device_time_ms] for part in parts])
    }
    for place, part in enumerate(parts):
        for key, cell in part.cells.items():
            values.setdefault(key, np.zeros((len(parts), len(MEASURES))))[place] = cell
    bounds = {
        (table, measure): weakest(part.bound(table, time=measure == "device_time_ms") for part in parts)
        for table in TABLES
        for measure in MEASURES
    }
    rows = [
        Spread(
            table=table,
            key=key,
            measure=measure,
            minimum=float(column.min()),
            median=float(np.median(column)),
            maximum=float(column.max()),
            largest_on=None if column.min() == column.max() else ranks[int(column.argmax())],
            bound=bounds[table, measure],
        )
        for (table, key), found in values.items()
        for measure, column in zip(MEASURES, found.T, strict=True)
    ]
    return tuple(
        sorted(
            rows,
            key=lambda row: (
                TABLES.index(row.table),
                MEASURES.index(row.measure),
                -(row.maximum - row.minimum),
                row.key or "",
            ),
        )
    )


def _slowest(parts: Sequence[RankPart]) -> Slowest | None:
    """Find the rank with most device time outside communication: who waits for it communicates longer."""
    times = {part.rank: part.compute_time_ms for part in parts if part.compute_time_ms is not None}
    if len(times) < 2 or any(part.communication is None for part in parts):
        return None
    own = max(parts, key=lambda part: times.get(part.rank, -1.0))
    common = set.intersection(*(set(part.compute_ms) for part in parts if part.compute_ms))
    slowest_by_step = [
        max((part for part in parts if part.compute_ms), key=lambda part: part.compute_ms[step]).rank
        for step in sorted(common)
    ]
    return Slowest(
        rank=own.rank,
        compute_time_ms=times[own.rank],
        excess_ms=times[own.rank] - float(np.median(list(times.values()))),
        steps_slowest=slowest_by_step.count(own.rank),
        steps=len(slowest_by_step),
        waits_least=min(
            parts, key=lambda part: part.communication.time_ms if part.communication else 0.0
        ).rank,
        rows=_excesses(own, parts),
        bound=weakest(part.bound("compute", time=True) for part in parts),
    )


def _excesses(own: RankPart, parts: Sequence[RankPart]) -> tuple[Excess, ...]:
    found = []
    for (table, key), (_, time_ms) in own.cells.items():
        if table == "kernel" or (table == "operator" and not is_communication(key)):
            median = float(np.median([part.cells.get((table, key), (0.0, 0.0))[1] for part in parts]))
            if time_ms > median:
                found.append(Excess(table=table, key=key, time_ms=time_ms, median_ms=median))
    return tuple(sorted(found, key=lambda row: (-row.excess_ms, row.table, row.key))[:_ROWS])
