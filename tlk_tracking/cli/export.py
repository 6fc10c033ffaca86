"""`tlk export`: write a window as a timeline that other programs show."""

from __future__ import annotations

from pathlib import Path

import click

from tlk_tracking.cli.parameters import GIVEN
from tlk_tracking.cli.targets import choose, open_target


@click.command("export")
@click.argument("target", type=GIVEN)
@click.option(
    "--perfetto",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="File to write (NAME.pftrace or NAME.pftrace.gz), for ui.perfetto.dev.",
)
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Kineto trace the annotation was made of: adds ATen calls without launches and names of runtime calls.",
)
@click.option("--window", type=int, help="First step of the window to export [the last one].")
@click.option("--rank", type=int, help="Rank to export [the lowest].")
@click.option("--tracking-uri", type=GIVEN, help="MLflow server or store for runs:/ targets.")
def command(
    target: str,
    perfetto: Path,
    trace: Path | None,
    window: int | None,
    rank: int | None,
    tracking_uri: str | None,
) -> None:
    """Write one annotation of TARGET as a timeline with an arrow for each relation."""
    from tlk_tracking.cli.terminal import reading, writing
    from tlk_tracking.core.text import plural
    from tlk_tracking.report.perfetto import write_perfetto
    from tlk_tracking.report.timeline import lay_out, times_in_trace, times_of_launches

    annotation = choose(open_target(target, tracking_uri=tracking_uri), window=window, rank=rank)
    if trace is None:
        timeline = lay_out(annotation, times_of_launches(annotation))
    else:
        with reading(trace) as progress:
            timeline = lay_out(annotation, times_in_trace(annotation, trace, progress=progress))
    with writing(perfetto):
        write_perfetto(timeline, perfetto)
    slices = plural(sum(len(track.slices) for track in timeline.tracks), "slice")
    click.echo(f"{perfetto}: {slices} in {plural(len(timeline.tracks), 'track')}")
    if timeline.untimed_launches:
        click.echo(f"not in it: {plural(timeline.untimed_launches, 'launch')} whose time is not known")
    if timeline.untimed_calls:
        how = "" if trace is not None else "; --trace adds those of the trace"
        click.echo(f"not in it: {plural(timeline.untimed_calls, 'ATen call')} whose time is not known{how}")
    click.echo("next: open it at ui.perfetto.dev (it stays in your browser)")
