from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import TOP

PACKAGE = TOP / "tlk_tracking"

# A room imports itself and the rooms before it.
ROOMS = [
    "core",
    "annotation",
    "attribution",
    "analysis",
    "report",
    "tracking",
    "delivery",
    "recording",
    "cli",
]

# The rooms that reading, comparing and reporting need never touch torch; within the others, these do.
TORCH_MODULES = {
    "cli.diagnosis_probe",
    "recording.block_recording",
    "recording.call_markers",
    "recording.environment",
    "recording.fit_recorder",
    "recording.fused_kernels",
    "recording.inductor_private",
    "recording.module_tracker",
    "recording.profiler_session",
    "recording.step_brackets",
    "recording.torch_private",
    "recording.window_recorder",
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


def _modules_imported(path: Path) -> set[str]:
    """Return the package's modules that a file imports ("core.errors")."""
    names = {
        name.removeprefix("tlk_tracking.") for name in _imported(path) if name.startswith("tlk_tracking.")
    }
    return {module for module in MODULES if module in names}


def _top_level_imported(path: Path) -> set[str]:
    return {name.split(".")[0] for name in _imported(path)}


def _run_fresh(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=120
    ).stdout


def test_every_module_is_in_a_room() -> None:
    assert {name.split(".")[0] for name in MODULES} == set(ROOMS)


def test_a_room_itself_holds_no_code_that_an_import_of_it_would_run() -> None:
    rooms = [path for path in PACKAGE.rglob("*/__init__.py") if path.parent != PACKAGE / "cli"]
    bodies = {path.parent.name: ast.parse(path.read_text(encoding="utf-8")).body for path in rooms}
    assert [room for room, body in bodies.items() if [type(node) for node in body] != [ast.Expr]] == []


@pytest.mark.parametrize("module", MODULES)
def test_a_room_imports_only_rooms_above_it(module: str) -> None:
    above = ROOMS[: ROOMS.index(module.split(".")[0]) + 1]
    assert {name.split(".")[0] for name in _modules_imported(MODULES[module])} - set(above) == set()


def test_no_module_imports_itself_by_way_of_others() -> None:
    imported = {module: _modules_imported(path) for module, path in MODULES.items()}
    while free := {module for module, others in imported.items() if not others & set(imported)}:
        imported = {module: others for module, others in imported.items() if module not in free}
    assert imported == {}


@pytest.mark.parametrize("module", MODULES)
def test_nothing_in_the_package_imports_the_callbacks(module: str) -> None:
    assert not {"callbacks", "tlk_tracking.callbacks"} & set(_imported(MODULES[module]))


@pytest.mark.parametrize("module", MODULES)
def test_only_mlflow_store_imports_mlflow(module: str) -> None:
    assert module == "tracking.mlflow_store" or "mlflow" not in _top_level_imported(MODULES[module])


@pytest.mark.parametrize("module", MODULES)
def test_torch_is_imported_only_where_ranges_sessions_modules_and_fused_graphs_are_made(module: str) -> None:
    assert module in TORCH_MODULES or "torch" not in _top_level_imported(MODULES[module])


@pytest.mark.parametrize("module", MODULES)
def test_no_module_imports_lightning(module: str) -> None:
    assert not {"lightning", "pytorch_lightning"} & _top_level_imported(MODULES[module])


def test_importing_the_package_loads_nothing_heavy() -> None:
    program = f"import sys, tlk_tracking; print([name for name in {HEAVY} if name in sys.modules])"
    assert _run_fresh(program) == "[]\n"


def test_reading_comparing_and_reporting_load_neither_torch_nor_lightning() -> None:
    modules = [f"tlk_tracking.{name}" for name in MODULES if name not in TORCH_MODULES]
    program = (
        "import importlib, sys\n"
        f"for name in {modules}: importlib.import_module(name)\n"
        f"print([name for name in {TRAINING} if name in sys.modules])"
    )
    assert _run_fresh(program) == "[]\n"
