"""Part one rank's device work into communication and compute (KernelAnnotation -> RankPart)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tlk_tracking.annotation.kernel_annotation import KernelAnnotation
from tlk_tracking.annotation.totals import relations_of_calls
from tlk_tracking.core.gaps import LOSES_ANYTHING, LOSES_ATTRIBUTION, LOSES_TIME, Bound, GapReason, bound_of
from tlk_tracking.core.records import Availability, CallSource, LaunchKind

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# Operators of process groups: eager ones, and the functional ones of DTensor and of compiled code.
_NAMESPACES = ("c10d.", "_c10d_functional.", "_c10d_functional_autograd.", "c10d_functional.")

_ABSENT = -1  # inside this module: an unknown number or text

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
    reasons = tuple(manifest.lower_bound_reasons)
    seen = manifest.availability is not Availability.UNAVAILABLE and bool(steps)
    launches = _Launches(annotation) if seen else None
    return RankPart(
        rank=manifest.rank,
        availability=manifest.availability,
        failed=any(gap.reason is GapReason.CAPTURE_RAISED for gap in manifest.gaps),
        reasons=reasons,
        steps=len(steps),
        launches=None if launches is None else int(launches.inside.sum()) / len(steps),
        device_time_ms=None if launches is None else launches.ms(launches.inside) / len(steps),
        communication=None if launches is None else launches.communication(len(steps), reasons),
        compute_ms={} if launches is None else launches.compute_ms(steps),
        cells={} if launches is None else launches.cells(len(steps)),
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


class _Launches:
    """The columns of one annotation's launches as arrays, and which of them a process group's call caused."""

    def __init__(self, annotation: KernelAnnotation) -> None:
        table = annotation.launch_table
        self._table = table
        self.step = _ints(table["step"])
        self.inside = np.isin(self.step, annotation.complete_steps)
        self.timed = np.asarray(pc.fill_null(table["time_valid"], False).to_numpy(), bool)
        duration = np.asarray(pc.fill_null(table["duration"], 0.0).to_numpy(), np.float64)
        self.time_ns = np.rint(np.where(self.timed, duration, 0.0) * 1000).astype(np.int64)
        self._read_operators(annotation)

    def _read_operators(self, annotation: KernelAnnotation) -> None:
        calls, relations = annotation.call_table, annotation.relation_table
        self.communicates = np.zeros(len(self.step), bool)
        self.operators: list[str] | None = None
        # Rows that are no ATen calls, and calls without a name, do not tell whose the launches are.
        if annotation.manifest.call_source is not CallSource.DISPATCH_MODE or calls["operator"].null_count:
            return
        code, self.operators = _codes(calls["operator"])
        dispatched = relations_of_calls(relations)
        call = np.searchsorted(_ints(calls["sequence"]), _ints(dispatched["sequence"]))
        # A launch that several calls of one operator share is one of that operator.
        pairs = np.unique(_ints(dispatched["launch"]) * max(1, len(self.operators)) + code[call])
        self.pair_launch, self.pair_operator = np.divmod(pairs, max(1, len(self.operators)))
        is_own = np.array([is_communication(name) for name in self.operators], bool)
        self.communicates[self.pair_launch[is_own[self.pair_operator]]] = True

    def ms(self, rows: Bools) -> float:
        """Return the device time of the rows."""
        return float(self.time_ns[rows].sum()) / 1e6

    def compute_ms(self, steps: Sequence[int]) -> dict[int, float]:
        """Return the device time of each step without its communication."""
        compute = ~self.communicates
        return {step: self.ms(compute & (self.step == step)) for step in steps}

    def communication(self, steps: int, reasons: tuple[GapReason, ...]) -> Communication | None:
        """Return what the calls of process groups launched; None where calls have no name."""
        if self.operators is None:
            return None
        own = self.inside & self.communicates
        return Communication(
            launches=int(own.sum()) / steps,
            time_ms=self.ms(own) / steps,
            overlapped_ms=self._overlapped_ns(own & self.timed) / 1e6 / steps,
            bound=bound_of(LOSES_TIME | LOSES_ATTRIBUTION, reasons),
        )

    def _overlapped_ns(self, own: Bools) -> int:
        start, device, stream = (_ints(self._table[name]) for name in ("start_ns", "device", "stream"))
        end = start + self.time_ns
        is_kernel = pc.equal(self._table["kind"].cast(pa.string()), LaunchKind.KERNEL.value)
        # Compute may reach into a step from outside of it.
        others = ~self.communicates & self.timed & np.asarray(is_kernel.to_numpy(), bool)
        overlapped = 0
        for place in np.unique(np.stack([device[own], stream[own]]), axis=1).T:
            rows = own & (device == place[0]) & (stream == place[1])
            beside = others & (device == place[0]) & (stream != place[1])
            overlapped += covered_ns(start[rows], end[rows], by_start=start[beside], by_end=end[beside])
        return overlapped

    def cells(self, steps: int) -> Cells:
        """Return launches and device time by phase, operator, compute kernel and communication kernel."""
        cells: dict[tuple[str, str], tuple[float, float]] = {}

        def add(table: str, codes: Ints, names: Sequence[str], time_ns: Ints) -> None:
            count = np.bincount(codes, minlength=len(names))
            # In float64 nanoseconds are exact up to 104 days.
            time = np.bincount(codes, time_ns, minlength=len(names))
            for code in np.flatnonzero(count).tolist():
                cells[table, names[code]] = (int(count[code]) / steps, float(time[code]) / 1e6 / steps)

        phase, phases = _codes(self._table["phase"])
        known = self.inside & (phase != _ABSENT)
        add("phase", phase[known], phases, self.time_ns[known])
        if self.operators is not None:
            chosen = self.inside[self.pair_launch]
            add(
                "operator", self.pair_operator[chosen], self.operators, self.time_ns[self.pair_launch[chosen]]
            )
        kernel, kernels = _codes(self._table["launch_name"])
        for name, rows in (("kernel", ~self.communicates), ("communication", self.communicates)):
            rows = rows & self.inside & (kernel != _ABSENT)
            add(name, kernel[rows], kernels, self.time_ns[rows])
        return cells


def _ints(column: pa.ChunkedArray) -> Ints:
    return np.asarray(pc.fill_null(column, _ABSENT).to_numpy(), np.int64)


def _codes(column: pa.ChunkedArray) -> tuple[Ints, list[str]]:
    """Return a column of text as codes into its distinct values."""
    encoded = column.cast(pa.string()).combine_chunks().dictionary_encode()
    return _ints(pa.chunked_array([encoded.indices])), encoded.dictionary.to_pylist()
