"""A headless Chromium, spoken to over its debugging pipe: no driver, no socket, no library."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

PROGRAM: Final = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING: Final = "no Chromium here; on Debian it is the package `chromium`"
PATIENCE: Final = 60.0
FLAGS: Final = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage",
    "--no-first-run", "--disable-extensions",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-default-apps", "--hide-scrollbars",
    "--force-color-profile=srgb", "--remote-debugging-pipe",
)  # fmt: skip


class Page:
    """One tab.

    `complaints`: what came to the console, and errors of scripts and policies; `asked`: addresses it wanted.
    """

    def __init__(self, to: int, back: int, home: Path) -> None:
        self._to, self._back, self._home = to, back, home
        self._rest, self._number, self._session = b"", 0, ""
        self.complaints: list[str] = []
        self.asked: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(
        self,
        path: Path | str,
        *,
        width: int = 1280,
        height: int = 900,
        dark: bool = False,
        script: bool = True,
        media: str = "",
    ) -> None:
        """Show a file or an address, and wait until it is loaded and laid out."""
        self.complaints.clear()
        self.asked.clear()
        self.call("Emulation.setScriptExecutionDisabled", value=not script)
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self.call("Page.navigate", url=path if isinstance(path, str) else path.as_uri())
        self._until("Page.loadEventFired")
        if script:
            self.ask("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def ask(self, expression: str) -> Any:
        """The value of an expression in the page, waited for if it is a promise."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key: str, code: int) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the DevTools protocol, and its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        answer = self._until(self._number)
        assert "error" not in answer, (method, answer["error"])
        return dict(answer["result"])

    def _until(self, wanted: int | str) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while True:
            message = self._next(end)
            self._note(message)
            if message.get("id") == wanted or message.get("method") == wanted:
                return message

    def _next(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._back], [], [], max(0.0, end - time.monotonic()))
            data = os.read(self._back, 1 << 20) if ready else b""
            assert data, (
                "Chromium has ended, or does not answer:\n"
                + (self._home / "stderr").read_text(errors="replace")[-2000:]
            )
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, message: dict[str, Any]) -> None:
        method, told = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(
                told["exceptionDetails"].get("exception", {}).get("description", "exception")
            )
        elif method == "Log.entryAdded" and told["entry"]["level"] in {"warning", "error"}:
            self.complaints.append(told["entry"]["text"])
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(str(told["args"]))
        elif method == "Network.requestWillBeSent":
            self.asked.append(told["request"]["url"])


@contextmanager
def chromium(home: Path) -> Iterator[Page]:
    """A browser with an empty profile in `home`, and one tab of it."""
    assert PROGRAM is not None
    down, to = os.pipe()
    back, up = os.pipe()
    # Chromium reads commands from descriptor 3 and answers on 4. Both are moved out of the way first: each
    # may already be a 3 or a 4.
    program = f'exec 8<&{down} 9>&{up}; exec 3<&8 4>&9 8<&- 9>&-; exec "$@"'
    with (home / "stderr").open("wb") as said:
        process = subprocess.Popen(
            ["bash", "-c", program, "bash", PROGRAM, *FLAGS, f"--user-data-dir={home / 'profile'}"],
            pass_fds=(down, up), stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True,
        )  # fmt: skip
    os.close(down)
    os.close(up)
    try:
        yield Page(to, back, home)
    finally:
        os.close(to)
        os.close(back)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    if PROGRAM is None:
        pytest.skip(MISSING)
    with chromium(tmp_path_factory.mktemp("chromium")) as tab:
        yield tab


def contrast(one: Any, other: Any) -> float:
    """Return the contrast ratio of WCAG 2; colours are three numbers up to 255, or #rrggbb."""

    def light(colour: Any) -> float:
        parts = (
            [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
            if isinstance(colour, str)
            else [int(part) for part in colour]
        )
        linear = [
            part / 255 / 12.92 if part <= 10 else ((part / 255 + 0.055) / 1.055) ** 2.4 for part in parts
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)
