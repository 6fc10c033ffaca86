"""Sum ATen calls and launches by module, alone and with the modules inside it (tables -> module_summary.csv)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tlk_tracking.core.gaps import LOSES_ATTRIBUTION, LOSES_TIME, GapReason

_Floats = npt.NDArray[np.float64]

MODULE_MEASURES = ("aten_calls", "launches", "device_time_us")


def summarize_modules(
    *,
    calls: pa.Table,
    launches: pa.Table | None,
    complete_steps: tuple[int, ...],
    reasons: frozenset[GapReason],
) -> pa.Table:
    """Return one row per module, by falling device time with children.

    Columns: `module` ("" is the root itself), then for each of `MODULE_MEASURES` `{measure}_per_step` and
    `{measure}_per_step_with_children`, then `share` (0..1 of all device time, with children), `lower_bound`,
    `reasons` (joined by spaces). What has no known module is in no row. Only complete steps are counted. Without
    `launches`, since device telemetry is unavailable, all but the ATen calls is null.

    A launch in `block.0` and one in `block.1` become

        block      0   2
        block.0    1   1
        block.1    1   1
    """
    steps = pa.array(complete_steps, pa.int64())
    calls = calls.filter(pc.is_in(calls["step"], steps))
    own: dict[str, _Floats] = {}
    _add(own, calls["module"], np.ones(len(calls)), measure=0)
    total_us = 0.0
    if launches is not None:
        launches = launches.filter(pc.is_in(launches["step"], steps))
        time_us = pc.if_else(launches["time_valid"], pc.fill_null(launches["duration"], 0.0), 0.0)
        _add(own, launches["module"], np.ones(len(launches)), measure=1)
        _add(own, launches["module"], np.asarray(time_us.to_numpy(), np.float64), measure=2)
        total_us = float(pc.sum(time_us).as_py() or 0)
    every: dict[str, _Floats] = {}
    for path, values in own.items():
        for around in _around(path):
            every[around] = every.get(around, 0) + values
    order = sorted(every, key=lambda path: (-every[path][2], -every[path][1], -every[path][0], path))
    per_step = 1 / max(len(complete_steps), 1)
    none = np.zeros(len(MODULE_MEASURES))
    columns: dict[str, object] = {"module": pa.array(order, pa.string())}
    for place, measure in enumerate(MODULE_MEASURES):
        for suffix, found in (("", own), ("_with_children", every)):
            known = launches is not None or measure == "aten_calls"
            shown = [
                round(float(found.get(path, none)[place]) * per_step, 6) if known else None for path in order
            ]
            columns[f"{measure}_per_step{suffix}"] = pa.array(shown, pa.float64())
    shares = [round(every[path][2] / total_us, 6) if total_us else None for path in order]
    present = sorted(reason.value for reason in reasons & (LOSES_ATTRIBUTION | LOSES_TIME))
    columns |= {
        "share": pa.array(shares, pa.float64()),
        "lower_bound": pa.array([bool(present)] * len(order), pa.bool_()),
        "reasons": pa.array([" ".join(present)] * len(order), pa.string()),
    }
    return pa.table(columns)


def _add(own: dict[str, _Floats], modules: pa.ChunkedArray, weights: _Floats, *, measure: int) -> None:
    encoded = modules.cast(pa.string()).combine_chunks().dictionary_encode()
    known = pc.is_valid(encoded).to_numpy(zero_copy_only=False)
    codes = encoded.indices.filter(pa.array(known)).to_numpy()
    sums = np.bincount(codes, weights[known], minlength=len(encoded.dictionary))
    for path, value in zip(encoded.dictionary.to_pylist(), sums.tolist(), strict=True):
        own.setdefault(path, np.zeros(len(MODULE_MEASURES)))[measure] += value


def _around(path: str) -> Iterator[str]:
    """Give the module itself and all around it: "a.b", "a", "" for "a.b"."""
    yield path
    while path:
        path = path.rpartition(".")[0]
        yield path
