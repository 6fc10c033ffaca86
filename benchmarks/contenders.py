"""Run one contender once on one trace and print what it took and what it found (JSON on stdout).

    python contenders.py NAME TRACE WORK_FOLDER

Each runs in a process of its own; imports are over before the clock starts. Memory is the process's peak over
what it held after its imports. Contenders that relate launches to markers print the digest of all pairs
(marker's number, correlation), so that the driver can refuse to compare unequal work.
"""

from __future__ import annotations

import gc
import gzip
import hashlib
import json
import sys
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Pairs = list[tuple[int, int]]
Contender = Callable[[Path, Path], tuple[Callable[[], Any], Callable[[Any], Pairs] | None]]
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
RUNTIME = ("cuda_runtime", "cuda_driver")


def tlk(trace: Path, work: Path) -> tuple[Callable[[], Any], Callable[[Any], Pairs]]:
    """Make and check an annotation in memory."""
    from tlk_tracking.attribution.annotate import import_trace

    return lambda: _checked(import_trace(trace)), _pairs_of_annotation


def tlk_with_rows(trace: Path, work: Path) -> tuple[Callable[[], Any], Callable[[Any], Pairs]]:
    """The same with the dispatch mode's rows as JSON beside the trace."""
    from tlk_tracking.attribution.annotate import import_trace

    ops = trace.with_name(trace.name.replace(".trace.json", ".ops.json"))
    return lambda: _checked(import_trace(trace, ops=ops)), _pairs_of_annotation


def tlk_save_load(trace: Path, work: Path) -> tuple[Callable[[], Any], Callable[[Any], Pairs]]:
    """Save, load and check an annotation that is made already."""
    import shutil

    from tlk_tracking.annotation.kernel_annotation import load_annotation
    from tlk_tracking.attribution.annotate import import_trace

    annotation = import_trace(trace)
    folder = work / "saved"
    shutil.rmtree(folder, ignore_errors=True)

    def run() -> Any:
        annotation.save(folder)
        return load_annotation(folder)

    return run, _pairs_of_annotation


def msgspec_typed(trace: Path, work: Path) -> tuple[Callable[[], Any], None]:
    """Decode the file into typed structs, as msgspec's documentation does it."""
    return _typed(trace)


def msgspec_lean(trace: Path, work: Path) -> tuple[Callable[[], Any], None]:
    """The same with structs that the collector does not track, and with the collector off."""
    gc.disable()
    return _typed(trace, gc=False)


def _typed(trace: Path, **options: bool) -> tuple[Callable[[], Any], None]:
    import msgspec

    args = msgspec.defstruct(
        "Args",
        [
            ("external_id", int | None, msgspec.field(name="External id", default=None)),
            *((name, int | None, None) for name in ("correlation", "device", "stream", "bytes")),
            *((name, tuple[int, int, int] | None, None) for name in ("grid", "block")),
        ],
        **options,
    )
    event = msgspec.defstruct(
        "Event",
        [
            ("ph", str, ""), ("cat", str, ""), ("name", str, ""), ("pid", int | str, 0), ("tid", int | str, 0),
            ("ts", float | None, None), ("dur", float | None, None), ("args", args | None, None),
        ],
        **options,
    )  # fmt: skip
    file = msgspec.defstruct("File", [("traceEvents", list[event])], **options)
    decoder = msgspec.json.Decoder(file)
    return lambda: decoder.decode(trace.read_bytes()), None


def json_load(trace: Path, work: Path) -> tuple[Callable[[], Any], None]:
    """Decode the file with the standard library."""
    return lambda: json.loads(trace.read_bytes()), None


def json_stack(trace: Path, work: Path) -> tuple[Callable[[], Any], Callable[[Any], Pairs]]:
    """The script that everybody writes first: json.load, and a search among the markers of each thread."""

    def run() -> Pairs:
        events = json.loads(trace.read_bytes())["traceEvents"]
        markers: dict[Any, list[tuple[float, float, int]]] = defaultdict(list)
        for event in events:
            if (
                event.get("cat") == "cpu_op"
                and event["name"].startswith("tlk::")
                and "::op::" in event["name"]
            ):
                number = int(event["name"].rsplit("::", 1)[1])
                markers[event["tid"]].append((event["ts"], event["ts"] + event["dur"], number))
        starts = {}
        for tid, ranges in markers.items():
            ranges.sort()
            starts[tid] = [start for start, _, _ in ranges]
        owner: dict[int, int] = {}
        for event in events:
            if event.get("cat") in RUNTIME and event["tid"] in starts:
                place = bisect_right(starts[event["tid"]], event["ts"]) - 1
                if place >= 0 and event["ts"] < markers[event["tid"]][place][1]:
                    owner[event["args"].get("correlation", 0)] = markers[event["tid"]][place][2]
        pairs = []
        for event in events:
            if event.get("cat") in DEVICE:
                correlation = event["args"].get("correlation", 0)
                if correlation in owner:
                    pairs.append((owner[correlation], correlation))
        return pairs

    return run, list


