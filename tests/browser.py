"""A headless Chromium, driven through its debugging pipe: what a page does, says and asks for. Needs no package."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
ANSWER_SECONDS = 60.0


def find() -> str | None:
    """A Chromium on this machine; CHROMIUM names another."""
    return os.environ.get("CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One page in a browser of its own.

    Attributes:
        problems: console errors, uncaught exceptions and refused resources, as text.
        requests: the addresses that the page asked for.
    """

    def __init__(self, browser: str, profile: Path, width: int = 1280, height: int = 900) -> None:
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._events: list[dict[str, Any]] = []
        self._last, self._left = 0, b""
        out_read, self._out = os.pipe()
        self._in, in_write = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe",
                 "--disable-dev-shm-usage", "--force-color-profile=srgb", "--hide-scrollbars",
                 f"--user-data-dir={profile}", f"--window-size={width},{height}", "about:blank"]  # fmt: skip
        # Chromium reads commands from descriptor 3 and writes answers to 4.
        shell = f'exec 3<&{out_read} 4>&{in_write}; exec "$@"'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", shell, "chromium", browser, *flags],
            pass_fds=(out_read, in_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(out_read)
        os.close(in_write)
        self._session: str | None = None
        targets = self.send("Target.getTargets")["targetInfos"]
        target = next(t["targetId"] for t in targets if t["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.size(width, height)

    def __enter__(self) -> Page:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._session = None
        try:
            self.send("Browser.close")
            self._process.wait(timeout=20)
        except (OSError, EOFError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def send(self, method: str, **parameters: Any) -> Any:
        """One command of the DevTools protocol, and its answer."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def open(self, path: Path) -> float:
        """Shows a file, and returns the seconds until it was loaded."""
        self._events.clear()
        start = time.monotonic()
        self.send("Page.navigate", url=path.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._note(self._receive())
        return time.monotonic() - start

    def run(self, script: str) -> Any:
        """The value of an expression, evaluated in the page."""
        result = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(str(result["exceptionDetails"]))
        return result["result"].get("value")

    def key(self, name: str) -> None:
        """Presses a key such as "Tab", "ArrowRight" or "Enter"."""
        codes = {"Tab": 9, "Enter": 13, "End": 35, "Home": 36}
        arrows = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        code = {**codes, **arrows}[name]
        for kind in ("rawKeyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code)

    def size(self, width: int, height: int) -> None:
        """Makes the window as large as that, in CSS pixels."""
        metrics: Mapping[str, Any] = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **metrics)

    def media(self, kind: str = "", **features: str) -> None:
        """Emulates a medium ("print") and preferences, as `prefers_color_scheme="dark"`."""
        named = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.send("Emulation.setEmulatedMedia", media=kind, features=named)

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """A PNG of the window, or of the whole page."""
        options: dict[str, Any] = {"format": "png", "captureBeyondViewport": whole}
        if whole:
            size = self.send("Page.getLayoutMetrics")["cssContentSize"]
            options["clip"] = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", **options)["data"]))

    def _receive(self) -> dict[str, Any]:
        until = time.monotonic() + ANSWER_SECONDS
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser does not answer")
            data = os.read(self._in, 1 << 16)
            if not data:
                raise EOFError("the browser has ended")
            self._left += data
        message, _, self._left = self._left.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        self._events.append(event)
        given = event.get("params", {})
        if event["method"] == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(given["exceptionDetails"]))
        elif event["method"] == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(given["args"]))
        elif event["method"] == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning"):
            self.problems.append(json.dumps(given["entry"]))
        elif event["method"] == "Network.requestWillBeSent":
            self.requests.append(given["request"]["url"])
