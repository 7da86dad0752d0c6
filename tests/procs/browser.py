"""Headless Chromium for tests, over WebDriver: a page as a user sees it."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key that WebDriver gives an element's id
_ENTER = "\ue007"


class Browser:
    """One tab. Elements are named by CSS selectors."""

    def __init__(self, driver: str, binary: str, profile: Path, width: int, height: int) -> None:
        self._process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self._process.stdout is not None
        self._url = ""
        for line in self._process.stdout:
            if found := re.search(r"successfully on port (\d+)", line):
                self._url = f"http://127.0.0.1:{found[1]}/session"
                break
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        arguments += [f"--window-size={width},{height}", f"--user-data-dir={profile}"]
        options = {"browserName": "chrome", "goog:chromeOptions": {"binary": binary, "args": arguments}}
        session = self._call("POST", "", {"capabilities": {"alwaysMatch": options}})
        self._url += f"/{session['sessionId']}"

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"content-type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from None

    def open(self, url: str) -> None:
        self._call("POST", "/url", {"url": url})

    def run(self, script: str) -> Any:
        """The value of some JavaScript."""
        return self._call("POST", "/execute/sync", {"script": f"return {script}", "args": []})

    def devtools(self, command: str, **params: Any) -> None:
        self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def _element(self, selector: str) -> str:
        found = self._call("POST", "/element", {"using": "css selector", "value": selector})
        return f"/element/{found[_ELEMENT]}"

    def click(self, selector: str) -> None:
        self._call("POST", f"{self._element(selector)}/click", {})

    def type(self, selector: str, text: str, *, enter: bool = False) -> None:
        self._call("POST", f"{self._element(selector)}/value", {"text": text + _ENTER * enter})

    def texts(self, selector: str) -> list[str]:
        """What the elements show."""
        return self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.innerText)")  # type: ignore[no-any-return]

    def is_shown(self, selector: str) -> bool:
        return self._call("GET", f"{self._element(selector)}/displayed")  # type: ignore[no-any-return]

    def wait_for(self, condition: Callable[[], Any], what: str, seconds: float = 60) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < deadline, f"{what}: {self.texts('body')}"
            time.sleep(0.05)
        return found

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("GET", "/screenshot")))

    def close(self) -> None:
        try:
            self._call("DELETE", "")
        finally:
            self._process.terminate()
            self._process.wait(30)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    driver, binary = shutil.which("chromedriver"), shutil.which("chromium") or shutil.which("google-chrome")
    if driver is None or binary is None:
        pytest.skip("Chromium and its driver are not installed: apt-get install chromium chromium-driver")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        made = Browser(driver, binary, Path(profile), 900, 720)
        yield made
        made.close()
