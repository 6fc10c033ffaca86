"""Measure comparing two large annotations and searching many runs.

    python -m benchmarks.compare [RUNS]

Prints JSON: seconds (median of five, imports excluded) to compare `bench_transformer` with itself, and to read
metrics and tags of RUNS runs (200) of a new sqlite store in one paged search.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric, RunTag

from tlk_tracking import compare_annotations, import_trace
from tlk_tracking.tracking.mlflow_tracking import search_runs

DATA = Path(__file__).parent / "data"


def main(runs: int) -> None:
    """Measure both and print them."""
    annotation = import_trace(
        DATA / "bench_transformer.trace.json.gz", ops=DATA / "bench_transformer.ops.json.gz"
    )
    compare = _median(lambda: compare_annotations(annotation, annotation))
    with tempfile.TemporaryDirectory() as folder:
        uri = f"sqlite:///{folder}/mlflow.db"
        _log_runs(MlflowClient(uri), runs)
        found = len(search_runs("runs", uri))
        search = _median(lambda: search_runs("runs", uri))
    print(json.dumps({"compare_s": compare, "runs": found, "search_s": search}))


def _log_runs(client: MlflowClient, runs: int) -> None:
    experiment = client.create_experiment("runs")
    for number in range(runs):
        run_id = client.create_run(experiment).info.run_id
        metrics = [Metric(f"kernel_telemetry/m{i}", float(number), 1, 0) for i in range(25)]
        tags = [RunTag(f"tlk.lower_bound/kernel_telemetry/m{i}", "false") for i in range(25)]
        client.log_batch(run_id, metrics=metrics, tags=[*tags, RunTag("tlk.schema_version", "1")])


def _median(work: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return round(statistics.median(times), 4)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
