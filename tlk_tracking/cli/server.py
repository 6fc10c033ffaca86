"""Wait for an MLflow server only so long, and say so where somebody watches (tracking URI -> context)."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import click

from tlk_tracking.core.text import visible
from tlk_tracking.tracking.tracking_uri import request_limits, without_credentials

# A request may take a third of it and is tried twice: a server that says nothing is given up after half a minute.
_READING_S = 45.0
# What is sent may be large, and a server that takes it in slow.
SENDING_S = 90.0
_MOMENT_S = 3.0


@contextmanager
def bounded_requests(tracking_uri: str | None, *, limit_s: float = _READING_S) -> Iterator[None]:
    """Let MLflow give up in time; its own limits let a dead server hold each request for four minutes.

    What the user set in the environment stands.
    """
    limits = {key: value for key, value in request_limits(limit_s).items() if key not in os.environ}
    os.environ.update(limits)
    uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "")
    say = threading.Timer(_MOMENT_S, _say_waiting, [uri])
    say.daemon = True
    if uri.startswith(("http://", "https://", "databricks")) and sys.stderr.isatty():
        say.start()
    try:
        yield
    finally:
        say.cancel()
        for key in limits:
            os.environ.pop(key, None)


def _say_waiting(uri: str) -> None:
    click.echo(f"waiting for {visible(without_credentials(uri))}", err=True)
