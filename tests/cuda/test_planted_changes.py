"""Changes planted in a training step, which a comparison has to find and name; and an unchanged step."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tlk_tracking import KernelAnnotation, compare_annotations, record_kernels
from tlk_tracking.analysis.comparison import Comparison
from tlk_tracking.analysis.comparison_rows import Row
from tlk_tracking.analysis.verdicts import Verdict

Check = Callable[[str, str, object, object], None]

STEPS = 9
TOP = 5
WARM_UP = 5


class Net(nn.Module):
    def __init__(self, *, more: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(256, 512)
        self.block = nn.TransformerEncoderLayer(
            512, nhead=8, dim_feedforward=2048, batch_first=True, dropout=0.0
        )
        self.head = nn.Linear(512, 64)
        self.more = more

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.block(self.embed(x))
        return self.head(hidden.atan() if self.more else hidden)


@dataclass(frozen=True, kw_only=True)
class Variant:
    batch: int = 16
    more: bool = False
    bf16: bool = False
    foreach: bool = True
    compiled: bool = False
    spin_cycles: int = 200_000


def windows(variant: Variant, *, count: int = STEPS) -> list[KernelAnnotation]:
    """Train some steps unseen, then record each of `count` steps as a window of its own."""
    torch.manual_seed(0)
    model = Net(more=variant.more).cuda()
    run: Callable[[Tensor], Tensor] = torch.compile(model) if variant.compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), foreach=variant.foreach)
    batch = torch.randn(variant.batch, 128, 256)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=variant.bf16):
            loss = run(batch.cuda()).square().mean()
        loss.backward()
        optimizer.step()
        torch.cuda._sleep(variant.spin_cycles)

    for _ in range(WARM_UP):
        step()
    recorded = []
    for _ in range(count):
        with record_kernels(model=model) as recording:
            step()
        recorded.append(recording.annotation)
    return recorded


@pytest.fixture(scope="module")
def baseline() -> list[KernelAnnotation]:
    return windows(Variant())


def top(comparison: Comparison, table: str) -> list[Row]:
    """Return all changed rows of the first keys of a table that have any."""
    changed = [row for row in comparison.changes if row.table == table]
    keys = list(dict.fromkeys(row.key for row in changed))[:TOP]
    return [row for row in changed if row.key in keys]


def named(rows: list[Row], *verdicts: Verdict) -> str:
    """Return the keys of the rows with these verdicts as one text to look into."""
    return " ".join(row.key or "" for row in rows if row.verdict in verdicts)


def total(comparison: Comparison, measure: str) -> Verdict:
    (row,) = [row for row in comparison.rows if row.table == "total" and row.measure == measure]
    return row.verdict


def test_one_more_operation_is_named(baseline: list[KernelAnnotation], check: Check) -> None:
    found = compare_annotations(baseline, windows(Variant(more=True)))
    check(
        "a comparison names one more operation",
        "Tensor.atan after the block",
        (True, Verdict.INCREASED),
        ("aten.atan" in named(top(found, "call"), Verdict.ADDED), total(found, "launches")),
    )


def test_another_precision_is_named(baseline: list[KernelAnnotation], check: Check) -> None:
    found = compare_annotations(baseline, windows(Variant(bf16=True)))
    check(
        "a comparison names another precision",
        "fp32 to bf16 autocast",
        (True, True, Verdict.DECREASED),
        (
            # What is gone took longer than what came for it, so the fp32 calls and kernels stand first.
            "float32" in named(top(found, "call"), Verdict.REMOVED),
            "f32f32" in named(top(found, "kernel"), Verdict.REMOVED),
            total(found, "device_time_ms"),
        ),
    )


def test_an_optimizer_without_foreach_is_named(baseline: list[KernelAnnotation], check: Check) -> None:
    found = compare_annotations(baseline, windows(Variant(foreach=False)))
    check(
        "a comparison names an optimizer without foreach",
        "AdamW(foreach=True) to AdamW(foreach=False)",
        (True, True, Verdict.INCREASED),
        (
            "optimizer" in named(top(found, "phase"), Verdict.INCREASED),
            "aten._foreach_" in named(top(found, "call"), Verdict.REMOVED),
            total(found, "launches"),
        ),
    )


def test_a_larger_batch_is_named(baseline: list[KernelAnnotation], check: Check) -> None:
    found = compare_annotations(baseline, windows(Variant(batch=32)))
    (differences,) = found.context.values()
    check(
        "a comparison names a larger batch",
        "batch of 16 to batch of 32",
        (True, [(["float32[16,128,256]"], ["float32[32,128,256]"])]),
        (
            "[32,128," in named(top(found, "call"), Verdict.ADDED).replace(" ", ""),
            [(each.baseline, each.candidate) for each in differences if each.field == "batch_shapes"],
        ),
    )


def test_a_compiled_model_is_named(baseline: list[KernelAnnotation], check: Check) -> None:
    found = compare_annotations(baseline, windows(Variant(compiled=True)))
    check(
        "a comparison names a compiled model",
        "eager to torch.compile",
        (True, Verdict.DECREASED),
        (
            any("triton_" in named([row], Verdict.ADDED) for row in found.changes if row.table == "kernel"),
            total(found, "launches"),
        ),
    )


def test_one_slowed_kernel_is_named(baseline: list[KernelAnnotation], check: Check) -> None:
    found = compare_annotations(baseline, windows(Variant(spin_cycles=600_000)))
    changed = [row for row in found.changes if row.table == "kernel"]
    check(
        "a comparison names one slowed kernel",
        "one kernel of the step spins three times as long",
        ({"device_time_ms": Verdict.INCREASED}, True),
        (
            {row.measure: row.verdict for row in changed[:1]},
            bool(changed) and "spin" in json.loads(changed[0].key or "{}")["kernel"],
        ),
    )


def test_an_unchanged_program_shows_no_change(check: Check) -> None:
    recorded = windows(Variant(), count=4 * STEPS)
    generator = np.random.default_rng(0)
    clean = 0
    for _ in range(100):
        drawn = generator.permutation(len(recorded))
        before, after = (
            [recorded[place] for place in part] for part in (drawn[:STEPS], drawn[STEPS : 2 * STEPS])
        )
        verdicts = {row.verdict for row in compare_annotations(before, after).rows}
        clean += not verdicts & {Verdict.ADDED, Verdict.REMOVED, Verdict.INCREASED, Verdict.DECREASED}
    check(
        "two windows of an unchanged program show no change",
        f"100 draws of {STEPS} against {STEPS} of {4 * STEPS} recorded steps",
        True,
        clean >= 95,
    )
