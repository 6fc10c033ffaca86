"""Group kernel launches by what launched them (tables -> the rows of launch_summary.csv)."""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from tlk_tracking.inert_text import csv_cell
from tlk_tracking.records import GapReason, Origin
from tlk_tracking.totals import LOSES_ATTRIBUTION, LOSES_TIME

SUMMARY_KEYS = ("phase", "operator", "launch_name", "kind", "grid", "block")


def caller_column(calls: pa.Table, relations: pa.Table, *, column: str, launches: int) -> pa.Array:
    """Return for each launch the value of `column` of the ATen call that launched it, null without one.

    A launch that several calls with different values share gets all of them, joined with ` + `.
    """
    chosen = relations.filter(pc.equal(relations["origin"].cast(pa.string()), Origin.DISPATCH.value))
    launch = chosen["launch"].to_numpy()
    row = np.searchsorted(calls["sequence"].to_numpy(), chosen["sequence"].to_numpy())
    index = np.full(launches, -1, np.int64)
    index[launch] = row
    values = calls[column].cast(pa.string()) if pa.types.is_dictionary(calls[column].type) else calls[column]
    values = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    result = values.take(pa.array(index, mask=index < 0))
    unique, count = np.unique(launch, return_counts=True)
    shared = unique[count > 1]
    if not len(shared):
        return result
    texts = result.to_pylist()
    for each in shared.tolist():
        found = {values[r].as_py() for r in row[launch == each].tolist()}
        texts[each] = " + ".join(sorted(str(v) for v in found if v is not None)) or None
    return pa.array(texts, result.type)


def summarize_launches(
    *,
    calls: pa.Table,
    launches: pa.Table,
    relations: pa.Table,
    complete_steps: tuple[int, ...],
    reasons: frozenset[GapReason],
) -> pa.Table:
    """Return one row per phase, operator, kernel, kind, grid and block, by falling device time.

    Columns: the six keys, `launches_per_step`, `device_time_us_per_step`, `share` (0..1 of all device time),
    `distinct_calls`, `lower_bound`, `reasons` (joined by spaces). Only complete steps are counted.
    """
    keyed = launches.append_column(
        "operator", caller_column(calls, relations, column="operator", launches=len(launches))
    )
    keyed = keyed.append_column("calls", _owner_sequence(relations, len(launches)))
    keyed = keyed.filter(pc.is_in(keyed["step"], pa.array(complete_steps, pa.int64())))
    plain = pa.table(
        {name: keyed[name].cast(pa.string()).combine_chunks().dictionary_encode() for name in SUMMARY_KEYS}
        | {name: keyed[name] for name in ("duration", "calls", "launch")}
    )
    grouped = plain.group_by(list(SUMMARY_KEYS), use_threads=False).aggregate(
        [("launch", "count"), ("duration", "sum"), ("calls", "count_distinct")]
    )
    steps = max(len(complete_steps), 1)
    time = pc.fill_null(grouped["duration_sum"], 0.0).to_numpy()
    total = time.sum()
    order = np.lexsort((np.arange(len(grouped)), -time))
    # A row without an ATen call may hide calls, a row with one may lack launches: attribution gaps bound every row.
    present = sorted(reason.value for reason in reasons & (LOSES_ATTRIBUTION | LOSES_TIME))
    columns: dict[str, object] = {name: grouped[name].cast(pa.string()) for name in SUMMARY_KEYS}
    columns |= {
        "launches_per_step": grouped["launch_count"].to_numpy() / steps,
        "device_time_us_per_step": np.round(time / steps, 3),
        "share": np.round(time / total, 6) if total else pa.nulls(len(grouped), pa.float64()),
        "distinct_calls": grouped["calls_count_distinct"],
        "lower_bound": pa.array([bool(present)] * len(grouped), pa.bool_()),
        "reasons": pa.array([" ".join(present)] * len(grouped), pa.string()),
    }
    return pa.table(columns).take(order)


def encode_summary(table: pa.Table) -> bytes:
    """Return the table as CSV in which no text is a formula or holds a control character."""
    inert = pa.table(
        {
            name: pa.array([v if v is None else csv_cell(v) for v in table[name].to_pylist()], pa.string())
            if pa.types.is_string(table[name].type)
            else table[name]
            for name in table.column_names
        }
    )
    sink = io.BytesIO()
    pyarrow.csv.write_csv(inert, sink)
    return sink.getvalue()


def _owner_sequence(relations: pa.Table, launches: int) -> pa.Array:
    owner = np.full(launches, -1, np.int64)
    dispatched = relations.filter(pc.equal(relations["origin"].cast(pa.string()), Origin.DISPATCH.value))
    owner[_int64(dispatched["launch"])] = _int64(dispatched["sequence"])
    return pa.array(owner, mask=owner < 0)


def _int64(column: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    return np.asarray(column.to_numpy(), np.int64)
