"""`tlk compare`: what changed between two or more annotations or runs, as far as the data supports it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from tlk_tracking.cli.parameters import GIVEN, FiniteRange
from tlk_tracking.cli.targets import open_target
from tlk_tracking.cli.terminal import opening, writing

if TYPE_CHECKING:
    from tlk_tracking.analysis.comparison import Comparison
    from tlk_tracking.annotation.kernel_annotation import KernelAnnotation

_TABLES = ("total", "phase", "module", "call", "kernel")


@click.command("compare")
@click.argument("baseline", type=GIVEN)
@click.argument("candidates", nargs=-1, required=True, type=GIVEN)
@click.option("--json", "output", flag_value="json", help="Print context and rows as strict JSON.")
@click.option("--csv", "output", flag_value="csv", help="Print the rows as CSV.")
@click.option("--html", type=click.Path(path_type=Path), help="Also write a self-contained HTML page.")
@click.option(
    "--fail-on",
    type=click.Choice(["regression", "undecided"]),
    multiple=True,
    help="Exit 1 when launches or device time surely grew, or when that cannot be decided; either, when there "
    "is nothing to check.",
)
@click.option(
    "--fail-table",
    "fail_tables",
    type=click.Choice(_TABLES),
    multiple=True,
    default=("total", "phase"),
    show_default=True,
    help="Tables that --fail-on looks at.",
)
@click.option("--max-time-increase", type=FiniteRange(min=0), help="Percent of time that may come on top.")
@click.option(
    "--max-launch-increase",
    type=FiniteRange(min=0),
    default=0.0,
    show_default=True,
    help="Percent of launches that may come on top.",
)
@click.option(
    "--min-change", type=float, default=5.0, show_default=True, help="Percent that is a change of time."
)
@click.option(
    "--min-samples", type=int, default=8, show_default=True, help="Steps a side for a verdict on time."
)
@click.option("--across-devices", is_flag=True, help="Judge times of different GPU models too.")
@click.option("--window", "windows", type=int, multiple=True, help="First step of a window to pool [all].")
@click.option("--rank", "ranks", type=int, multiple=True, help="Rank to pool [the lowest].")
@click.option("--all-ranks", is_flag=True, help="Pool every rank; each rank's step is a step.")
@click.option("--top", type=click.IntRange(min=1), default=10, show_default=True, help="Rows of each table.")
@click.option("--tracking-uri", type=GIVEN, help="MLflow server or store for runs:/ targets.")
def command(
    baseline: str,
    candidates: tuple[str, ...],
    output: str | None,
    html: Path | None,
    fail_on: tuple[str, ...],
    fail_tables: tuple[str, ...],
    max_time_increase: float | None,
    max_launch_increase: float,
    min_change: float,
    min_samples: int,
    across_devices: bool,
    windows: tuple[int, ...],
    ranks: tuple[int, ...],
    all_ranks: bool,
    top: int,
    tracking_uri: str | None,
) -> None:
    """Compare each of CANDIDATES with BASELINE: annotation folders and runs:/RUN_ID, mixed as you like.

    All windows of a target are pooled. A verdict is said only when it holds for every value that the bounds
    allow; else it is UNDECIDED with the reason.
    """
    if all_ranks and ranks:
        raise click.UsageError("--all-ranks pools every rank; leave out --rank")
    from tlk_tracking.analysis.comparison import compare_annotations, distinct_labels
    from tlk_tracking.analysis.time_samples import Thresholds

    targets = (baseline, *candidates)
    comparison = compare_annotations(
        *_open(targets, tracking_uri, windows or None, "all" if all_ranks else ranks or None),
        thresholds=Thresholds(min_change=min_change / 100, min_samples=min_samples),
        across_devices=across_devices,
        labels=distinct_labels(targets),
    )
    _print(comparison, output, top)
    if html is not None:
        from tlk_tracking.report.comparison_report import render_comparison

        page = render_comparison(comparison)
        with writing(html):
            html.write_text(page, encoding="utf-8")
    if fail_on and _fails(
        comparison,
        fail_on,
        fail_tables,
        max_time_increase=(min_change if max_time_increase is None else max_time_increase) / 100,
        max_launch_increase=max_launch_increase / 100,
    ):
        sys.exit(1)


def _open(
    targets: Sequence[str],
    tracking_uri: str | None,
    windows: Sequence[int] | None,
    ranks: Sequence[int] | Literal["all"] | None,
) -> list[list[KernelAnnotation]]:
    from tlk_tracking.analysis.comparison import choose_annotations
    from tlk_tracking.analysis.rank_summary import missing_annotations

    sides = []
    for target in opening(targets):
        annotations = open_target(target, tracking_uri=tracking_uri)
        if ranks == "all" and (missing := missing_annotations(annotations)):
            click.echo(f"{target} lacks {', '.join(missing)}", err=True)
        sides.append(choose_annotations(annotations, windows=windows, ranks=ranks, of=target))
    return sides


def _print(comparison: Comparison, output: str | None, top: int) -> None:
    if output == "json":
        from tlk_tracking.report.comparison_json import comparison_json

        click.echo(json.dumps(comparison_json(comparison), sort_keys=True, allow_nan=False, indent=2))
    elif output == "csv":
        from tlk_tracking.report.comparison_json import comparison_csv

        click.echo(comparison_csv(comparison), nl=False)
    else:
        from tlk_tracking.cli.compare_tables import print_comparison

        print_comparison(comparison, top=top)


def _fails(
    comparison: Comparison,
    fail_on: Sequence[str],
    tables: Sequence[str],
    *,
    max_time_increase: float,
    max_launch_increase: float,
) -> bool:
    """Say on standard error which rows fail the check, and return whether one does."""
    from tlk_tracking.analysis.regression import find_regressions
    from tlk_tracking.core.text import visible
    from tlk_tracking.report.row_names import show_key

    found = find_regressions(
        comparison,
        tables=tables,
        max_time_increase=max_time_increase,
        max_launch_increase=max_launch_increase,
    )
    failing = [("regression", row) for row in found.regressions]
    if "undecided" in fail_on:
        failing += [("undecided", row) for row in found.undecided]
    elif found.undecided:
        click.echo(f"{len(found.undecided)} of the checked rows are UNDECIDED", err=True)
    for word, row in failing:
        what = " ".join(part for part in (row.table.value, show_key(row.table, row.key), row.measure) if part)
        said = row.reason or f"{row.baseline or 0:g} -> {row.candidate or 0:g}"
        click.echo(visible(f"{word}: {row.target}: {what}: {said}"), err=True)
    for label in found.unchecked_candidates:
        why = "no launches or times are known on both sides"
        click.echo(visible(f"nothing could be checked: {why} ({label})"), err=True)
    return bool(found.unchecked_candidates) or any(word in fail_on for word, _ in failing)
