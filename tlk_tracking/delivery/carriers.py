"""What can do the work of a window worker: a process, a thread, the caller (window names -> Deliveries)."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from tlk_tracking.delivery.outbox import Delivery, DeliveryState, Outbox
from tlk_tracking.tracking.tracking_uri import is_in_memory, request_limits

_Message = TypeVar("_Message")
_PROGRAM = "tlk_tracking.delivery.worker"
# They would change what the process prints, how it ends or what its imports raise.
_NOT_INHERITED = ("PYTHONWARNINGS", "PYTHONINSPECT", "PYTHONSTARTUP")


class Begin(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker works for; the first line that its process reads. The URI may carry credentials."""

    root: Path
    max_bytes: int
    tracking_uri: str | None
    upload_timeout_s: float


class Carrier(Protocol):
    """Whoever does the work. None of its methods but `work` waits."""

    pid: int | None
    has_ended: bool

    def ask(self, name: str) -> None:
        """Ask for a window; the answer comes later."""

    def work(self) -> None:
        """Do now what can be done by the caller alone."""

    def end(self) -> None:
        """Let it end when it has done what was asked."""


def encode_line(message: Begin | Delivery | str) -> bytes:
    """Return a message between the two processes as one line."""
    return msgspec.json.encode(message, enc_hook=str) + b"\n"  # the hook is for paths


def decode_line(line: bytes, kind: type[_Message]) -> _Message:
    """Return the message of one line. Raises msgspec.MsgspecError when it is another."""
    return msgspec.json.decode(line, type=kind, dec_hook=lambda path, text: path(text))


def start_carrier(begin: Begin, *, answer: Callable[[Delivery], None], ended: Callable[[], None]) -> Carrier:
    """Start what suits the tracking store and this process.

    Args:
        begin: what it works for.
        answer: called with each Delivery, on any thread.
        ended: called when a process has ended, by itself or not.
    """
    if begin.tracking_uri is not None and is_in_memory(begin.tracking_uri):
        return _CallerCarrier(begin, answer)
    if not _is_notebook() and sys.executable and not getattr(sys, "frozen", False):
        with suppress(OSError):  # no more processes, no memory: the thread does it
            return _ProcessCarrier(begin, answer, ended)
    return _ThreadCarrier(begin, answer)


def run_deliveries(
    begin: Begin, requests: queue.SimpleQueue[str | None], answer: Callable[[Delivery], None]
) -> None:
    """Settle and send what is asked for until None is, and for at most the upload timeout after that."""
    # Late, since the training process has no use for the analysis.
    from tlk_tracking.delivery.delivery_loop import DeliveryLoop, get_ready

    if begin.tracking_uri is not None:
        # Beside the loop: a window that is asked for meanwhile, or a store that hangs, waits for nothing.
        threading.Thread(
            target=get_ready, args=(begin.tracking_uri,), name="tlk_tracking get ready", daemon=True
        ).start()
    loop = DeliveryLoop(
        Outbox(begin.root, max_bytes=begin.max_bytes),
        begin.tracking_uri,
        upload_timeout_s=begin.upload_timeout_s,
        answer=answer,
    )
    loop.run(requests)


class _ProcessCarrier:
    """`python -m tlk_tracking.delivery.worker`, in a session of its own: Ctrl-C in the terminal is not for it."""

    def __init__(self, begin: Begin, answer: Callable[[Delivery], None], ended: Callable[[], None]) -> None:
        self.has_ended = False
        self._answer = answer
        self._ended = ended
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _PROGRAM, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=_environment(begin.upload_timeout_s),
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        if os.name == "posix":  # a worker that does not read must not hold the training
            os.set_blocking(self._requests.fileno(), False)
        self.pid: int | None = self._process.pid
        self._write(begin)
        threading.Thread(target=self._read_answers, name="tlk_tracking answers", daemon=True).start()

    def ask(self, name: str) -> None:
        self._write(name)

    def work(self) -> None:
        """Nothing: the process works."""

    def end(self) -> None:
        with suppress(OSError):
            self._requests.close()

    def _write(self, message: Begin | str) -> None:
        # A pipe that is full or broken loses a request, not a window: that is in the outbox.
        with suppress(OSError):
            self._requests.write(encode_line(message))

    def _read_answers(self) -> None:
        with self._answers:
            for line in self._answers:
                self._answer(decode_line(line, Delivery))
        self._process.wait()
        self.end()
        self.has_ended = True
        self._ended()


class _ThreadCarrier:
    """A daemon thread of this process: it has the credentials that live in memory, and holds no exit."""

    pid: int | None = None
    has_ended = False

    def __init__(self, begin: Begin, answer: Callable[[Delivery], None]) -> None:
        self._requests: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(
            target=run_deliveries,
            args=(begin, self._requests, answer),
            name="tlk_tracking window worker",
            daemon=True,
        ).start()

    def ask(self, name: str) -> None:
        self._requests.put(name)

    def work(self) -> None:
        """Nothing: the thread works."""

    def end(self) -> None:
        self._requests.put(None)


class _CallerCarrier:
    """The caller itself, in `drain`: only the thread that made a database in memory sees it."""

    pid: int | None = None
    has_ended = False

    def __init__(self, begin: Begin, answer: Callable[[Delivery], None]) -> None:
        self._outbox = Outbox(begin.root, max_bytes=begin.max_bytes)
        self._tracking_uri = begin.tracking_uri
        self._answer = answer
        self._asked: list[str] = []

    def ask(self, name: str) -> None:
        self._asked.append(name)

    def work(self) -> None:
        from tlk_tracking.delivery.delivery_loop import send, settle

        while self._asked:
            name = self._asked.pop(0)
            delivery = settle(self._outbox, self._outbox.raw_window(name))
            if delivery.state is DeliveryState.SAVED:
                delivery = send(self._outbox, self._outbox.entry(name), self._tracking_uri)
            self._answer(delivery)

    def end(self) -> None:
        """Nothing: there is nobody to end."""


def _environment(upload_timeout_s: float) -> dict[str, str]:
    environment = {key: value for key, value in os.environ.items() if key not in _NOT_INHERITED}
    # The package that this process runs, also where it is no installed one; last, so that it hides nothing.
    package_parent = str(Path(__file__).parents[2])
    path = [*filter(None, [environment.get("PYTHONPATH")]), package_parent]
    # One core is enough, and the others are training's.
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return environment | request_limits(upload_timeout_s) | threads | {"PYTHONPATH": os.pathsep.join(path)}


def _is_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in getattr(shell, "config", {})
