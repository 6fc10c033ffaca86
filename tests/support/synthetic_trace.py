"""Small Kineto traces made by hand; times are whole microseconds from an origin like that of a real trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import pyarrow as pa

from tlk_tracking.core.records import StepBracket, StepOutcome, WindowFacts, WindowSource

SESSION = "0123abcd"
ORIGIN_US = 5_096_766_469_000.0
MAIN, BACKWARD, FOREIGN = 100, 101, 102
# What the recording side knows of the step of `one_step`.
WINDOW = WindowFacts(
    session=SESSION,
    source=WindowSource.CALLBACK,
    first_step=5,
    warmup=1,
    requested=1,
    steps=(StepBracket(step=5, outcome=StepOutcome.COMPLETE),),
    synchronized=True,
)

Event = dict[str, Any]


class Layout(StrEnum):
    """How a trace is laid out in its file."""

    KINETO_2_11 = "kineto_2_11"
    KINETO_2_13 = "kineto_2_13"
    COMPACT = "compact"
    LIST = "list"


@dataclass(slots=True)
class SyntheticTrace:
    """Events of one trace in the order in which they were added; each method adds one and returns it."""

    session: str = SESSION
    events: list[Event] = field(default_factory=list)
    header: dict[str, Any] = field(default_factory=dict)

    def host(
        self,
        name: str,
        start: float,
        end: float,
        *,
        thread: int = MAIN,
        external_id: int = 0,
        cat: str = "cpu_op",
    ) -> Event:
        args = {"External id": external_id, "Record function id": 0, "Ev Idx": len(self.events)}
        return self._add(cat=cat, name=name, start=start, duration=end - start, pid=9, tid=thread, args=args)

    def op(
        self, sequence: int, start: float, end: float, *, session: str | None = None, **more: Any
    ) -> Event:
        """Add our range around an ATen call."""
        return self.host(f"tlk::{session or self.session}::op::{sequence}", start, end, **more)

    def step(self, step: int, start: float, end: float, *, session: str | None = None, **more: Any) -> Event:
        """Add our range around a step."""
        return self.host(f"tlk::{session or self.session}::step::{step}", start, end, **more)

    def call(
        self, correlation: int | None, start: float, *, name: str = "cudaLaunchKernel", thread: int = MAIN,
        duration: float = 2, cat: str = "cuda_runtime",
    ) -> Event:  # fmt: skip
        """Add a CUDA runtime (or driver) call."""
        args = {"cbid": 211} if correlation is None else {"cbid": 211, "correlation": correlation}
        return self._add(cat=cat, name=name, start=start, duration=duration, pid=9, tid=thread, args=args)

    def record(
        self, correlation: int | None, start: float, *, duration: float = 5, name: str = "kernel_a",
        cat: str = "kernel", device: int = 0, stream: int = 7, external_id: int = 0, **more: Any,
    ) -> Event:  # fmt: skip
        """Add a device record; `more` are further arguments (`bytes`, `grid`, `block`)."""
        args = {"device": device, "stream": stream, **more}
        args |= {} if correlation is None else {"correlation": correlation}
        args |= {"External id": external_id} if external_id else {}
        return self._add(
            cat=cat, name=name, start=start, duration=duration, pid=device, tid=stream, args=args
        )

    def launch(self, correlation: int, start: float, *, thread: int = MAIN, **more: Any) -> None:
        """Add a kernel launch: a runtime call, and its record 10 µs later."""
        self.call(correlation, start, thread=thread)
        self.record(correlation, start + 10, **more)

    def text(self, layout: Layout = Layout.KINETO_2_13) -> str:
        """Return the trace as the text of a file."""
        return _TEXTS[layout](self.header, [json.dumps(event) for event in self.events])

    def write(self, folder: Path, layout: Layout = Layout.KINETO_2_13) -> Path:
        """Write the trace into the folder; return its path."""
        path = folder / f"{layout.value}.trace.json"
        path.write_text(self.text(layout), encoding="utf-8")
        return path

    def _add(
        self, *, cat: str, name: str, start: float, duration: float, pid: int, tid: int, args: Event
    ) -> Event:
        event = {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ORIGIN_US + start}
        self.events.append(event | {"dur": duration, "args": args})
        return self.events[-1]


def one_step() -> SyntheticTrace:
    """Return a step (0 to 1,000 µs) with two ATen calls, the second on autograd's thread; each launches a kernel."""
    trace = SyntheticTrace()
    trace.step(5, 0, 1000, external_id=1)
    trace.op(0, 100, 200, external_id=2)
    trace.host("aten::mm", 110, 190, external_id=3)
    trace.launch(11, 120, external_id=3)
    trace.op(1, 300, 400, thread=BACKWARD, external_id=4)
    trace.launch(12, 320, thread=BACKWARD, external_id=4)
    return trace


def table_of(schema: pa.Schema, *rows: dict[str, Any]) -> pa.Table:
    """Return rows as a table; what they leave out is null."""
    return pa.Table.from_pylist([dict.fromkeys(schema.names) | row for row in rows], schema=schema)


def ops_json(rows: list[dict[str, Any]], *, session: str = SESSION) -> str:
    """Return the text of an ops file."""
    return json.dumps({"session": session, "torch": "2.13.0", "rows": rows})


def _kineto_2_11(header: dict[str, Any], events: list[str]) -> str:
    return (
        '\n  {\n    "schemaVersion": 1,\n    "deviceProperties": [\n    ],\n'
        f'{_header_lines(header)}  "displayTimeUnit": "ms",\n  "traceEvents": [\n'
        + ",\n".join(f"  {{\n    {event[1:-1]}\n  }}" for event in events)
        + '\n  ],\n  "traceName": "trace.json"\n}'
    )


def _kineto_2_13(header: dict[str, Any], events: list[str]) -> str:
    return (
        ' {\n    "schemaVersion": 1,\n    "deviceProperties": [],\n    \n'
        f'{_header_lines(header)}    "displayTimeUnit": "ms",\n    "traceEvents": [\n    \n'
        + ",\n".join(f"  {{\n    {event[1:-1]}\n    \n  }}" for event in events)
        + '\n  ],"traceName": "trace.json" }'
    )


def _header_lines(header: dict[str, Any]) -> str:
    return "".join(f"      {json.dumps(key)}: {json.dumps(value)},\n" for key, value in header.items())


_TEXTS: dict[Layout, Callable[[dict[str, Any], list[str]], str]] = {
    Layout.KINETO_2_11: _kineto_2_11,
    Layout.KINETO_2_13: _kineto_2_13,
    Layout.COMPACT: lambda header, events: (
        json.dumps(header, separators=(",", ":"))[:-1]
        + ("," if header else "")
        + f'"traceEvents":[{",".join(events)}]}}'
    ),
    Layout.LIST: lambda header, events: f"[{','.join(events)}]",
}
