"""`tlk show`: what launched what, how often, how long, and which numbers are lower bounds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from tlk_tracking.cli.parameters import GIVEN
from tlk_tracking.cli.targets import choose, open_target

if TYPE_CHECKING:
    from tlk_tracking.annotation.kernel_annotation import KernelAnnotation


@click.command("show")
@click.argument("target", type=GIVEN)
@click.option("--json", "as_json", is_flag=True, help="Print the facts as strict JSON.")
@click.option(
    "--by",
    type=click.Choice(["module", "phase", "operator", "kernel"]),
    help="Show one row a module (with the modules inside it), phase, operator with its inputs, or kernel.",
)
@click.option("--window", type=int, help="First step of the window to show [the last one].")
@click.option("--rank", type=int, default=None, help="Rank to show [the lowest].")
@click.option(
    "--ranks", is_flag=True, help="Show all ranks of the window side by side, and where they differ."
)
@click.option("--top", type=click.IntRange(min=1), default=15, show_default=True, help="Rows of the table.")
@click.option("--tracking-uri", type=GIVEN, help="MLflow server or store for runs:/ targets.")
def command(
    target: str,
    as_json: bool,
    by: str | None,
    window: int | None,
    rank: int | None,
    ranks: bool,
    top: int,
    tracking_uri: str | None,
) -> None:
    """Show one annotation of TARGET."""
    annotations = open_target(target, tracking_uri=tracking_uri)
    annotation = choose(annotations, window=window, rank=rank)
    if ranks:
        if by is not None or rank is not None:
            raise click.UsageError("--ranks shows every rank; leave out --by and --rank")
        _show_ranks(annotations, annotation, as_json=as_json, top=top)
        return
    if by is not None:
        _show_by(annotation, by, as_json=as_json, top=top)
        return
    if as_json:
        from tlk_tracking.analysis.metrics import facts

        click.echo(json.dumps(facts(annotation), sort_keys=True, allow_nan=False, indent=2))
        return
    from tlk_tracking.cli.show_tables import print_annotation

    print_annotation(annotation, top=top)
    if rank is None and annotation.manifest.world_size > 1:
        from tlk_tracking.cli.show_ranks import print_overview

        print_overview(annotations, annotation)
    if len(annotations) > 1:
        others = ", ".join(a.folder_name for a in annotations if a is not annotation)
        click.echo(f"also in {target}: {others} (choose with --window and --rank)")


def _show_ranks(
    annotations: tuple[KernelAnnotation, ...], one: KernelAnnotation, *, as_json: bool, top: int
) -> None:
    from tlk_tracking.analysis.rank_summary import same_window, summarize_ranks
    from tlk_tracking.cli import show_ranks

    summary = summarize_ranks(same_window(annotations, one))
    if as_json:
        click.echo(json.dumps(show_ranks.as_json(summary), sort_keys=True, allow_nan=False, indent=2))
    else:
        show_ranks.print_ranks(summary)
        show_ranks.print_spread(summary, top=top)


def _show_by(annotation: KernelAnnotation, by: str, *, as_json: bool, top: int) -> None:
    from tlk_tracking.cli import show_by

    table = show_by.group(annotation, show_by.By(by))
    if as_json:
        click.echo(json.dumps(show_by.as_json(table), sort_keys=True, allow_nan=False, indent=2))
    else:
        show_by.print_groups(table, show_by.By(by), top=top)
