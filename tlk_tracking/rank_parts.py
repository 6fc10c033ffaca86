"""Part one rank's device work into communication and compute (KernelAnnotation -> RankPart)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from tlk_tracking.annotation import KernelAnnotation
from tlk_tracking.records import Availability, Bound, CallSource, GapReason, LaunchKind, Origin
from tlk_tracking.totals import LOSES_ANYTHING, LOSES_ATTRIBUTION, LOSES_TIME, bound_of

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# Operators of process groups: eager ones, and the functional ones of DTensor and of compiled code.
_NAMESPACES = ("c10d.", "_c10d_functional.", "_c10d_functional_autograd.", "c10d_functional.")

# (table, key) -> (launches, device time in ms), a complete step.
Cells = Mapping[tuple[str, str], tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """What the calls of process groups launched, a complete step.

    Attributes:
        overlapped_ms: how long of `time_ms` kernels of other calls ran on other streams of the same device.
        bound: of `launches` and `time_ms`; `overlapped_ms` is `exact` or `unknown` with them.
    """

    launches: float
    time_ms: float
    overlapped_ms: float
    bound: Bound

    @property
    def overlapped_share(self) -> float | None:
        """The share of the time that is overlapped; None without communication."""
        return self.overlapped_ms / self.time_ms if self.time_ms else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """What one rank ran in one window, a complete step; None is unknown.

    Attributes:
        failed: the fit raised on this rank while the window was open.
        communication: None where it is not known which calls launched what.
        compute_ms: by complete step, device time of everything but communication (of everything, when that is not
            known).
        cells: launches and device time by phase, operator, compute kernel and communication kernel.
    """

    rank: int
    availability: Availability
    failed: bool
    reasons: tuple[GapReason, ...]
    steps: int
    launches: float | None
    device_time_ms: float | None
    communication: Communication | None
    compute_ms: Mapping[int, float]
    cells: Cells

    @property
    def compute_time_ms(self) -> float | None:
        """Mean of `compute_ms`; None without a complete step."""
        return sum(self.compute_ms.values()) / len(self.compute_ms) if self.compute_ms else None

    def bound(self, table: str, *, time: bool) -> Bound:
        """Return the bound of launches, or of times, in a table; `total` is of the whole rank."""
        lossy = LOSES_TIME if time else LOSES_ANYTHING
        if table in ("phase", "operator", "communication", "compute"):
            lossy |= LOSES_ATTRIBUTION
        return bound_of(lossy, self.reasons)


def part_rank(annotation: KernelAnnotation) -> RankPart:
    """Count one annotation; time and memory are linear in its rows, but for the sorting of intervals."""
    manifest = annotation.manifest
    steps = annotation.complete_steps
    seen = manifest.availability is not Availability.UNAVAILABLE and bool(steps)
    launches, operators = _launches(annotation) if seen else (_NOTHING, None)
    inside = launches[launches["step"].isin(steps)]
    reasons = tuple(manifest.lower_bound_reasons)
    compute = inside[~inside["communicates"]]
    by_step = compute.groupby("step", observed=True)["time_ns"].sum()
    return RankPart(
        rank=manifest.rank,
        availability=manifest.availability,
        failed=any(gap.reason is GapReason.CAPTURE_RAISED for gap in manifest.gaps),
        reasons=reasons,
        steps=len(steps),
        launches=len(inside) / len(steps) if seen else None,
        device_time_ms=_ms(inside) / len(steps) if seen else None,
        communication=None if operators is None else _communication(launches, inside, len(steps), reasons),
        compute_ms={step: float(by_step.get(step, 0)) / 1e6 for step in steps} if seen else {},
        cells=_cells(inside, operators, len(steps)) if seen else {},
    )


def is_communication(operator: str) -> bool:
    """Return whether an ATen call's operator belongs to a process group."""
    return operator.startswith(_NAMESPACES)


def covered_ns(start: Ints, end: Ints, *, by_start: Ints, by_end: Ints) -> int:
    """Return how long of the intervals `start..end`, each for itself, some interval of the others runs.

    ```
    0..10, 20..30 against 5..8, 7..22   ->   10 - 5 + 22 - 20 = 7
    ```
    """
    if not len(by_start):
        return 0
    order = np.argsort(by_start, kind="stable")
    first, reached = by_start[order], np.maximum.accumulate(by_end[order])
    # Where a gap lies before an interval, a block of the union begins.
    begins = np.concatenate([[True], first[1:] > reached[:-1]])
    block_start = first[begins]
    block_end = reached[np.concatenate([np.flatnonzero(begins)[1:] - 1, [len(first) - 1]])]
    before = np.concatenate([[0], np.cumsum(block_end - block_start)])

    def covered_until(time: Ints) -> Ints:
        block = np.searchsorted(block_start, time, side="right")
        last = np.maximum(block - 1, 0)
        over = np.where(block > 0, np.maximum(block_end[last] - time, 0), 0)
        return np.asarray(before[block] - over, np.int64)

    return int((covered_until(end) - covered_until(start)).sum())