def torchlens(trace: Path, work: Path) -> tuple[Callable[[], Any], Callable[[Any], Pairs]]:
    """TorchLens's own reader and join; its markers are user annotations, so the input has ours as such."""
    from torchlens._io import _json
    from torchlens.kernel_telemetry import _payload_from_events
    from torchlens.observability._kineto import _normalize_chrome_event

    own = work / f"{trace.name}.torchlens.json"
    if not own.exists():
        text = trace.read_text(encoding="utf-8")
        own.write_text(text.replace('"cpu_op", "name": "tlk::', '"user_annotation", "name": "tlk::'), "utf-8")
    names = [
        event["name"]
        for event in json.loads(own.read_bytes())["traceEvents"]
        if "::op::" in event.get("name", "")
    ]
    numbers = {name: int(name.rsplit("::", 1)[1]) for name in names}

    def run() -> Any:
        raw = _json.read_bounded(own)["traceEvents"]
        events = tuple(e for event in raw if (e := _normalize_chrome_event(event)) is not None)
        return _payload_from_events(events, numbers, telemetry_available=True)

    def pairs(payload: Any) -> Pairs:
        return [
            (sequence, payload._launches[row].runtime_correlation) for sequence, row in payload._relations
        ]

    return run, pairs


def hta(trace: Path, work: Path) -> tuple[Callable[[], Any], Callable[[Any], Pairs]]:
    """HTA's own parser and call graph; a launch's marker is the nearest one above it.

    Without rounding to whole microseconds, at which HTA 0.5.0 stops on this trace (two ranges become one).
    """
    import logging
    import os
    import warnings

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    os.environ["HTA_DISABLE_NS_ROUNDING"] = "1"
    from hta.common.trace import Trace
    from hta.common.trace_call_graph import CallGraph

    def run() -> Any:
        read = Trace(trace_files={0: str(trace)}, trace_dir="")
        read.parse_traces(use_multiprocessing=False)
        CallGraph(read, ranks=[0])
        return read

    def pairs(read: Any) -> Pairs:
        frame = read.get_trace(0)
        texts = read.symbol_table.get_sym_table()
        name = dict(zip(frame["index"], frame["name"], strict=True))
        parent = dict(zip(frame["index"], frame["parent"], strict=True))
        found = []
        for index, correlation in zip(
            *(frame.loc[frame["stream"].ne(-1), column] for column in ("index", "correlation")), strict=True
        ):
            above = parent.get(index, -1)
            while above in name and "::op::" not in texts[name[above]]:
                above = parent[above]
            if above in name:
                found.append((int(texts[name[above]].rsplit("::", 1)[1]), int(correlation)))
        return found

    return run, pairs


def gunzip(trace: Path, work: Path) -> tuple[Callable[[], Any], None]:
    """Only read and decompress, in pieces."""

    def run() -> None:
        with gzip.open(trace) as file:
            while file.read(1 << 20):
                pass

    return run, None


CONTENDERS: dict[str, Contender] = {
    f.__name__: f
    for f in (
        tlk, tlk_with_rows, tlk_save_load, msgspec_typed, msgspec_lean, json_load, json_stack, torchlens, hta, gunzip,
    )
}  # fmt: skip


def main() -> None:
    """Run the contender named on the command line."""
    name, trace, work = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    run, pairs = CONTENDERS[name](trace, work)
    gc.collect()
    base_kib = _start_of_memory()
    cpu, begin = time.process_time(), time.perf_counter()
    result = run()
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu
    peak_mb = (_status("VmHWM") - base_kib) / 1024
    found = None if pairs is None else pairs(result)
    print(
        json.dumps(
            {
                "seconds": seconds,
                "cpu_seconds": cpu_seconds,
                "peak_mb": round(peak_mb, 1),
                "pairs": None if found is None else _digest(found),
            }
        )
    )


def _checked(annotation: Any) -> Any:
    from tlk_tracking.annotation.checks import check_tables

    check_tables(
        annotation.manifest,
        calls=annotation.call_table,
        launches=annotation.launch_table,
        relations=annotation.relation_table,
        fused=annotation.fused_table,
    )
    return annotation


def _pairs_of_annotation(annotation: Any) -> Pairs:
    correlation = annotation.launch_table["runtime_correlation"].to_pylist()
    relations = annotation.relation_table
    rows = zip(relations["sequence"].to_pylist(), relations["launch"].to_pylist(), strict=True)
    return [(sequence, correlation[launch]) for sequence, launch in rows]


def _digest(pairs: Iterable[tuple[int, int]]) -> str:
    ordered = sorted(pairs)
    return f"{len(ordered)}:{hashlib.sha256(repr(ordered).encode()).hexdigest()[:16]}"


def _start_of_memory() -> int:
    """Let the kernel measure the peak from here on; return what is held now, in KiB."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1])


if __name__ == "__main__":
    main()
