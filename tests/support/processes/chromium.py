"""Debian's Chromium, headless, driven by its own protocol: pages, what they load, pictures."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

# `npm pack axe-core` gives an archive with the file package/axe.min.js.
AXE_VARIABLE = "TENSOR_DEDUP_AXE"
_PATIENCE_S = 60.0


class Page:
    """One page of a browser."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._number = 0
        self.requested: list[str] = []
        self.said: list[str] = []
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            reply = self._receive()
            if reply.get("id") == self._number:
                assert "error" not in reply, reply["error"]
                result: dict[str, Any] = reply["result"]
                return result

    def _receive(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self._socket.recv(_PATIENCE_S))
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requested.append(message["params"]["request"]["url"])
            case "Log.entryAdded":
                self.said.append(message["params"]["entry"]["text"])
        return message

    def show(self, url: str, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Load a page at a width in CSS pixels, in a light or dark scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        while self._receive().get("method") != "Page.loadEventFired":
            pass

    def ask(self, expression: str) -> Any:
        """Return the value of an expression in the page, awaited."""
        found = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key: str, code: int) -> None:
        """Press a key."""
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                **(text if kind == "keyDown" else {}),
            )

    def picture(self) -> bytes:
        """Return a PNG of the whole page."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        return base64.b64decode(
            self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"]
        )

    def accessibility(self) -> list[str]:
        """Return the serious and critical findings of axe-core; skips where that is not there."""
        self.ask(_axe())
        found = self.ask("axe.run().then(found => found.violations)")
        return [
            f"{each['id']}: {node['html'][:200]}"
            for each in found
            if each["impact"] in ("serious", "critical")
            for node in each["nodes"]
        ]


def _axe() -> str:
    path = os.environ.get(AXE_VARIABLE)
    if not path:
        pytest.skip(
            "no axe-core: npm pack axe-core && tar xf axe-core-*.tgz, and "
            f"{AXE_VARIABLE}=$PWD/package/axe.min.js"
        )
    return Path(path).read_text(encoding="utf-8")


@contextmanager
def browser() -> Iterator[Page]:
    """A headless browser with one empty page; skips where there is none."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("no chromium: apt-get install chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [
                program,
                "--headless=new",
                "--no-sandbox",  # which root has none of
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--hide-scrollbars",
                "--remote-debugging-port=0",
                f"--user-data-dir={folder}",
                "about:blank",
            ],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        try:
            with connect(_page_address(process), max_size=None) as socket:
                yield Page(socket)
        finally:
            process.terminate()
            process.wait(_PATIENCE_S)
            assert process.stderr is not None
            process.stderr.close()


def _page_address(process: "subprocess.Popen[str]") -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("DevTools listening on "):
            address = line.split()[-1]
            break
    else:
        pytest.fail("chromium ended without an address")
    with connect(address, max_size=None) as socket:
        socket.send(json.dumps({"id": 1, "method": "Target.getTargets"}))
        while (reply := json.loads(socket.recv(_PATIENCE_S))).get("id") != 1:
            pass
    (page,) = [t for t in reply["result"]["targetInfos"] if t["type"] == "page"]
    return f"{address.rpartition('/devtools/')[0]}/devtools/page/{page['targetId']}"
