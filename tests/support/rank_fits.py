"""Run Lightning fits on several ranks: `python rank_fits.py PLAN.json RANKS ...` runs these ranks of a world.

The plan is a Plan as JSON, RANKS such as 0,1; more worlds may follow. One process is forked for each of several
ranks, so that imports are paid once.
Each rank writes `FOLDER/NAME.rank_N.json` after each fit. Also a program for torchrun and for Lightning's own
launchers, with which the rank comes from the environment: then RANKS is `env`.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import statistics
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import MLFlowLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tlk_tracking.callbacks import KernelTelemetry

# Nobody listens there.
NOWHERE = "http://127.0.0.1:9"


@dataclass(kw_only=True)
class Plan:
    """One world and the fits it runs one after the other; each fit is a dict of `run_fit`'s keywords."""

    folder: str
    uri: str
    world_size: int
    fits: list[dict[str, Any]]
    nodes: int = 1
    port: int = 0
    device: str = "cpu"
    timeout_s: float = 25.0


class Net(pl.LightningModule):
    """Linear layers of one width; `fault` strikes in the forward of one step."""

    def __init__(self, width: int, layers: int, fault: Any = None) -> None:
        super().__init__()
        self.width, self.layers, self.fault = width, layers, fault
        self.net: nn.Sequential | None = None

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(7)
            self.net = nn.Sequential(*(nn.Linear(self.width, self.width) for _ in range(self.layers)))
            if type(self.trainer.strategy).__name__ == "ModelParallelStrategy":
                from torch.distributed.fsdp import fully_shard

                assert self.device_mesh is not None
                mesh = self.device_mesh["data_parallel"]
                for layer in self.net:
                    fully_shard(layer, mesh=mesh)
                fully_shard(self.net, mesh=mesh)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.fault is not None and not torch.compiler.is_compiling():
            self.fault(self.trainer.fit_loop.total_batch_idx)
        assert self.net is not None
        loss: Tensor = self.net(batch[0]).pow(2).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if type(self.trainer.strategy).__name__ == "DeepSpeedStrategy":
            return torch.optim.AdamW(self.parameters(), lr=0.01)
        # The same launches for every layout of the parameters.
        return torch.optim.SGD(self.parameters(), lr=0.01, foreach=False)


class StepClock(pl.Callback):
    """How long each step took, with the device at rest at both ends.

    Without `at_rest` nobody waits for the device, which never rests when a peer does not come.
    """

    def __init__(self, *, at_rest: bool) -> None:
        self.ends: list[float] = []
        self.at_rest = at_rest

    def on_train_batch_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
        if self.at_rest and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    def median_ms(self, first: int, last: int) -> float:
        """Return the median of the steps from `first` to `last`."""
        took = [1e3 * (self.ends[step] - self.ends[step - 1]) for step in range(first, last + 1)]
        return round(statistics.median(took), 3)


class PlainProfiler(pl.Callback):
    """torch.profiler alone, each recorded step one `ProfilerStep#N` from batch end to batch end."""

    def __init__(self, trace: Path, first: int, active: int) -> None:
        self.trace, self.first, self.last = trace, first, first + active - 1
        self.profiler: torch.profiler.profile | None = None
        self.range: Any = None

    def on_train_batch_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
        done = trainer.fit_loop.total_batch_idx
        if self.range is not None:
            self.range.__exit__(None, None, None)
            self.range = None
        if done == self.first - 1:
            torch.cuda.synchronize()
            activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            self.profiler = torch.profiler.profile(activities=activities)
            self.profiler.start()
        if done == self.last:
            torch.cuda.synchronize()
            assert self.profiler is not None
            self.profiler.stop()
            self.profiler.export_chrome_trace(str(self.trace))
            self.profiler = None
        elif self.profiler is not None:
            self.range = torch.profiler.record_function(f"ProfilerStep#{done + 1}")
            self.range.__enter__()


