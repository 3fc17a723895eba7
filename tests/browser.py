"""A headless Chromium, driven by its DevTools protocol."""

import asyncio
import base64
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def chromium() -> str | None:
    """Find the browser; returns its path, or None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Tab:
    """One page of a headless Chromium, controlled through the DevTools protocol.

    Args:
        socket: connection to the page's DevTools.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._count = 0
        self.requests: list[str] = []
        """URLs that the page requested, including those that its content security policy then refused."""
        self.errors: list[str] = []
        """Uncaught exceptions, and error messages of the console."""

    async def call(self, method: str, **settings: Any) -> dict[str, Any]:
        """Send a command of the protocol and wait for its answer; events on the way are noted."""
        self._count += 1
        own = self._count
        await self._socket.send_json({"id": own, "method": method, "params": settings})
        while True:
            message = json.loads((await self._socket.receive()).data)
            if message.get("id") == own:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, found = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(found["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(found["exceptionDetails"]))
        elif method == "Log.entryAdded" and found["entry"]["level"] == "error":
            self.errors.append(found["entry"]["text"])

    async def open(self, url: str, *, scheme: str = "light", width: int = 1280, height: int = 800) -> None:
        """Go to a page; returns when it has begun to load."""
        for domain in ("Page", "Network", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        await self.call("Page.navigate", url=url)

    async def value(self, expression: str) -> Any:
        """Evaluate a JavaScript expression and return its value; if it is a promise, wait for the promise's result.

        Raises:
            RuntimeError: the expression threw an exception.
        """
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    async def wait_for(self, expression: str, *, seconds: float = 30) -> Any:
        """Evaluate an expression until it is true, and return its value.

        Raises:
            TimeoutError: the expression was not true within so many seconds.
        """
        for _ in range(round(seconds / 0.05)):
            if found := await self.value(expression):
                return found
            await asyncio.sleep(0.05)
        raise TimeoutError(f"{expression} was not true in {seconds} s; errors: {self.errors}")

    async def screenshot(self, path: Path) -> None:
        """Write the visible part of the page as a PNG."""
        path.write_bytes(base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"]))


@asynccontextmanager
async def browser_tab(folder: Path) -> AsyncIterator[Tab]:
    """Start a browser with an empty profile, yield one page of it, and end the browser.

    Args:
        folder: folder for the profile; it must be new.

    Raises:
        RuntimeError: there is no browser, or it does not start.
    """
    program = chromium()
    if program is None:
        raise RuntimeError(f"there is none of {', '.join(NAMES)}")
    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage")
    process = subprocess.Popen(
        [program, *flags, "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        port = await _port(folder / "DevToolsActivePort")
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                targets = await answer.json()
            address = next(target["webSocketDebuggerUrl"] for target in targets if target["type"] == "page")
            async with session.ws_connect(address, max_msg_size=0) as socket:
                yield Tab(socket)
    finally:
        process.terminate()
        process.wait()


async def _port(file: Path) -> int:
    for _ in range(600):
        if file.exists() and (lines := file.read_text().splitlines()):
            return int(lines[0])
        await asyncio.sleep(0.05)
    raise RuntimeError("the browser did not start within 30 s")
