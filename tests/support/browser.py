"""A headless browser, which a test can steer with the keyboard and the mouse by the DevTools protocol."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import aiohttp

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium and no google-chrome is installed")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars",
)  # fmt: skip
TIMEOUT_S = 60
KEYS = {"+": "+", "-": "-", "0": "0", "Enter": "\r", "Tab": "\t", " ": " "}
"""Key -> the text that it types; other keys type none."""


class Tab:
    """The page of a browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._number = socket, 0
        self.errors: list[str] = []
        """Uncaught errors of scripts."""

    async def send(self, method: str, **params: object) -> dict[str, object]:
        """Calls a method of the protocol."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            found = await self._socket.receive_json(timeout=TIMEOUT_S)
            if found.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(found["params"]))
            if found.get("id") == self._number:
                assert "error" not in found, found["error"]
                return found["result"]

    async def evaluate(self, expression: str) -> object:
        """Returns the value of an expression of JavaScript."""
        found = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")  # type: ignore[attr-defined]

    async def wait_for(self, expression: str) -> None:
        """Waits until an expression is true."""
        async with asyncio.timeout(TIMEOUT_S):
            while not await self.evaluate(expression):
                await asyncio.sleep(0.05)

    async def press(self, key: str) -> None:
        """Presses and releases a key."""
        text = {"text": KEYS[key]} if key in KEYS else {}
        code = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowRight": 39, "ArrowDown": 40}.get(key, 0)
        await self.send("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
        await self.send("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    async def move_mouse(self, x: float, y: float, kind: str = "mouseMoved") -> None:
        """Moves, presses or releases the mouse at a place of the window."""
        button = {"button": "none" if kind == "mouseMoved" else "left", "clickCount": 0 if kind == "mouseMoved" else 1}
        await self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)


@asynccontextmanager
async def open_tab(url: str, profile: Path, *, width: int = 1280) -> AsyncIterator[Tab]:
    """Opens an address in a headless browser."""
    import aiohttp  # a test without this function does not need it

    flags = [*FLAGS, "--remote-debugging-port=0", f"--user-data-dir={profile}", f"--window-size={width},1400"]
    process = await asyncio.create_subprocess_exec(str(BROWSER), *flags, url, stderr=asyncio.subprocess.DEVNULL)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while not (found := _read_port(profile)):
                await asyncio.sleep(0.05)
        async with aiohttp.ClientSession() as client:
            async with client.get(f"http://127.0.0.1:{found}/json/list") as response:
                [page] = [each for each in await response.json() if each["type"] == "page"]
            async with client.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                tab = Tab(socket)
                await tab.send("Runtime.enable")
                await tab.wait_for("document.querySelectorAll('canvas').length > 0")
                yield tab
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


def _read_port(profile: Path) -> str:
    """Returns the port of the protocol; empty until the browser has written the whole file, which has two lines."""
    path = profile / "DevToolsActivePort"
    lines = path.read_text().splitlines() if path.exists() else []
    return lines[0] if len(lines) > 1 else ""
