"""`tlk report`: one annotation as a self-contained HTML page."""

from __future__ import annotations

from pathlib import Path

import click

from tlk_tracking.cli.parameters import GIVEN
from tlk_tracking.cli.targets import choose, open_target
from tlk_tracking.cli.terminal import writing


@click.command("report")
@click.argument("target", type=GIVEN)
@click.option("--html", type=click.Path(path_type=Path), required=True, help="The file to write.")
@click.option("--window", type=int, help="First step of the window to show [the last one].")
@click.option("--rank", type=int, default=None, help="Rank to show [the lowest].")
@click.option("--tracking-uri", type=GIVEN, help="MLflow server or store for runs:/ targets.")
def command(target: str, html: Path, window: int | None, rank: int | None, tracking_uri: str | None) -> None:
    """Write where the device time of TARGET goes, what could not be seen, and all tables.

    Of a window of several ranks, one rank's numbers and all ranks side by side; --rank leaves the others out.
    """
    from tlk_tracking.analysis.rank_summary import same_window, summarize_ranks
    from tlk_tracking.report.annotation_report import render_report

    annotations = open_target(target, tracking_uri=tracking_uri)
    annotation = choose(annotations, window=window, rank=rank)
    ranks = None
    if rank is None and annotation.manifest.world_size > 1:
        summary = summarize_ranks(same_window(annotations, annotation))
        ranks = summary if len(summary.ranks) + len(summary.missing) > 1 else None
    page = render_report(annotation, ranks=ranks)
    with writing(html):
        html.write_text(page, encoding="utf-8")
    click.echo(f"{html}: open it in a browser")
