"""Say what a run holds of its windows and ranks, and what it lacks (annotations of a run -> RunTelemetry)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from tlk_tracking.analysis.rank_summary import missing_ranks
from tlk_tracking.annotation.kernel_annotation import KernelAnnotation
from tlk_tracking.core.gaps import GapReason
from tlk_tracking.core.places import ARTIFACT_ROOT


@dataclass(frozen=True, slots=True, kw_only=True)
class RunWindow:
    """One window of a run: the annotation of each rank that sent one, by rank."""

    first_step: int
    session: str
    ranks: Mapping[int, KernelAnnotation]

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """The ranks that were to record this window and have no whole annotation in the run."""
        manifest = next(iter(self.ranks.values())).manifest
        return missing_ranks(manifest.recording_ranks, world_size=manifest.world_size, there=self.ranks)


class RankGapReason(StrEnum):
    """Why a run has not all that a rank was to record."""

    NOT_SENT = "not_sent"
    UPLOAD_INCOMPLETE = "upload_incomplete"
    CAPTURE_RAISED = "capture_raised"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGap:
    """A rank of which a window of the run lacks something. `window` is the window's folder."""

    window: str
    rank: int
    reason: RankGapReason


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTelemetry:
    """The kernel telemetry of one MLflow run.

    Attributes:
        windows: by first step.
        incomplete: artifact folders without a manifest, since their upload has not ended.
        metrics: the last value of each metric of this package, by its whole key.
        tags: the tags of this package, by their whole key.
    """

    run_id: str
    run_name: str | None
    windows: tuple[RunWindow, ...]
    incomplete: tuple[str, ...]
    metrics: Mapping[str, float]
    tags: Mapping[str, str]

    @property
    def annotations(self) -> tuple[KernelAnnotation, ...]:
        """Every annotation, by window and then by rank."""
        return tuple(annotation for window in self.windows for annotation in window.ranks.values())

    @property
    def rank_gaps(self) -> tuple[RankGap, ...]:
        """What the run lacks of its ranks, by window and rank: never is one silently missing."""
        gaps = []
        for window in self.windows:
            folder = next(iter(window.ranks.values())).folder_name.partition("/")[0]
            for rank in window.missing_ranks:
                begun = f"{ARTIFACT_ROOT}/{folder}/rank_{rank}" in self.incomplete
                reason = RankGapReason.UPLOAD_INCOMPLETE if begun else RankGapReason.NOT_SENT
                gaps.append(RankGap(window=folder, rank=rank, reason=reason))
            for rank, annotation in window.ranks.items():
                if any(gap.reason is GapReason.CAPTURE_RAISED for gap in annotation.manifest.gaps):
                    gaps.append(RankGap(window=folder, rank=rank, reason=RankGapReason.CAPTURE_RAISED))
        return tuple(sorted(gaps, key=lambda gap: (gap.window, gap.rank)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What one search says of a run: its metrics and tags of this package, no artifact."""

    run_id: str
    run_name: str | None
    status: str
    start_time_ms: int | None
    metrics: Mapping[str, float]
    tags: Mapping[str, str]
