"""Say what a run keeps of an annotation besides its files (KernelAnnotation -> metrics, tags)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tlk_tracking.analysis.metrics import metrics
from tlk_tracking.annotation.kernel_annotation import KernelAnnotation
from tlk_tracking.annotation.manifest import Manifest
from tlk_tracking.core.errors import TrackingError
from tlk_tracking.core.gaps import Bound
from tlk_tracking.core.records import Availability

METRIC_PREFIX = "kernel_telemetry/"
TAG_PREFIX = "tlk."
LOWER_BOUND_TAG = "tlk.lower_bound"
REASONS_TAG = "tlk.lower_bound_reasons"
AVAILABILITY_TAG = "tlk.availability"
SCHEMA_VERSION_TAG = "tlk.schema_version"
RECORDING_RANKS_TAG = "tlk.recording_ranks"
WORLD_SIZE_TAG = "tlk.world_size"
MAX_METRICS = 40
MAX_TAGS = 100  # MLflow refuses a batch with more

_WORST_FIRST = (Availability.UNAVAILABLE, Availability.RECORDED, Availability.EMPTY)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The metrics and the tags of one annotation, by their whole keys."""

    metrics: Mapping[str, float]
    tags: Mapping[str, str]


def record_of(
    annotation: KernelAnnotation, *, files: Collection[str], run_tags: Mapping[str, str]
) -> RunRecord:
    """Return what to write: never a better verdict than the run's own tags give from an earlier window.

    Metrics and the tags of metrics and files are rank 0's; another rank says only whether its annotation is
    a lower bound. Of several ranks each says that, and rank 0 also which ranks were to record.
    Raises TrackingError beyond 40 metrics or 100 tags.
    """
    manifest = annotation.manifest
    if manifest.rank != 0:
        bounds = {f"{LOWER_BOUND_TAG}/rank_{manifest.rank}": manifest.lower_bound}
        return RunRecord(metrics={}, tags=_monotone(bounds, run_tags))
    several = _several_ranks(manifest) if manifest.world_size > 1 else {}
    rows = {f"{METRIC_PREFIX}{row.name}": row for row in metrics(annotation)}
    bounds = {LOWER_BOUND_TAG: manifest.lower_bound}
    bounds |= {f"{LOWER_BOUND_TAG}/{key}": row.bound is not Bound.EXACT for key, row in rows.items()}
    bounds |= {f"{LOWER_BOUND_TAG}/artifact/{name}": manifest.lower_bound for name in files}
    if several:
        bounds[f"{LOWER_BOUND_TAG}/rank_0"] = manifest.lower_bound
    reasons = {*manifest.lower_bound_reasons, *run_tags.get(REASONS_TAG, "").split(",")} - {""}
    availabilities = {str(manifest.availability), run_tags.get(AVAILABILITY_TAG)}
    tags = _monotone(bounds, run_tags) | {
        REASONS_TAG: ",".join(sorted(reasons)),
        AVAILABILITY_TAG: next(str(value) for value in _WORST_FIRST if value in availabilities),
        SCHEMA_VERSION_TAG: str(manifest.schema_version),
        **several,
    }
    if len(rows) > MAX_METRICS or len(tags) > MAX_TAGS:
        raise TrackingError(f"{len(rows)} metrics and {len(tags)} tags are more than one batch may hold")
    return RunRecord(metrics={key: row.value for key, row in rows.items()}, tags=tags)


def _several_ranks(manifest: Manifest) -> dict[str, str]:
    tags = {WORLD_SIZE_TAG: str(manifest.world_size)}
    ranks = manifest.recording_ranks
    if ranks is not None:
        tags[RECORDING_RANKS_TAG] = ranks if ranks == "all" else ",".join(str(rank) for rank in ranks)
    return tags


def _monotone(bounds: Mapping[str, bool], run_tags: Mapping[str, str]) -> dict[str, str]:
    return {key: "true" if bound or run_tags.get(key) == "true" else "false" for key, bound in bounds.items()}
