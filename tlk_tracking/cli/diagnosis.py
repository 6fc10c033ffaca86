"""Say what this machine and environment can record and where it would go (environment -> Diagnosis).

Whatever may hang or crash (CUDA, CUPTI, a tracking server) runs in a process of its own with a deadline.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

import msgspec

from tlk_tracking.cli.diagnosis_lines import (
    Hardware,
    Line,
    ProbeAnswer,
    Subject,
    driver_line,
    fail,
    gpu_line,
    lightning_line,
    mlflow_line,
    ok,
    outbox_line,
    permission_line,
    session_line,
    tools_line,
    torch_line,
)
from tlk_tracking.core.records import Availability
from tlk_tracking.core.text import visible
from tlk_tracking.tracking.tracking_uri import request_limits, without_credentials

PROBE_DEADLINE_S = 120.0
_CUPTI_ERROR = re.compile(r"CUPTI_ERROR_\w+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """One line a subject. `can_record` is false where a recording would be `unavailable`."""

    can_record: bool
    lines: tuple[Line, ...]


def diagnose(
    *,
    tracking_uri: str | None,
    outbox: Path,
    deadline_s: float,
    write: bool = True,
    environ: Mapping[str, str] = os.environ,
    ask_probe: Callable[[], ProbeAnswer | str] | None = None,
) -> Diagnosis:
    """Look at everything a recording needs.

    Args:
        tracking_uri: MLflow store to try; None is MLflow's own choice.
        outbox: where unsent annotations would wait.
        deadline_s: how long a request to the store may take.
        write: also write to the store: a run that is deleted at once.
        environ: environment variables.
        ask_probe: gives the answer of the tiny recording, or a sentence on why there is none.
    """
    answer = (ask_probe or _run_probe)()
    hardware = _nvidia_smi()
    probed = answer if isinstance(answer, ProbeAnswer) else None
    return Diagnosis(
        can_record=probed is not None and probed.availability is Availability.RECORDED,
        lines=(
            gpu_line(hardware, probed),
            driver_line(hardware, probed),
            torch_line(probed),
            session_line(answer),
            tools_line(environ),
            permission_line(),
            lightning_line(),
            mlflow_line(),
            _tracking(tracking_uri, deadline_s, write=write, environ=environ),
            outbox_line(outbox),
        ),
    )


def _run_probe() -> ProbeAnswer | str:
    command = [sys.executable, "-m", "tlk_tracking.cli.diagnosis_probe"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=PROBE_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        return f"the tiny session did not end within {PROBE_DEADLINE_S:g} s"
    cupti = _CUPTI_ERROR.search(done.stderr.decode(errors="replace"))
    if done.returncode != 0:
        why = cupti[0] if cupti else _last_line(done.stderr)
        return f"the tiny session ended with exit code {done.returncode}: {why}"
    try:
        answer = msgspec.json.decode(done.stdout.splitlines()[-1], type=ProbeAnswer)
    except (IndexError, msgspec.MsgspecError):
        return f"the tiny session gave no answer: {_last_line(done.stderr)}"
    if cupti and answer.availability is not Availability.RECORDED:
        return msgspec.structs.replace(answer, reason=f"{answer.reason or 'no record'} ({cupti[0]})")
    return answer


def _nvidia_smi() -> Hardware:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, timeout=20, check=False, text=True)
    except (OSError, subprocess.TimeoutExpired):
        return Hardware(gpus=(), driver=None)
    rows = [
        line.rsplit(", ", 1) for line in done.stdout.splitlines() if ", " in line and done.returncode == 0
    ]
    return Hardware(gpus=tuple(name for name, _ in rows), driver=rows[0][1] if rows else None)


def _tracking(uri: str | None, deadline_s: float, *, write: bool, environ: Mapping[str, str]) -> Line:
    own = {"MLFLOW_TRACKING_URI": uri} if uri is not None else {}
    call = (
        "from tlk_tracking.tracking.mlflow_store import current_tracking_uri, try_store; "
        f"print(try_store(write={write}), current_tracking_uri(), sep='\\n')"
    )
    shown = visible(without_credentials(uri or environ.get("MLFLOW_TRACKING_URI") or "MLflow's own choice"))
    try:
        done = subprocess.run(
            [sys.executable, "-c", call],
            capture_output=True,
            # Python and MLflow take seconds to load; the deadline is for the requests.
            timeout=3 * deadline_s + 30,
            check=False,
            env={**environ, **own, **request_limits(deadline_s)},
        )
    except subprocess.TimeoutExpired:
        found = f"{shown} does not answer within {deadline_s:g} s"
        advice = "training goes on all the same; `tlk upload` sends later"
        return fail(Subject.TRACKING, found, advice)
    if done.returncode == 0:
        *_, found, store = done.stdout.decode(errors="replace").splitlines()
        return ok(Subject.TRACKING, f"{visible(without_credentials(store))}: {visible(found)}")
    return fail(
        Subject.TRACKING,
        f"{shown}: {_last_line(done.stderr).removeprefix('tlk_tracking.core.errors.TrackingError: ')}",
        "set MLFLOW_TRACKING_URI, or give --tracking-uri",
    )


def _last_line(output: bytes) -> str:
    lines = [line for line in output.decode(errors="replace").splitlines() if line.strip()]
    return shorten(visible(lines[-1]), 200, placeholder=" …") if lines else "it said nothing"