_NOTHING = pd.DataFrame(
    {name: pd.Series(dtype=kind) for name, kind in {
        "launch": "int64", "step": "Int64", "phase": "str", "kernel": "str", "kind": "str", "device": "int64",
        "stream": "int64", "start_ns": "int64", "time_ns": "int64", "timed": "bool", "communicates": "bool",
    }.items()}
)  # fmt: skip


def _launches(annotation: KernelAnnotation) -> tuple[pd.DataFrame, pd.DataFrame | None]:
    """Return the launches as plain columns, and (launch, operator) pairs where operators are known."""
    table = annotation.launches
    timed = table["time_valid"].fillna(False).astype(bool)
    frame = pd.DataFrame(
        {
            "launch": table["launch"].astype("int64"),
            "step": table["step"].astype("Int64"),
            "phase": table["phase"].astype(object),
            "kernel": table["launch_name"].astype(object),
            "kind": table["kind"].astype(object),
            "device": table["device"].fillna(-1).astype("int64"),
            "stream": table["stream"].fillna(-1).astype("int64"),
            "start_ns": table["start_ns"].fillna(0).astype("int64"),
            "time_ns": (table["duration"].where(timed, 0.0).fillna(0.0) * 1000).round().astype("int64"),
            "timed": timed,
            "communicates": False,
        }
    )
    calls = annotation.aten_calls
    known = annotation.manifest.call_source is CallSource.DISPATCH_MODE and calls["operator"].notna().all()
    if not known:
        return frame, None
    relations = annotation.relations
    pairs = relations[relations["origin"].astype(str) == Origin.DISPATCH.value][["sequence", "launch"]]
    names = calls.set_index("sequence")["operator"].astype(str)
    pairs = pd.DataFrame(
        {"launch": pairs["launch"].to_numpy(), "operator": names.loc[pairs["sequence"]].to_numpy()}
    ).drop_duplicates()
    communicating = pairs["launch"][pairs["operator"].str.startswith(_NAMESPACES)]
    return frame.assign(communicates=frame["launch"].isin(communicating)), pairs


def _communication(
    launches: pd.DataFrame, inside: pd.DataFrame, steps: int, reasons: tuple[GapReason, ...]
) -> Communication:
    own = inside[inside["communicates"]]
    timed = own[own["timed"]]
    # Compute may reach into a step from outside of it.
    others = launches[~launches["communicates"] & launches["timed"] & (launches["kind"] == LaunchKind.KERNEL)]
    overlapped = 0
    for (device, stream), rows in timed.groupby(["device", "stream"]):
        beside = others[(others["device"] == device) & (others["stream"] != stream)]
        start, by_start = _ints(rows["start_ns"]), _ints(beside["start_ns"])
        overlapped += covered_ns(
            start,
            start + _ints(rows["time_ns"]),
            by_start=by_start,
            by_end=by_start + _ints(beside["time_ns"]),
        )
    return Communication(
        launches=len(own) / steps,
        time_ms=_ms(own) / steps,
        overlapped_ms=overlapped / 1e6 / steps,
        bound=bound_of(LOSES_TIME | LOSES_ATTRIBUTION, reasons),
    )


def _cells(inside: pd.DataFrame, operators: pd.DataFrame | None, steps: int) -> Cells:
    cells: dict[tuple[str, str], tuple[float, float]] = {}

    def add(table: str, rows: pd.DataFrame, column: str) -> None:
        found = rows.groupby(column, observed=True)["time_ns"].agg(["size", "sum"])
        for key, count, time_ns in found.itertuples():
            cells[table, str(key)] = (count / steps, time_ns / 1e6 / steps)

    add("phase", inside, "phase")
    if operators is not None:
        add("operator", operators.merge(inside[["launch", "time_ns"]], on="launch"), "operator")
    add("kernel", inside[~inside["communicates"]], "kernel")
    add("communication", inside[inside["communicates"]], "kernel")
    return cells


def _ms(rows: pd.DataFrame) -> float:
    return float(rows["time_ns"].sum()) / 1e6


def _ints(column: pd.Series) -> Ints:
    return np.asarray(column.to_numpy(), np.int64)
