"""Group kernel launches by what launched them (tables -> the rows of launch_summary.csv)."""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.acero  # group_by loads it, better now than in the middle of a save
import pyarrow.compute as pc
import pyarrow.csv

from tlk_tracking.annotation.totals import relations_of_calls
from tlk_tracking.core.gaps import LOSES_ATTRIBUTION, LOSES_TIME, GapReason
from tlk_tracking.core.text import csv_cell

_JOINED = 8  # names of calls that share a launch; the others are a number
SUMMARY_KEYS = ("phase", "operator", "launch_name", "kind", "grid", "block")


def caller_column(calls: pa.Table, relations: pa.Table, *, column: str, launches: int) -> pa.DictionaryArray:
    """Return for each launch the text in `column` of the ATen call that launched it, null without one.

    A launch that several calls with different texts share gets them joined with ` + `.
    """
    launch, sequence = _dispatched(relations)
    row = np.searchsorted(calls["sequence"].to_numpy(), sequence)
    texts = calls[column].unify_dictionaries().combine_chunks()
    codes = pc.fill_null(texts.indices, -1).to_numpy()
    code = np.full(launches, -1, np.int64)
    code[launch] = codes[row]
    known = texts.dictionary.to_pylist()
    order = np.argsort(launch, kind="stable")
    shared, first, count = np.unique(launch[order], return_index=True, return_counts=True)
    several = count > 1
    for each, begin, end in zip(*(a[several].tolist() for a in (shared, first, first + count)), strict=True):
        found = sorted({known[c] for c in np.unique(codes[row[order[begin:end]]]).tolist() if c >= 0})
        more = f" + {len(found) - _JOINED} more" if len(found) > _JOINED else ""
        known.append(" + ".join(found[:_JOINED]) + more)
        code[each] = len(known) - 1 if found else -1
    return pa.DictionaryArray.from_arrays(
        pa.array(code.astype(np.int32), mask=code < 0), pa.array(known, pa.string())
    )


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
    keyed = keyed.filter(pc.is_in(keyed["step"], pa.array(complete_steps, pa.int64())))
    # Texts stay numbers until they are few.
    keyed = keyed.select([*SUMMARY_KEYS, "duration", "launch"]).unify_dictionaries().combine_chunks()
    grouped = keyed.group_by(list(SUMMARY_KEYS), use_threads=False).aggregate(
        [("launch", "count"), ("duration", "sum"), ("launch", "list")]
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
        "distinct_calls": _count_calls(grouped["launch_list"], relations, launches=len(launches)),
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


def _count_calls(groups: pa.ChunkedArray, relations: pa.Table, *, launches: int) -> pa.Array:
    """Return for each group of launches how many ATen calls launched them."""
    lists = groups.combine_chunks()
    group = np.full(launches, -1, np.int64)
    group[lists.flatten().to_numpy()] = pc.list_parent_indices(lists).to_numpy()
    launch, sequence = _dispatched(relations)
    pairs = np.unique(np.stack((group[launch], sequence)), axis=1)[0]
    return pa.array(np.bincount(pairs[pairs >= 0], minlength=len(lists)))


def _dispatched(relations: pa.Table) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return launch and sequence of the relations that are of calls."""
    chosen = relations_of_calls(relations)
    return _int64(chosen["launch"]), _int64(chosen["sequence"])


def _int64(column: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    return np.asarray(column.to_numpy(), np.int64)
