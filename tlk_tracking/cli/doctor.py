"""`tlk doctor`: what this machine and environment can record, and where it would go."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import click

from tlk_tracking.cli.parameters import GIVEN, FiniteRange
from tlk_tracking.delivery.outbox import DEFAULT_FOLDER

_COLORS = {"ok": "green", "note": "yellow", "fail": "red"}


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print the lines as strict JSON.")
@click.option("--tracking-uri", type=GIVEN, help="MLflow server or store to try [MLflow's own choice].")
@click.option(
    "--outbox",
    type=click.Path(path_type=Path),
    default=Path(DEFAULT_FOLDER),
    show_default=True,
    help="The outbox to look into.",
)
@click.option(
    "--deadline",
    type=FiniteRange(min=1),
    default=10.0,
    show_default=True,
    help="Seconds that the MLflow store may take to answer.",
)
@click.option(
    "--no-write",
    is_flag=True,
    help="Only read from the MLflow store [a run is made there and deleted at once].",
)
def command(as_json: bool, tracking_uri: str | None, outbox: Path, deadline: float, no_write: bool) -> None:
    """Say in ten lines what can be recorded here and where it would go.

    Exit code 1 if a recording would be `unavailable`.
    """
    from tlk_tracking.cli.diagnosis import diagnose

    diagnosis = diagnose(tracking_uri=tracking_uri, outbox=outbox, deadline_s=deadline, write=not no_write)
    if as_json:
        click.echo(json.dumps(asdict(diagnosis), sort_keys=True, allow_nan=False, indent=2))
    else:
        for line in diagnosis.lines:
            state = click.style(f"{line.state.value:<4}", fg=_COLORS[line.state.value])
            advice = "" if line.advice is None else f" -> {line.advice}"
            click.echo(f"{state}  {line.subject.value:<10}  {line.found}{advice}")
    sys.exit(0 if diagnosis.can_record else 1)
