"""Servers as users start them, for tests: a process, its address, its log, and the processes of its replicas."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

_READY_S = 180.0


@dataclass
class Served:
    """A server in a process of its own."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    def request(
        self, path: str, body: Any = None, *, headers: dict[str, str] | None = None, raw: bytes | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """(status, JSON or text, headers)."""
        data = raw if raw is not None else json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json", **(headers or {})})
        try:
            with urllib.request.urlopen(request, timeout=240) as answer:
                status, text, found = answer.status, answer.read().decode(), dict(answer.headers)
        except urllib.error.HTTPError as error:
            status, text, found = error.code, error.read().decode(), dict(error.headers)
        return status, json.loads(text) if text.startswith("{") else text, {key.lower(): value for key, value in found.items()}

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=240)

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def line(self, request: str) -> dict[str, Any]:
        """The log's line of the request with this id, which comes after its answer."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            if found := [line for line in self.lines if line.get("id") == request]:
                assert len(found) == 1
                return found[0]
            time.sleep(0.05)
        raise AssertionError(f"no line of {request}")

    def ranks(self) -> list[int]:
        """Processes of replicas: the children of the server's fork servers."""
        children = lambda pid: [int(p) for p in subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout.split()]  # noqa: E731
        return [rank for fork_server in children(self.process.pid) for rank in children(fork_server)]

    def metric(self, name: str) -> float:
        text = self.request("/metrics")[1]
        return sum(float(value) for value in re.findall(rf"^meshwright_{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, what
            time.sleep(0.1)

    def wait_until_idle(self) -> None:
        idle = lambda: all(self.metric(n) == 0 for n in ("sequences_running", "sequences_waiting", "kv_memory_used_ratio"))  # noqa: E731
        self.wait_for(idle, "requests are still under way")

    def kill_a_rank(self) -> None:
        os.kill(self.ranks()[0], signal.SIGKILL)

    def open(self, data: bytes = b"") -> socket.socket:
        """A connection on which this has been sent."""
        peer = socket.create_connection(self.address)
        peer.sendall(data)
        return peer


Serve = Callable[..., Served]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Start servers; they end with the module."""
    started: list[Served] = []

    def start(*arguments: str, cwd: Path | None = None, ready: bool = True, **environ: str) -> Served:
        folder = tmp_path_factory.mktemp("served")
        log = folder / "log"
        command = [
            sys.executable,
            "-m",
            "meshwright.cli.main",
            "serve",
            *arguments,
            *(() if "--port" in arguments else ("--port", "0")),
            "--json",
            "--log",
            str(log),
        ]
        env = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
        process = subprocess.Popen(command, cwd=cwd or folder, stdout=subprocess.PIPE, stderr=(folder / "err").open("w"), text=True, env=env)
        first: list[str] = []
        reader = threading.Thread(target=lambda: first.append(process.stdout.readline()), daemon=True)  # type: ignore[union-attr]
        reader.start()
        reader.join(_READY_S)
        if not first or not first[0]:
            process.kill()
            raise AssertionError((folder / "err").read_text())
        started.append(Served(process, json.loads(first[0])["url"], log))
        return started[-1]

    yield start
    for server in started:
        server.process.terminate()
    for server in started:
        server.process.wait(60)
