"""Make raw windows annotations and send these to their runs (Outbox -> one Delivery a window)."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pyarrow.parquet as pq

from tlk_tracking.annotation.kernel_annotation import KernelAnnotation, load_annotation
from tlk_tracking.attribution.annotate import annotate
from tlk_tracking.attribution.fused_notes import decode_window_notes
from tlk_tracking.core.errors import TlkError, TrackingError
from tlk_tracking.delivery.outbox import Delivery, DeliveryState, Entry, Outbox, RawWindow
from tlk_tracking.tracking.mlflow_store import open_store
from tlk_tracking.tracking.mlflow_tracking import send_annotation
from tlk_tracking.tracking.tracking_uri import Address


def settle(outbox: Outbox, window: RawWindow) -> Delivery:
    """Make a raw window an annotation; one that is an annotation already is left as it is."""
    entry = outbox.entry(window.name)
    with outbox.claim(window) as mine:
        if mine:
            try:
                outbox.add_annotation(window, lambda folder: _annotate(window).save(folder))
            except Exception as error:  # noqa: BLE001 - whatever is wrong with one, the others go on
                return _waiting(window, DeliveryState.RAW, error)
        elif window.folder.exists():
            return _busy(window, DeliveryState.RAW)
    if entry.folder.exists():
        return Delivery(name=entry.name, state=DeliveryState.SAVED, folder=entry.folder)
    return Delivery(name=entry.name, state=DeliveryState.GONE)


def send(outbox: Outbox, entry: Entry, tracking_uri: str | None = None) -> Delivery:
    """Draw an annotation's report, send both to the annotation's run and take them out of the outbox.

    `tracking_uri` is used instead of the one on disk, which has no credentials.
    """
    with outbox.claim(entry) as mine:
        if mine:
            try:
                annotation = load_annotation(entry.annotation_folder)
                _add_report(annotation, entry.annotation_folder)
                address = entry.address()
                if address.run_id is None:
                    raise TrackingError("it belongs to no MLflow run; `log_annotation` sends it to one")
                _send(outbox, entry, annotation, address=address, tracking_uri=tracking_uri)
                outbox.remove(entry)
            except Exception as error:  # noqa: BLE001 - whatever is wrong with one, the others go on
                return _waiting(entry, DeliveryState.SAVED, error)
        elif entry.folder.exists():
            return _busy(entry, DeliveryState.SAVED)
        else:
            return Delivery(name=entry.name, state=DeliveryState.GONE)
    return Delivery(name=entry.name, state=DeliveryState.SENT)


def get_ready(tracking_uri: str) -> None:
    """Import what sending needs and open the store, so that the first annotation does not wait for seconds.

    Nothing is asked of a server. Says nothing of what is wrong: each annotation that is sent does.
    """
    with suppress(Exception):  # stores fail in ways of their own
        open_store(tracking_uri)
    with suppress(ImportError):
        for name in ("matplotlib.figure", "tlk_tracking.report.annotation_report"):
            import_module(name)


class DeliveryLoop:
    """Settle and send the windows that are asked for, settling first; what cannot be sent stays."""

    def __init__(
        self,
        outbox: Outbox,
        tracking_uri: str | None,
        *,
        upload_timeout_s: float,
        answer: Callable[[Delivery], None],
    ) -> None:
        self._outbox = outbox
        self._tracking_uri = tracking_uri
        self._upload_timeout_s = upload_timeout_s
        self._answer = answer
        self._to_send: deque[Entry] = deque()
        self._unsent: dict[str, Entry] = {}
        self._deadline: float | None = None

    def run(self, requests: queue.SimpleQueue[str | None]) -> None:
        """Work until None is asked for and `upload_timeout_s` more for what is left; answer for each window."""
        while True:
            try:
                name = requests.get(block=not self._to_send and self._deadline is None)
            except queue.Empty:
                if not self._to_send:
                    return
                self._send_next()
                continue
            if name is None:
                self._deadline = time.monotonic() + self._upload_timeout_s
            else:
                self._settle(name)

    def _settle(self, name: str) -> None:
        settled = settle(self._outbox, self._outbox.raw_window(name))
        if settled.state is DeliveryState.SAVED:
            self._to_send.append(self._outbox.entry(name))
        else:
            self._answer(settled)

    def _send_next(self) -> None:
        entry = self._to_send.popleft()
        left_s = self._upload_timeout_s
        if self._deadline is not None:
            left_s = min(left_s, self._deadline - time.monotonic())
        sent = self._send_within(entry, left_s)
        self._answer(sent)
        if sent.state is DeliveryState.SENT:
            # The store answers again: what failed before has its next chance now.
            self._unsent.pop(entry.name, None)
            self._to_send.extend(self._unsent.values())
            self._unsent.clear()
        else:
            self._unsent[entry.name] = entry

    def _send_within(self, entry: Entry, left_s: float) -> Delivery:
        answers: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        # A store that sends a byte now and then defeats every timeout of a request, so the whole has one here.
        # A thread left behind keeps its claim: nobody sends the same beside it.
        sending = threading.Thread(
            target=lambda: answers.put(send(self._outbox, entry, self._tracking_uri)),
            name="tlk_tracking send",
            daemon=True,
        )
        try:
            if left_s <= 0:
                raise queue.Empty
            sending.start()
            return answers.get(timeout=left_s)
        except queue.Empty:
            late = TrackingError(f"not sent within {self._upload_timeout_s:g} s")
            return _waiting(entry, DeliveryState.SAVED, late)


def _annotate(window: RawWindow) -> KernelAnnotation:
    calls = window.calls
    graphs = window.graphs
    return annotate(
        window.trace,
        window.facts(),
        calls=None if calls is None else pq.read_table(calls),
        graphs=() if graphs is None else decode_window_notes(graphs.read_bytes()),
    )


def _add_report(annotation: KernelAnnotation, folder: Path) -> None:
    from tlk_tracking.report.annotation_report import (
        add_report,  # late: annotating goes on while matplotlib loads
    )

    add_report(annotation, folder)


def _send(
    outbox: Outbox, entry: Entry, annotation: KernelAnnotation, *, address: Address, tracking_uri: str | None
) -> None:
    try:
        send_annotation(
            annotation,
            entry.annotation_folder,
            address.run_id or "",
            tracking_uri=tracking_uri or address.tracking_uri,
            timestamp_ms=address.timestamp_ms,
            tag_turn=outbox.tag_turn(),
        )
    except TlkError as error:
        if tracking_uri is None and address.credentials_removed:
            raise TrackingError(
                f"{error} (the outbox keeps no credentials; give the whole tracking URI)"
            ) from error
        raise


def _waiting(item: RawWindow | Entry, state: DeliveryState, error: Exception) -> Delivery:
    reason = str(error) if isinstance(error, TlkError) else f"{type(error).__name__}: {error}"
    run_is_missing = isinstance(error, TrackingError) and error.run_is_missing
    return Delivery(
        name=item.name, state=state, folder=item.folder, reason=reason, run_is_missing=run_is_missing
    )


def _busy(item: RawWindow | Entry, state: DeliveryState) -> Delivery:
    return Delivery(name=item.name, state=state, folder=item.folder, reason="another process works on it")
