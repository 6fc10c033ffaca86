from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path, PurePosixPath

import pytest
from paths import TOP

SOURCES = ("pyproject.toml", "README.md", "LICENSE", "tlk_tracking", "callbacks")


@pytest.fixture(scope="module")
def source_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of what the build reads, so that no build leaves files in the tree."""
    folder = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        source = TOP / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel_names(source_copy: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Build the wheel; return the names of its files outside its metadata."""
    out = tmp_path_factory.mktemp("wheel")
    _python("-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source_copy))
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return sorted(name for name in archive.namelist() if ".dist-info/" not in name)


def _python(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _files_of_package() -> list[str]:
    """Return what the wheel must hold: the package's files, with callbacks/ in its installed place."""
    package = [path.relative_to(TOP) for path in (TOP / "tlk_tracking").rglob("*")]
    callbacks = ["tlk_tracking" / path.relative_to(TOP) for path in (TOP / "callbacks").rglob("*")]
    return sorted(
        path.as_posix()
        for path in [*package, *callbacks]
        if path.suffix not in ("", ".pyc") and "__pycache__" not in path.parts
    )


def test_the_wheel_holds_every_file_of_the_package_and_no_other(wheel_names: list[str]) -> None:
    assert wheel_names == _files_of_package()


def test_the_wheel_has_the_callbacks_inside_the_package_and_no_package_of_that_name(
    wheel_names: list[str],
) -> None:
    assert {PurePosixPath(name).parts[0] for name in wheel_names} == {"tlk_tracking"}
    assert "tlk_tracking/callbacks/kernel_telemetry.py" in wheel_names


def test_the_wheel_says_that_it_is_typed(wheel_names: list[str]) -> None:
    assert "tlk_tracking/py.typed" in wheel_names


def test_the_callback_is_importable_from_an_editable_install(source_copy: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    install = ("-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(site))
    _python(*install, "-e", str(source_copy))
    # Without this environment's own editable install (-S) and out of this tree (-P): only the new one can find it.
    program = (
        "import site, sys; site.addsitedir(sys.argv[1]); sys.path.append(sys.argv[2])\n"
        "from tlk_tracking.callbacks import KernelTelemetry, kernel_telemetry\n"
        "print(kernel_telemetry.__file__)"
    )
    shown = _python("-P", "-S", "-c", program, str(site), sysconfig.get_path("purelib"))
    assert Path(shown.strip()) == source_copy / "callbacks" / "kernel_telemetry.py"


def test_without_the_callbacks_everything_else_is_importable(source_copy: Path, tmp_path: Path) -> None:
    shutil.copytree(source_copy / "tlk_tracking", tmp_path / "tlk_tracking")
    program = (
        "import importlib, pkgutil, sys, tlk_tracking\n"
        "assert tlk_tracking.__file__.startswith(sys.argv[1]), tlk_tracking.__file__\n"
        "for module in pkgutil.walk_packages(tlk_tracking.__path__, 'tlk_tracking.'):\n"
        "    module.name.endswith('__main__') or importlib.import_module(module.name)\n"
        "for name in tlk_tracking.__all__: getattr(tlk_tracking, name)\n"
        "print([name for name in sys.modules if 'callbacks' in name and 'tlk' in name])"
    )
    assert _python("-P", "-c", program, str(tmp_path), PYTHONPATH=str(tmp_path)) == "[]\n"


def test_every_folder_with_modules_is_a_listed_package() -> None:
    listed = tomllib.loads((TOP / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {path.parent.relative_to(TOP) for path in (TOP / "tlk_tracking").rglob("*.py")}
    assert sorted(listed) == sorted(
        [".".join(folder.parts) for folder in folders] + ["tlk_tracking.callbacks"]
    )


def test_what_is_imported_is_what_is_declared_and_has_its_reason() -> None:
    imported = {
        name.split(".")[0]
        for folder in ("tlk_tracking", "callbacks")
        for path in (TOP / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in _absolute_imports(node)
    } - {"tlk_tracking", *sys.stdlib_module_names}
    requirements = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]["dependencies"]
    declared = {re.split(r"[<>=]", requirement)[0] for requirement in requirements}
    reasons = (TOP / "docs" / "decisions.md").read_text(encoding="utf-8")
    # MLflow's client has another name as a distribution; pytorch_lightning is the callback's other home.
    # Dask is an extra; _typeshed is there for mypy alone.
    needed = imported - {"pytorch_lightning", "dask", "_typeshed"}
    assert {name.replace("mlflow", "mlflow-skinny") for name in needed} == declared
    assert [name for name in declared if f"\n| {name} |" not in reasons] == []


def _absolute_imports(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
