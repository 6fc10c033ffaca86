from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from damage import LAUNCHES, MANIFEST, rewrite_manifest
from real_traces import RealTrace, real_trace, real_traces
from synthetic_trace import SyntheticTrace, one_step

from tlk_tracking import cli
from tlk_tracking.annotation.kernel_annotation import load_annotation
from tlk_tracking.cli.server import bounded_requests
from tlk_tracking.core.errors import TrackingError

SHOWN = {
    "availability", "lower_bound", "lower_bound_reasons", "counts", "by_step", "streams", "device_time_us",
    "device_busy_us", "max_records_per_launch", "gaps", "audit", "bounds",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one run of the command line gave."""

    code: int
    out: str
    err: str


Tlk = Callable[..., Answer]


@pytest.fixture
def tlk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tlk:
    """Run the command line in this process, to its exit."""

    def run(*arguments: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["tlk", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return Answer(code=int(ended.value.code or 0), out=out, err=err)

    return run


@pytest.fixture
def saved(tmp_path: Path, tlk: Tlk) -> Path:
    """Return the folder of an imported annotation."""
    folder = tmp_path / "saved"
    assert tlk("import", one_step().write(tmp_path), "--out", folder).code == 0
    return folder


def _strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not strict JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("real", real_traces(), ids=str)
def test_import_and_show_give_every_fact_of_a_real_trace(tmp_path: Path, tlk: Tlk, real: RealTrace) -> None:
    imported = tlk("import", real.trace, "--ops", real.ops, "--out", tmp_path / "out")
    assert (imported.code, imported.err) == (0, "")
    shown = tlk("show", tmp_path / "out", "--json")
    assert (shown.code, shown.err) == (0, "")
    said, expected = _strict(shown.out), real.facts()
    assert set(said) == SHOWN
    assert shown.out == json.dumps(said, sort_keys=True, indent=2) + "\n"
    counts = said["counts"]
    assert {
        "op_markers": counts["aten_calls"],
        "step_markers": len(said["by_step"]),
        "records": counts["launches"] + counts["outside_steps"],
        "in_window": counts["launches"],
        "by_kind": {k: n for k in ("kernel", "memcpy", "memset") if (n := counts[f"{k}s"])},
        "by_status": {s: n for s in ("attributed", "unattributed") if (n := counts[s])},
        "by_step": said["by_step"],
        "streams": sorted({stream for streams in said["streams"].values() for stream in streams}),
        "device_time_us": said["device_time_us"],
        "max_records_per_launch": said["max_records_per_launch"],
        "ops_with_launches": counts["aten_calls_with_launches"],
        "relations": counts["relations"],
        "gaps": said["gaps"],
    } == {k: v for k, v in expected.items() if k not in ("raised", "note", "relation_pairs")}
    if "relation_pairs" in expected:
        annotation = load_annotation(tmp_path / "out")
        pairs = annotation.relations.merge(annotation.launches, on="launch")
        pairs = pairs[pairs["step"].notna()]
        found = sorted(zip(pairs["sequence"], pairs["runtime_correlation"], strict=True))
        assert found == sorted(map(tuple, expected["relation_pairs"]))


def test_what_is_unavailable_is_null_in_json(tmp_path: Path, tlk: Tlk) -> None:
    trace = SyntheticTrace()
    trace.step(5, 0, 1000)
    trace.op(0, 100, 200)
    assert tlk("import", trace.write(tmp_path), "--out", tmp_path / "out").code == 0
    said = _strict(tlk("show", tmp_path / "out", "--json").out)
    assert (set(said), said["availability"], said["by_step"]) == (SHOWN, "unavailable", None)
    assert said["counts"] == dict.fromkeys(said["counts"]) | {"aten_calls": 1}


def test_show_says_which_numbers_are_bounds_and_why(tmp_path: Path, tlk: Tlk) -> None:
    real = real_trace("warmup_leak")
    assert tlk("import", real.trace, "--ops", real.ops, "--out", tmp_path / "out").code == 0
    shown = " ".join(tlk("show", tmp_path / "out", "--top", 1).out.split())
    for words in ("≥ 40", "record_without_launch", "queued before the window", "NVIDIA H200", "aten"):
        assert words in shown


def test_show_of_what_is_unavailable_says_so_and_shows_the_calls(tmp_path: Path, tlk: Tlk) -> None:
    trace = SyntheticTrace()
    trace.step(5, 0, 1000)
    trace.op(0, 100, 200)
    assert tlk("import", trace.write(tmp_path), "--out", tmp_path / "out").code == 0
    shown = tlk("show", tmp_path / "out").out
    assert "device telemetry is unavailable here: the trace holds no CUDA runtime call" in shown.replace(
        "\n", " "
    )
    assert "≥ 1" in shown


@pytest.mark.parametrize(
    "arguments",
    [
        ("export", "saved", "--perfetto", "nowhere/x.pftrace"),
        ("export", "saved", "--perfetto", "nowhere/x.pftrace.gz"),
        ("report", "saved", "--html", "nowhere/x.html"),
        ("compare", "saved", "saved", "--html", "nowhere/x.html"),
    ],
    ids=" ".join,
)
def test_a_file_that_cannot_be_written_is_one_line(
    saved: Path, tlk: Tlk, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(saved.parent)
    answer = tlk(*arguments)
    said = f"tlk: cannot write {arguments[-1]}: No such file or directory; give another file\n"
    assert (answer.code, answer.err) == (2, said)


def test_what_the_file_system_refuses_is_one_line(
    saved: Path, tlk: Tlk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr("tlk_tracking.annotation.kernel_annotation.load_annotation", refuse)
    assert tlk("show", saved) == Answer(code=2, out="", err=f"tlk: {saved}: Permission denied\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("show", "runs:/"), "tlk: 'runs:/' has no run id; give runs:/RUN_ID\n"),
        (
            ("show", "runs:/abc", "--tracking-uri", "foo://x"),
            "tlk: foo://x is no tracking URI that MLflow knows; give http(s)://SERVER or sqlite:///FILE\n",
        ),
        (
            ("show", "saved", "--rank", "7"),
            "tlk: no annotation has rank 7; there are window_000005_0123abcd/rank_0\n",
        ),
        (
            ("show", "saved", "--window", "8", "--rank", "7"),
            "tlk: no annotation has window 8 and rank 7; there are window_000005_0123abcd/rank_0\n",
        ),
    ],
)
def test_a_target_that_is_not_there_is_named(
    saved: Path, tlk: Tlk, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(saved.parent)
    assert tlk(*arguments) == Answer(code=2, out="", err=said)


def test_an_experiment_that_is_not_there_is_named(mlflow_sqlite: str, tlk: Tlk) -> None:
    answer = tlk("history", "nothere", "--tracking-uri", mlflow_sqlite)
    assert answer == Answer(code=2, out="", err=f"tlk: there is no experiment 'nothere' at {mlflow_sqlite}\n")


@pytest.mark.parametrize("place", ["out", "run"])
def test_a_place_that_cannot_take_an_import_is_refused_before_the_trace_is_read(
    saved: Path, tlk: Tlk, monkeypatch: pytest.MonkeyPatch, mlflow_sqlite: str, place: str
) -> None:
    monkeypatch.setattr(
        "tlk_tracking.attribution.import_traces.import_traces", lambda *_, **__: pytest.fail("was read")
    )
    (saved.parent / "t.json").write_text("{")
    to, said = {
        "out": (["--out", saved], "exists already; choose a new folder"),
        "run": (["--run", "a" * 32, "--tracking-uri", mlflow_sqlite], "not found"),
    }[place]
    answer = tlk("import", saved.parent / "t.json", *to)
    assert (answer.code, said in answer.err) == (2, True)


def test_the_next_command_names_the_store_that_was_given(
    tmp_path: Path, tlk: Tlk, mlflow_sqlite: str
) -> None:
    to = ("--experiment", "e", "--tracking-uri", mlflow_sqlite)
    said = tlk("import", one_step().write(tmp_path), *to).out.splitlines()[-1]
    assert said.startswith("next: tlk show runs:/")
    assert tlk(*shlex.split(said.removeprefix("next: tlk "))).code == 0


# A server that does not answer


def test_requests_of_a_verb_are_bounded_and_what_the_user_set_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "6")
    before = dict(os.environ)
    with bounded_requests("http://127.0.0.1:9"):
        names = ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT")
        assert [os.environ[name] for name in names] == ["6", "15"]
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    "arguments", [("show", "runs:/abc"), ("history", "e"), ("import", "t.json", "--run", "abc")], ids=" ".join
)
def test_a_dead_server_is_asked_within_the_bounds(
    tmp_path: Path, tlk: Tlk, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    (tmp_path / "t.json").write_text("{")
    monkeypatch.chdir(tmp_path)
    seen = []

    def answer_nothing(uri: str) -> None:
        seen.append((uri, os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"]))
        raise TrackingError("no answer")

    monkeypatch.setattr("tlk_tracking.tracking.mlflow_store._new_client", answer_nothing)
    assert tlk(*arguments, "--tracking-uri", "http://127.0.0.1:9").err == "tlk: no answer\n"
    assert seen == [("http://127.0.0.1:9", "1")]


def test_whoever_watches_is_told_what_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    written = threading.Event()

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

        def flush(self) -> None:
            written.set()

    terminal = Terminal()
    monkeypatch.setattr("tlk_tracking.cli.server._MOMENT_S", 0)
    monkeypatch.setattr(sys, "stderr", terminal)
    with bounded_requests("http://user:secret@127.0.0.1:9"):
        assert written.wait(30)
    assert terminal.getvalue() == "waiting for http://127.0.0.1:9\n"


def test_show_of_a_trace_without_phases_and_device_shows_the_calls(tmp_path: Path, tlk: Tlk) -> None:
    trace = tmp_path / "plain.json"
    call = {"ph": "X", "pid": 1, "tid": 1, "cat": "cpu_op", "name": "aten::mm", "ts": 20, "dur": 30}
    trace.write_text(json.dumps({"traceEvents": [call]}))
    assert tlk("import", trace, "--out", tmp_path / "out").code == 0
    assert tlk("show", tmp_path / "out").out.splitlines()[-1].split() == ["—", "aten::mm", "≥", "1"]


# Exit codes: 0 fine, 1 the check asked for fails, 2 usage or bad input


def test_validate_says_what_is_valid(saved: Path, tlk: Tlk) -> None:
    answer = tlk("validate", saved)
    assert (answer.code, answer.err) == (0, "")
    assert answer.out == "valid: window_000005_0123abcd/rank_0, 2 ATen calls, 2 launch rows, 2 relations\n"


def test_the_row_that_says_unavailable_is_not_called_a_launch(tmp_path: Path, tlk: Tlk) -> None:
    trace = SyntheticTrace()
    trace.step(5, 0, 1000)
    trace.op(0, 100, 200)
    imported = tlk("import", trace.write(tmp_path), "--out", tmp_path / "out").out
    assert ": window_000005_0123abcd/rank_0, 1 step, launches unknown, 1 call row\n" in imported
    assert tlk("validate", tmp_path / "out").out == (
        "valid: window_000005_0123abcd/rank_0, 1 ATen call, no launch (device telemetry unavailable), 0 relations, "
        "lower bounds: no_device_evidence\n"
    )


def test_validate_of_a_damaged_annotation_fails_and_says_where(saved: Path, tlk: Tlk) -> None:
    with (saved / LAUNCHES).open("ab") as file:
        file.write(b"more")
    answer = tlk("validate", saved)
    assert (answer.code, answer.out.startswith(f"invalid: {LAUNCHES}: has ")) == (1, True)


def test_validate_checks_every_annotation_below_a_folder(tmp_path: Path, tlk: Tlk) -> None:
    for rank in range(2):
        out = tmp_path / "kernel_telemetry" / "window_000005_0123abcd" / f"rank_{rank}"
        assert tlk("import", one_step().write(tmp_path), "--rank", rank, "--out", out).code == 0
    for target in (tmp_path, tmp_path / "kernel_telemetry", out.parent):
        answer = tlk("validate", target)
        assert [answer.code, answer.out.count("valid: window_000005_0123abcd/rank_")] == [0, 2]
    (out / LAUNCHES).unlink()
    assert tlk("validate", tmp_path).code == 1


def test_show_chooses_window_and_rank(tmp_path: Path, tlk: Tlk) -> None:
    for rank in range(2):
        out = tmp_path / "window_000005_0123abcd" / f"rank_{rank}"
        assert tlk("import", one_step().write(tmp_path), "--rank", rank, "--out", out).code == 0
    assert "rank_0  " in tlk("show", tmp_path).out.splitlines()[0]
    assert "rank_1" in tlk("show", tmp_path, "--rank", 1).out.splitlines()[0]
    answer = tlk("show", tmp_path, "--window", 99)
    assert (answer.code, "no annotation has window 99" in answer.err) == (2, True)


@pytest.mark.parametrize(
    "arguments",
    [
        ("show", "nowhere"),
        ("show", "."),
        ("validate", "nowhere"),
        ("validate", "."),
        ("import", "nowhere", "--out", "out"),
        ("import", "bad.json", "--out", "out"),
        ("import", "bad.json"),
        ("import", "good.json", "--ops", "bad.json", "--out", "out"),
        ("import", "good.json", "--out", "good.json"),
        ("import", "good.json", "--out", "good.json/below"),
        ("import", "good.json", "--rank", "-1", "--out", "out"),
        ("show", "saved", "--top", "0"),
        ("show", ""),
        ("show", "saved", "--tracking-uri", ""),
        ("validate", " "),
        ("export", "", "--perfetto", "out"),
        ("report", "", "--html", "out"),
        ("compare", "saved", ""),
        ("compare", "", "saved"),
        ("compare", "saved", "saved", "--max-launch-increase", "nan"),
        ("compare", "saved", "saved", "--max-time-increase", "nan"),
        ("compare", "saved", "saved", "--max-launch-increase", "inf"),
        ("history", ""),
        ("import", "good.json", "--experiment", ""),
        ("import", "good.json", "--run", "", "--out", "out"),
        ("doctor", "--deadline", "nan"),
        ("unknown",),
        ("show", "--unknown"),
    ],
    ids=" ".join,
)
def test_bad_input_is_exit_code_2_and_a_line_on_standard_error(
    tmp_path: Path, saved: Path, tlk: Tlk, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "bad.json").write_text("{")
    (tmp_path / "empty" / "good.json").write_text(one_step().text())
    (tmp_path / "empty" / "saved").symlink_to(saved)
    monkeypatch.chdir(tmp_path / "empty")
    answer = tlk(*arguments)
    assert answer.code == 2
    assert answer.err
    assert "Traceback" not in answer.err
    assert not (tmp_path / "empty" / "out").exists()


def test_a_damaged_target_of_show_is_bad_input(saved: Path, tlk: Tlk) -> None:
    (saved / LAUNCHES).unlink()
    assert tlk("show", saved) == Answer(code=2, out="", err=f"tlk: {LAUNCHES}: is missing\n")


@pytest.mark.parametrize("verb", ["show", "validate"])
def test_a_message_about_a_hostile_file_is_inert(saved: Path, tlk: Tlk, verb: str) -> None:
    hostile = "\x1b[31m\u202e" + "x" * 1_000_000
    rewrite_manifest(saved, lambda said: said.update({hostile: 1}))
    answer = tlk(verb, saved)
    shown = answer.out + answer.err
    assert MANIFEST in shown
    assert len(shown) < 3000
    assert all(line.isprintable() for line in shown.splitlines())


@pytest.mark.parametrize("arguments", [("show",), ("show", "--top", "100")])
def test_hostile_names_are_shown_inert_on_a_terminal(
    tmp_path: Path, tlk: Tlk, arguments: tuple[str, ...]
) -> None:
    trace = SyntheticTrace()
    trace.host("aten::\x1b[2J\u202e[bold]op", 0, 100)
    for number, name in enumerate(
        ("\x1b]0;title\x07", "\u202eevil", "[red]markup[/red]", "a\nb\rc", "x" * 5000)
    ):
        trace.launch(number + 1, number, name=name)
    trace.header = {"deviceProperties": [{"name": "GPU \x1b[31m\u202e"}]}
    out = tmp_path / "out"
    imported = tlk("import", trace.write(tmp_path), "--out", out)
    shown = tlk(arguments[0], out, *arguments[1:])
    assert (imported.code, shown.code) == (0, 0)
    for line in (*imported.out.splitlines(), *shown.out.splitlines()):
        assert line.isprintable(), line
        assert len(line) <= 200
    assert "[red]markup" in shown.out


def test_the_command_runs_as_a_program(saved: Path) -> None:
    program = "from tlk_tracking.cli import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", program, "show", saved, "--json"], capture_output=True, timeout=120, check=True
    )
    assert set(_strict(ended.stdout.decode())) == SHOWN
