"""Whatever a trace or an ops file holds, it is refused with a typed error or becomes a valid annotation."""

from __future__ import annotations

import gzip
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from mutations import (
    HANG_S,
    HOSTILE_TEXTS,
    HOSTILE_VALUES,
    MUTATIONS,
    dump_json,
    processor_time,
    scramble_bytes,
    scramble_json,
    untouched,
)
from real_traces import real_trace
from soak_figures import SOAK, TIMEOUT_S, tell
from synthetic_trace import FOREIGN, Layout, SyntheticTrace, one_step, ops_json

from tlk_tracking.analysis.metrics import facts, metrics
from tlk_tracking.annotation.kernel_annotation import load_annotation
from tlk_tracking.attribution.annotate import import_trace
from tlk_tracking.core.errors import TraceError

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.usefixtures("without_fsync")]


def _rich() -> SyntheticTrace:
    """Return a trace with an event of every kind and gaps of most reasons."""
    trace = one_step()
    trace.header = {"distributedInfo": {"rank": 0, "world_size": 2}, "cuda_runtime_version": 13000}
    trace.step(6, 1000, 2000)
    trace.host("ProfilerStep#5", 0, 1000, cat="user_annotation")
    trace.call(50, 500, name="cudaGraphLaunch")
    trace.record(50, 510, grid=[1, 2, 3], block=[32, 1, 1])
    trace.record(50, 520, duration=0)
    trace.launch(51, 530, thread=FOREIGN, external_id=3)
    trace.call(52, 540, name="cudaMemcpyAsync")
    trace.record(52, 545, cat="gpu_memcpy", bytes=100)
    trace.record(99, 550, cat="gpu_memset")
    trace.call(1, 560, name="cudaStreamBeginCapture")
    trace.call(53, 565)
    trace.call(2, 570, name="cudaStreamEndCapture")
    return trace


OPS = ops_json(
    [
        {
            "sequence": number,
            "operator": "aten.mm.default",
            "phase": "forward",
            "inputs": [[[2, 3], "float32", "cuda:0"]],
            "outcome": "returned",
        }
        for number in range(2)
    ]
)


def _bodies() -> list[bytes]:
    return [_rich().text(layout).encode() for layout in Layout] + [
        gzip.decompress(real_trace("paused_interior").trace.read_bytes())
    ]


def _import(folder: Path, trace: bytes, ops: bytes | None = None) -> bool:
    """Import, save, load and sum up; return whether the trace was good."""
    inputs = folder / "inputs"
    inputs.mkdir(exist_ok=True)
    (inputs / "trace.json").write_bytes(trace)
    if ops is not None:
        (inputs / "ops.json").write_bytes(ops)
    with (
        processor_time(HANG_S),
        untouched(folder, but=lambda path: (folder / "out") in (path, *path.parents)),
    ):
        try:
            annotation = import_trace(inputs / "trace.json", ops=None if ops is None else inputs / "ops.json")
        except TraceError:
            return False
        annotation.save(folder / "out")
        loaded = load_annotation(folder / "out")
        assert loaded.manifest == annotation.manifest
        assert json.dumps(facts(loaded), allow_nan=False) == json.dumps(facts(annotation), allow_nan=False)
        assert metrics(loaded) == metrics(annotation)
    shutil.rmtree(folder / "out")
    return True


def _scrambled_bytes(dice: random.Random) -> bytes:
    return scramble_bytes(dice.choice(_bodies()), dice)


def _scrambled_gzip(dice: random.Random) -> bytes:
    return scramble_bytes(gzip.compress(dice.choice(_bodies())), dice)


def _scrambled_json(dice: random.Random) -> bytes:
    said = {"traceEvents": _rich().events} | _rich().header
    for _ in range(dice.randint(1, 3)):
        if said:
            scramble_json(said, dice)
    return dump_json(said)


def _scrambled_events(dice: random.Random) -> bytes:
    """Change events only, so that nearly all of these are still traces."""
    trace = _rich()
    for _ in range(dice.randint(1, 5)):
        event: Any = dice.choice(trace.events)
        part = dice.choice([event, event["args"]] if isinstance(event.get("args"), dict) else [event])
        if part:
            part[dice.choice(list(part))] = deepcopy(dice.choice((*HOSTILE_VALUES, *HOSTILE_TEXTS)))
    return trace.text(dice.choice(list(Layout))).encode()


