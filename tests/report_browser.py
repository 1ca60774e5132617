"""A browser without a window, driven over the pipe of Chromium's DevTools protocol."""

import json
import os
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
NO_BROWSER = f"needs a browser, and none of {', '.join(NAMES)} is installed; 'make browser' installs one"

# Chromium reads commands from file descriptor 3 and writes answers to 4.
_LAUNCH = """
import fcntl, os, sys
ours = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
os.dup2(ours[0], 3)
os.dup2(ours[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
_OPTIONS = (
    "--headless=new --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-dev-shm-usage "
    "--disable-component-update --disable-extensions --remote-debugging-pipe"
).split()


def find_browser() -> str | None:
    """Return the path of a Chromium, None if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page; a context manager. `events` has all that the browser has told: requests, console, exceptions.

    Args:
        program: Path of the browser.
        home: An empty folder for its profile.
        width: Of the window, in pixels.
    """

    def __init__(self, program: str, home: Path, *, width: int = 1200) -> None:
        their_input, self._commands = os.pipe()
        self._answers, their_output = os.pipe()
        options = [*_OPTIONS, f"--user-data-dir={home}", f"--window-size={width},900", "about:blank"]
        launch = [sys.executable, "-c", _LAUNCH, str(their_input), str(their_output), program, *options]
        environment = {**os.environ, "HOME": str(home)}
        self._log = (home / "stderr.log").open("wb")
        self._process = subprocess.Popen(
            launch, pass_fds=(their_input, their_output), stdout=self._log, stderr=self._log, env=environment
        )
        os.close(their_input)
        os.close(their_output)
        self._buffer, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> "Browser":
        self.wait(self._attach)
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(timeout=20)
        self._log.close()
        for number in (self._commands, self._answers):
            os.close(number)

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": arguments}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression on the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def open(self, url: str) -> None:
        """Go to an address and wait until it is loaded."""
        self.call("Page.navigate", url=url)
        self.wait(lambda: self.evaluate("document.readyState") == "complete" and self.address() != "about:blank")

    def address(self) -> str:
        """Return the address of the page."""
        return str(self.evaluate("location.href"))

    def click(self, selector: str) -> None:
        """Click on the middle of an element with the mouse."""
        self.wait(lambda: self._place(selector) == self._place(selector))
        x, y = self._place(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, *keys: str) -> None:
        """Press and release keys: letters, or names such as `Escape`."""
        for key in keys:
            text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
            code = {"Enter": 13, "Escape": 27}.get(key, 0)
            self.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def _place(self, selector: str) -> list[float]:
        """Return the middle of an element, once the page is idle (a link's target has been scrolled to) and painted."""
        script = (
            f"new Promise((done) => requestIdleCallback(() => {{ const it = document.querySelector({json.dumps(selector)});"
            "it.scrollIntoView({block: 'center'}); requestAnimationFrame(() => requestAnimationFrame(() => {"
            "const box = it.getClientRects()[0]; done([box.x + box.width / 2, box.y + box.height / 2]); }));"
            "}, {timeout: 5000}))"
        )
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        place: list[float] = result["result"]["value"]
        return place

    def wait(self, until: Callable[[], Any], seconds: float = 20.0) -> None:
        """Wait until something is true."""
        end = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < end, f"waited {seconds} s"
            time.sleep(0.02)

    def requests(self) -> list[str]:
        """Return the addresses that were asked for."""
        sent = [event["params"] for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [each["request"]["url"] for each in sent]

    def complaints(self) -> list[dict[str, Any]]:
        """Return what the console shows: errors, warnings, exceptions."""
        methods = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [event for event in self.events if event.get("method") in methods]

    def _attach(self) -> bool:
        pages = [each for each in self.call("Target.getTargets")["targetInfos"] if each["type"] == "page"]
        if pages:
            result = self.call("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)
            self._session = result["sessionId"]
        return bool(pages)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], 20)
            piece = os.read(self._answers, 1 << 16) if ready else b""
            assert piece, "the browser does not answer"
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        parsed: dict[str, Any] = json.loads(message)
        return parsed


def fits_a_phone(browser: Browser, address: str, scheme: str) -> None:
    """Open a page at 360 pixels: nothing sticks out, nothing is asked for, and the colours follow the scheme."""
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.call("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=1, mobile=True)
    browser.open(address)
    assert browser.evaluate("document.documentElement.scrollWidth") <= 360
    ink, paper = (browser.evaluate(f"getComputedStyle(document.body).{each}") for each in ("color", "backgroundColor"))
    ink_sum, paper_sum = (sum(int(each) for each in re.findall(r"\d+", colour)[:3]) for colour in (ink, paper))
    assert (ink_sum < paper_sum) is (scheme == "light")
    assert browser.requests() == [address]
    assert browser.complaints() == []