def run_fit(
    plan: Plan,
    rank: int,
    *,
    name: str,
    observe: str = "telemetry",
    strategy: str = "ddp",
    compiled: bool = False,
    telemetry: dict[str, Any] | None = None,
    steps: int = 8,
    width: int = 8,
    layers: int = 2,
    batch: int = 2,
    has_run: bool = True,
    fault: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Run one fit on this rank; return what this rank has to say of it."""
    chosen: dict[str, Any] = {
        "skip_first": 2,
        "warmup": 1,
        "active": 2,
        "min_interval_s": 0.0,
        "every_n_steps": 1000,
    }
    chosen |= telemetry or {}
    first = chosen["skip_first"] + chosen["warmup"]
    clock = StepClock(at_rest=fault is None)
    callbacks: list[pl.Callback] = [clock]
    if observe == "telemetry":
        callbacks.append(KernelTelemetry(**chosen))
    elif observe == "profiler":
        callbacks.append(
            PlainProfiler(Path(plan.folder, f"{name}.rank_{rank}.trace.json"), first, chosen["active"])
        )
    fault_here = fault if fault is not None and fault["rank"] == rank else None
    if fault_here is not None and fault_here["kind"] == "offline":
        os.environ |= dict.fromkeys(("http_proxy", "HTTP_PROXY"), NOWHERE)
    experiment = Path(plan.folder).name
    logger = MLFlowLogger(experiment, run_name=name, tracking_uri=plan.uri) if has_run else None
    trainer = pl.Trainer(
        accelerator="gpu" if plan.device == "cuda" else "cpu",
        devices=plan.world_size // plan.nodes,
        num_nodes=plan.nodes,
        strategy=_strategy(strategy, plan),
        max_steps=steps,
        logger=logger or False,
        callbacks=callbacks,
        default_root_dir=_disk(plan, rank) / name,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    model: Any = Net(
        width, layers, None if fault_here is None else lambda step: _strike(plan, fault_here, step)
    )
    data = DataLoader(TensorDataset(torch.ones(batch * steps, width)), batch_size=batch)
    said: dict[str, Any] = {"rank": rank, "pid": os.getpid(), "ended": "well"}
    try:
        whole: Any = torch.compile(model) if compiled else model
        trainer.fit(whole, data)
    except Exception as error:  # noqa: BLE001 - which one is for the test to judge
        said["ended"] = type(error).__name__
        said["error"] = str(error)[:300]
    else:
        if clock.ends:  # where ranks are spawned, this process has none
            said["median_ms"] = clock.median_ms(first, first + chosen["active"] - 1)
        if strategy.startswith("deepspeed"):
            said |= _weights(model)
    said["ended_at_s"] = time.time()
    # Asked for a run that it does not have, a logger makes one.
    return said | {"run_id": logger.run_id if rank == 0 and clock.ends and logger is not None else None}


def run_rank(plan: Plan, rank: int) -> bool:
    """Run every fit of the plan as this rank; return whether the last one ended well."""
    ended_well = True
    for fit in plan.fits:
        said = run_fit(plan, rank, **fit)
        Path(plan.folder, f"{fit['name']}.rank_{rank}.json").write_text(json.dumps(said))
        ended_well = said["ended"] == "well"
    return ended_well


def _disk(plan: Plan, rank: int) -> Path:
    """Return the folder that a rank's node keeps for itself: nodes share no disk."""
    per_node = plan.world_size // plan.nodes
    return Path(plan.folder, f"node_{rank // per_node}") if plan.nodes > 1 else Path(plan.folder)


def _rank_from_environment(plan: Plan) -> int:
    """Return the global rank that torchrun gave, or that Lightning will give to this process of its node."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    node = int(os.environ.get("NODE_RANK", "0"))
    return int(os.environ.get("RANK", node * (plan.world_size // plan.nodes) + local))


def _strategy(name: str, plan: Plan) -> Any:
    timeout = timedelta(seconds=plan.timeout_s)
    if name == "fsdp":
        from lightning.pytorch.strategies import FSDPStrategy

        return FSDPStrategy(auto_wrap_policy={nn.Linear}, timeout=timeout)
    if name == "fsdp2":
        from lightning.pytorch.strategies import ModelParallelStrategy

        return ModelParallelStrategy(
            data_parallel_size=plan.world_size, tensor_parallel_size=1, timeout=timeout
        )
    if name.startswith("deepspeed"):
        from lightning.pytorch.strategies import DeepSpeedStrategy

        return DeepSpeedStrategy(stage=int(name.removeprefix("deepspeed")), timeout=timeout)
    from lightning.pytorch.strategies import DDPStrategy

    start_method: Any = "spawn" if name == "ddp_spawn" else "popen"
    backend = "nccl" if plan.device == "cuda" else "gloo"
    return DDPStrategy(
        timeout=timeout, process_group_backend=backend, start_method=start_method, bucket_cap_mb=4
    )


def _weights(model: Net) -> dict[str, Any]:
    """Return whether what this rank holds of the weights is finite, and its digest; a stage 3 keeps it elsewhere."""
    held = torch.cat(
        [getattr(weight, "ds_tensor", weight).detach().flatten().cpu() for weight in model.parameters()]
    )
    return {
        "finite": bool(held.isfinite().all()),
        "weights": held.numel(),
        "sha256": hashlib.sha256(held.numpy().tobytes()).hexdigest(),
    }


def _strike(plan: Plan, fault: dict[str, Any], step: int) -> None:
    if fault["kind"] in ("raise", "kill") and step == fault["step"]:
        Path(plan.folder, "struck_at_s").write_text(str(time.time()))
        if fault["kind"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ArithmeticError("theirs")


def _fork_ranks(plan: Plan, ranks: list[int]) -> None:
    children = []
    for rank in ranks:
        child = os.fork()
        if child == 0:
            _run_alone(plan, rank)
        children.append(child)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(statuses):
        sys.stderr.write(f"ranks {ranks} ended with {statuses}\n")


def _run_alone(plan: Plan, rank: int) -> NoReturn:
    """Be this rank and nothing more; an exit as usual would wait for peers that may be gone."""
    os.environ |= {
        "LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(plan.world_size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(plan.port),
    }  # fmt: skip
    status = 1
    try:
        run_rank(plan, rank)
        status = 0
    except BaseException as error:  # noqa: BLE001 - it ends here whatever happens
        sys.stderr.write(f"rank {rank}: {error!r}\n")
    sys.stderr.flush()
    os._exit(status)


def main() -> None:
    """Run the worlds that the command line names, one after the other."""
    torch.set_num_threads(1)
    for path, ranks in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        plan = Plan(**json.loads(Path(path).read_text()))
        if ranks == "env":
            if not run_rank(plan, _rank_from_environment(plan)):
                sys.exit(1)  # as an error that nobody caught: torchrun ends the other ranks of the node
        elif ranks.isdecimal():  # a process that has asked for GPUs may not be forked
            _run_alone(plan, int(ranks))
        else:
            _fork_ranks(plan, [int(rank) for rank in ranks.split(",")])


if __name__ == "__main__":
    main()