@pytest.mark.parametrize(
    "mutate",
    [_scrambled_bytes, _scrambled_gzip, _scrambled_json, _scrambled_events],
    ids=lambda mutate: mutate.__name__,
)
def test_a_mutated_trace_is_refused_or_valid(
    tmp_path: Path, mutate: Callable[[random.Random], bytes]
) -> None:
    good = [_import(tmp_path, mutate(random.Random(seed))) for seed in range(MUTATIONS)]
    tell(mutate.__name__.strip("_"), tried=MUTATIONS, valid=sum(good))
    if mutate in (_scrambled_bytes, _scrambled_gzip):
        assert not all(good)
    if mutate in (_scrambled_bytes, _scrambled_events):
        assert any(good)


def test_a_mutated_ops_file_is_refused_or_valid(tmp_path: Path) -> None:
    trace = one_step().text().encode()
    good = []
    for seed in range(MUTATIONS):
        dice = random.Random(seed)
        if dice.random() < 0.5:
            ops = scramble_bytes(OPS.encode(), dice)
        else:
            ops = dump_json(scramble_json(json.loads(OPS), dice))
        good.append(_import(tmp_path, trace, ops))
    tell("scrambled_ops", tried=MUTATIONS, valid=sum(good))
    assert len(set(good)) == 2


@pytest.mark.parametrize("value", [*HOSTILE_VALUES, *HOSTILE_TEXTS], ids=lambda value: repr(value)[:30])
def test_a_hostile_value_anywhere_in_an_event_is_refused_or_valid(tmp_path: Path, value: object) -> None:
    places = [("record", None, key) for key in ("ph", "cat", "name", "pid", "tid", "ts", "dur", "args")]
    places += [
        ("record", "args", k) for k in ("correlation", "External id", "device", "stream", "bytes", "grid")
    ]
    places += [("call", None, key) for key in ("name", "tid", "ts", "dur")] + [
        ("call", "args", "correlation")
    ]
    places += [("host", None, key) for key in ("name", "pid", "tid", "ts", "dur")] + [
        ("host", "args", "External id")
    ]
    shown = len(repr(value)) % 4  # each value in every fourth place, not the same ones; in a soak in all
    for which, part, key in places if SOAK else places[shown::4]:
        trace = one_step()
        event = {
            "record": lambda t=trace: t.record(77, 500, bytes=1, grid=[1, 1, 1]),
            "call": lambda t=trace: t.call(77, 490),
            "host": lambda t=trace: t.host("aten::add", 480, 520, external_id=5),
        }[which]()
        (event[part] if part else event)[key] = value
        _import(tmp_path, trace.text().encode())


_BOMBS = """
import gzip, resource, sys
from pathlib import Path
from tlk_tracking import TlkError, import_trace

folder, mebibyte = Path(sys.argv[1]), 1 << 20
start, event = b'{"traceEvents": [\\n', b'  {"ph": "X"\\n  },\\n'


def pack(name, *parts):
    path = folder / name
    with gzip.open(path, "wb", compresslevel=1) as file:
        for part, times in parts:
            for _ in range(times):
                file.write(part)
    return path


bombs = [
    pack("zeros", (bytes(mebibyte), 300)),
    pack("spaces", (b"[", 1), (b" " * mebibyte, 300)),
    pack("numbers", (b"[", 1), (b"0," * (mebibyte // 2), 60)),
    pack("objects", (b"[", 1), (b"{}," * (mebibyte // 3), 60)),
    pack("arrays", (b"[" * mebibyte, 60)),
    pack("keys", (b'{"a":' * (mebibyte // 5), 60)),
    pack("name", (start + event + event + b'  {"name": "', 1), (b"x" * mebibyte, 60)),
    pack("events_on_a_line", (start + event + event + b"  ", 1), (b"{}," * (mebibyte // 3), 60)),
    pack("events", (start + event, 1), (event * (mebibyte // len(event)), 300)),
    pack("header", (b'{"x": "', 1), (b"x" * mebibyte, 60), (b'", "traceEvents": []}', 1)),
]
trace = folder / "trace.json"
trace.write_bytes(b'{"traceEvents": []}')
refused = []
for bomb in bombs:
    for trace_path, ops in ((bomb, None), (trace, bomb)):
        try:
            import_trace(trace_path, ops=ops)
        except TlkError:
            refused.append((bomb.name, ops is not None))
print(len(refused), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def test_bombs_are_refused_in_bounded_memory(tmp_path: Path) -> None:
    """Each is a few hundred kilobytes that would be hundreds of megabytes, and gigabytes as objects."""
    program = tmp_path / "bombs.py"
    program.write_text(_BOMBS)
    ended = subprocess.run(
        [sys.executable, program, tmp_path], capture_output=True, text=True, timeout=170, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    refused, mebibytes = map(int, ended.stdout.split())
    assert refused >= 19  # "header" is a long text and no bomb: a trace without events
    assert mebibytes < 1500
