"""Find the annotations that a TARGET names (folder or runs:/RUN_ID -> annotations)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tlk_tracking.core.errors import AnnotationError, ConfigurationError
from tlk_tracking.core.places import MANIFEST_FILE, find_annotation_folders

if TYPE_CHECKING:
    from tlk_tracking.annotation.kernel_annotation import KernelAnnotation

RUN_PREFIX = "runs:/"


def open_target(target: str, *, tracking_uri: str | None = None) -> tuple[KernelAnnotation, ...]:
    """Return the annotations of a target, by window and rank.

    A folder is one annotation, or holds several at any depth of `window_*/rank_*`.

    Raises:
        AnnotationError: the folder holds no annotation, or a damaged one.
        TrackingError: the run cannot be read or has none.
        ConfigurationError: there is no run id after runs:/.
    """
    if target.startswith(RUN_PREFIX):
        run_id = run_id_of(target)
        from tlk_tracking.cli.server import bounded_requests
        from tlk_tracking.tracking.mlflow_tracking import load_run

        with bounded_requests(tracking_uri):
            return load_run(run_id, tracking_uri).annotations
    from tlk_tracking.annotation.kernel_annotation import load_annotation

    folder = Path(target)
    if not folder.is_dir():
        raise AnnotationError(f"{target} is no folder; give an annotation folder or {RUN_PREFIX}RUN_ID")
    found = find_annotation_folders(folder)
    if not found:
        raise AnnotationError(f"{target} holds no {MANIFEST_FILE}; is it a kernel annotation?")
    return tuple(load_annotation(each) for each in found)


def run_id_of(run: str) -> str:
    """Return the id in RUN_ID or runs:/RUN_ID. Raises ConfigurationError when there is none."""
    run_id = run.removeprefix(RUN_PREFIX).strip("/ ")
    if not run_id:
        raise ConfigurationError(f"{run!r} has no run id; give {RUN_PREFIX}RUN_ID")
    return run_id


def choose(
    annotations: tuple[KernelAnnotation, ...], *, window: int | None, rank: int | None
) -> KernelAnnotation:
    """Return the annotation of that window and rank; None is the last window, the lowest rank.

    Raises:
        AnnotationError: there is none.
    """
    found = [
        a
        for a in annotations
        if (window is None or a.manifest.window.first_step == window)
        and (rank is None or a.manifest.rank == rank)
    ]
    if not found:
        there = ", ".join(a.folder_name for a in annotations)
        asked = {"window": window, "rank": rank}
        named = " and ".join(f"{name} {number}" for name, number in asked.items() if number is not None)
        raise AnnotationError(f"no annotation has {named}; there are {there}")
    return min(found, key=lambda a: (-a.manifest.window.first_step, a.manifest.rank))
