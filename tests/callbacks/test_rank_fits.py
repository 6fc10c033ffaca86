"""Fits of several real processes with gloo, whose windows go to one run of a real MLflow server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from rank_worlds import HANG_S, World, run_worlds

from tlk_tracking.tracking.run_telemetry import RankGap, RankGapReason, RunTelemetry

# A world has up to eight processes, and the machine may be busy.
pytestmark = pytest.mark.timeout(400)

TELEMETRY = {"ranks": "all", "upload_timeout_s": 60.0}
FIRST = 3  # the window's steps are 3 and 4
# A second window comes due with step 6, but for the clock.
TWO_WINDOWS = {"every_n_steps": 3, "min_interval_s": 1000.0}


@pytest.fixture(scope="module")
def worlds(mlflow_server: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, World]:
    """Run four ranks through several fits, and two worlds of two ranks in which rank 1 raises or is killed."""
    four = [
        {"name": "no run", "telemetry": TELEMETRY, "has_run": False},
        {"name": "no such rank", "telemetry": TELEMETRY | {"ranks": [0, 4]}},
        {"name": "all", "telemetry": TELEMETRY},
        {"name": "some", "telemetry": TELEMETRY | TWO_WINDOWS | {"ranks": [0, 2]}, "strategy": "fsdp2"},
        {"name": "zero", "telemetry": TELEMETRY | TWO_WINDOWS | {"ranks": "zero"}},
        {
            "name": "offline", "telemetry": TELEMETRY | {"ranks": [0, 3], "upload_timeout_s": 10.0},
            "fault": {"rank": 3, "kind": "offline"},
        },
    ]  # fmt: skip
    faults = {kind: {"rank": 1, "kind": kind, "step": FIRST + 1} for kind in ("raise", "kill")}
    plans: dict[str, Any] = {"four": (4, four)}
    plans |= {
        kind: (2, [{"name": kind, "telemetry": TELEMETRY, "fault": fault}]) for kind, fault in faults.items()
    }
    return run_worlds(tmp_path_factory.mktemp("ranks"), mlflow_server, plans)


@pytest.fixture(scope="module")
def two_nodes(mlflow_server: str, tmp_path_factory: pytest.TempPathFactory) -> World:
    """Run two nodes of two ranks, each by a torchrun of its own and with a disk of its own."""
    fits = [
        {"name": "all", "telemetry": TELEMETRY},
        {
            "name": "offline", "telemetry": TELEMETRY | {"ranks": [0, 3], "upload_timeout_s": 10.0},
            "fault": {"rank": 3, "kind": "offline"},
        },
        {"name": "kill", "telemetry": TELEMETRY, "fault": {"rank": 3, "kind": "kill", "step": FIRST + 1}},
    ]  # fmt: skip
    folder = tmp_path_factory.mktemp("nodes")
    return run_worlds(folder, mlflow_server, {"nodes": (4, fits)}, "torchrun", nodes=2)["nodes"]


@pytest.fixture
def four(worlds: dict[str, World]) -> World:
    """Return the world of four ranks: all record, two under FSDP, one cannot reach the server, none finds a run."""
    return worlds["four"]


@pytest.fixture(params=["one node", "two nodes"])
def each_four(request: pytest.FixtureRequest) -> World:
    """Return a world of four ranks, on one node and on two."""
    named = {"one node": "four", "two nodes": "two_nodes"}
    world: World = request.getfixturevalue(named[request.param])
    return world


def recorded(run: RunTelemetry) -> dict[int, list[tuple[int, str]]]:
    """Return the steps of the run's only window, by rank."""
    (window,) = run.windows
    return {
        rank: [(row.step, row.outcome.value) for row in annotation.manifest.window.steps]
        for rank, annotation in window.ranks.items()
    }


def own_tags(run: RunTelemetry) -> dict[str, str]:
    """Return the tags about ranks."""
    return {key: value for key, value in run.tags.items() if "rank" in key or key == "tlk.world_size"}


BOTH_STEPS = [(FIRST, "complete"), (FIRST + 1, "complete")]


