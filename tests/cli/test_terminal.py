"""What is wrong with standard output never looks like the answer of a check."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import EXAMPLES
from real_traces import real_traces

DATA = EXAMPLES / "data"
PROGRAM = "from tlk_tracking.cli import main; main()"
SHIPPED = (str(DATA / "compare_fp32"), str(DATA / "compare_bf16"))
NO_SPACE = b"tlk: standard output: No space left on device\n"


def _run(
    *arguments: object, out: int | None = subprocess.PIPE, encoding: str = "utf-8"
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        env={**os.environ, "PYTHONIOENCODING": encoding},
        stdout=out,
        stderr=subprocess.PIPE,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--help",), 0),
        (("show", SHIPPED[0]), 0),
        (("show", SHIPPED[0], "--json"), 0),
        (("compare", *SHIPPED, "--fail-on", "regression"), 1),
        (("compare", SHIPPED[0], SHIPPED[0], "--fail-on", "regression"), 0),
    ],
    ids=["help", "tables", "json", "a regression", "no regression"],
)
def test_a_reader_who_leaves_does_not_change_the_exit_code(arguments: tuple[str, ...], code: int) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = _run(*arguments, out=writer)
    finally:
        os.close(writer)
    assert (ended.returncode, b"Traceback" in ended.stderr) == (code, False)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("arguments", [("--help",), ("show", SHIPPED[0]), ("show", SHIPPED[0], "--json")])
def test_an_output_that_takes_no_more_is_one_line_and_exit_code_2(arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("wb") as full:
        ended = _run(*arguments, out=full.fileno())
    assert (ended.returncode, ended.stderr) == (2, NO_SPACE)


def test_a_sign_that_the_output_cannot_encode_is_spelled(tmp_path: Path) -> None:
    leaky = next(real for real in real_traces() if "warmup_leak" in str(real.trace))
    assert _run("import", leaky.trace, "--ops", leaky.ops, "--out", tmp_path / "out").returncode == 0
    wide = _run("show", tmp_path / "out").stdout.decode()
    spelled = _run("show", tmp_path / "out", encoding="ascii")
    assert (spelled.returncode, spelled.stderr) == (0, b"")
    for sign, letters in (("≥", ">="), ("·", "|"), ("µ", "u"), ("…", "...")):
        wide = wide.replace(sign, letters)
    assert spelled.stdout.decode("ascii") == wide
    assert ">= 40" in wide


def test_a_path_that_is_no_text_is_named_and_no_traceback(tmp_path: Path) -> None:
    trace = next(iter(real_traces())).trace
    ended = _run("import", trace, "--out", tmp_path / "\udcff")
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert rb"\udcff" in ended.stdout
