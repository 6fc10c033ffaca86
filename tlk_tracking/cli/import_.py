"""`tlk import`: make an annotation of a Kineto trace."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("import")
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--ops",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Rows that a dispatch mode saw, as JSON.",
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="New folder for the annotation.")
@click.option(
    "--rank", type=click.IntRange(min=0), help="Rank to give the annotation [the trace's own, else 0]."
)
def command(trace: Path, ops: Path | None, out: Path, rank: int | None) -> None:
    """Make an annotation of TRACE, a Chrome trace of Kineto (.json or .json.gz)."""
    from tlk_tracking.annotate import import_trace
    from tlk_tracking.cli.progress import reading
    from tlk_tracking.records import CallSource

    with reading(trace) as progress:
        annotation = import_trace(trace, ops=ops, rank=rank, progress=progress)
    annotation.save(out)
    manifest = annotation.manifest
    click.echo(f"{out}: {len(annotation.launch_table)} launch rows, {len(annotation.call_table)} call rows")
    if manifest.call_source is CallSource.HOST_OPS:
        click.echo(
            "the trace has no markers: its innermost host ops are the call rows; modules and phases are unknown"
        )
    elif manifest.call_source is CallSource.MARKERS_ONLY:
        click.echo("no --ops was given: operators, inputs and phases of the marked calls are unknown")
    if manifest.availability_reason is not None:
        click.echo(f"device telemetry is unavailable: {manifest.availability_reason}")
    for gap in manifest.gaps:
        click.echo(f"gap {gap.reason.value} ({gap.count}): {gap.evidence}")
    click.echo(f"next: tlk show {out}")