def test_every_rank_records_the_same_steps_into_one_run(each_four: World) -> None:
    ended = {rank: said["ended"] for rank, said in each_four.said("all").items()}
    assert ended == dict.fromkeys(range(4), "well"), each_four.output[-3000:]
    run = each_four.run("all")
    assert recorded(run) == dict.fromkeys(range(4), BOTH_STEPS)
    assert run.rank_gaps == ()
    assert own_tags(run) == {
        **{f"tlk.lower_bound/rank_{rank}": "true" for rank in range(4)},
        "tlk.recording_ranks": "all",
        "tlk.world_size": "4",
    }
    (window,) = run.windows
    for rank, annotation in window.ranks.items():
        calls = annotation.aten_calls["operator"].astype(str).value_counts()
        assert (annotation.manifest.rank, annotation.manifest.world_size) == (rank, 4)
        # Lightning's word on SIGTERM at each batch, and one bucket of gradients.
        assert {name: calls[name] for name in calls.index if name.startswith("c10d")} == {
            "c10d.broadcast_": 2,
            "c10d.allreduce_": 2,
        }


def test_the_metrics_are_those_of_rank_0_alone(each_four: World) -> None:
    run = each_four.run("all")
    history = MlflowClient(each_four.uri).get_metric_history(run.run_id, "kernel_telemetry/aten_calls")
    (window,) = run.windows
    own = window.ranks[0]
    assert [metric.value for metric in history] == [
        own.aten_calls["step"].isin(own.complete_steps).sum() / len(own.complete_steps)
    ]


def test_ranks_that_are_named_record_under_fsdp_and_others_do_not(four: World) -> None:
    assert {said["ended"] for said in four.said("some").values()} == {"well"}, four.output[-3000:]
    run = four.run("some")
    assert [list(window.ranks) for window in run.windows] == [[0, 2], [0, 2]]
    assert run.rank_gaps == ()
    assert own_tags(run)["tlk.recording_ranks"] == "0,2"
    operators = set(run.windows[0].ranks[2].aten_calls["operator"].astype(str))
    assert any(name.startswith("c10d._reduce_scatter") for name in operators), " ".join(sorted(operators))


def test_steps_alone_decide_where_several_ranks_record_and_the_clock_too_where_one_does(four: World) -> None:
    """Each rank has a clock of its own, and windows open on all ranks or on none."""
    of_two = [(each.manifest.window.first_step, each.manifest.rank) for each in four.run("some").annotations]
    assert of_two == [(FIRST, 0), (FIRST, 2), (FIRST + 3, 0), (FIRST + 3, 2)]
    run = four.run("zero")
    assert recorded(run) == {0: BOTH_STEPS}
    assert own_tags(run) == {
        "tlk.lower_bound/rank_0": "true", "tlk.recording_ranks": "0", "tlk.world_size": "4",
    }  # fmt: skip


def test_without_a_run_every_rank_says_so_and_none_waits(four: World) -> None:
    said = four.said("no run")
    assert {rank: one["ended"] for rank, one in said.items()} == dict.fromkeys(range(4), "ConfigurationError")
    assert all("KernelTelemetry(run_id=mlflow.active_run()" in one["error"] for one in said.values())


def test_a_rank_that_is_not_in_the_fit_is_refused_on_every_rank(four: World) -> None:
    said = four.said("no such rank")
    assert {one["ended"] for one in said.values()} == {"ConfigurationError"}
    assert {one["error"] for one in said.values()} == {
        "ranks=[0, 4] names rank 4, and this fit has the ranks 0 to 3"
    }


def test_a_rank_that_cannot_reach_the_server_is_a_gap_until_its_outbox_is_sent(four: World) -> None:
    assert {said["ended"] for said in four.said("offline").values()} == {"well"}, four.output[-3000:]
    run = four.run("offline")
    folder = run.annotations[0].folder_name.partition("/")[0]
    assert recorded(run) == {0: BOTH_STEPS}
    assert run.rank_gaps == (RankGap(window=folder, rank=3, reason=RankGapReason.NOT_SENT),)
    upload(four.folder / "offline")
    run = four.run("offline")
    assert recorded(run) == {0: BOTH_STEPS, 3: BOTH_STEPS}
    assert run.rank_gaps == ()


