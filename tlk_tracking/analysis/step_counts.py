"""Count every complete step by phase, module, ATen call group and kernel (KernelAnnotation -> StepTables)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tlk_tracking.analysis.step_tables import (
    CALL_MEASURES,
    TIME_MEASURES,
    Floats,
    Ints,
    StepTable,
    StepTables,
    TableName,
)
from tlk_tracking.annotation.kernel_annotation import KernelAnnotation
from tlk_tracking.annotation.totals import relations_of_calls, union_ns
from tlk_tracking.core.gaps import (
    LOSES_ANYTHING,
    LOSES_ATTRIBUTION,
    LOSES_CALLS,
    LOSES_TIME,
    Bound,
    GapReason,
    bound_of,
)
from tlk_tracking.core.records import Availability, LaunchKind

Bools = npt.NDArray[np.bool_]

CALL_KEYS = ("phase", "module", "operator", "overload", "inputs")
KERNEL_KEYS = {"kernel": "launch_name", "grid": "grid", "block": "block"}
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_ABSENT = -1  # a group or step index that leads nowhere; only inside this module


def known_call_keys(annotation: KernelAnnotation) -> frozenset[str]:
    """Return which columns of the ATen calls tell calls apart here.

    A phase or an operator is known when every call has one. No module can also mean outside every module, and
    no overload or inputs that the call has none: one that is there says that they were recorded.
    """
    calls = annotation.call_table
    some = {name for name in CALL_KEYS if calls[name].null_count < len(calls) or not len(calls)}
    return frozenset(name for name in some if name not in ("phase", "operator") or not calls[name].null_count)


def count_steps(annotation: KernelAnnotation, *, call_keys: frozenset[str]) -> StepTables:
    """Count one annotation by step; only the call columns in `call_keys` tell calls apart.

    A launch that several calls share is in the row of each, so that rows by call may sum to more than the
    total. A launch without a call is in no row by call, and in one by phase or module where it is known where it
    was launched. Unknown keys make no table.
    """
    reader = _Reader(annotation)
    tables = {TableName.TOTAL: reader.totals()}
    if reader.observed:
        tables[TableName.KERNEL] = reader.by_kernel()
    for name in (TableName.PHASE, TableName.MODULE):
        if name.value in call_keys:
            tables[name] = reader.by_place(name.value)
    if "operator" in call_keys:
        tables[TableName.CALL] = reader.by_call(call_keys)
    return StepTables(tables=tables, windows=np.zeros(len(reader.steps), np.int64))


class _Reader:
    """The columns of one annotation as arrays, read once for all its tables."""

    def __init__(self, annotation: KernelAnnotation) -> None:
        manifest = annotation.manifest
        self.annotation = annotation
        self.observed = manifest.availability is not Availability.UNAVAILABLE
        self.reasons = frozenset(gap.reason for gap in manifest.gaps) | frozenset(
            manifest.lower_bound_reasons
        )
        self.disputed = bool(manifest.audit.disagreed)
        self.steps = np.unique(np.array(annotation.complete_steps, np.int64))
        launches, relations = annotation.launch_table, annotation.relation_table
        self.call_step = self._step_index(annotation.call_table["step"])
        self.launch_step = self._step_index(launches["step"])
        valid = pc.fill_null(launches["time_valid"], False).to_numpy().astype(bool)
        # Whole nanoseconds, so that sums are exact and equal times are equal.
        self.time_ns = np.where(
            valid, np.rint(pc.fill_null(launches["duration"], 0.0).to_numpy() * 1000), 0.0
        )
        self.timed = valid
        self.kinds = launches["kind"].cast(pa.string()).to_numpy(zero_copy_only=False)
        copies = (self.launch_step != _ABSENT) & (self.kinds == LaunchKind.MEMCPY)
        self.sizes_missing = bool((copies & pc.is_null(launches["bytes"]).to_numpy()).any())
        chosen = relations_of_calls(relations)
        launch = _ints(chosen["launch"])
        inside = self.launch_step[launch] != _ABSENT
        self.pair_launch = launch[inside]
        self.pair_call = np.searchsorted(
            _ints(annotation.call_table["sequence"]), _ints(chosen["sequence"])[inside]
        )

    def totals(self) -> StepTable:
        """Count whole steps; measures are named as the metrics of a run are."""
        values = {"aten_calls": self._count(self.call_step)}
        if self.observed:
            launches = self.annotation.launch_table
            kinds = self.kinds
            copied = pc.fill_null(launches["bytes"], 0).to_numpy() * (kinds == LaunchKind.MEMCPY)
            values |= {
                "launches": self._count(self.launch_step),
                "kernels": self._count(self.launch_step[kinds == LaunchKind.KERNEL]),
                "memcpys": self._count(self.launch_step[kinds == LaunchKind.MEMCPY]),
                "memsets": self._count(self.launch_step[kinds == LaunchKind.MEMSET]),
                "memcpy_bytes": self._count(self.launch_step, copied),
                "attributed_launches": self._count(self.launch_step[np.unique(self.pair_launch)]),
                "aten_calls_with_launches": self._distinct_pairs(self.pair_call),
                "device_time_ms": self._count(self.launch_step, self.time_ns) / 1e6,
                "device_busy_ms": self._busy_ms(),
            }
        return self._table(
            (None,),
            {name: value[None, :] for name, value in values.items()},
            lacks_launches=False,
            disputed=False,
        )

    def by_kernel(self) -> StepTable:
        """Count launches by name, grid and block: no ATen call is needed to know these."""
        table = self.annotation.launch_table
        columns = {name: _coded(table[column]) for name, column in KERNEL_KEYS.items()}
        group, keys = _group(columns, self.launch_step != _ABSENT)
        values = self._launches_by(group, np.arange(len(group)), len(keys))
        return self._table([_canonical(key) for key in keys], values, lacks_launches=False, disputed=False)

    def by_call(self, known: frozenset[str]) -> StepTable:
        """Count ATen calls, and the launches that they caused, by what tells calls apart; unknown is null."""
        table = self.annotation.call_table
        columns = {name: _coded(table[name], read=_READ_AS.get(name)) for name in CALL_KEYS if name in known}
        group, keys = _group(columns, self._calls_inside())
        values = {"aten_calls": self._count_groups(group, self.call_step, len(keys))}
        if self.observed:
            values |= self._launches_by(group[self.pair_call], self.pair_launch, len(keys))
        names = [_canonical({name: key.get(name) for name in CALL_KEYS}) for key in keys]
        return self._table(names, values, lacks_launches=True, disputed=self.disputed)

    def by_place(self, name: str) -> StepTable:
        """Count ATen calls and launches by phase or module: that of the call, or of a launch without one."""
        calls, launches = self.annotation.call_table[name], self.annotation.launch_table[name]
        both = pa.chunked_array(
            [*calls.cast(pa.string()).chunks, *launches.cast(pa.string()).chunks], pa.string()
        )
        codes, texts = _coded(both, read=_READ_AS.get(name))
        lonely = self.launch_step != _ABSENT
        lonely[self.pair_launch] = False
        # Outside every module is no module.
        inside = np.concatenate([self._calls_inside(), lonely]) & (codes != _ABSENT)
        group, keys = _group({name: (codes, texts)}, inside)
        of_call, of_launch = group[: len(calls)], group[len(calls) :]
        values = {"aten_calls": self._count_groups(of_call, self.call_step, len(keys))}
        if self.observed:
            alone = np.flatnonzero(lonely & (of_launch != _ABSENT))
            values |= self._launches_by(
                np.concatenate([of_call[self.pair_call], of_launch[alone]]),
                np.concatenate([self.pair_launch, alone]),
                len(keys),
            )
        unplaced = bool((lonely & (of_launch == _ABSENT)).any())
        return self._table(
            [_canonical(key) for key in keys], values, lacks_launches=unplaced, disputed=self.disputed
        )

    def _calls_inside(self) -> Bools:
        inside: Bools = self.call_step != _ABSENT
        inside[self.pair_call] = True  # a call may begin before the bracket in which its launch is
        return inside

    def _table(
        self,
        keys: Sequence[str | None],
        values: dict[str, Floats],
        *,
        lacks_launches: bool,
        disputed: bool,
    ) -> StepTable:
        """Make a table; it may lack launches, or have some in the wrong row."""
        bounds = {
            name: self._bound(name, lacks_launches=lacks_launches, disputed=disputed) for name in values
        }
        return StepTable(
            keys=tuple(keys),
            values=values,
            bounds={name: bound for name, (bound, _) in bounds.items()},
            reasons={name: reasons for name, (_, reasons) in bounds.items()},
        )

    def _bound(
        self, measure: str, *, lacks_launches: bool, disputed: bool
    ) -> tuple[Bound, frozenset[GapReason]]:
        if measure == "memcpy_bytes" and self.sizes_missing:
            return Bound.LOWER, self.reasons & LOSES_ANYTHING
        if measure == "aten_calls":
            return bound_of(LOSES_CALLS, self.reasons), self.reasons & LOSES_CALLS
        lossy = LOSES_TIME if measure in TIME_MEASURES else LOSES_ANYTHING
        if disputed:
            # Kineto names another call for a launch: the row that has it may be too high, the other too low.
            return Bound.UNKNOWN, self.reasons & (lossy | LOSES_ATTRIBUTION)
        if lacks_launches or measure in CALL_MEASURES:
            lossy |= LOSES_ATTRIBUTION
        return bound_of(lossy, self.reasons), self.reasons & lossy

    def _step_index(self, column: pa.ChunkedArray) -> Ints:
        """Return for each row the column of its complete step."""
        step = pc.fill_null(column, _ABSENT).to_numpy()
        if not len(self.steps):
            return np.full(len(step), _ABSENT, np.int64)
        index = np.clip(np.searchsorted(self.steps, step), 0, len(self.steps) - 1)
        return np.where(self.steps[index] == step, index, _ABSENT)

    def _count(self, step: Ints, weight: Floats | None = None) -> Floats:
        counted: Floats = self._count_groups(np.zeros(len(step), np.int64), step, 1, weight)[0]
        return counted

    def _count_groups(self, group: Ints, step: Ints, rows: int, weight: Floats | None = None) -> Floats:
        inside = (step != _ABSENT) & (group != _ABSENT)
        cell = group[inside] * len(self.steps) + step[inside]
        counted = np.bincount(
            cell, None if weight is None else weight[inside], minlength=rows * len(self.steps)
        )
        return counted.astype(np.float64).reshape(rows, len(self.steps))

    def _launches_by(self, group: Ints, launch: Ints, rows: int) -> dict[str, Floats]:
        """Count each launch once in a row, however many calls of that row share it."""
        pair = np.unique(np.stack([group, launch]), axis=1)
        step = self.launch_step[pair[1]]
        return {
            "launches": self._count_groups(pair[0], step, rows),
            "device_time_ms": self._count_groups(pair[0], step, rows, self.time_ns[pair[1]]) / 1e6,
        }

    def _distinct_pairs(self, call: Ints) -> Floats:
        pair = np.unique(np.stack([call, self.launch_step[self.pair_launch]]), axis=1)
        return self._count(pair[1])

    def _busy_ms(self) -> Floats:
        launches = self.annotation.launch_table
        start_ns, device = _ints(launches["start_ns"]), _ints(launches["device"])
        duration_ns = self.time_ns.astype(np.int64)
        busy = np.zeros(len(self.steps))
        timed_step = np.where(self.timed, self.launch_step, _ABSENT)
        order = np.argsort(timed_step, kind="stable")
        edges = np.searchsorted(timed_step[order], np.arange(len(self.steps) + 1))
        for step in range(len(self.steps)):
            rows = order[edges[step] : edges[step + 1]]
            for one in np.unique(device[rows]):
                on_device = rows[device[rows] == one]
                busy[step] += union_ns(start_ns[on_device], duration_ns[on_device]) / 1e6
        return busy


def _canonical(key: Mapping[str, str | None]) -> str:
    return json.dumps(key, separators=(",", ":"))


def _coded(column: pa.ChunkedArray, *, read: Callable[[str], str] | None = None) -> tuple[Ints, list[str]]:
    """Return a column of text as codes into its distinct values, after `read` has been applied to them."""
    encoded = column.cast(pa.string()).combine_chunks().dictionary_encode()
    codes: Ints = pc.fill_null(encoded.indices, _ABSENT).to_numpy(zero_copy_only=False).astype(np.int64)
    texts = encoded.dictionary.to_pylist()
    if read is None or not texts:
        return codes, texts
    values, merged = np.unique([read(text) for text in texts], return_inverse=True)
    return np.where(codes == _ABSENT, _ABSENT, merged[codes]), values.tolist()


def _group(
    columns: Mapping[str, tuple[Ints, list[str]]], inside: Bools
) -> tuple[Ints, list[dict[str, str | None]]]:
    """Number the rows inside by their values in all columns; return each row's group, each group's values."""
    combined = np.zeros(len(inside), np.int64)
    for codes, texts in columns.values():
        # Renumbered each time, so that the product of many columns cannot overflow.
        combined = np.unique(combined * (len(texts) + 1) + codes + 1, return_inverse=True)[1]
    _, first, group = np.unique(combined[inside], return_index=True, return_inverse=True)
    groups = np.full(len(inside), _ABSENT, np.int64)
    groups[inside] = group
    row_of = np.flatnonzero(inside)[first]
    return groups, [
        {
            name: texts[codes[row]] if codes[row] != _ABSENT else None
            for name, (codes, texts) in columns.items()
        }
        for row in row_of.tolist()
    ]


def _shapes_and_dtypes(inputs: str) -> str:
    """Return the inputs of a call without their devices, as canonical JSON."""
    return json.dumps([[shape, dtype] for shape, dtype, _ in json.loads(inputs)], separators=(",", ":"))


def _unwrapped(module: str) -> str:
    """Return a module's path without what compilation, sharding and checkpointing put in between."""
    return ".".join(part for part in module.split(".") if part not in _WRAPPERS)


# How a column of the calls is read, so that the same computation has the same key on both sides.
_READ_AS = {"inputs": _shapes_and_dtypes, "module": _unwrapped}


def _ints(column: pa.ChunkedArray) -> Ints:
    return np.asarray(pc.fill_null(column, _ABSENT).to_numpy(), np.int64)
