"""A proxy before a real MLflow server that does wrong what networks and servers do wrong."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from urllib.parse import urlsplit

_CHUNK = 1 << 16


class Fault(Enum):
    NONE = "relay everything"
    REFUSED = "refuse the connection"
    STATUS_500 = "answer 500"
    STATUS_429 = "answer 429"
    STATUS_401 = "answer 401"
    SILENT = "accept and never answer"
    CUT = "cut each connection in the middle of an artifact"
    SLOW = "relay answers byte by byte, for ever"


class FaultProxy:
    """`uri` is the server's, with the fault that `fault` says; it may change between connections."""

    def __init__(self, upstream: str) -> None:
        self.fault = Fault.NONE
        parts = urlsplit(upstream)
        self._upstream = (parts.hostname or "", parts.port or 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._ended = threading.Event()
        self.uri = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def end(self) -> None:
        self._ended.set()
        self._listener.close()
        for connection in self._open:
            _cut(connection)

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(client)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError):
            match self.fault:
                case Fault.REFUSED:
                    client.close()
                case Fault.STATUS_500 | Fault.STATUS_429 | Fault.STATUS_401:
                    client.recv(_CHUNK)
                    status = self.fault.name.removeprefix("STATUS_")
                    client.sendall(
                        f"HTTP/1.1 {status} No\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno".encode()
                    )
                    client.close()
                case Fault.SILENT:
                    self._ended.wait()
                case fault:
                    self._relay(client, fault)

    def _relay(self, client: socket.socket, fault: Fault) -> None:
        server = socket.create_connection(self._upstream)
        self._open.append(server)
        back = threading.Thread(target=self._back, args=(server, client, fault), daemon=True)
        back.start()
        while chunk := client.recv(_CHUNK):
            if fault is Fault.CUT and b"PUT " in chunk and b".parquet" in chunk:
                server.sendall(chunk[: len(chunk) // 2])
                _cut(client)
                _cut(server)
                return
            server.sendall(chunk)
        server.shutdown(socket.SHUT_WR)

    def _back(self, server: socket.socket, client: socket.socket, fault: Fault) -> None:
        with suppress(OSError):
            while chunk := server.recv(1 if fault is Fault.SLOW else _CHUNK):
                client.sendall(chunk)
                if fault is Fault.SLOW:
                    self._ended.wait(0.2)
            client.shutdown(socket.SHUT_WR)


def _cut(connection: socket.socket) -> None:
    with suppress(OSError):  # closing alone does not wake a thread that reads
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


@contextmanager
def fault_proxy(upstream: str) -> Iterator[FaultProxy]:
    proxy = FaultProxy(upstream)
    try:
        yield proxy
    finally:
        proxy.end()
