"""Send annotations to an MLflow run and read them back (KernelAnnotation <-> run); only this imports mlflow.

Nothing here opens or ends a run; imports may ask for one that has ended already. mlflow takes seconds to
import, so it is imported when first used.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tlk_tracking.annotation import REPORT_FILE, KernelAnnotation, load_annotation
from tlk_tracking.errors import TlkError, TrackingError
from tlk_tracking.number_text import plural
from tlk_tracking.outbox import ARTIFACT_ROOT
from tlk_tracking.ranks import missing_ranks
from tlk_tracking.records import GapReason
from tlk_tracking.run_artifacts import RunArtifacts, files_to_send
from tlk_tracking.run_record import METRIC_PREFIX, SCHEMA_VERSION_TAG, TAG_PREFIX, record_of

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment, Run

_Value = TypeVar("_Value")
_SEARCH_PAGE = 1000


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


def log_annotation(
    annotation: KernelAnnotation | Path | str, run_id: str, tracking_uri: str | None = None
) -> None:
    """Send an annotation (or the folder of one) to an MLflow run: metrics and tags, then the files.

    The run may have ended; it is neither reopened nor ended. `tracking_uri=None` is MLflow's own choice.

    Raises:
        AnnotationError: the folder is not a valid annotation.
        TrackingError: the run does not exist or cannot be written.
    """
    timestamp_ms = time.time_ns() // 1_000_000
    if isinstance(annotation, KernelAnnotation):
        with tempfile.TemporaryDirectory(prefix="tlk_") as parent:
            folder = Path(parent, "annotation")
            annotation.save(folder)
            add_report(folder)
            send_annotation(folder, run_id, tracking_uri=tracking_uri, timestamp_ms=timestamp_ms)
    else:
        send_annotation(Path(annotation), run_id, tracking_uri=tracking_uri, timestamp_ms=timestamp_ms)


def add_report(folder: Path) -> None:
    """Put the report of the annotation in `folder` beside it, for the MLflow UI to show, unless it has one.

    Raises AnnotationError when the annotation is damaged.
    """
    report = folder / REPORT_FILE
    if os.path.lexists(report):
        return
    from tlk_tracking.report import render_report

    annotation = load_annotation(folder)
    try:
        page = render_report(annotation)
    except Exception:  # an annotation is not lost for want of its picture, which can be drawn again
        logging.getLogger(__name__).warning("no report of %s", annotation.folder_name, exc_info=True)
    else:
        partial = folder / f".{REPORT_FILE}.partial"
        partial.write_text(page, encoding="utf-8")
        partial.replace(report)  # half a report is never sent


def send_annotation(
    folder: Path,
    run_id: str,
    *,
    tracking_uri: str | None,
    timestamp_ms: int,
    tag_turn: AbstractContextManager[None] | None = None,
) -> None:
    """Send the annotation in `folder`; the same `timestamp_ms` again writes the same again, once.

    `tag_turn` is held while the run's tags are read and rewritten, so that two senders of one run keep them
    monotone. Raises as `log_annotation`.
    """
    annotation = load_annotation(folder)
    files = files_to_send(folder)
    with _as_tracking_errors(run_id, tracking_uri):
        client = _client(tracking_uri)
        with tag_turn or nullcontext():
            _log_batch(
                client, run_id, annotation, names=[file.name for file in files], timestamp_ms=timestamp_ms
            )
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
    with _as_tracking_errors(run_id, tracking_uri):
        client = _client(tracking_uri)
        run = client.get_run(run_id)
        artifacts = _artifacts_of(run, client.tracking_uri)
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


def check_run(run_id: str, tracking_uri: str | None = None) -> None:
    """Raise TrackingError when the run does not exist or cannot be read."""
    with _as_tracking_errors(run_id, tracking_uri):
        _client(tracking_uri).get_run(run_id)


def search_runs(experiment: str, tracking_uri: str | None = None) -> tuple[RunSummary, ...]:
    """Return the runs of an experiment (name or id) that have kernel telemetry, newest first.

    One paged search: metrics and tags alone, no artifact is read.

    Raises:
        TrackingError: there is no such experiment, or the store cannot be read.
    """
    runs: list[RunSummary] = []
    token: str | None = None
    with _as_tracking_errors(None, tracking_uri):
        client = _client(tracking_uri)
        found = client.get_experiment_by_name(experiment) or _experiment_by_id(client, experiment)
        if found is None:
            where = "" if tracking_uri is None else f" at {_inert(tracking_uri)}"
            raise TrackingError(f"there is no experiment {_inert(experiment)!r}{where}")
        while token != "":
            page = client.search_runs(
                [found.experiment_id],
                filter_string=f"tags.`{SCHEMA_VERSION_TAG}` LIKE '%'",
                order_by=["attributes.start_time DESC"],
                max_results=_SEARCH_PAGE,
                page_token=token,
            )
            runs.extend(_summary_of(run) for run in page)
            token = page.token or ""
    return tuple(runs)


def create_finished_run(
    experiment: str, *, run_name: str | None = None, tracking_uri: str | None = None
) -> str:
    """Make a run that has ended already, for annotations of traces that exist; return its id.

    The experiment (and a store `sqlite:///...`) is made where there is none. Training never comes here.

    Raises:
        TrackingError: the store cannot be written.
    """
    import mlflow

    with _as_tracking_errors(None, tracking_uri):
        client = _new_client(tracking_uri or mlflow.get_tracking_uri())
        found = client.get_experiment_by_name(experiment)
        experiment_id = client.create_experiment(experiment) if found is None else found.experiment_id
        run_id: str = client.create_run(experiment_id, run_name=run_name).info.run_id
        client.set_terminated(run_id)
    return run_id


def try_store(tracking_uri: str | None = None, *, write: bool) -> str:
    """Ask the store for an experiment, and with `write` make, fill and delete a run; say what worked.

    Raises:
        TrackingError: something did not work.
    """
    import mlflow

    uri = tracking_uri or mlflow.get_tracking_uri()
    path = Path(uri.removeprefix("sqlite:///"))
    if uri.startswith("sqlite:///") and not path.exists():
        if not os.access(path.absolute().parent, os.W_OK):
            raise TrackingError(f"{path.parent} cannot be written")
        return "no store yet; the first run makes it"
    with _as_tracking_errors(None, tracking_uri):
        client = _new_client(uri)
        experiments = client.search_experiments(filter_string="name = 'Default'", max_results=1)
        experiments = experiments or client.search_experiments(max_results=1)
        if not write or not experiments:
            return "answers, not written to"
        run_id = client.create_run(experiments[0].experiment_id, run_name="tlk doctor").info.run_id
        try:
            client.log_text(run_id, "written by tlk doctor", "tlk_doctor.txt")
        finally:
            client.delete_run(run_id)
    return f"answers, a run and an artifact were written to experiment {experiments[0].name!r} and deleted"


def current_tracking_uri() -> str:
    """Return the store that MLflow itself is set to in this process."""
    import mlflow

    return str(mlflow.get_tracking_uri())


def get_ready(tracking_uri: str) -> None:
    """Import what sending needs and open the store, so that the first annotation does not wait for seconds.

    Nothing is asked of a server. Says nothing of what is wrong: each annotation that is sent does.
    """
    with suppress(Exception):  # stores fail in ways of their own
        _client(tracking_uri)
    with suppress(ImportError):
        for name in ("matplotlib.figure", "tlk_tracking.report"):
            import_module(name)


def _log_batch(
    client: MlflowClient, run_id: str, annotation: KernelAnnotation, *, names: list[str], timestamp_ms: int
) -> None:
    from mlflow.entities import Metric, RunTag

    record = record_of(annotation, files=names, run_tags=client.get_run(run_id).data.tags)
    step = annotation.manifest.global_step
    client.log_batch(
        run_id,
        metrics=[Metric(key, value, timestamp_ms, step) for key, value in record.metrics.items()],
        tags=[RunTag(key, value) for key, value in record.tags.items()],
        synchronous=True,
    )


def _artifacts_of(run: Run, tracking_uri: str) -> RunArtifacts:
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
    from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

    repository = get_artifact_repository(run.info.artifact_uri, tracking_uri=tracking_uri)
    if isinstance(repository, LocalArtifactRepository):
        return RunArtifacts(repository, local_root=Path(repository.artifact_dir))
    return RunArtifacts(repository, local_root=None)


def _why_nothing(run_id: str, incomplete: list[str]) -> str:
    if incomplete:
        return (
            f"run {_short(run_id)} has {plural(len(incomplete), 'kernel annotation')} whose upload has not ended; "
            "`tlk upload` sends what is left in an outbox"
        )
    return (
        f"run {_short(run_id)} has no kernel annotation; was KernelTelemetry among its callbacks, "
        "or did the fit end before its first window?"
    )


def _summary_of(run: Run) -> RunSummary:
    return RunSummary(
        run_id=run.info.run_id,
        run_name=run.info.run_name,
        status=str(run.info.status),
        start_time_ms=run.info.start_time,
        metrics=_own(run.data.metrics, METRIC_PREFIX),
        tags=_own(run.data.tags, TAG_PREFIX),
    )


def _own(values: Mapping[str, _Value], prefix: str) -> dict[str, _Value]:
    return {key: value for key, value in sorted(values.items()) if key.startswith(prefix)}


def _client(tracking_uri: str | None) -> MlflowClient:
    import mlflow

    uri = tracking_uri if tracking_uri is not None else mlflow.get_tracking_uri()
    path = uri.removeprefix("sqlite:///").partition("?")[0]
    is_file = uri.startswith("sqlite:///") and path not in ("", ":memory:") and not path.startswith("file:")
    if is_file and not Path(path).exists():  # MLflow would make an empty store there
        raise TrackingError(f"there is no MLflow store {path}; give the run's own tracking URI")
    return _new_client(uri)


def _new_client(uri: str) -> MlflowClient:
    import mlflow

    try:
        return mlflow.MlflowClient(tracking_uri=uri)
    except mlflow.MlflowException as error:
        raise TrackingError(
            f"{_inert(uri)} is no tracking URI that MLflow knows; give http(s)://SERVER or sqlite:///FILE"
        ) from error


def _experiment_by_id(client: MlflowClient, experiment_id: str) -> Experiment | None:
    from mlflow import MlflowException

    try:
        return client.get_experiment(experiment_id)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise


@contextmanager
def _as_tracking_errors(run_id: str | None, tracking_uri: str | None) -> Iterator[None]:
    try:
        yield
    except TlkError:
        raise
    except Exception as error:  # each kind of tracking and artifact store raises errors of its own
        what = "the MLflow store" if run_id is None else f"run {_short(run_id)}"
        where = "" if tracking_uri is None else f" at {_inert(tracking_uri)}"
        raise TrackingError(
            f"{what}{where} cannot be used: {_inert(str(error) or repr(error))}",
            run_is_missing=run_id is not None
            and getattr(error, "error_code", None) == "RESOURCE_DOES_NOT_EXIST",
        ) from error


def _short(run_id: str) -> str:
    return run_id if len(run_id) <= 12 else f"{run_id[:8]}…"


def _inert(text: str) -> str:
    """Return the first line without credentials and control characters, cut to what a message holds."""
    line = next(iter(text.strip().splitlines()), "")
    line = re.sub(r"://[^/@\s]+@", "://", line)
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", "?", line)[:300]
