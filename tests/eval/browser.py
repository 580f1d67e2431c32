"""Headless Chromium, driven through a pipe by its DevTools protocol: no library is needed."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE_S = 60.0


class Browser:
    """One page in headless Chromium. A context manager."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        self._read, theirs_out = os.pipe()
        theirs_in, self._write = os.pipe()
        # Chromium reads commands from descriptor 3 and writes answers to 4.
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--hide-scrollbars"]
        flags += [f"--user-data-dir={profile}", "--no-first-run"]
        pipes = f"3</proc/self/fd/{theirs_in} 4>/proc/self/fd/{theirs_out}"  # sh copies no descriptors above 9
        command = ["sh", "-c", f'exec "$@" {pipes}', "sh", CHROMIUM, *flags, "about:blank"]
        self._process = subprocess.Popen(
            command, pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer, self._calls = b"", 0
        targets = self.call("Target.getTargets", session=None)["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        attach = {"targetId": page["targetId"], "flatten": True}
        self._session = self.call("Target.attachToTarget", session=None, **attach)["sessionId"]

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def call(self, method: str, session: str | None = "own", **params: Any) -> dict[str, Any]:
        """What the browser answers to a command of the protocol."""
        self._calls += 1
        message: dict[str, Any] = {"id": self._calls, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._calls:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], PATIENCE_S)
            data = os.read(self._read, 1 << 20) if ready else b""
            assert data, "the browser says nothing"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(line))

    def value(self, expression: str) -> Any:
        """Of JavaScript in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression: str, wanted: Any) -> None:
        """Returns when the expression has the value wanted."""
        deadline = time.monotonic() + PATIENCE_S
        while (found := self.value(expression)) != wanted:
            assert time.monotonic() < deadline, f"{expression} is {found!r}, not {wanted!r}"
            time.sleep(0.02)

    def open(self, page: Path) -> None:
        self.call("Page.navigate", url=page.as_uri())
        self.until("document.readyState", "complete")
