"""The seven situations that nobody had verified on a real GPU, each with counts known from elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pandas as pd
import pytest
import torch
from plain_profiler import profiled, work_of
from recorded_window import recorded, work_of_launches
from torch import nn

from tlk_tracking import KernelAnnotation, record_kernels

Check = Callable[[str, str, object, object], None]

MIB = 1 << 20


def launches_by_operator(annotation: KernelAnnotation) -> dict[str, list[int]]:
    """Return for each operator the number of launches of each of its calls that launched."""
    owned = annotation.relations.merge(annotation.aten_calls[["sequence", "operator"]], on="sequence")
    owned["operator"] = owned["operator"].astype(str)
    counted = owned.groupby(["operator", "sequence"]).size()
    return {str(name): rows.tolist() for name, rows in counted.groupby("operator")}


def operator_of(annotation: KernelAnnotation) -> pd.Series:
    """Return the operator of each launch."""
    owned = annotation.relations.merge(annotation.aten_calls[["sequence", "operator"]], on="sequence")
    return owned.set_index("launch")["operator"].astype(str)


def agrees_with_plain(program: Callable[[], object]) -> KernelAnnotation:
    """Record `program`; its launches have to be those that a plain profiler sees."""
    annotation = recorded(program)
    assert work_of_launches(annotation) == work_of(profiled(program))
    return annotation


def test_one_call_to_many_kernels(check: Check) -> None:
    x = (torch.arange(MIB, device="cuda") % 3 == 0).float()
    keys = torch.randint(1 << 30, (MIB,), device="cuda", dtype=torch.int64)

    def program() -> None:
        torch.nonzero(x)
        torch.sort(keys)

    annotation = agrees_with_plain(program)
    plain = {
        "aten.nonzero": [len(profiled(lambda: torch.nonzero(x)))],
        "aten.sort": [len(profiled(lambda: torch.sort(keys)))],
    }
    check(
        "one ATen call, many launches",
        "torch.nonzero and torch.sort of 1 Mi elements; each alone under a plain profiler",
        plain,
        launches_by_operator(annotation),
    )
    assert min(plain["aten.nonzero"] + plain["aten.sort"]) >= 3
    assert annotation.manifest.counts["unattributed"].value == 0


def test_one_call_on_many_tensors(check: Check) -> None:
    tensors = [torch.zeros(1000, device="cuda") for _ in range(400)]
    annotation = agrees_with_plain(lambda: torch._foreach_add_(tensors, 1.0))
    check(
        "one ATen call, many launches: foreach",
        "torch._foreach_add_ of 400 tensors; plain profiler",
        {
            "calls": 1,
            "launches": {"aten._foreach_add_": [len(profiled(lambda: torch._foreach_add_(tensors, 1.0)))]},
        },
        {"calls": len(annotation.aten_calls), "launches": launches_by_operator(annotation)},
    )
    assert launches_by_operator(annotation)["aten._foreach_add_"][0] >= 2


@pytest.mark.parametrize("arguments", [{"foreach": True}, {"fused": True}], ids=["foreach", "fused"])
def test_optimizers_over_many_parameters(arguments: dict[str, bool], check: Check) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12))).cuda()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(model.parameters(), **arguments)
    annotation = agrees_with_plain(optimizer.step)
    check(
        f"optimizer, {next(iter(arguments))}",
        "AdamW.step over 24 parameters; plain profiler",
        {"launches": len(profiled(optimizer.step)), "unattributed": 0, "phases": ["optimizer"]},
        {
            "launches": annotation.manifest.counts["launches"].value,
            "unattributed": annotation.manifest.counts["unattributed"].value,
            "phases": sorted(annotation.aten_calls["phase"].astype(str).unique()),
        },
    )


def test_streams_that_wait_for_each_other(check: Check) -> None:
    a, b, c = (torch.zeros(MIB, device="cuda") for _ in range(3))
    one, two = torch.cuda.Stream(), torch.cuda.Stream()

    def program() -> None:
        main = torch.cuda.current_stream()
        a.add_(1)
        started = main.record_event()
        with torch.cuda.stream(one):
            one.wait_event(started)
            b.add_(1).mul_(2)
        with torch.cuda.stream(two):
            two.wait_event(started)
            c.add_(1).mul_(2).add_(3)
            two.wait_stream(one)
            c.sub_(1)
        main.wait_stream(one)
        main.wait_stream(two)
        a.mul_(3)

    annotation = agrees_with_plain(program)
    launches = annotation.launches
    check(
        "several streams with cross-stream waits",
        "2 kernels on the main stream, 2 on one, 4 on another; from the program",
        {"launches by stream": [2, 2, 4], "unattributed": 0, "last to start": "aten.mul_"},
        {
            "launches by stream": sorted(Counter(launches["stream"].tolist()).values()),
            "unattributed": annotation.manifest.counts["unattributed"].value,
            "last to start": operator_of(annotation)[launches["start_ns"].idxmax()],
        },
    )
    ends = launches["start_ns"] + (launches["duration"] * 1000).round().astype("int64")
    assert launches["start_ns"].iloc[-1] >= ends.iloc[:-1].max()


def test_kernels_that_start_after_their_marker_has_closed(check: Check) -> None:
    big = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    small = torch.zeros(1024, device="cuda")

    def program() -> None:
        for _ in range(24):
            big @ big
        for _ in range(50):
            small.add_(1)

    annotation = agrees_with_plain(program)
    launches = annotation.launches
    operator = operator_of(annotation)
    adds = launches[launches["launch"].map(operator) == "aten.add_"]
    called = adds["start_ns"] - adds["launch_latency_ns"]
    # The next call's launch comes after this call's marker: a kernel that starts later still started too late for it.
    late = int((adds["start_ns"].iloc[:-1].to_numpy() > called.iloc[1:].to_numpy()).sum())
    check(
        "asynchronous launches under a deep queue",
        "24 products of 8192 x 8192, then 50 additions; from the program",
        {"additions": 50, "started after their marker": 49, "calls of additions": 50, "unattributed": 0},
        {
            "additions": len(adds),
            "started after their marker": late,
            "calls of additions": len(launches_by_operator(annotation)["aten.add_"]),
            "unattributed": annotation.manifest.counts["unattributed"].value,
        },
    )


def test_copies_and_sets_with_their_bytes(check: Check) -> None:
    device = torch.zeros(4 * MIB, dtype=torch.uint8, device="cuda")
    other = torch.zeros_like(device)
    pinned = torch.zeros(4 * MIB, dtype=torch.uint8).pin_memory()
    pageable = torch.zeros(4 * MIB, dtype=torch.uint8)
    large = torch.ones(1 << 26, device="cuda")

    def program() -> None:
        device[: 1 * MIB].copy_(pinned[: 1 * MIB], non_blocking=True)
        device[: 2 * MIB].copy_(pageable[: 2 * MIB])
        pinned[: 3 * MIB].copy_(device[: 3 * MIB], non_blocking=True)
        pageable.copy_(device)
        other[: MIB // 2].copy_(device[: MIB // 2])
        large.sum()

    annotation = agrees_with_plain(program)
    launches = annotation.launches
    copies = launches[launches["kind"] == "memcpy"]
    check(
        "memory copies, in bytes",
        "H2D 1 MiB pinned and 2 MiB pageable, D2H 3 MiB pinned and 4 MiB pageable, D2D 0.5 MiB; from the program",
        {
            "Memcpy HtoD (Pinned -> Device)": MIB,
            "Memcpy HtoD (Pageable -> Device)": 2 * MIB,
            "Memcpy DtoH (Device -> Pinned)": 3 * MIB,
            "Memcpy DtoH (Device -> Pageable)": 4 * MIB,
            "Memcpy DtoD (Device -> Device)": MIB // 2,
        },
        {str(row.launch_name): int(row.bytes) for row in copies.itertuples()},
    )
    plain = [record.work for record in profiled(program) if record.work.kind == "memset"]
    sets = launches[launches["kind"] == "memset"]
    check(
        "memory sets, in bytes",
        "sum of 64 Mi floats; plain profiler",
        {"bytes": sorted(work.bytes or 0 for work in plain), "by": {"aten.sum"}},
        {"bytes": sorted(sets["bytes"].tolist()), "by": set(sets["launch"].map(operator_of(annotation)))},
    )
    assert plain


def test_a_tensor_made_of_numbers_on_the_device(check: Check) -> None:
    """Torch itself turns dispatch modes off while it copies the numbers; Lightning does this at each batch of DDP."""
    annotation = agrees_with_plain(lambda: torch.tensor([1.0, 2.0], device="cuda") + 1)
    launches = annotation.launches
    check(
        "a tensor made of numbers on the device",
        "torch.tensor([1., 2.], device='cuda') + 1; from the program",
        {"memcpy": "mode_paused_interior", "kernel": "attributed"},
        {
            str(row.kind): str(row.attribution_status if row.attribution_status == "attributed" else row.gap)
            for row in launches.itertuples()
        },
    )


def test_a_second_window_is_good_after_one_that_raised(check: Check) -> None:
    x = torch.zeros(MIB, device="cuda", requires_grad=True)
    x.detach().add_(1)
    recordings = []

    def program() -> None:
        with record_kernels() as recording:
            recordings.append(recording)
            x.detach().add_(1)
            x.detach().mul_(2)
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        program()
    annotation = agrees_with_plain(lambda: x.detach().add_(1))
    check(
        "teardown when capture raises: record_kernels",
        "two calls, then an exception; then a second window",
        {"launches": 2, "gaps": ["capture_raised", "window_truncated"], "second window": 1},
        {
            "launches": recordings[0].annotation.manifest.counts["launches"].value,
            "gaps": sorted(gap.reason.value for gap in recordings[0].annotation.manifest.gaps),
            "second window": annotation.manifest.counts["launches"].value,
        },
    )


def test_a_product_under_autocast_with_an_empty_set(check: Check) -> None:
    layer = nn.Linear(256, 256).cuda()
    x = torch.randn(32, 256, device="cuda")

    def program() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            layer(x).sum().backward()

    annotation = agrees_with_plain(program)
    check(
        "a set of zero bytes has no record",
        "Linear under bf16 autocast, forward and backward; plain profiler",
        {"launches": len(profiled(program)), "bound": "exact", "unattributed": 0},
        {
            "launches": annotation.manifest.counts["launches"].value,
            "bound": annotation.manifest.counts["launches"].bound.value,
            "unattributed": annotation.manifest.counts["unattributed"].value,
        },
    )


def test_module_tracking_changes_no_launch(check: Check) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(32, 64, device="cuda")

    def program() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    plain = recorded(program)
    with record_kernels(model=model) as recording:
        program()
    tracked = recording.annotation
    columns = ["launch_name", "stream", "kind", "step", "bytes", "grid", "block"]
    lists = [one.launch_table.select(columns).to_pylist() for one in (plain, tracked)]
    check(
        "module tracking changes no launch",
        "a training step with and without model=; the launches in order, with grid, block, stream and bytes",
        {"launches": len(lists[0]), "same list": True, "with a module": 0},
        {
            "launches": len(lists[1]),
            "same list": lists[0] == lists[1],
            "with a module": int(plain.launches["module"].notna().sum()),
        },
    )
    assert set(tracked.launches["module"].dropna()) == {"0", "1", "2", "3"}
