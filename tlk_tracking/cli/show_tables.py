"""The tables of `tlk show` on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tlk_tracking.analysis.metrics import launch_summary, metrics
from tlk_tracking.cli.terminal import open_console
from tlk_tracking.core.gaps import Bound
from tlk_tracking.core.records import Availability, CallSource, Phase
from tlk_tracking.core.text import SIGNS, short_kernel, visible

if TYPE_CHECKING:
    from tlk_tracking.annotation.kernel_annotation import KernelAnnotation

_PHASES = tuple(phase.value for phase in Phase)


def print_annotation(annotation: KernelAnnotation, *, top: int) -> None:
    """Print heading, numbers, gaps and what launched what."""
    console = open_console()
    _print_heading(console, annotation)
    _print_numbers(console, annotation)
    _print_phases(console, annotation)
    _print_gaps(console, annotation)
    _print_fused(console, annotation)
    if annotation.manifest.availability is Availability.UNAVAILABLE:
        _print_calls(console, annotation, top)
    else:
        _print_launches(console, annotation, top)


def _print_heading(console: Console, annotation: KernelAnnotation) -> None:
    manifest = annotation.manifest
    env = manifest.environment
    place = [
        t for t in (env.gpu_model, env.torch and f"torch {env.torch}", env.cuda and f"CUDA {env.cuda}") if t
    ]
    steps = ", ".join(
        f"{row.step}" + ("" if row.outcome == "complete" else f" ({row.outcome})")
        for row in manifest.window.steps
    )
    console.print(Text(visible(f"{annotation.folder_name}  {' · '.join(place)}"), style="bold"))
    console.print(Text(f"steps {steps or 'none'} · {manifest.availability.value}"))
    if manifest.availability_reason is not None:
        console.print(
            Text(
                visible(f"device telemetry is unavailable here: {manifest.availability_reason}"),
                style="yellow",
            )
        )
    if manifest.call_source is CallSource.HOST_OPS:
        console.print(
            Text("rows are innermost host ops of a trace without markers; modules and phases are unknown")
        )


def _print_numbers(console: Console, annotation: KernelAnnotation) -> None:
    table = Table("metric (per complete step)", "value", "bound", "because of", box=None, pad_edge=False)
    table.columns[1].justify = "right"
    for metric in metrics(annotation):
        if metric.name.endswith(_PHASES):
            continue
        table.add_row(
            metric.name,
            f"{SIGNS[metric.bound]}{metric.value:,.6g}",
            metric.bound.value,
            ", ".join(metric.reasons) if metric.bound is not Bound.EXACT else "",
        )
    console.print(table)
    audit = annotation.manifest.audit
    if audit.agreed is not None:
        console.print(
            Text(
                f"Kineto's own link agrees for {audit.agreed} launches, "
                f"disagrees for {audit.disagreed}, says nothing of {audit.not_audited}"
            )
        )


def _print_phases(console: Console, annotation: KernelAnnotation) -> None:
    by_name = {metric.name: metric for metric in metrics(annotation)}
    table = Table("phase (per complete step)", "launches", "device time ms", box=None, pad_edge=False)
    table.columns[1].justify = table.columns[2].justify = "right"
    for phase in _PHASES:
        launches, time = by_name.get(f"launches_{phase}"), by_name.get(f"device_time_ms_{phase}")
        if (
            launches is not None
            and time is not None
            and (launches.value or launches.bound is not Bound.EXACT)
        ):
            table.add_row(
                phase,
                f"{SIGNS[launches.bound]}{launches.value:,.6g}",
                f"{SIGNS[time.bound]}{time.value:,.4g}",
            )
    if table.row_count:
        console.print(table)


def _print_gaps(console: Console, annotation: KernelAnnotation) -> None:
    for gap in annotation.manifest.gaps:
        console.print(Text(visible(f"gap {gap.reason.value}: {gap.count} {gap.evidence}"), style="yellow"))


def _print_fused(console: Console, annotation: KernelAnnotation) -> None:
    notes = annotation.manifest.notes
    parts = [
        f"{notes[name]} {text}"
        for name, text in (
            ("fused_inductor_kernel", "by their call site"),
            ("fused_inductor_graph", "by their graph alone"),
            ("fused_autotuning", "not, being tried out"),
            ("fused_no_provenance", "not, for want of Inductor's notes"),
        )
        if notes.get(name)
    ]
    if parts:
        console.print(Text(f"launches of compiled code related to ATen nodes: {', '.join(parts)}"))


def _print_launches(console: Console, annotation: KernelAnnotation, top: int) -> None:
    rows = launch_summary(annotation)
    if not len(rows):
        console.print(Text("no launch in a complete step"))
        return
    bounded = bool(rows["lower_bound"].iloc[0])
    sign = SIGNS[Bound.LOWER] if bounded else ""
    table = Table("phase", "ATen call", "launched", "a step", "µs a step", "share", box=None, pad_edge=False)
    for column in table.columns:
        column.no_wrap = True
        column.overflow = "ellipsis"
    for number in table.columns[3:]:
        number.justify = "right"
        number.min_width = 6
    table.columns[0].max_width, table.columns[1].max_width = 12, 34
    table.columns[2].ratio = 1
    table.expand = True
    for row in rows.head(top).itertuples():
        table.add_row(
            Text(_or(row.phase, "—")),
            Text(visible(_or(row.operator, "(no ATen call)"))),
            Text(short_kernel(_or(row.launch_name, "—"))),
            f"{sign}{row.launches_per_step:,.6g}",
            f"{sign}{row.device_time_us_per_step:,.1f}",
            f"{row.share:.1%}" if row.share == row.share else "—",
        )
    console.print(table)
    if len(rows) > top:
        console.print(
            Text(f"{len(rows) - top} more rows; all are in launch_summary.csv (or --top {len(rows)})")
        )
    if bounded:
        console.print(Text(f"≥ is a lower bound: the truth may be larger ({rows['reasons'].iloc[0]})"))


def _print_calls(console: Console, annotation: KernelAnnotation, top: int) -> None:
    """Without device telemetry the ATen calls are all there is to see."""
    calls = annotation.aten_calls
    calls = calls[calls["step"].isin(annotation.complete_steps)]
    if not len(calls):
        console.print(Text("no ATen call in a complete step"))
        return
    # A trace without markers has no phases, and one without its ops no operators.
    by_call = calls.groupby(["phase", "operator"], observed=True, dropna=False)
    counted = by_call.size().sort_values(ascending=False)
    table = Table("phase", "ATen call", "calls a step", box=None, pad_edge=False)
    table.columns[2].justify = "right"
    for (phase, operator), count in counted.head(top).items():
        table.add_row(
            Text(_or(phase, "—")),
            Text(visible(_or(operator, "—"))),
            f"≥ {count / len(annotation.complete_steps):,.6g}",
        )
    console.print(table)
    if len(counted) > top:
        console.print(Text(f"{len(counted) - top} more rows (--top {len(counted)})"))


def _or(value: object, unknown: str) -> str:
    return value if isinstance(value, str) else unknown
