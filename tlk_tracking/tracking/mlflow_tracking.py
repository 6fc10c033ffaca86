"""Send annotations to an MLflow run and read them back (KernelAnnotation <-> run)."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TypeVar

from tlk_tracking.annotation.kernel_annotation import KernelAnnotation, load_annotation
from tlk_tracking.core.errors import TrackingError
from tlk_tracking.core.places import ARTIFACT_ROOT
from tlk_tracking.core.text import plural
from tlk_tracking.tracking.mlflow_store import (
    artifacts_of,
    as_tracking_errors,
    find_experiment,
    log_record,
    open_store,
    short_id,
)
from tlk_tracking.tracking.run_artifacts import files_to_send
from tlk_tracking.tracking.run_record import METRIC_PREFIX, SCHEMA_VERSION_TAG, TAG_PREFIX, record_of
from tlk_tracking.tracking.run_telemetry import RunSummary, RunTelemetry, RunWindow

_Value = TypeVar("_Value")
_SEARCH_PAGE = 1000


def log_annotation(
    annotation: KernelAnnotation | Path | str, run_id: str, tracking_uri: str | None = None
) -> None:
    """Send an annotation (or the folder of one) to an MLflow run: metrics and tags, then the files.

    The run may have ended; it is neither reopened nor ended. `tracking_uri=None` is MLflow's own choice.

    Raises:
        AnnotationError: the folder is not a valid annotation.
        TrackingError: the run does not exist or cannot be written.
    """
    from tlk_tracking.report.annotation_report import add_report  # matplotlib takes a second

    timestamp_ms = time.time_ns() // 1_000_000
    if isinstance(annotation, KernelAnnotation):
        with tempfile.TemporaryDirectory(prefix="tlk_") as parent:
            folder = Path(parent, "annotation")
            annotation.save(folder)
            add_report(annotation, folder)
            send_annotation(annotation, folder, run_id, tracking_uri=tracking_uri, timestamp_ms=timestamp_ms)
    else:
        folder = Path(annotation)
        found = load_annotation(folder)
        send_annotation(found, folder, run_id, tracking_uri=tracking_uri, timestamp_ms=timestamp_ms)


def send_annotation(
    annotation: KernelAnnotation,
    folder: Path,
    run_id: str,
    *,
    tracking_uri: str | None,
    timestamp_ms: int,
    tag_turn: AbstractContextManager[None] | None = None,
) -> None:
    """Send an annotation, whose files are in `folder`; the same `timestamp_ms` again writes the same again, once.

    `tag_turn` is held while the run's tags are read and rewritten, so that two senders of one run keep them
    monotone. Raises as `log_annotation`.
    """
    files = files_to_send(folder)
    with as_tracking_errors(run_id, tracking_uri):
        client = open_store(tracking_uri)
        with tag_turn or nullcontext():
            run_tags = client.get_run(run_id).data.tags
            record = record_of(annotation, files=[file.name for file in files], run_tags=run_tags)
            step = annotation.manifest.global_step
            log_record(client, run_id, record, global_step=step, timestamp_ms=timestamp_ms)
        for file in files:
            client.log_artifact(run_id, str(file), f"{ARTIFACT_ROOT}/{annotation.folder_name}")


def load_run(run_id: str, tracking_uri: str | None = None) -> RunTelemetry:
    """Read back every annotation of a run, each validated as `load_annotation` does.

    Files come into a temporary folder that is gone at the end; names, links and sizes are checked first.

    Raises:
        TrackingError: the run cannot be read, or has no kernel annotation.
        AnnotationError: one of its annotations is damaged or lies in another's place.
    """
    windows: dict[tuple[int, str], dict[int, KernelAnnotation]] = {}
    incomplete = []
    with as_tracking_errors(run_id, tracking_uri):
        client = open_store(tracking_uri)
        run = client.get_run(run_id)
        artifacts = artifacts_of(client, run)
        for place in artifacts.places():
            annotation = artifacts.fetch(place)
            if annotation is None:
                incomplete.append(f"{ARTIFACT_ROOT}/{place}")
            else:
                window = (annotation.manifest.window.first_step, annotation.manifest.session)
                windows.setdefault(window, {})[annotation.manifest.rank] = annotation
    if not windows:
        raise TrackingError(_why_nothing(run_id, incomplete))
    return RunTelemetry(
        run_id=run_id,
        run_name=run.info.run_name,
        windows=tuple(
            RunWindow(first_step=first_step, session=session, ranks=dict(sorted(ranks.items())))
            for (first_step, session), ranks in sorted(windows.items())
        ),
        incomplete=tuple(incomplete),
        metrics=_own(run.data.metrics, METRIC_PREFIX),
        tags=_own(run.data.tags, TAG_PREFIX),
    )


def search_runs(experiment: str, tracking_uri: str | None = None) -> tuple[RunSummary, ...]:
    """Return the runs of an experiment (name or id) that have kernel telemetry, newest first.

    One paged search: metrics and tags alone, no artifact is read.

    Raises:
        TrackingError: there is no such experiment, or the store cannot be read.
    """
    runs: list[RunSummary] = []
    token: str | None = None
    with as_tracking_errors(None, tracking_uri):
        client = open_store(tracking_uri)
        experiment_id = find_experiment(client, experiment, tracking_uri=tracking_uri)
        while token != "":
            page = client.search_runs(
                [experiment_id],
                filter_string=f"tags.`{SCHEMA_VERSION_TAG}` LIKE '%'",
                order_by=["attributes.start_time DESC"],
                max_results=_SEARCH_PAGE,
                page_token=token,
            )
            runs.extend(
                RunSummary(
                    run_id=run.info.run_id,
                    run_name=run.info.run_name,
                    status=str(run.info.status),
                    start_time_ms=run.info.start_time,
                    metrics=_own(run.data.metrics, METRIC_PREFIX),
                    tags=_own(run.data.tags, TAG_PREFIX),
                )
                for run in page
            )
            token = page.token or ""
    return tuple(runs)


def _why_nothing(run_id: str, incomplete: list[str]) -> str:
    if incomplete:
        return (
            f"run {short_id(run_id)} has {plural(len(incomplete), 'kernel annotation')} whose upload has not ended; "
            "`tlk upload` sends what is left in an outbox"
        )
    return (
        f"run {short_id(run_id)} has no kernel annotation; was KernelTelemetry among its callbacks, "
        "or did the fit end before its first window?"
    )


def _own(values: Mapping[str, _Value], prefix: str) -> dict[str, _Value]:
    return {key: value for key, value in sorted(values.items()) if key.startswith(prefix)}
