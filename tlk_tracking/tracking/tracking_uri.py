"""Read tracking URIs: the run of a window, its address on disk, MLflow's deadlines (URI -> Address, settings)."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import msgspec

_SCHEMELESS_URIS = frozenset({"databricks", "databricks-uc", "uc"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """The MLflow run that a window belongs to. `tracking_uri` may carry credentials, so it is in no repr."""

    run_id: str
    tracking_uri: str = field(repr=False)


class Address(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the disk keeps of a destination: never a credential.

    Attributes:
        run_id: None when there is no run to send to.
        tracking_uri: absolute, without user, password and query.
        credentials_removed: whether `tracking_uri` had them.
        global_step: step axis of the window's metrics.
        timestamp_ms: when the window closed; every attempt to send it uses this one.
    """

    schema_version: int = 1
    run_id: str | None
    tracking_uri: str | None
    credentials_removed: bool
    global_step: int
    timestamp_ms: int


def address_of(destination: Destination | None, global_step: int) -> Address:
    """Return what the disk keeps of a destination, with the present as the time its window closed."""
    uri = None if destination is None else absolute_tracking_uri(destination.tracking_uri)
    kept = None if uri is None else without_credentials(uri)
    return Address(
        run_id=None if destination is None else destination.run_id,
        tracking_uri=kept,
        credentials_removed=kept != uri,
        global_step=global_step,
        timestamp_ms=time.time_ns() // 1_000_000,
    )


def absolute_tracking_uri(uri: str) -> str:
    """Return the URI with a relative local path made absolute, so that it means the same from any folder."""
    if uri.startswith("sqlite:///"):
        path, mark, query = uri.removeprefix("sqlite:///").partition("?")
        if path in ("", ":memory:") or path.startswith("file:") or Path(path).is_absolute():
            return uri
        return f"sqlite:///{Path(path).absolute()}{mark}{query}"
    if ":" in uri or uri in _SCHEMELESS_URIS:
        return uri
    return str(Path(uri).absolute())


def without_credentials(uri: str) -> str:
    """Return the URI without user, password and, where it is not sqlite's, query."""
    if "://" not in uri or uri.startswith("sqlite:"):
        return uri
    parts = urlsplit(uri)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def is_in_memory(uri: str) -> bool:
    """Return whether the URI is of a database that only the thread that made it can see."""
    return uri in ("sqlite://", "sqlite:///") or (
        uri.startswith("sqlite:") and (":memory:" in uri or "mode=memory" in uri)
    )


def database_file(uri: str) -> Path | None:
    """Return the file of an SQLite store; None for every other store."""
    path = uri.removeprefix("sqlite:///").partition("?")[0]
    if not uri.startswith("sqlite:///") or path in ("", ":memory:") or path.startswith("file:"):
        return None
    return Path(path)


def request_limits(timeout_s: float) -> dict[str, str]:
    """Return the variables with which MLflow ends a request well within a deadline and sends no telemetry.

    For the environment of a process of ours alone: MLflow reads it at each request, and by default a dead
    server holds one for four minutes.
    """
    return {
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
        "MLFLOW_HTTP_REQUEST_BACKOFF_JITTER": "0",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": str(max(1, math.floor(timeout_s / 3))),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
    }
