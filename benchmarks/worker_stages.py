"""Do the window worker's work one stage after another and print each stage's seconds as JSON.

python -m benchmarks.worker_stages OUTBOX TRACKING_URI BEGIN (of the process, as `time.time` says)
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any


class _Stages:
    def __init__(self, begin: float) -> None:
        self.seconds: dict[str, float] = {}
        self.cpu_seconds: dict[str, float] = {}
        self._last = (begin, 0.0)

    def over(self, name: str) -> None:
        now = (time.time(), time.process_time())
        self.seconds[name], self.cpu_seconds[name] = (
            at - last for at, last in zip(now, self._last, strict=True)
        )
        self._last = (time.time(), time.process_time())


def main() -> None:
    """Settle and send the one window of the outbox."""
    stages = _Stages(float(sys.argv[3]))
    worker = importlib.import_module("tlk_tracking.delivery.worker")
    gc.set_threshold(worker.COLLECT_EVERY)
    stages.over("interpreter_and_worker")
    delivery = importlib.import_module("tlk_tracking.delivery.delivery_loop")
    stages.over("import_analysis")
    mlflow: Any = importlib.import_module("mlflow")
    stages.over("import_mlflow")
    mlflow.MlflowClient(tracking_uri=sys.argv[2])
    stages.over("open_store")
    for name in ("matplotlib.figure", "tlk_tracking.report.annotation_report"):
        importlib.import_module(name)
    stages.over("import_charts")
    outbox = worker.Outbox(Path(sys.argv[1]))
    [window] = outbox.raw_windows()
    delivery.settle(outbox, window)
    stages.over("annotate_and_save")
    entry = outbox.entry(window.name)
    delivery._add_report(delivery.load_annotation(entry.annotation_folder), entry.annotation_folder)
    stages.over("draw_report")
    sent = delivery.send(outbox, entry, sys.argv[2])
    stages.over("send")
    if sent.is_waiting:
        raise SystemExit(f"not sent: {sent.reason}")
    print(json.dumps({"seconds": stages.seconds, "cpu_seconds": stages.cpu_seconds}))


if __name__ == "__main__":
    main()
