"""Tables of numbers by step: a row a key, a column a complete step (StepTables -> pooled StepTables)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from tlk_tracking.core.gaps import Bound, GapReason, weakest

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

TIME_MEASURES = frozenset({"device_time_ms", "device_busy_ms"})
# What counts ATen calls, or depends on what an ATen call is.
CALL_MEASURES = frozenset({"aten_calls", "aten_calls_with_launches", "attributed_launches"})


class TableName(StrEnum):
    """The tables of a comparison."""

    TOTAL = "total"
    PHASE = "phase"
    MODULE = "module"
    CALL = "call"
    KERNEL = "kernel"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTable:
    """One table: a row a key, a column a complete step.

    Attributes:
        keys: canonical JSON of each row's key, None for the one row of the totals; no key comes twice.
        values: measure -> array (keys, steps); without the measures that could not be observed.
        bounds: measure -> bound of all its values, and of the 0 of a key that has no row.
        reasons: measure -> the gaps behind its bound.
    """

    keys: tuple[str | None, ...]
    values: Mapping[str, Floats]
    bounds: Mapping[str, Bound]
    reasons: Mapping[str, frozenset[GapReason]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTables:
    """All tables of one annotation, or of several put together.

    `windows` numbers the annotation that each step (column) came from.
    """

    tables: Mapping[TableName, StepTable]
    windows: Ints


def pool(parts: Iterable[StepTables]) -> StepTables:
    """Put the steps of several annotations side by side; a key that one of them lacks is 0 in its steps."""
    parts = list(parts)
    names = [name for name in TableName if all(name in part.tables for part in parts)]
    return StepTables(
        tables={name: _pool_table([part.tables[name] for part in parts]) for name in names},
        windows=np.repeat(np.arange(len(parts)), [len(part.windows) for part in parts]),
    )


def decode_key(key: str | None) -> dict[str, object] | None:
    """Return a row's key as an object; None for the totals."""
    if key is None:
        return None
    decoded: dict[str, object] = json.loads(key)
    if isinstance(decoded.get("inputs"), str):
        decoded["inputs"] = json.loads(str(decoded["inputs"]))
    return decoded


def key_holds(key: str | None, wanted: Mapping[str, object]) -> bool:
    """Return whether a row's key has all these fields with these values; None there asks for an unknown one."""
    decoded = decode_key(key) or {}
    return all(name in decoded and decoded[name] == value for name, value in wanted.items())


def _pool_table(parts: list[StepTable]) -> StepTable:
    keys = tuple(dict.fromkeys(key for part in parts for key in part.keys))
    place = {key: row for row, key in enumerate(keys)}
    measures = [name for name in parts[0].values if all(name in part.values for part in parts)]
    values = {}
    for name in measures:
        columns = []
        for part in parts:
            column = np.zeros((len(keys), part.values[name].shape[1]))
            column[[place[key] for key in part.keys]] = part.values[name]
            columns.append(column)
        values[name] = np.concatenate(columns, axis=1)
    return StepTable(
        keys=keys,
        values=values,
        bounds={name: weakest(part.bounds[name] for part in parts) for name in measures},
        reasons={name: frozenset().union(*(part.reasons[name] for part in parts)) for name in measures},
    )
