"""Annotate and send windows beside the training process (RawWindow -> WorkerReport).

The training process holds a `WindowWorker`; the work is done by `python -m tlk_tracking.delivery.worker`. Requests
are lines of JSON on its standard input, answers lines on its standard output. It ends when its input does,
so also when the training process is killed, and what it could not send stays in the outbox.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tlk_tracking.delivery.carriers import (
    Begin,
    Carrier,
    decode_line,
    encode_line,
    run_deliveries,
    start_carrier,
)
from tlk_tracking.delivery.outbox import Delivery, DeliveryState, Outbox, RawWindow
from tlk_tracking.tracking.tracking_uri import Destination, absolute_tracking_uri

_MAX_STARTS = 3
_MAX_ATTEMPTS = 2
# How long the process may still annotate, beyond the time for sending, once the training process is gone.
_LAST_ANNOTATIONS_S = 120.0
_PARENT_POLL_S = 1.0
COLLECT_EVERY = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """What became of every window that was submitted, in that order."""

    deliveries: tuple[Delivery, ...]

    @property
    def waiting(self) -> tuple[Delivery, ...]:
        """The windows that are not in their run yet."""
        return tuple(found for found in self.deliveries if found.is_waiting)


class WindowWorker:
    """The training process's handle on its window worker.

    Nothing but `drain` waits, nothing raises for trouble of the worker, and nothing holds the exit. A worker
    that dies is started again. In a notebook, whose credentials may live in memory alone, and where no process
    can be started, a thread does the work; a database in memory is written in `drain`.
    """

    def __init__(self, outbox: Outbox, destination: Destination | None, *, upload_timeout_s: float) -> None:
        self._outbox = outbox
        self._tracking_uri = None if destination is None else absolute_tracking_uri(destination.tracking_uri)
        self._upload_timeout_s = upload_timeout_s
        self._owner = os.getpid()
        self._changed = threading.Condition()
        self._carrier: Carrier | None = None
        self._starts = 0
        self._attempts: dict[str, int] = {}
        self._answers: dict[str, Delivery] = {}
        self._answered_at: dict[str, float] = {}
        self._warned: set[str] = set()
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The process id of the worker, None while no process does the work."""
        carrier = self._carrier
        return None if carrier is None else carrier.pid

    def start(self) -> None:
        """Start the worker, so that its imports overlap with training."""
        with self._changed:
            if self._carrier is None and not self._is_over():
                self._start_carrier()

    def submit(self, window: RawWindow) -> None:
        """Ask for a window to be annotated and sent."""
        with self._changed:
            if not self._is_over():
                self._attempts[window.name] = 0
                self._ask(window.name)

    def drain(self, timeout_s: float) -> WorkerReport:
        """Wait until every submitted window is done, at most that long, and warn once of those not sent."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            if not self._is_over():
                self._ask_again_for_old_failures()
                if self._carrier is not None:
                    self._carrier.work()
                self._wait_until(deadline)
            report = WorkerReport(
                deliveries=tuple(
                    self._answers.get(name) or self._unanswered(name, timeout_s) for name in self._attempts
                )
            )
        self._warn(report)
        return report

    def close(self) -> None:
        """Let the worker end by itself, after at most its own `upload_timeout_s`; do not wait for it."""
        with self._changed:
            if not self._is_over():
                self._closed = True
                if self._carrier is not None:
                    self._carrier.end()

    def _is_over(self) -> bool:
        # A forked child has the handle too, but not the worker.
        return self._closed or os.getpid() != self._owner

    def _start_carrier(self) -> None:
        self._starts += 1
        self._carrier = start_carrier(
            Begin(
                root=self._outbox.root,
                max_bytes=self._outbox.max_bytes,
                tracking_uri=self._tracking_uri,
                upload_timeout_s=self._upload_timeout_s,
            ),
            answer=self._take,
            ended=self._note_end,
        )

    def _ask(self, name: str) -> None:
        if self._carrier is None or self._carrier.has_ended:
            self._restart_or_give_up()
            if self._carrier is None or self._carrier.has_ended:
                return
        self._attempts[name] += 1
        self._answers.pop(name, None)
        self._carrier.ask(name)

    def _restart_or_give_up(self) -> None:
        """Start a worker and ask again for what the dead one left; a window is not tried for ever."""
        unanswered = [name for name in self._attempts if name not in self._answers]
        if self._starts >= _MAX_STARTS:
            why = f"the window worker ended {self._starts} times"
            for name in unanswered:
                self._answers[name] = self._left(name, why)
            return
        self._start_carrier()
        for name in unanswered:
            if self._attempts[name] >= _MAX_ATTEMPTS:
                self._answers[name] = self._left(
                    name, "the window worker ended while it worked on this window"
                )
            elif self._attempts[name] > 0:
                self._ask(name)

    def _ask_again_for_old_failures(self) -> None:
        now = time.monotonic()
        for name, found in list(self._answers.items()):
            old = now - self._answered_at.get(name, now) > self._upload_timeout_s
            if found.state is DeliveryState.SAVED and old:
                self._ask(name)

    def _wait_until(self, deadline: float) -> None:
        while any(name not in self._answers for name in self._attempts):
            if self._carrier is None or self._carrier.has_ended:
                self._restart_or_give_up()
                continue
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            self._changed.wait(left_s)

    def _take(self, answer: Delivery) -> None:
        with self._changed:
            self._answers[answer.name] = answer
            self._answered_at[answer.name] = time.monotonic()
            self._changed.notify_all()

    def _note_end(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _unanswered(self, name: str, timeout_s: float) -> Delivery:
        return self._left(name, f"not done within {timeout_s:g} s")

    def _left(self, name: str, reason: str) -> Delivery:
        raw, entry = self._outbox.raw_window(name), self._outbox.entry(name)
        if entry.folder.exists():
            return Delivery(name=name, state=DeliveryState.SAVED, folder=entry.folder, reason=reason)
        return Delivery(name=name, state=DeliveryState.RAW, folder=raw.folder, reason=reason)

    def _warn(self, report: WorkerReport) -> None:
        new = [found for found in report.waiting if found.name not in self._warned]
        if not new:
            return
        self._warned.update(found.name for found in new)
        root = self._outbox.root
        text = (
            f"{len(new)} of {len(report.deliveries)} windows of kernel telemetry are not in their MLflow run yet "
            f"({new[0].reason}). Their files are in {root}; {_advice(new, root)}."
        )
        try:
            # No line of the program is to blame, so that none is quoted.
            warnings.warn_explicit(text, UserWarning, filename="tlk_tracking", lineno=1, module=__name__)
        except UserWarning:  # under -W error it must not end the training either
            logging.getLogger(__name__).warning(text)


def _advice(waiting: Sequence[Delivery], root: Path) -> str:
    if all(delivery.run_is_missing for delivery in waiting):
        return "there is no such run, so send each by `log_annotation(folder, run_id)` to one that exists"
    return f"`tlk upload --outbox {root}` sends them"


def main() -> None:
    """Work for the training process that started this one, until its end of the pipe closes."""
    answers = _take_standard_output()
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # meant for training; the end of the pipe says when to end
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if hasattr(os, "nice"):
        os.nice(5)
    # Importing makes hundreds of thousands of objects that stay: looking for garbage among them is a fifth of it.
    gc.set_threshold(COLLECT_EVERY)
    lines = _request_lines(int(sys.argv[1]))
    begin = decode_line(next(lines, b""), Begin)
    requests: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    reader = threading.Thread(
        target=_read_requests, args=(lines, requests, begin.upload_timeout_s), daemon=True
    )
    reader.start()

    def answer(delivery: Delivery) -> None:
        with suppress(BrokenPipeError):  # the training process is gone; the outbox is what counts
            os.write(answers, encode_line(delivery))

    run_deliveries(begin, requests, answer)
    # A thread that hangs in an upload, or a pool that waits for one at exit, must not hold this process.
    os._exit(0)


def _take_standard_output() -> int:
    """Return a descriptor of the pipe for the answers; what libraries print goes nowhere."""
    answers = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    return answers


def _request_lines(parent_pid: int) -> Iterator[bytes]:
    """Yield the lines of standard input until its end, or until the parent is dead.

    A child that the training process forked may hold the pipe open for longer than its parent lives.
    """
    rest = b""
    while True:
        if os.name == "posix" and not select.select([0], [], [], _PARENT_POLL_S)[0]:
            if os.getppid() != parent_pid:
                return
            continue
        chunk = os.read(0, 1 << 16)
        if not chunk:
            return
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole


def _read_requests(
    lines: Iterator[bytes], requests: queue.SimpleQueue[str | None], upload_timeout_s: float
) -> None:
    for line in lines:
        requests.put(decode_line(line, str))
    limit = threading.Timer(upload_timeout_s + _LAST_ANNOTATIONS_S, os._exit, args=(1,))
    limit.daemon = True
    limit.start()
    requests.put(None)


if __name__ == "__main__":
    main()
