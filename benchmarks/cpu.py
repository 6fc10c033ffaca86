"""Measure everything that a CPU can, ours and peers interleaved in one run; print a table, write JSON.

python -m benchmarks.cpu [--rounds 5] [--sizes 1,4,16] [--peers .venv-bench/bin/python] [--json FILE]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.larger_traces import OPS, TRACE, write_ops, write_trace
from benchmarks.training_thread import measure_training_thread

ROOT = Path(__file__).parent.parent
PEERS = ("torchlens", "hta")
# At 16 times the size peers take minutes; linearity is ours to show.
CONTENDERS = {
    1: (
        "tlk",
        "tlk_with_rows",
        "tlk_save_load",
        "msgspec_lean",
        "msgspec_typed",
        "json_load",
        "json_stack",
        *PEERS,
    ),
    4: ("tlk", "msgspec_lean", "msgspec_typed", "json_stack", *PEERS),
    16: ("tlk", "msgspec_lean"),
}
Samples = dict[str, list[dict[str, Any]]]


def main() -> None:
    """Run all benchmarks for which there is a machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", default="1,4,16")
    parser.add_argument("--peers", type=Path, default=None, help="Python of an environment with the peers")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "bench")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    measured: Samples = {}
    for size in (int(text) for text in options.sizes.split(",")):
        trace = write_trace(options.work, size)
        write_ops(options.work, size)
        runs = [(f"{name} {size}x", name, trace) for name in CONTENDERS[size]]
        if size == 1:
            zipped = Path(shutil.copy(TRACE, options.work / "bench_transformer_1x.trace.json.gz"))
            runs += [("tlk gz", "tlk", zipped), ("gunzip", "gunzip", zipped)]
        if options.peers is None:
            runs = [run for run in runs if run[1] not in PEERS]
        measured |= _measure(runs, options.rounds, peers=options.peers, work=options.work)
    medians = {label: _median(samples) for label, samples in measured.items()}
    report = {
        "machine": _machine(),
        "versions": _versions(options.peers),
        "medians": medians,
        "samples": measured,
        "file_bytes": _file_bytes(options.work),
        "start_seconds": _start_times(options.rounds),
        "training_thread": measure_training_thread(options.work, rounds=options.rounds),
    }
    print(_table(medians, report))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _measure(runs: list[tuple[str, str, Path]], rounds: int, *, peers: Path | None, work: Path) -> Samples:
    """Run each contender once a round; the order turns round every time, so that drift hits all alike."""
    found: Samples = {label: [] for label, _, _ in runs}
    for number in range(rounds + 1):
        for label, name, trace in runs if number % 2 else reversed(runs):
            python = str(peers) if name in PEERS and peers is not None else sys.executable
            done = subprocess.run(
                [python, str(ROOT / "benchmarks" / "contenders.py"), name, str(trace), str(work)],
                capture_output=True, text=True, check=False, cwd=ROOT,
            )  # fmt: skip
            if done.returncode:
                raise SystemExit(f"{label} failed:\n{done.stderr[-2000:]}")
            if number:  # the first round only warms the file cache
                found[label].append(json.loads(done.stdout.splitlines()[-1]))
        if not number:
            continue
        # Before any time is believed: everybody relates the same launches to the same markers.
        answers = {label: samples[-1]["pairs"] for label, samples in found.items() if samples[-1]["pairs"]}
        if len(set(answers.values())) > 1:
            raise SystemExit(f"the contenders do not agree: {answers}")
        print(
            f"round {number} of {rounds}: {len(answers)} contenders agree on {set(answers.values())}",
            file=sys.stderr,
        )
    return found


def _median(samples: list[dict[str, Any]]) -> dict[str, float]:
    return {
        key: round(statistics.median(sample[key] for sample in samples), 4)
        for key in ("seconds", "cpu_seconds", "peak_mb")
    }


def _file_bytes(work: Path) -> dict[str, int]:
    """Return the size of each file of the annotation of trace and rows together."""
    from tlk_tracking import import_trace

    folder = work / "annotation"
    shutil.rmtree(folder, ignore_errors=True)
    import_trace(TRACE, ops=OPS).save(folder)
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir())}


def _start_times(rounds: int) -> dict[str, float]:
    """Return what `import tlk_tracking` and `tlk --help` take, less what Python itself takes to start."""
    commands = {
        "python": [sys.executable, "-c", "pass"],
        "import tlk_tracking": [sys.executable, "-c", "import tlk_tracking"],
        "tlk --help": [str(Path(sys.executable).with_name("tlk")), "--help"],
    }
    samples: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            before = os.times()
            subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
            samples[name].append(os.times().elapsed - before.elapsed)
    medians = {name: statistics.median(times) for name, times in samples.items()}
    medians["import tlk_tracking"] -= medians["python"]
    return {name: round(seconds, 3) for name, seconds in medians.items()}


def _machine() -> dict[str, Any]:
    models = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")
    ]
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": models[0].partition(":")[2].strip() if models else platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "python": platform.python_version(),
    }


def _versions(peers: Path | None) -> dict[str, str]:
    ours = {name: version(name) for name in ("tlk-tracking", "msgspec", "numpy", "pyarrow", "torch")}
    if peers is None:
        return ours
    code = (
        "import importlib.metadata as m, json; print(json.dumps({n: m.version(n) for n in "
        "('torchlens', 'HolisticTraceAnalysis')}))"
    )
    done = subprocess.run([str(peers), "-c", code], capture_output=True, text=True, check=True)
    return ours | json.loads(done.stdout)


def _table(medians: dict[str, dict[str, float]], report: dict[str, Any]) -> str:
    lines = [f"{'what':<22}{'seconds':>9}{'CPU s':>9}{'peak MB':>9}{'of tlk, CPU':>13}"]
    for label, row in medians.items():
        size = label.rsplit(" ", 1)[-1]
        ours = medians.get("tlk 1x" if size == "gz" or label == "gunzip" else f"tlk {size}")
        ratio = "" if ours is None else f"{row['cpu_seconds'] / ours['cpu_seconds']:.2f}"
        lines.append(
            f"{label:<22}{row['seconds']:>9.3f}{row['cpu_seconds']:>9.3f}{row['peak_mb']:>9.1f}{ratio:>13}"
        )
    sizes = report["file_bytes"]
    lines.append(f"files: {sum(sizes.values())} bytes, {sizes}; the gzipped trace has {TRACE.stat().st_size}")
    lines.append(f"start: {report['start_seconds']}")
    lines.append(f"training thread: {json.dumps(report['training_thread'])}")
    lines.append(f"{report['machine']} {report['versions']}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
