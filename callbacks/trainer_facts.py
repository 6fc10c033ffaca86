"""Find out from a Trainer where a fit's windows go and under what they ran (Trainer -> Destination, Environment)."""

from __future__ import annotations

import secrets
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from tlk_tracking.core.errors import ConfigurationError
from tlk_tracking.core.records import Environment
from tlk_tracking.delivery.outbox import DEFAULT_FOLDER
from tlk_tracking.recording.environment import describe_environment
from tlk_tracking.tracking.mlflow_store import current_tracking_uri
from tlk_tracking.tracking.tracking_uri import Destination

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def agree_on_run(
    trainer: Trainer, *, run_id: str | None, tracking_uri: str | None
) -> tuple[str, Destination]:
    """Return a token of the fit and its run, as rank zero has them: other ranks' loggers know no run.

    `run_id` and `tracking_uri` are what the user gave, if anything. Every rank must call this.
    Raises ConfigurationError, on every rank, when there is nowhere to log to.
    """
    found: tuple[str, str | None, str] = ("", None, "")
    problem: Exception | None = None
    if trainer.is_global_zero:
        try:
            destination = _find_destination(trainer, run_id=run_id, tracking_uri=tracking_uri)
            found = (secrets.token_hex(16), destination.run_id, destination.tracking_uri)
        except Exception as error:  # noqa: BLE001 - raised below: here the other ranks would wait for ever
            problem = error
            # Of another error only the type: its text may hold credentials.
            said = error if isinstance(error, ConfigurationError) else type(error).__name__
            found = ("", None, f"rank 0 found no MLflow run: {said}")
    token, agreed_run_id, uri_or_problem = trainer.strategy.broadcast(found)
    if problem is not None:
        raise problem
    if agreed_run_id is None:
        raise ConfigurationError(uri_or_problem)
    return token, Destination(run_id=agreed_run_id, tracking_uri=uri_or_problem)


def default_outbox_folder(trainer: Trainer) -> Path:
    """Return where windows wait if the user says nothing. Raises ConfigurationError when it is no local folder."""
    if "://" in trainer.default_root_dir:
        raise ConfigurationError(
            f"default_root_dir={trainer.default_root_dir!r} is not a folder of this machine; give "
            "KernelTelemetry(outbox=...) one"
        )
    return Path(trainer.default_root_dir) / DEFAULT_FOLDER


def describe_fit(trainer: Trainer) -> Environment:
    """Return the environment with what the Trainer adds to it."""
    packages = {kind.__module__.partition(".")[0] for kind in type(trainer).__mro__}
    package = next((name for name in ("lightning", "pytorch_lightning") if name in packages), None)
    return replace(
        describe_environment(),
        lightning=None if package is None else version(package),
        precision=str(trainer.precision),
        strategy=type(trainer.strategy).__name__,
        world_size=trainer.world_size,
    )


def _find_destination(trainer: Trainer, *, run_id: str | None, tracking_uri: str | None) -> Destination:
    if run_id is not None:
        return Destination(run_id=run_id, tracking_uri=tracking_uri or current_tracking_uri())
    for logger in trainer.loggers:
        # By name: the class has two homes, and a class of either is not one of the other.
        if any(kind.__name__ == "MLFlowLogger" for kind in type(logger).__mro__):
            logged_id, client = getattr(logger, "run_id", None), getattr(logger, "experiment", None)
            if isinstance(logged_id, str) and client is not None:
                return Destination(run_id=logged_id, tracking_uri=str(client.tracking_uri))
    raise ConfigurationError(
        "KernelTelemetry has no MLflow run to write to. Give the Trainer an MLFlowLogger "
        '(Trainer(logger=MLFlowLogger(tracking_uri="sqlite:///mlflow.db"))), or give the run itself: '
        "KernelTelemetry(run_id=mlflow.active_run().info.run_id)"
    )
