"""`tlk history`: one number over the runs of an experiment."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from tlk_tracking.cli.parameters import GIVEN

if TYPE_CHECKING:
    import pandas as pd


@click.command("history")
@click.argument("experiment", type=GIVEN)
@click.option("--metric", default="launches", show_default=True, help="A metric's name without its prefix.")
@click.option(
    "--table",
    type=click.Choice(["phase", "module", "call", "kernel"]),
    help="Follow rows of this table instead of a metric; the annotations of every run are read.",
)
@click.option(
    "--key", "keys", multiple=True, metavar="FIELD=VALUE", help="What the rows must have, with --table."
)
@click.option("--json", "output", flag_value="json", help="Print the rows as strict JSON.")
@click.option("--csv", "output", flag_value="csv", help="Print the rows as CSV.")
@click.option("--tracking-uri", type=GIVEN, help="MLflow server or store.")
def command(
    experiment: str,
    metric: str,
    table: str | None,
    keys: tuple[str, ...],
    output: str | None,
    tracking_uri: str | None,
) -> None:
    """Show a number of every run of EXPERIMENT (name or id) that has kernel telemetry, oldest first."""
    from tlk_tracking.cli.server import bounded_requests
    from tlk_tracking.tracking.across_runs import kernel_history

    if bool(table) != bool(keys):
        raise click.UsageError("--table and --key go together, as in --table call --key operator=aten.mm")
    with bounded_requests(tracking_uri):
        frame = kernel_history(
            experiment, measure=metric, table=table, key=_parsed(keys), tracking_uri=tracking_uri
        )
    if output == "json":
        click.echo(json.dumps(_records(frame), sort_keys=True, allow_nan=False, indent=2))
    elif output == "csv":
        from tlk_tracking.core.text import csv_cell

        texts = frame.select_dtypes(exclude=["number", "bool", "datetimetz"]).columns
        inert = frame.assign(
            **{
                name: [csv_cell(text) if isinstance(text, str) else text for text in frame[name]]
                for name in texts
            }
        )
        click.echo(inert.to_csv(index=False, lineterminator="\n"), nl=False)
    else:
        _print(frame, experiment)


def _parsed(keys: tuple[str, ...]) -> dict[str, object]:
    parsed: dict[str, object] = {}
    for key in keys:
        field, sign, value = key.partition("=")
        if not sign:
            raise click.UsageError(f"--key {key} is not FIELD=VALUE")
        parsed[field] = json.loads(value) if field == "inputs" else value
    return parsed


def _records(frame: pd.DataFrame) -> list[dict[str, object]]:
    return [
        {
            name: None
            if value != value or value is None
            else value.isoformat()
            if name == "start_time"
            else value
            for name, value in row.items()
        }
        for row in frame.to_dict("records")
    ]


def _print(frame: pd.DataFrame, experiment: str) -> None:
    from rich.table import Table
    from rich.text import Text

    from tlk_tracking.cli.terminal import open_narrow_console
    from tlk_tracking.core.text import visible

    if frame.empty:
        click.echo(f"no run of {visible(experiment)} has kernel telemetry")
        return
    console = open_narrow_console()
    table = Table("started (UTC)", "run", "name", "status", box=None, pad_edge=False)
    table.add_column(visible(str(frame["measure"].iloc[0])), justify="right")
    table.add_column("why a lower bound")
    for row in _records(frame):
        value = row["value"]
        sign = "≥ " if row["lower_bound"] else ""
        table.add_row(
            str(row["start_time"])[:19].replace("T", " "),
            Text(str(row["run_id"])[:8]),
            Text(visible(str(row["run_name"] or ""))),
            Text(str(row["status"])),
            "unknown" if value is None else f"{sign}{value:,.6g}",
            Text(visible(str(row["reasons"]).replace(",", ", "))),
        )
    console.print(table)
