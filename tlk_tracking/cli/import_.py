"""`tlk import`: make annotations of Kineto traces, in a folder or in an MLflow run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tlk_tracking.cli.targets import RUN_PREFIX

if TYPE_CHECKING:
    from tlk_tracking.trace_set import ImportedTrace

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command("import")
@click.argument("traces", metavar="TRACE...", nargs=-1, required=True, type=_FILE)
@click.option("--ops", type=_FILE, multiple=True, help="Rows that a dispatch mode saw, as JSON; one a trace.")
@click.option(
    "--rank",
    "ranks",
    type=click.IntRange(min=0),
    multiple=True,
    help="Rank of the trace; once for each trace, in their order [the trace's own, else 0].",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="New folder for the annotation; several go below it as window_*/rank_*.",
)
@click.option("--run", help="MLflow run to attach the annotations to, like recorded ones.")
@click.option("--experiment", help="Make a new run in this MLflow experiment, and attach them to it.")
@click.option("--run-name", help="Name of the new run.")
@click.option("--tracking-uri", help="MLflow server or store [MLflow's own choice].")
def command(
    traces: tuple[Path, ...],
    ops: tuple[Path, ...],
    ranks: tuple[int, ...],
    out: Path | None,
    run: str | None,
    experiment: str | None,
    run_name: str | None,
    tracking_uri: str | None,
) -> None:
    """Make an annotation of each TRACE, a Chrome trace of Kineto (.json or .json.gz).

    torch.profiler, Lightning's PyTorchProfiler, accelerate and torchtitan write such traces. Traces of the
    same first step are the ranks of one window.
    """
    from tlk_tracking.cli.progress import reading
    from tlk_tracking.trace_set import import_traces

    if out is None and run is None and experiment is None:
        raise click.UsageError("give --out DIR, --run RUN_ID or --experiment NAME")
    if run is not None and experiment is not None:
        raise click.UsageError("--run is a run that exists and --experiment makes one; give one of them")
    imported = import_traces(traces, ops=ops, ranks=ranks, reading=reading)
    _print(imported)
    if out is not None:
        _save(imported, out)
        click.echo(f"next: tlk show {out}")
    if run is not None or experiment is not None:
        run_id = _send(imported, run, experiment=experiment, run_name=run_name, tracking_uri=tracking_uri)
        click.echo(f"next: tlk show {RUN_PREFIX}{run_id}")


def _save(imported: tuple[ImportedTrace, ...], out: Path) -> None:
    from tlk_tracking.errors import AnnotationError

    folders = [out if len(imported) == 1 else out / one.annotation.folder_name for one in imported]
    standing = [folder for folder in folders if folder.exists()]
    if standing:
        raise AnnotationError(f"{standing[0]} exists already; choose a new folder")
    for one, folder in zip(imported, folders, strict=True):
        one.annotation.save(folder)


def _send(
    imported: tuple[ImportedTrace, ...],
    run: str | None,
    *,
    experiment: str | None,
    run_name: str | None,
    tracking_uri: str | None,
) -> str:
    from tlk_tracking.mlflow_tracking import create_finished_run, log_annotation

    if run is None:
        run_id = create_finished_run(str(experiment), run_name=run_name, tracking_uri=tracking_uri)
    else:
        run_id = run.removeprefix(RUN_PREFIX).strip("/")
    for one in imported:
        log_annotation(one.annotation, run_id, tracking_uri)
    click.echo(f"{len(imported)} annotation(s) are in run {run_id}")
    return run_id


def _print(imported: tuple[ImportedTrace, ...]) -> None:
    from tlk_tracking.trace_set import what_is_missing

    missing: Counter[str] = Counter()
    for one in imported:
        annotation = one.annotation
        counted = annotation.manifest.counts["launches"].value
        launches = "launches unknown" if counted is None else f"{counted} launches"
        click.echo(
            f"{one.trace.name}: {annotation.folder_name}, {len(annotation.complete_steps)} steps, "
            f"{launches}, {len(annotation.call_table)} call rows"
        )
        for gap in annotation.manifest.gaps:
            click.echo(f"  gap {gap.reason.value} ({gap.count}): {gap.evidence}")
        missing.update(what_is_missing(annotation))
    for sentence, count in missing.items():
        where = "" if len(imported) == 1 else f" ({count} of {len(imported)} traces)"
        click.echo(f"not in the trace{where}: {sentence}")
