"""Compare MLflow runs, and follow one number over them (run ids -> Comparison; experiment -> frame)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import pandas as pd

from tlk_tracking.analysis.comparison import (
    Comparison,
    choose_annotations,
    compare_annotations,
    distinct_labels,
)
from tlk_tracking.analysis.metrics import METRIC_GAPS
from tlk_tracking.analysis.step_counts import count_steps, known_call_keys
from tlk_tracking.analysis.step_tables import TableName, key_holds
from tlk_tracking.analysis.time_samples import Thresholds
from tlk_tracking.annotation.kernel_annotation import KernelAnnotation
from tlk_tracking.core.errors import ComparisonError
from tlk_tracking.core.gaps import Bound, GapReason, weakest
from tlk_tracking.core.records import Availability
from tlk_tracking.tracking.mlflow_tracking import load_run, search_runs
from tlk_tracking.tracking.run_record import AVAILABILITY_TAG, LOWER_BOUND_TAG, METRIC_PREFIX, REASONS_TAG
from tlk_tracking.tracking.run_telemetry import RunSummary

HISTORY_COLUMNS = (
    "run_id",
    "run_name",
    "start_time",
    "status",
    "availability",
    "measure",
    "value",
    "lower_bound",
    "reasons",
)


def compare_runs(
    baseline_run: str,
    *runs: str,
    tracking_uri: str | None = None,
    windows: Sequence[int] | None = None,
    ranks: Sequence[int] | Literal["all"] = (0,),
    thresholds: Thresholds | None = None,
    across_devices: bool = False,
) -> Comparison:
    """Compare the kernel telemetry of MLflow runs, of whatever experiments, with that of a baseline run.

    Args:
        baseline_run: id of the run that the others are compared with.
        runs: ids of one or several runs.
        tracking_uri: where the runs are; None is MLflow's own choice.
        windows: first steps of the windows to pool; None pools all of a run.
        ranks: ranks to pool, or "all" that sent an annotation; rank 0 alone unless more are asked for.
        thresholds: what a change of time must be; None takes the defaults.
        across_devices: judge times of different GPU models too.

    Raises:
        TrackingError: a run cannot be read or has no annotation.
        ComparisonError: a run has no annotation of the windows and ranks that were chosen.
    """
    sides = [
        choose_annotations(
            load_run(run, tracking_uri).annotations, windows=windows, ranks=ranks, of=f"run {run}"
        )
        for run in (baseline_run, *runs)
    ]
    return compare_annotations(
        *sides,
        thresholds=thresholds,
        across_devices=across_devices,
        labels=distinct_labels((baseline_run, *runs)),
    )


def kernel_history(
    experiment: str,
    *,
    measure: str = "launches",
    table: str | None = None,
    key: Mapping[str, object] | None = None,
    windows: Sequence[int] | None = None,
    ranks: Sequence[int] = (0,),
    tracking_uri: str | None = None,
) -> pd.DataFrame:
    """Return one number of every run of an experiment that has kernel telemetry, oldest first.

    Without a table it is a metric of the runs, as of their latest window: one paged search, nothing is
    downloaded. With one it is the sum of the table's rows that agree with `key`, from the annotations themselves.

    Columns are `HISTORY_COLUMNS`: `start_time` is UTC, `value` is per complete step and NaN where the run could
    not know it, `lower_bound` is true unless the value is exact, `reasons` are joined by commas.

    Args:
        experiment: name or id.
        measure: a metric's name without its prefix; with a table `launches`, `device_time_ms` or `aten_calls`.
        table: `phase`, `module`, `call` or `kernel`.
        key: what the rows must have, such as `{"operator": "aten.mm"}`; fields as `tlk compare --json` prints
            them. Rows of the table `call` need an operator; a null field of theirs is not looked at.
        windows: first steps of the windows to pool (with a table); None pools all of a run.
        ranks: ranks to pool (with a table).
        tracking_uri: where the runs are; None is MLflow's own choice.

    Raises:
        ComparisonError: there is no such metric or table.
        TrackingError: there is no such experiment, or it cannot be read.
    """
    runs = search_runs(experiment, tracking_uri)
    if table is None:
        rows = [_metric_row(run, measure) for run in runs]
    else:
        name, wanted = _asked(table, key or {})
        rows = []
        for run in runs:
            chosen = choose_annotations(
                load_run(run.run_id, tracking_uri).annotations,
                windows=windows,
                ranks=ranks,
                of=f"run {run.run_id}",
            )
            rows.append(_row(run, measure, *_number(chosen, name, wanted, measure)))
    frame = pd.DataFrame(rows, columns=list(HISTORY_COLUMNS)).astype({"value": float})
    frame["start_time"] = pd.to_datetime(frame["start_time"], unit="ms", utc=True)
    return frame.sort_values(["start_time", "run_id"], ignore_index=True)


def _metric_row(run: RunSummary, measure: str) -> dict[str, object]:
    if measure not in METRIC_GAPS:
        raise ComparisonError(f"there is no metric {measure!r}; there are {', '.join(METRIC_GAPS)}")
    key = f"{METRIC_PREFIX}{measure}"
    exact = run.tags.get(f"{LOWER_BOUND_TAG}/{key}") == "false"
    reasons = "" if exact else run.tags.get(REASONS_TAG, "")
    return _row(run, measure, run.metrics.get(key), not exact, reasons)


def _row(
    run: RunSummary, measure: str, value: float | None, lower_bound: bool, reasons: str
) -> dict[str, object]:
    values = (
        run.run_id,
        run.run_name,
        run.start_time_ms,
        run.status,
        run.tags.get(AVAILABILITY_TAG),
        measure,
        value,
        lower_bound,
        reasons,
    )
    return dict(zip(HISTORY_COLUMNS, values, strict=True))


def _asked(table: str, key: Mapping[str, object]) -> tuple[TableName, Mapping[str, object]]:
    names = [name.value for name in TableName if name is not TableName.TOTAL]
    if table not in names:
        raise ComparisonError(f"there is no table {table!r} with keys; there are {', '.join(names)}")
    if table != TableName.CALL:
        return TableName(table), key
    if key.get("operator") is None:
        raise ComparisonError("a key of the table call needs an operator, such as aten.mm")
    return TableName.CALL, {field: value for field, value in key.items() if value is not None}


def _number(
    annotations: Sequence[KernelAnnotation], name: TableName, key: Mapping[str, object], measure: str
) -> tuple[float | None, bool, str]:
    """Return value, whether it is not exact, and why, over all annotations together."""
    seeing = [one for one in annotations if one.manifest.availability is not Availability.UNAVAILABLE]
    total, steps = 0.0, 0
    bounds: list[Bound] = []
    reasons: set[GapReason] = set()
    # Only the fields that are asked for tell calls apart, so that no launch is in two of the rows that are added.
    asked = frozenset() if name is TableName.KERNEL else frozenset(key)
    for one in seeing or annotations:
        known = known_call_keys(one)
        table = count_steps(one, call_keys=known & asked).tables.get(name)
        if table is None or measure not in table.values or not asked <= known:
            return None, True, ""
        values = table.values[measure]
        total += sum(float(values[row].sum()) for row, text in enumerate(table.keys) if key_holds(text, key))
        steps += values.shape[1]
        bounds.append(table.bounds[measure])
        reasons |= table.reasons[measure]
    exact = weakest(bounds) is Bound.EXACT
    return total / steps if steps else None, not exact, ",".join(sorted(reasons))
