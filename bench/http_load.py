"""Servers to be measured, ours and LitServe's, and a client of few instructions that keeps its connection and times the tokens of streams."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LITSERVE = """
    import litserve, torch
    from meshwright import zoo

    class API(litserve.LitAPI):
        def setup(self, device):
            torch.set_num_threads(THREADS)
            torch.manual_seed(0)
            self.model = zoo.load(NAME).build().eval()
        def decode_request(self, request):
            return torch.tensor(request["instances"][0])
        def batch(self, inputs):
            return torch.stack(inputs)
        def predict(self, batch):
            with torch.inference_mode():
                return self.model(batch)
        def encode_response(self, output):
            return {"predictions": [output.tolist()]}

    if __name__ == "__main__":
        api = API(max_batch_size=32, batch_timeout=WAIT)
        server = litserve.LitServer(api, accelerator="cpu", fast_queue=True, timeout=60)
        server.run(port=PORT, host="127.0.0.1", num_api_servers=1, generate_client_file=False, log_level="error")
"""


@contextmanager
def serving(*arguments: str) -> Iterator[str]:
    """A server of ours; its address."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "meshwright.cli.main", "serve", *arguments, "--port", "0", "--json", "--log", f"{folder}/log"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder)
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()
            process.wait(60)


@contextmanager
def serving_with_litserve(name: str, wait_s: float, threads: int) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as chosen:
        port = chosen.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "lit.py"
        values = {"NAME": repr(name), "WAIT": repr(wait_s), "PORT": str(port), "THREADS": str(threads)}
        text = textwrap.dedent(LITSERVE)
        for key, value in values.items():
            text = text.replace(key, value)
        file.write_text(text)
        process = subprocess.Popen([sys.executable, str(file)], cwd=folder, stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            _wait_for(port)
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, 9)
            process.wait()


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            with socket.create_connection(("127.0.0.1", port), 5) as peer:
                peer.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
                if b" 200 " in peer.recv(200):
                    return
        except OSError:
            pass
        time.sleep(0.2)
    raise SystemExit("LitServe does not start")


class Client:
    """One connection that is kept."""

    def __init__(self, url: str) -> None:
        self._host, port = url.removeprefix("http://").split(":")
        self._port = int(port)
        self._reader: asyncio.StreamReader | None = None

    async def send(self, path: str, body: bytes) -> int:
        """Send a request; returns the status."""
        if self._reader is None:
            self._reader, self._writer = await asyncio.open_connection(self._host, self._port, limit=1 << 24)
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        status, self._length = int((await self._reader.readline()).split()[1]), -1
        while (line := await self._reader.readline()) != b"\r\n":
            name, _, value = line.lower().partition(b":")
            if name == b"content-length":
                self._length = int(value)
        return status

    async def read(self) -> bytes:
        """The rest of an answer."""
        assert self._reader is not None
        if self._length >= 0:
            return await self._reader.readexactly(self._length)
        return b"".join([part async for part in self.parts()])

    async def parts(self) -> Any:
        """The parts of a streamed answer as they come."""
        assert self._reader is not None
        if self._length >= 0:
            yield await self._reader.readexactly(self._length)
            return
        while size := int(await self._reader.readline(), 16):
            yield await self._reader.readexactly(size)
            await self._reader.readline()
        await self._reader.readline()

    def close(self) -> None:
        if self._reader is not None:
            self._writer.close()
            self._reader = None


def percentile(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(int(part * len(values)), len(values) - 1)] if values else float("nan")


@dataclass
class Stream:
    """Times of one streamed answer."""

    first_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    total_s: float = 0.0
    tokens: int = 0
    error: str = ""


async def stream_answer(client: Client, body: dict[str, Any]) -> Stream:
    """Each token is an event: `logprobs` is asked for, so that one comes even where its text is held back."""
    found, started = Stream(), time.perf_counter()
    last = started
    try:
        status = await client.send("/v1/completions", json.dumps({**body, "stream": True, "ignore_end": True, "logprobs": 0}).encode())
        async for part in client.parts():
            now = time.perf_counter()
            new = part.count(b'"token_logprobs":')
            tokens = sum(
                len(json.loads(event[6:])["choices"][0]["logprobs"]["tokens"]) for event in part.split(b"\n\n") if b"token_logprobs" in event
            )
            found.tokens += tokens
            if new and not found.first_s:
                found.first_s = now - started
            elif new:
                found.gaps_s.append(now - last)
            last = now
            if status != 200 or b'"error"' in part:
                found.error = part.decode()[:200]
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        found.error = f"{type(error).__name__}: {error}"
    found.total_s = time.perf_counter() - started
    return found


async def closed_load(url: str, bodies: Sequence[dict[str, Any]], clients: int) -> tuple[list[Stream], float]:
    """All requests, by so many clients that each wait for their answer; and the seconds that it took."""
    queue, found = list(reversed(bodies)), list[Stream]()

    async def work() -> None:
        client = Client(url)
        while queue:
            found.append(await stream_answer(client, queue.pop()))
        client.close()

    started = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(clients)))
    return found, time.perf_counter() - started
