"""`tlk validate`: check every file of an annotation."""

from __future__ import annotations

import sys

import click

from tlk_tracking.cli.parameters import GIVEN
from tlk_tracking.cli.targets import open_target
from tlk_tracking.core.errors import AnnotationError
from tlk_tracking.core.records import Availability
from tlk_tracking.core.text import plural, visible


@click.command("validate")
@click.argument("target", type=GIVEN)
@click.option("--tracking-uri", type=GIVEN, help="MLflow server or store for runs:/ targets.")
def command(target: str, tracking_uri: str | None) -> None:
    """Check every file of TARGET against its manifest; exit 1 when something is wrong."""
    try:
        annotations = open_target(target, tracking_uri=tracking_uri)
    except AnnotationError as error:
        if error.file is None:  # there is no annotation at all: bad input, not a failed check
            raise
        click.echo(f"invalid: {visible(str(error))}")
        sys.exit(1)
    for annotation in annotations:
        manifest = annotation.manifest
        unavailable = manifest.availability is Availability.UNAVAILABLE  # its one row is not a launch
        launches = (
            "no launch (device telemetry unavailable)"
            if unavailable
            else plural(len(annotation.launch_table), "launch row")
        )
        counted = manifest.counts["aten_calls"].value
        calls = "ATen calls unknown" if counted is None else plural(int(counted), "ATen call")
        click.echo(
            f"valid: {annotation.folder_name}, {calls}, "
            f"{launches}, {plural(len(annotation.relation_table), 'relation')}"
            f"{', lower bounds: ' + ', '.join(manifest.lower_bound_reasons) if manifest.lower_bound else ''}"
        )
