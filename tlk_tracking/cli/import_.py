"""`tlk import`: make annotations of Kineto traces, in a folder or in an MLflow run."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tlk_tracking.cli.parameters import GIVEN
from tlk_tracking.cli.targets import RUN_PREFIX, run_id_of
from tlk_tracking.core.errors import AnnotationError
from tlk_tracking.core.text import plural
from tlk_tracking.tracking.tracking_uri import without_credentials

if TYPE_CHECKING:
    from tlk_tracking.attribution.import_traces import ImportedTrace

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_FILE_OR_FOLDER = click.Path(exists=True, path_type=Path)


@click.command("import")
@click.argument("traces", metavar="TRACE...", nargs=-1, required=True, type=_FILE_OR_FOLDER)
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
@click.option("--run", type=GIVEN, help="MLflow run to attach the annotations to, like recorded ones.")
@click.option(
    "--experiment", type=GIVEN, help="Make a new run in this MLflow experiment, and attach them to it."
)
@click.option("--run-name", type=GIVEN, help="Name of the new run.")
@click.option("--tracking-uri", type=GIVEN, help="MLflow server or store [MLflow's own choice].")
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
    """Make an annotation of each TRACE, a Chrome trace of Kineto (.json or .json.gz) or a folder of such traces.

    torch.profiler, Lightning's PyTorchProfiler, accelerate and torchtitan write such traces. Traces of the
    same first step are the ranks of one window.
    """
    from tlk_tracking.attribution.import_traces import find_traces, import_traces
    from tlk_tracking.cli.terminal import reading

    if out is None and run is None and experiment is None:
        raise click.UsageError("give --out DIR, --run RUN_ID or --experiment NAME")
    if run is not None and experiment is not None:
        raise click.UsageError("--run is a run that exists and --experiment makes one; give one of them")
    files = find_traces(traces)
    # What is wrong with the place is said before minutes of reading.
    if out is not None and (len(files) == 1 or not out.is_dir()):
        _refuse_standing([out])
    if run is not None:
        run = run_id_of(run)
        _refuse_missing(run, tracking_uri)
    imported = import_traces(files, ops=ops, ranks=ranks, reading=reading)
    _print(imported)
    if out is not None:
        _save(imported, out)
        click.echo(f"next: tlk show {shlex.quote(str(out))}")
    if run is not None or experiment is not None:
        run_id = _send(imported, run, experiment=experiment, run_name=run_name, tracking_uri=tracking_uri)
        click.echo(f"next: tlk show {RUN_PREFIX}{run_id}{_tracking_option(tracking_uri)}")


def _save(imported: tuple[ImportedTrace, ...], out: Path) -> None:
    folders = [out if len(imported) == 1 else out / one.annotation.folder_name for one in imported]
    _refuse_standing(folders)
    for one, folder in zip(imported, folders, strict=True):
        one.annotation.save(folder)


def _refuse_standing(folders: Sequence[Path]) -> None:
    for folder in folders:
        if os.path.lexists(folder):
            raise AnnotationError(f"{folder} exists already; choose a new folder")


def _refuse_missing(run_id: str, tracking_uri: str | None) -> None:
    from tlk_tracking.cli.server import bounded_requests
    from tlk_tracking.tracking.mlflow_store import check_run

    with bounded_requests(tracking_uri):
        check_run(run_id, tracking_uri)


def _tracking_option(tracking_uri: str | None) -> str:
    return "" if tracking_uri is None else f" --tracking-uri {shlex.quote(without_credentials(tracking_uri))}"


def _send(
    imported: tuple[ImportedTrace, ...],
    run_id: str | None,
    *,
    experiment: str | None,
    run_name: str | None,
    tracking_uri: str | None,
) -> str:
    from tlk_tracking.cli.server import SENDING_S, bounded_requests
    from tlk_tracking.tracking.mlflow_store import create_finished_run
    from tlk_tracking.tracking.mlflow_tracking import log_annotation

    with bounded_requests(tracking_uri, limit_s=SENDING_S):
        if run_id is None:
            run_id = create_finished_run(str(experiment), run_name=run_name, tracking_uri=tracking_uri)
        for one in imported:
            log_annotation(one.annotation, run_id, tracking_uri)
    click.echo(f"{plural(len(imported), 'annotation')} sent to run {run_id}")
    return run_id


def _print(imported: tuple[ImportedTrace, ...]) -> None:
    from tlk_tracking.attribution.import_traces import what_is_missing

    missing: Counter[str] = Counter()
    for one in imported:
        annotation = one.annotation
        counted = annotation.manifest.counts["launches"].value
        launches = "launches unknown" if counted is None else plural(int(counted), "launch")
        click.echo(
            f"{one.name}: {annotation.folder_name}, {plural(len(annotation.complete_steps), 'step')}, "
            f"{launches}, {plural(len(annotation.call_table), 'call row')}"
        )
        for gap in annotation.manifest.gaps:
            click.echo(f"  gap {gap.reason.value} ({gap.count}): {gap.evidence}")
        missing.update(what_is_missing(annotation))
    for sentence, count in missing.items():
        where = "" if len(imported) == 1 else f" ({count} of {len(imported)} traces)"
        click.echo(f"not in the trace{where}: {sentence}")
