"""Show one annotation as a self-contained HTML page (KernelAnnotation -> HTML text)."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from tlk_tracking.analysis.metrics import metrics
from tlk_tracking.analysis.rank_summary import RankSummary
from tlk_tracking.analysis.step_counts import count_steps, known_call_keys
from tlk_tracking.analysis.step_tables import StepTable, StepTables, TableName, decode_key
from tlk_tracking.annotation.kernel_annotation import REPORT_FILE, KernelAnnotation, module_table
from tlk_tracking.annotation.module_summary import MODULE_MEASURES
from tlk_tracking.core.gaps import Bound
from tlk_tracking.core.records import Availability, CallSource, Phase
from tlk_tracking.core.text import SIGNS, show_number, visible
from tlk_tracking.report.charts import Bar, draw_bars
from tlk_tracking.report.page import (
    Card,
    Cell,
    Chart,
    Column,
    Page,
    PageTable,
    Section,
    key_cells,
    key_titles,
    limited,
    number_cell,
    render_within_limit,
    text_cell,
)
from tlk_tracking.report.rank_report import rank_section
from tlk_tracking.report.row_names import show_call, show_key

_BARS = 12
_PHASES = tuple(f"_{phase.value}" for phase in Phase)
_REST = "all of them are in the annotation's tables."
_TITLES = {
    TableName.KERNEL: ("Kernels", "kernels"),
    TableName.CALL: ("ATen calls", "calls"),
    TableName.MODULE: ("Modules", "modules"),
    TableName.PHASE: ("Phases", "phases"),
}
_MEASURES = {"aten_calls": "ATen calls", "launches": "launches", "device_time_ms": "device time ms"}


def render_report(annotation: KernelAnnotation, *, ranks: RankSummary | None = None) -> str:
    """Return an HTML page under 1 MB that needs nothing else: where device time goes, gaps, tables.

    Every number carries the sign of its bound, and every name is escaped. With `ranks` the page also has the
    other ranks of the window.
    """
    tables = count_steps(annotation, call_keys=known_call_keys(annotation))
    overview = _overview(annotation, tables)
    return render_within_limit(
        lambda rows: Page(
            title=f"Kernel telemetry {annotation.folder_name}",
            lines=_circumstances(annotation),
            notices=_notices(annotation),
            sections=(
                overview,
                *(() if ranks is None else (rank_section(ranks, limit=rows),)),
                _gaps(annotation),
                *_tables(annotation, tables, rows),
            ),
        )
    )


def add_report(annotation: KernelAnnotation, folder: Path) -> None:
    """Put the page of an annotation beside its files in `folder`, for the MLflow UI to show, unless it has one."""
    report = folder / REPORT_FILE
    if os.path.lexists(report):
        return
    try:
        page = render_report(annotation)
    except Exception:  # an annotation is not lost for want of its picture, which can be drawn again
        logging.getLogger(__name__).warning("no report of %s", annotation.folder_name, exc_info=True)
    else:
        partial = folder / f".{REPORT_FILE}.partial"
        partial.write_text(page, encoding="utf-8")
        partial.replace(report)  # half a report is never sent


def _circumstances(annotation: KernelAnnotation) -> tuple[str, ...]:
    manifest = annotation.manifest
    environment = manifest.environment
    named = {
        "torch": environment.torch,
        "CUDA": environment.cuda,
        "driver": environment.driver,
        "Lightning": environment.lightning,
        "precision": environment.precision,
        "strategy": environment.strategy,
    }
    facts = [environment.gpu_model or "GPU unknown"]
    facts += [f"{name} {value}" for name, value in named.items() if value is not None]
    facts += ["compiled"] if environment.compiled else []
    steps = ", ".join(
        f"{row.step}" if row.outcome == "complete" else f"{row.step} ({row.outcome.value})"
        for row in manifest.window.steps[:50]
    )
    return (
        visible(" · ".join(facts)),
        f"Rank {manifest.rank} of {manifest.world_size}. Steps {steps or 'none'}"
        f"{', …' if len(manifest.window.steps) > 50 else ''}. Numbers are per complete step.",
    )


def _notices(annotation: KernelAnnotation) -> tuple[str, ...]:
    manifest = annotation.manifest
    notices = []
    if manifest.availability is Availability.UNAVAILABLE:
        reason = visible(manifest.availability_reason or "the reason is unknown")
        notices.append(f"device telemetry was unavailable: {reason}")
    if manifest.lower_bound:
        reasons = ", ".join(reason.value for reason in manifest.lower_bound_reasons)
        notices.append(f"some numbers are only lower bounds ({reasons}).")
    if manifest.call_source is CallSource.HOST_OPS:
        notices.append(
            "ATen calls are innermost host ops of a trace without markers; their phases are unknown."
        )
    if not annotation.complete_steps:
        notices.append("no step was complete, so there is no number per step.")
    return tuple(notices)


def _overview(annotation: KernelAnnotation, tables: StepTables) -> Section:
    cards = tuple(
        Card(
            name=metric.name.replace("_", " "),
            text=show_number(metric.value, metric.bound),
            hint=", ".join(reason.value for reason in metric.reasons)
            if metric.bound is not Bound.EXACT
            else None,
        )
        for metric in metrics(annotation)
        if not metric.name.endswith(_PHASES)
    )
    charts = [
        _time_chart(tables, TableName.PHASE, "Device time by phase"),
        _time_chart(tables, TableName.MODULE, "Device time by module"),
        _operator_chart(tables),
        _time_chart(tables, TableName.KERNEL, "Device time by kernel"),
        _step_chart(annotation, tables),
    ]
    return Section(
        title="Where device time goes",
        anchor="overview",
        cards=cards,
        charts=tuple(chart for chart in charts if chart is not None),
    )


def _time_chart(tables: StepTables, name: TableName, caption: str) -> Chart | None:
    table = tables.tables.get(name)
    if table is None:
        return None
    labels = [show_key(name, key) for key in table.keys]
    return _bars(table, labels, caption)


def _operator_chart(tables: StepTables) -> Chart | None:
    table = tables.tables.get(TableName.CALL)
    if table is None:
        return None
    return _bars(table, [show_call(decode_key(key) or {}) for key in table.keys], "Device time by operator")


def _bars(table: StepTable, labels: Sequence[str], caption: str) -> Chart | None:
    """Draw the largest sums of device time by label; what is not drawn is counted in the caption."""
    times = table.values.get("device_time_ms")
    if times is None or not times.size:
        return None
    sums: dict[str, float] = {}
    for label, value in zip(labels, times.mean(axis=1).tolist(), strict=True):
        sums[label] = sums.get(label, 0.0) + value
    largest = sorted(((value, label) for label, value in sums.items() if value), reverse=True)
    if not largest:
        return None
    bound = table.bounds["device_time_ms"]
    rest = len(largest) - _BARS
    shown = f"{caption} ({rest} smaller ones not drawn)" if rest > 0 else caption
    bars = [
        Bar(label=label, value=value, text=f"{show_number(value, bound)} ms")
        for value, label in largest[:_BARS]
    ]
    return Chart(caption=shown, svg=draw_bars(bars, title=shown, unit="ms per step"))


def _step_chart(annotation: KernelAnnotation, tables: StepTables) -> Chart | None:
    table = tables.tables[TableName.TOTAL]
    launches = table.values.get("launches")
    if launches is None or not launches.size:
        return None
    steps = sorted(set(annotation.complete_steps))
    bound = table.bounds["launches"]
    bars = [
        Bar(label=f"step {step}", value=count, text=show_number(count, bound))
        for step, count in list(zip(steps, launches[0].tolist(), strict=True))[:_BARS]
    ]
    rest = len(steps) - len(bars)
    caption = f"Launches by step{f' ({rest} later ones not drawn)' if rest > 0 else ''}"
    return Chart(caption=caption, svg=draw_bars(bars, title=caption, unit="launches"))


def _gaps(annotation: KernelAnnotation) -> Section:
    manifest = annotation.manifest
    rows = tuple(
        (
            text_cell(gap.reason.value),
            number_cell(gap.count, Bound.EXACT),
            text_cell(gap.evidence),
        )
        for gap in manifest.gaps
    )
    lines = []
    if manifest.availability is Availability.UNAVAILABLE:
        lines.append("Without device telemetry nothing is known of gaps.")
    elif not rows:
        lines.append("No gap was found.")
    audit = manifest.audit
    if audit.agreed is not None:
        lines.append(
            f"Launches for which Kineto's own link names the same ATen call: {audit.agreed}; another: "
            f"{audit.disagreed}; that have no such link: {audit.not_audited}."
        )
    columns = (Column(title="reason"), Column(title="count", is_number=True), Column(title="evidence"))
    return Section(
        title="What could not be seen",
        anchor="gaps",
        lines=tuple(lines),
        tables=(PageTable(columns=columns, rows=rows),) if rows else (),
    )


def _tables(annotation: KernelAnnotation, tables: StepTables, limit: int) -> list[Section]:
    total = tables.tables[TableName.TOTAL]
    sections = []
    for name, (title, anchor) in _TITLES.items():
        table = tables.tables.get(name)
        if table is not None and table.keys and len(tables.windows):
            shown = (
                _modules(annotation, limit) if name is TableName.MODULE else _table(name, table, total, limit)
            )
            sections.append(Section(title=title, anchor=anchor, tables=(shown,)))
    return sections


def _modules(annotation: KernelAnnotation, limit: int) -> PageTable:
    """Every module with the modules inside it, those that only hold others among them."""
    found = module_table(annotation)
    measures = {
        f"{measure}_per_step{suffix}": (title + text, 1e-3 if measure == "device_time_us" else 1.0)
        for measure, title in zip(MODULE_MEASURES, _MEASURES.values(), strict=True)
        for suffix, text in (("", ""), ("_with_children", " with children"))
        if not found[f"{measure}_per_step"].null_count
    }
    rows = []
    for row in found.to_pylist():
        bound = Bound.LOWER if row["lower_bound"] else Bound.EXACT
        cells = [text_cell(row["module"] or "(the model itself)")]
        for column, (_, unit) in measures.items():
            cells.append(number_cell(row[column] * unit, bound, hint=row["reasons"] or None))
        rows.append(tuple(cells))
    columns = [Column(title="module")]
    columns += [Column(title=title, is_number=True) for title, _ in measures.values()]
    return limited(columns, rows, limit=limit, rest=_REST)


def _table(name: TableName, table: StepTable, total: StepTable, limit: int) -> PageTable:
    means = {measure: values.mean(axis=1).tolist() for measure, values in table.values.items()}
    measures = [measure for measure in _MEASURES if measure in means]
    shares = _shares(table, total)
    weight = means["launches" if "launches" in means else "aten_calls"]
    order = sorted(range(len(table.keys)), key=lambda row: (-(shares or weight)[row], -weight[row]))
    rows = []
    for row in order:
        cells = key_cells(name, table.keys[row])
        for measure in measures:
            reasons = ", ".join(sorted(reason.value for reason in table.reasons[measure]))
            cells.append(number_cell(means[measure][row], table.bounds[measure], hint=reasons or None))
        if shares is not None:
            sign = SIGNS[_share_bound(table, total)]
            cells.append(Cell(text=f"{sign}{shares[row]:.1%}", order=shares[row]))
        rows.append(tuple(cells))
    columns = [Column(title=title) for title in key_titles(name)]
    columns += [Column(title=_MEASURES[measure], is_number=True) for measure in measures]
    columns += [Column(title="share of device time", is_number=True)] if shares is not None else []
    return limited(columns, rows, limit=limit, rest=_REST)


def _shares(table: StepTable, total: StepTable) -> list[float] | None:
    """Return each row's share of all device time; None when there is none."""
    times, all_time = table.values.get("device_time_ms"), total.values.get("device_time_ms")
    if times is None or all_time is None or not all_time.sum():
        return None
    shares: list[float] = (times.sum(axis=1) / all_time.sum()).tolist()
    return shares


def _share_bound(table: StepTable, total: StepTable) -> Bound:
    """A part that may be larger makes the share a lower bound; a whole that may be larger makes it anything."""
    whole = total.bounds["device_time_ms"]
    return table.bounds["device_time_ms"] if whole is Bound.EXACT else Bound.UNKNOWN
