"""A headless Chromium that tests drive over its debugging pipe (no network port, no client library)."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
    # Nothing that a page asks for leaves the machine.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


def require_chromium() -> str:
    """Return the browser's path; skip the test where there is none."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("needs a Chromium: apt-get install chromium")
    return path


class Tab:
    """One page of the browser. `console` holds what the pages wrote to it and the errors of their scripts."""

    def __init__(self, browser: Browser, session: str) -> None:
        self.browser = browser
        self.session = session

    def call(self, method: str, **arguments: object) -> dict[str, Any]:
        return self.browser.call(method, arguments, session=self.session)

    def open(self, url: str) -> None:
        self.browser.events.clear()
        self.call("Page.navigate", url=url)
        self.wait_for(lambda event: event["method"] == "Page.loadEventFired")

    def attach_frame(self) -> Tab:
        """Return the first frame that has a process of its own, as a sandboxed one has."""
        found = self.wait_for(
            lambda event: (
                event["method"] == "Target.attachedToTarget"
                and event["params"]["targetInfo"]["type"] == "iframe"
            )
        )
        return Tab(self.browser, found["params"]["sessionId"])

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, wanted: Any) -> dict[str, Any]:
        return self.browser.wait_for(wanted)

    def press(self, key: str, *, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text
            )

    def screenshot(self, path: Path, *, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    @property
    def requests(self) -> list[str]:
        """The addresses that were asked for since the page was opened."""
        return [
            event["params"]["request"]["url"]
            for event in self.browser.events
            if event["method"] == "Network.requestWillBeSent"
        ]

    @property
    def complaints(self) -> list[str]:
        """Script errors, refusals of the content policy and console messages since the page was opened."""
        wanted = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self.browser.events if event["method"] in wanted]


class Browser:
    """The process and its pipe: requests go out numbered, answers and events come in."""

    def __init__(self, process: subprocess.Popen[bytes], to: int, back: int) -> None:
        self.process = process
        self._to = os.fdopen(to, "wb", buffering=0)
        self._back = os.fdopen(back, "rb")
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def call(
        self, method: str, arguments: dict[str, object] | None = None, *, session: str | None = None
    ) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": arguments or {}}
        if session is not None:
            message["sessionId"] = session
        self._to.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def wait_for(self, wanted: Any) -> dict[str, Any]:
        for event in self.events:
            if wanted(event):
                return event
        while True:
            message = self._read()
            if "method" in message and wanted(message):
                return message

    def new_tab(self) -> Tab:
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        tab = Tab(self, session)
        for domain in ("Page", "Runtime", "Network", "Log"):
            tab.call(f"{domain}.enable")
        tab.call("Target.setAutoAttach", autoAttach=True, waitForDebuggerOnStart=False, flatten=True)
        return tab

    def close(self) -> None:
        self._to.close()
        self._back.close()

    def _read(self) -> dict[str, Any]:
        parts = []
        while (byte := self._back.read(1)) != b"\0":
            assert byte, "the browser ended"
            parts.append(byte)
        message: dict[str, Any] = json.loads(b"".join(parts))
        if "method" in message:
            self.events.append(message)
        return message


@contextmanager
def run_chromium(profile: Path) -> Iterator[Browser]:
    """Run a browser with a profile of its own; it is ended, with its children, at the end."""
    path = require_chromium()
    to_read, to_write = os.pipe()
    back_read, back_write = os.pipe()

    def wire() -> None:
        # The browser reads descriptor 3 and writes descriptor 4.
        os.dup2(to_read, 10)
        os.dup2(back_write, 11)
        os.dup2(10, 3)
        os.dup2(11, 4)

    process = subprocess.Popen(
        [path, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=wire,
        close_fds=False,
        start_new_session=True,
    )
    os.close(to_read)
    os.close(back_write)
    browser = Browser(process, to_write, back_read)
    try:
        yield browser
    finally:
        browser.close()
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
