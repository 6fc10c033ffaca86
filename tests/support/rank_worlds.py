"""Run worlds of ranks, on one node or several, to their ends (plans of fits -> what was said, what is in MLflow)."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlflow import MlflowClient

from tlk_tracking.tracking.mlflow_tracking import load_run
from tlk_tracking.tracking.run_telemetry import RunTelemetry

PROGRAM = Path(__file__).parent / "rank_fits.py"
LIMIT_S = 300
# Nothing may wait for longer after a rank is gone.
HANG_S = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A world that has ended."""

    folder: Path
    uri: str
    output: str

    def said(self, name: str) -> dict[int, dict[str, Any]]:
        """Return what each rank that lived to the end says of a fit."""
        files = sorted(self.folder.glob(f"{name}.rank_*.json"))
        return {int(path.stem.rpartition("_")[2]): json.loads(path.read_text()) for path in files}

    def run(self, name: str) -> RunTelemetry:
        """Return what is in the run of a fit, which has made no other."""
        client = MlflowClient(self.uri)
        experiment = client.get_experiment_by_name(self.folder.name)
        assert experiment is not None, self.output[-3000:]
        runs = client.search_runs([experiment.experiment_id], filter_string=f"run_name = '{name}'")
        assert len(runs) == 1, self.output[-3000:]
        return load_run(runs[0].info.run_id, self.uri)

    def waited_s(self, name: str) -> float:
        """Return how long after the fault the last rank ended."""
        ends = [said["ended_at_s"] for said in self.said(name).values()]
        return float(max(ends)) - float((self.folder / "struck_at_s").read_text())


def run_worlds(
    folder: Path,
    uri: str,
    plans: Mapping[str, tuple[int, list[dict[str, Any]]]],
    launcher: str | None = None,
    *,
    nodes: int = 1,
    device: str = "cpu",
) -> dict[str, World]:
    """Run worlds (name -> size, fits) to their ends, and see that no process of theirs is left.

    Without a launcher all ranks are forks of one program; else each node has a program of its own.
    """
    arguments = []
    for name, (size, fits) in plans.items():
        place = folder / name
        place.mkdir()
        plan = {
            "folder": str(place), "uri": uri, "world_size": size, "fits": fits, "nodes": nodes,
            "port": free_port(), "device": device,
        }  # fmt: skip
        (place / "plan.json").write_text(json.dumps(plan))
        ranks = "env" if launcher else ",".join(str(rank) for rank in range(size))
        arguments += [str(place / "plan.json"), ranks]
    per_node = max(size for size, _ in plans.values()) // nodes
    meeting = [f"--nnodes={nodes}", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    commands = [[str(PROGRAM), *arguments]] * nodes
    if launcher == "torchrun":
        torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={per_node}", *meeting]
        commands = [[*torchrun, f"--node-rank={node}", *command] for node, command in enumerate(commands)]
    output = _run(commands, folder)
    return {name: World(folder=folder / name, uri=uri, output=output) for name in plans}


def _run(commands: list[list[str]], folder: Path) -> str:
    """Run one Python a node to the end; return what they wrote."""
    token = secrets.token_hex(8)
    log, deadline = folder / "world.log", time.monotonic() + LIMIT_S
    shared = {**os.environ, "TLK_TEST_WORLD": token, "OMP_NUM_THREADS": "1"}
    if (
        len(commands) > 1
    ):  # as a cluster says where Lightning starts the node's ranks itself; torchrun overrides it
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with log.open("wb") as output:
        programs = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", *command], cwd=folder, env={**shared, "NODE_RANK": str(node)},
                stdout=output, stderr=output, start_new_session=True,
            )
            for node, command in enumerate(commands)
        ]  # fmt: skip
        try:
            for program in programs:
                program.wait(timeout=deadline - time.monotonic())
        finally:
            left = still_there(f"TLK_TEST_WORLD={token}", limit_s=HANG_S)
            for pid in left:
                os.kill(pid, signal.SIGKILL)
    assert left == [], "processes of the world are left"
    return log.read_text(errors="replace")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def still_there(token: str, *, limit_s: float) -> list[int]:
    """Return the processes with the token in their environment that do not end within the limit."""
    deadline = time.monotonic() + limit_s
    while True:
        found = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _has(pid, token)]  # noqa: PTH208 - names alone
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def _has(pid: int, token: str) -> bool:
    try:
        return token.encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