def test_a_node_sends_from_its_own_disk_what_its_ranks_could_not(two_nodes: World) -> None:
    assert [said["ended"] for said in two_nodes.said("offline").values()] == ["well"] * 4
    assert [gap.rank for gap in two_nodes.run("offline").rank_gaps] == [3]
    upload(two_nodes.folder / "node_0" / "offline")
    assert recorded(two_nodes.run("offline")) == {0: BOTH_STEPS}
    upload(two_nodes.folder / "node_1" / "offline")
    run = two_nodes.run("offline")
    assert recorded(run) == {0: BOTH_STEPS, 3: BOTH_STEPS}
    assert run.rank_gaps == ()


def upload(root: Path) -> None:
    """Send what is left in the outbox under a fit's `default_root_dir`."""
    outbox = root / "kernel_telemetry_outbox"
    command = ["-c", "from tlk_tracking.cli import main; main()", "upload", "--outbox", str(outbox)]
    subprocess.run([sys.executable, *command], check=True, capture_output=True)


def test_one_rank_raises_in_a_window_and_both_keep_theirs(worlds: dict[str, World]) -> None:
    world = worlds["raise"]
    said = world.said("raise")
    assert [said[1]["ended"], said[0]["ended"]] == ["ArithmeticError", "RuntimeError"]
    assert world.waited_s("raise") < HANG_S
    upload(world.folder / "raise")  # after an error the fit itself waits for five seconds
    run = world.run("raise")
    raised = [(FIRST, "complete"), (FIRST + 1, "raised")]
    assert recorded(run) == {0: raised, 1: raised}
    assert [(gap.rank, gap.reason) for gap in run.rank_gaps] == [
        (0, RankGapReason.CAPTURE_RAISED),
        (1, RankGapReason.CAPTURE_RAISED),
    ]


def test_one_rank_is_killed_in_a_window_and_the_other_keeps_its_own(worlds: dict[str, World]) -> None:
    world = worlds["kill"]
    said = world.said("kill")
    assert {rank: one["ended"] for rank, one in said.items()} == {0: "RuntimeError"}
    assert world.waited_s("kill") < HANG_S
    upload(world.folder / "kill")
    run = world.run("kill")
    assert recorded(run) == {0: [(FIRST, "complete"), (FIRST + 1, "raised")]}
    assert [(gap.rank, gap.reason) for gap in run.rank_gaps] == [
        (0, RankGapReason.CAPTURE_RAISED),
        (1, RankGapReason.NOT_SENT),
    ]


def test_one_rank_is_killed_on_one_node_and_the_other_node_keeps_its_windows(two_nodes: World) -> None:
    """What torchrun, which ends the rest of the first node, leaves rank 2 time for is not ours to say."""
    said = two_nodes.said("kill")
    assert {rank: said[rank]["ended"] for rank in said if rank != 2} == {0: "RuntimeError", 1: "RuntimeError"}
    assert two_nodes.waited_s("kill") < HANG_S
    upload(two_nodes.folder / "node_0" / "kill")
    run = two_nodes.run("kill")
    raised = [(FIRST, "complete"), (FIRST + 1, "raised")]
    assert {rank: steps for rank, steps in recorded(run).items() if rank != 2} == {0: raised, 1: raised}
    assert {gap.rank: gap.reason for gap in run.rank_gaps if gap.rank != 2} == {
        0: RankGapReason.CAPTURE_RAISED,
        1: RankGapReason.CAPTURE_RAISED,
        3: RankGapReason.NOT_SENT,
    }


@pytest.mark.parametrize(("launcher", "nodes"), [("subprocesses", 1), ("spawn", 1), ("subprocesses", 2)])
def test_each_way_to_launch_ranks_gives_one_run_with_all_of_them(
    launcher: str, nodes: int, mlflow_server: str, tmp_path: Path
) -> None:
    """Where torchrun launches, `two_nodes` is the test."""
    name, ranks = f"{launcher} on {nodes}", 2 * nodes
    strategy = "ddp_spawn" if launcher == "spawn" else "ddp"
    plans = {name: (ranks, [{"name": "fit", "telemetry": TELEMETRY, "strategy": strategy}])}
    run = run_worlds(tmp_path, mlflow_server, plans, launcher, nodes=nodes)[name].run("fit")
    assert recorded(run) == dict.fromkeys(range(ranks), BOTH_STEPS)
    assert run.rank_gaps == ()
