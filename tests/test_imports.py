from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "tlk_tracking"

# The flow: a stage imports only what stands before it, and each line is one stage with its parts before it.
FLOW = """
    errors records tables inert_text number_text intervals durable_files
    profiling_window ranks
    fused_notes torch_private inductor_private modules fused_kernels markers step_brackets
    profiler_session
    environment window_recorder
    trace_files trace_blocks event_columns growing_columns kineto_events
    nested_ranges lost_launches correlation launch_places fused_relations
    totals launch_summary module_summary
    manifest table_files annotation_checks annotation
    annotation_tables ops_file annotate trace_set
    timeline perfetto
    summary
    rank_parts rank_summary
    step_tables step_counts key_text charts report_page rank_report report
    destinations outbox
    request_limits run_artifacts run_record run_telemetry mlflow_store mlflow_tracking dataset
    delivery window_carriers window_worker
    fit_recorder
    time_samples context comparison_rows comparison comparison_text comparison_json
    regression run_history comparison_report
    recording
    doctor_lines record_probe doctor
    cli
"""
ORDER = {stage: place for place, stage in enumerate(FLOW.split())}

TORCH_STAGES = {
    "torch_private",
    "modules",
    "inductor_private",
    "fused_kernels",
    "markers",
    "step_brackets",
    "profiler_session",
    "environment",
    "window_recorder",
    "fit_recorder",
    "recording",
    "record_probe",
}
TRAINING = ("torch", "lightning", "pytorch_lightning", "mlflow")
HEAVY = (*TRAINING, "pandas", "pyarrow")


def _modules() -> dict[str, Path]:
    """Return the package's modules by name ("cli.show"), without its __init__."""
    parts = {
        path.relative_to(PACKAGE).with_suffix("").parts: path
        for path in sorted(PACKAGE.rglob("*.py"))
        if path != PACKAGE / "__init__.py"
    }
    return {".".join(part for part in name if part != "__init__"): path for name, path in parts.items()}


MODULES = _modules()


def _imported(path: Path) -> Iterator[str]:
    """Give every module that a file imports anywhere, as an absolute dotted name."""
    package = ("tlk_tracking", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _stages_imported(path: Path) -> set[str]:
    dotted = (name.split(".") for name in _imported(path))
    return {parts[1] for parts in dotted if parts[0] == "tlk_tracking" and len(parts) > 1} & (
        {name.split(".")[0] for name in MODULES} | {"callbacks"}
    )


def _top_level_imported(path: Path) -> set[str]:
    return {name.split(".")[0] for name in _imported(path)}


def _run_fresh(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=120
    ).stdout


def test_every_module_has_its_place_in_the_flow() -> None:
    assert {name.split(".")[0] for name in MODULES} - set(ORDER) == set()


@pytest.mark.parametrize("module", MODULES)
def test_a_stage_imports_only_stages_above_it(module: str) -> None:
    stage = module.split(".")[0]
    above = {name for name, place in ORDER.items() if place < ORDER[stage]}
    allowed = above | {stage} if stage == "cli" else above
    assert _stages_imported(MODULES[module]) - allowed == set()


@pytest.mark.parametrize("module", MODULES)
def test_nothing_in_the_package_imports_the_callbacks(module: str) -> None:
    assert not {"callbacks", "tlk_tracking.callbacks"} & set(_imported(MODULES[module]))


@pytest.mark.parametrize("module", MODULES)
def test_only_mlflow_store_imports_mlflow(module: str) -> None:
    assert module == "mlflow_store" or "mlflow" not in _top_level_imported(MODULES[module])


@pytest.mark.parametrize("module", MODULES)
def test_torch_is_imported_only_where_ranges_sessions_modules_and_fused_graphs_are_made(module: str) -> None:
    assert module in TORCH_STAGES or "torch" not in _top_level_imported(MODULES[module])


@pytest.mark.parametrize("module", MODULES)
def test_no_stage_imports_lightning(module: str) -> None:
    assert not {"lightning", "pytorch_lightning"} & _top_level_imported(MODULES[module])


def test_importing_the_package_loads_nothing_heavy() -> None:
    program = f"import sys, tlk_tracking; print([name for name in {HEAVY} if name in sys.modules])"
    assert _run_fresh(program) == "[]\n"


def test_reading_comparing_and_reporting_load_neither_torch_nor_lightning() -> None:
    stages = [
        f"tlk_tracking.{name}"
        for name in MODULES
        if name.split(".")[0] not in TORCH_STAGES and not name.endswith("__main__")
    ]
    program = (
        "import importlib, sys\n"
        f"for name in {stages}: importlib.import_module(name)\n"
        f"print([name for name in {TRAINING} if name in sys.modules])"
    )
    assert _run_fresh(program) == "[]\n"
