"""Reach a run and its store (tracking URI -> client, artifacts); only this imports mlflow.

Nothing here opens or ends a run; imports may ask for one that has ended already. mlflow takes seconds to
import, so it is imported when first used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tlk_tracking.core.errors import TlkError, TrackingError
from tlk_tracking.tracking.run_artifacts import RunArtifacts
from tlk_tracking.tracking.run_record import RunRecord
from tlk_tracking.tracking.tracking_uri import database_file

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment, Run


def open_store(tracking_uri: str | None) -> MlflowClient:
    """Return a client of the store; None is MLflow's own choice.

    Raises TrackingError when the store is a database file that is not there, or the URI is of no known kind.
    """
    import mlflow

    uri = tracking_uri if tracking_uri is not None else mlflow.get_tracking_uri()
    path = database_file(uri)
    if path is not None and not path.exists():  # MLflow would make an empty store there
        raise TrackingError(f"there is no MLflow store {path}; give the run's own tracking URI")
    return _new_client(uri)


@contextmanager
def as_tracking_errors(run_id: str | None, tracking_uri: str | None) -> Iterator[None]:
    """Raise as a TrackingError whatever goes wrong with the store, without credentials in its text."""
    try:
        yield
    except TlkError:
        raise
    except Exception as error:  # each kind of tracking and artifact store raises errors of its own
        what = "the MLflow store" if run_id is None else f"run {short_id(run_id)}"
        where = "" if tracking_uri is None else f" at {_inert(tracking_uri)}"
        raise TrackingError(
            f"{what}{where} cannot be used: {_inert(str(error) or repr(error))}",
            run_is_missing=run_id is not None
            and getattr(error, "error_code", None) == "RESOURCE_DOES_NOT_EXIST",
        ) from error


def current_tracking_uri() -> str:
    """Return the store that MLflow itself is set to in this process."""
    import mlflow

    return str(mlflow.get_tracking_uri())


def find_experiment(client: MlflowClient, experiment: str, *, tracking_uri: str | None) -> str:
    """Return the id of an experiment, named or given by its id. Raises TrackingError when there is none."""
    found = client.get_experiment_by_name(experiment) or _experiment_by_id(client, experiment)
    if found is None:
        where = "" if tracking_uri is None else f" at {_inert(tracking_uri)}"
        raise TrackingError(f"there is no experiment {_inert(experiment)!r}{where}")
    experiment_id: str = found.experiment_id
    return experiment_id


def log_record(
    client: MlflowClient, run_id: str, record: RunRecord, *, global_step: int, timestamp_ms: int
) -> None:
    """Write metrics and tags in one batch, so that neither is ever there without the other."""
    from mlflow.entities import Metric, RunTag

    client.log_batch(
        run_id,
        metrics=[Metric(key, value, timestamp_ms, global_step) for key, value in record.metrics.items()],
        tags=[RunTag(key, value) for key, value in record.tags.items()],
        synchronous=True,
    )


def artifacts_of(client: MlflowClient, run: Run) -> RunArtifacts:
    """Return the artifacts of a run, wherever its store keeps them."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
    from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

    repository = get_artifact_repository(run.info.artifact_uri, tracking_uri=client.tracking_uri)
    if isinstance(repository, LocalArtifactRepository):
        return RunArtifacts(repository, local_root=Path(repository.artifact_dir))
    return RunArtifacts(repository, local_root=None)


def check_run(run_id: str, tracking_uri: str | None = None) -> None:
    """Raise TrackingError when the run does not exist or cannot be read."""
    with as_tracking_errors(run_id, tracking_uri):
        open_store(tracking_uri).get_run(run_id)


def create_finished_run(
    experiment: str, *, run_name: str | None = None, tracking_uri: str | None = None
) -> str:
    """Make a run that has ended already, for annotations of traces that exist; return its id.

    The experiment (and a store `sqlite:///...`) is made where there is none. Training never comes here.

    Raises:
        TrackingError: the store cannot be written.
    """
    import mlflow

    with as_tracking_errors(None, tracking_uri):
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
    path = database_file(uri)
    if path is not None and not path.exists():
        if not os.access(path.absolute().parent, os.W_OK):
            raise TrackingError(f"{path.parent} cannot be written")
        return "no store yet; the first run makes it"
    with as_tracking_errors(None, tracking_uri):
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


def short_id(run_id: str) -> str:
    """Return a run's id as messages name it."""
    return run_id if len(run_id) <= 12 else f"{run_id[:8]}…"


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


def _inert(text: str) -> str:
    """Return the first line without credentials and control characters, cut to what a message holds."""
    line = next(iter(text.strip().splitlines()), "")
    line = re.sub(r"://[^/@\s]+@", "://", line)
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", "?", line)[:300]
