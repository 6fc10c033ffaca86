from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner
from outboxes import seal, window_facts

from tlk_tracking.cli import tlk
from tlk_tracking.cli.diagnosis import diagnose
from tlk_tracking.cli.diagnosis_lines import (
    PROBE_KERNELS,
    Line,
    ProbeAnswer,
    State,
    Subject,
    outbox_line,
    session_line,
    tools_line,
    torch_line,
)
from tlk_tracking.core.records import Availability, Environment
from tlk_tracking.delivery.outbox import Outbox
from tlk_tracking.tracking.tracking_uri import Destination

RECORDED = ProbeAnswer(
    environment=Environment(torch="2.11.0+cu130", cuda="13.0", driver="580.159", cupti="13.0.85"),
    gpus=("NVIDIA H200",),
    availability=Availability.RECORDED,
    reason=None,
    kernels=PROBE_KERNELS,
)
WITHOUT_CUDA = ProbeAnswer(
    environment=Environment(torch="2.13.0+cpu"),
    gpus=(),
    availability=Availability.UNAVAILABLE,
    reason="CUDA is not available to torch in this process",
    kernels=None,
)


def _tracking_line(uri: str, *, deadline_s: float = 5.0, write: bool = True, **environ: str) -> Line:
    found = diagnose(
        tracking_uri=uri,
        outbox=Path("none"),
        deadline_s=deadline_s,
        write=write,
        environ={**os.environ, **environ},
        ask_probe=lambda: RECORDED,
    )
    return found.lines[list(Subject).index(Subject.TRACKING)]


@pytest.fixture
def deaf_server() -> Iterator[str]:
    """Return the URI of a server that takes connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_each_subject_has_one_line_and_the_exit_code_says_whether_recording_works(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        tlk,
        ["doctor", "--json", "--tracking-uri", f"sqlite:///{tmp_path}/m.db", "--outbox", str(tmp_path / "o")],
    )
    said = json.loads(result.output)
    assert [line["subject"] for line in said["lines"]] == [subject.value for subject in Subject]
    assert len(said["lines"]) == 10
    assert result.exit_code == (0 if said["can_record"] else 1)
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_fine_says_what_to_do(tmp_path: Path) -> None:
    diagnosis = diagnose(
        tracking_uri=f"sqlite:///{tmp_path}/m.db",
        outbox=tmp_path,
        deadline_s=5,
        environ={**os.environ, "CUDA_INJECTION64_PATH": "/opt/tool.so"},
        ask_probe=lambda: "the tiny session did not end within 120 s",
    )
    assert not diagnosis.can_record
    assert [line.subject for line in diagnosis.lines if (line.state is State.OK) == bool(line.advice)] == []


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (
            RECORDED,
            Line(subject=Subject.SESSION, state=State.OK, found="a tiny session recorded 3 of 3 kernels"),
        ),
        (
            WITHOUT_CUDA,
            Line(
                subject=Subject.SESSION,
                state=State.FAIL,
                found="unavailable: CUDA is not available to torch in this process",
                advice="see the lines above",
            ),
        ),
        (
            "the tiny session did not end within 120 s",
            Line(
                subject=Subject.SESSION,
                state=State.FAIL,
                found="the tiny session did not end within 120 s",
                advice="free the GPU of other profilers, then look at nvidia-smi and dmesg",
            ),
        ),
    ],
)
def test_the_session_line_is_what_the_tiny_recording_came_to(answer: ProbeAnswer | str, line: Line) -> None:
    assert session_line(answer) == line


def test_a_torch_without_cuda_is_in_the_way() -> None:
    assert (torch_line(WITHOUT_CUDA).state, torch_line(RECORDED).state) == (State.FAIL, State.OK)


def test_a_tool_that_is_switched_on_is_named_without_its_value() -> None:
    environ: Mapping[str, str] = {"CUDA_INJECTION64_PATH": "/home/somebody/tool.so"}
    assert tools_line(environ).found == "CUDA_INJECTION64_PATH is set"


def test_a_store_is_written_to_and_left_as_it_was(mlflow_sqlite: str) -> None:
    from mlflow import MlflowClient

    line = _tracking_line(mlflow_sqlite)
    assert line == Line(
        subject=Subject.TRACKING,
        state=State.OK,
        found=f"{mlflow_sqlite}: answers, a run and an artifact were written to experiment 'Default' and deleted",
    )
    assert MlflowClient(mlflow_sqlite).search_runs(["0"]) == []


def test_a_store_is_only_read_where_that_is_asked_for(mlflow_sqlite: str) -> None:
    assert _tracking_line(mlflow_sqlite, write=False).found == f"{mlflow_sqlite}: answers, not written to"


def test_a_server_that_never_answers_is_given_up(deaf_server: str) -> None:
    line = _tracking_line(deaf_server, deadline_s=3)
    assert (line.state, line.found.startswith(deaf_server)) == (State.FAIL, True)


def test_credentials_of_the_store_are_not_shown(deaf_server: str) -> None:
    line = _tracking_line(deaf_server.replace("//", "//someone:secret@"), deadline_s=3)
    assert "secret" not in line.found


def test_what_waits_in_the_outbox_is_counted_with_the_command_that_sends_it(tmp_path: Path) -> None:
    destination = Destination(run_id="ab", tracking_uri="http://localhost")
    seal(Outbox(tmp_path / "out"), window_facts(), destination)
    line = outbox_line(tmp_path / "out")
    assert line.found.endswith(", 1 unsent annotation")
    assert line.advice == f"tlk upload --outbox {tmp_path / 'out'}"
