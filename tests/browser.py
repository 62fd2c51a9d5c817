"""A page in headless Chromium, driven over WebDriver's plain HTTP protocol by the standard library alone."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of an element in WebDriver's answers
KEYS = {"tab": "\ue004", "enter": "\ue007", "escape": "\ue00c", "left": "\ue012", "right": "\ue014"}
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


def programs() -> tuple[str, str] | None:
    """Return the paths of Chromium and its driver, None where one of them is absent."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    return (chromium, driver) if chromium and driver else None


class Browser:
    """One window. `run(script, *arguments)` is JavaScript with `arguments`, ending in `return`."""

    def __init__(self, address: str, session: str) -> None:
        self._session = f"{address}/session/{session}"

    def open(self, page: Path, fragment: str = "") -> None:
        """Open a file, anew even if it is open."""
        self._post("url", {"url": "about:blank"})
        self._post("url", {"url": page.resolve().as_uri() + fragment})

    def run(self, script: str, *arguments: Any) -> Any:
        """Return what JavaScript returns."""
        return self._post("execute/sync", {"script": script, "args": list(arguments)})

    def text(self, css: str) -> str:
        """Return the visible text of the first element."""
        return self.run("return document.querySelector(arguments[0]).innerText", css)

    def texts(self, css: str) -> list[str]:
        """Return the visible texts of all elements."""
        return self.run("return [...document.querySelectorAll(arguments[0])].map(e => e.innerText)", css)

    def click(self, css: str) -> None:
        """Click the first element as a person does: it has to be visible."""
        self._post(f"element/{self._find(css)}/click", {})

    def type(self, css: str, text: str) -> None:
        """Type into an element."""
        self._post(f"element/{self._find(css)}/value", {"text": text})

    def press(self, *names: str) -> None:
        """Press keys, wherever the focus is; a name of `KEYS`, or a character."""
        keys = [KEYS.get(name, name) for name in names]
        strokes = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._post("actions", {"actions": [{"type": "key", "id": "keyboard", "actions": strokes}]})

    def wait(self, script: str, seconds: float = 15) -> Any:
        """Run a script until it returns something true, and return that."""
        end = time.monotonic() + seconds
        while not (found := self.run(script)):
            if time.monotonic() > end:
                raise TimeoutError(f"still not true after {seconds} s: {script}")
            time.sleep(0.05)
        return found

    def size(self, width: int, height: int) -> None:
        """Set the size of the page as a device with such a screen would have it."""
        phone = width < 600
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        self._devtools("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, scheme: str) -> None:
        """Prefer "dark" or "light", as the system's settings do."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self._devtools("Emulation.setEmulatedMedia", {"features": [feature]})

    def errors(self) -> list[str]:
        """Return what the page wrote to the console since the last call, warnings and worse."""
        return [entry["message"] for entry in self._post("se/log", {"type": "browser"})]

    def picture(self, path: Path, whole: bool = False) -> None:
        """Write a PNG of the window, or of the whole page."""
        options = {"captureBeyondViewport": True} if whole else {}
        if whole:
            height = self.run("return document.documentElement.scrollHeight")
            width = self.run("return document.documentElement.clientWidth")
            options["clip"] = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        path.write_bytes(base64.b64decode(self._devtools("Page.captureScreenshot", options)["data"]))

    def _find(self, css: str) -> str:
        return self._post("element", {"using": "css selector", "value": css})[ELEMENT]

    def _devtools(self, command: str, parameters: dict[str, Any]) -> Any:
        return self._post("goog/cdp/execute", {"cmd": command, "params": parameters})

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return request(f"{self._session}/{path}", body)


@contextlib.contextmanager
def opened() -> Iterator[Browser]:
    """Start Chromium in a new, empty profile, and end it again."""
    found = programs()
    assert found is not None
    chromium, driver = found
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # Port 0: the driver takes a free one and says which.
        process = subprocess.Popen(
            [driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            address = f"http://127.0.0.1:{_port(process)}"
            options = {"binary": chromium, "args": [*FLAGS, f"--user-data-dir={profile}"]}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "WARNING"}}
            made = request(f"{address}/session", {"capabilities": {"alwaysMatch": wanted}})
            try:
                yield Browser(address, made["sessionId"])
            finally:
                request(f"{address}/session/{made['sessionId']}", None, "DELETE")
        finally:
            process.terminate()
            process.wait(20)


def request(url: str, body: dict[str, Any] | None, method: str = "POST") -> Any:
    """Return the value of WebDriver's answer; what it refuses is an AssertionError that says why."""
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(asked, timeout=120) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise AssertionError(json.load(error)["value"]["message"].splitlines()[0]) from error


def _port(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    for line in process.stdout:
        if "started successfully on port" in line:
            return int(line.rstrip().rstrip(".").rpartition(" ")[2])
    raise AssertionError("chromedriver ended before it was ready")
