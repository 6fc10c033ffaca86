from __future__ import annotations

import importlib

import pytest

import tlk_tracking

PUBLIC_PACKAGES = ("tlk_tracking", "tlk_tracking.callbacks")


@pytest.mark.parametrize("package", PUBLIC_PACKAGES)
def test_every_exported_name_is_there_and_documented(package: str) -> None:
    module = importlib.import_module(package)
    undocumented = [name for name in module.__all__ if not getattr(module, name).__doc__]
    assert undocumented == []


@pytest.mark.parametrize("package", PUBLIC_PACKAGES)
def test_completion_shows_the_exported_names(package: str) -> None:
    module = importlib.import_module(package)
    assert set(module.__all__) - set(dir(module)) == set()


def test_what_the_design_names_is_exported() -> None:
    promised = {"record_kernels", "load_annotation", "load_run", "compare_runs", "compare_annotations"}
    assert promised - set(tlk_tracking.__all__) == set()


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        tlk_tracking.no_such_name  # noqa: B018 - looking the name up is the test
