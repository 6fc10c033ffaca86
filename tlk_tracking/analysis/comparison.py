"""Say what changed between experiments, as far as the data supports it (annotations or runs -> Comparison)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from tlk_tracking.analysis.circumstances import (
    ContextDifference,
    Fact,
    describe_context,
    differences,
    why_calls_cannot_be_compared,
    why_times_cannot_be_compared,
)
from tlk_tracking.analysis.comparison_rows import CHANGES, Row, compare_tables
from tlk_tracking.analysis.step_counts import count_steps, known_call_keys
from tlk_tracking.analysis.step_tables import StepTables, pool
from tlk_tracking.analysis.time_samples import Thresholds
from tlk_tracking.annotation.kernel_annotation import KernelAnnotation
from tlk_tracking.core.errors import ComparisonError
from tlk_tracking.core.records import Availability

Annotations = KernelAnnotation | Sequence[KernelAnnotation]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What one experiment of a comparison rests on.

    Attributes:
        windows: (first step, session, rank) of each annotation that was counted.
        left_out: how many annotations were left out, since others of the side could see the device and they not.
        steps: complete steps of all windows together.
    """

    label: str
    windows: tuple[tuple[int, str, int], ...]
    left_out: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What changed from a baseline to one or several candidates.

    Attributes:
        context: the circumstances that differ, by candidate's label.
        rows: every number, by candidate and table, the biggest change first.
    """

    baseline: Side
    candidates: tuple[Side, ...]
    context: Mapping[str, tuple[ContextDifference, ...]]
    rows: tuple[Row, ...]
    thresholds: Thresholds

    def frame(self) -> pd.DataFrame:
        """Return the rows as a frame, a column for each field of `Row`."""
        names = Row.__dataclass_fields__
        return pd.DataFrame({name: [getattr(row, name) for row in self.rows] for name in names})

    @property
    def changes(self) -> tuple[Row, ...]:
        """The rows of which something is known to have changed."""
        return tuple(row for row in self.rows if row.verdict in CHANGES)


def compare_annotations(
    baseline: Annotations,
    *candidates: Annotations,
    thresholds: Thresholds | None = None,
    across_devices: bool = False,
    labels: Sequence[str] | None = None,
) -> Comparison:
    """Compare annotations with a baseline; several in one argument (windows, ranks) are one experiment.

    Args:
        baseline: what the others are compared with.
        candidates: one or several experiments.
        thresholds: what a change of time must be; None takes the defaults.
        across_devices: judge times of different GPU models too.
        labels: a name for each, the baseline's first.

    Raises:
        ComparisonError: there is nothing to compare, or a label is missing or not unique.
    """
    sides = [[side] if isinstance(side, KernelAnnotation) else list(side) for side in (baseline, *candidates)]
    names = _labels(labels, len(sides))
    if not candidates or not all(sides):
        raise ComparisonError("give a baseline and a candidate, each with at least one annotation")
    chosen = thresholds or Thresholds()
    rows: list[Row] = []
    context: dict[str, tuple[ContextDifference, ...]] = {}
    described: list[Side] = []
    for name, candidate in zip(names[1:], sides[1:], strict=True):
        # Which columns tell ATen calls apart is a question to both sides of a pair.
        keys = frozenset.intersection(*(known_call_keys(one) for one in (*sides[0], *candidate)))
        before, after = _Experiment(sides[0], names[0], keys), _Experiment(candidate, name, keys)
        context[name] = differences(before.context, after.context)
        rows += compare_tables(
            before.counts,
            after.counts,
            target=name,
            thresholds=chosen,
            why_no_times=None
            if across_devices
            else why_times_cannot_be_compared(before.context, after.context),
            why_no_calls=why_calls_cannot_be_compared(before.context, after.context),
        )
        described = [before.side, *described[1:], after.side]
    return Comparison(
        baseline=described[0],
        candidates=tuple(described[1:]),
        context=context,
        rows=tuple(rows),
        thresholds=chosen,
    )


def choose_annotations(
    annotations: Sequence[KernelAnnotation],
    *,
    windows: Sequence[int] | None,
    ranks: Sequence[int] | Literal["all"] | None,
    of: str,
) -> list[KernelAnnotation]:
    """Return the annotations of these windows (first steps; None is all) and ranks ("all"; None is the lowest).

    Raises:
        ComparisonError: there is none; it says which there are.
    """
    if ranks is None or ranks == "all":
        there = sorted({one.manifest.rank for one in annotations})
        ranks = there if ranks == "all" else there[:1]
    chosen = [
        one
        for one in annotations
        if one.manifest.rank in ranks and (windows is None or one.manifest.window.first_step in windows)
    ]
    if not chosen:
        places = sorted({(one.manifest.window.first_step, one.manifest.rank) for one in annotations})
        raise ComparisonError(f"{of} has no such window and rank; it has (first step, rank) {places}")
    return chosen


def distinct_labels(labels: Sequence[str]) -> list[str]:
    """Return the labels, those that come again with their position."""
    return [
        label if label not in labels[:place] else f"{label} ({place + 1})"
        for place, label in enumerate(labels)
    ]


def _labels(labels: Sequence[str] | None, count: int) -> list[str]:
    if labels is None:
        return ["baseline"] + (["candidate"] if count == 2 else [f"candidate {n}" for n in range(1, count)])
    if len(set(labels)) != count or len(labels) != count:
        raise ComparisonError(f"{count} experiments need {count} different labels, not {list(labels)}")
    return list(labels)


class _Experiment:
    """One side: its annotations put together, and what is known of their circumstances."""

    def __init__(self, annotations: Sequence[KernelAnnotation], label: str, keys: frozenset[str]) -> None:
        # Where some windows could see the device, those that could not say nothing about it.
        seeing = [one for one in annotations if one.manifest.availability is not Availability.UNAVAILABLE]
        counted = seeing or list(annotations)
        self.context: dict[str, Fact] = describe_context(annotations)
        self.counts: StepTables = pool(count_steps(one, call_keys=keys) for one in counted)
        self.side = Side(
            label=label,
            windows=tuple(
                (one.manifest.window.first_step, one.manifest.session, one.manifest.rank) for one in counted
            ),
            left_out=len(annotations) - len(counted),
            steps=len(self.counts.windows),
        )
