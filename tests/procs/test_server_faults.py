"""A server and those who mean it no good, or have bad luck: connections that say nothing, bodies that never end, replicas that hang, weights that are
broken. Others are answered all the while."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import serve_models
from tests.procs.served import Serve, Served

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
ASK = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "ignore_end": True, "logprobs": 1}


def _save_llama(folder: Path, seed: int = 0) -> None:
    model = serve_models.build("llama", vocab_size=256)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.08, generator=torch.Generator().manual_seed(seed))
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    _save_llama(made)
    return made


@pytest.fixture(scope="module")
def server(serve: Serve, folder: Path) -> Served:
    options = ("batch=4", "max_waiting=8", "header_timeout_s=1", "body_timeout_s=1", "hang_timeout_s=2", "max_body_mb=1", "max_connections=700")
    return serve(str(folder), *(word for option in options for word in ("--set", option)))


def ask(server: Served, **changes: Any) -> list[str]:
    """The tokens of an answer: as a text, bytes of random weights would all look alike."""
    status, body, _ = server.request("/v1/completions", {**ASK, **changes})
    assert status == 200, body
    return body["choices"][0]["logprobs"]["tokens"]  # type: ignore[no-any-return]


def received(peer: socket.socket, seconds: float = 20) -> bytes:
    """What comes until the server closes the connection."""
    peer.settimeout(seconds)
    found = b""
    while part := peer.recv(65536):
        found += part
    return found


@pytest.fixture
def half_sent(server: Served) -> Iterator[list[socket.socket]]:
    """500 connections: nothing, half of the headers, half of a body."""
    with ExitStack() as stack:
        starts = (b"", HEAD[:30], HEAD + b"content-length: 100\r\n\r\n{", HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\n{")
        yield [stack.enter_context(server.open(starts[i % 4])) for i in range(500)]


def test_half_sent_requests_hold_nobody_up_and_are_ended(server: Served, half_sent: list[socket.socket]) -> None:
    expected = ask(server)
    assert [ask(server) for _ in range(5)] == [expected] * 5
    for start, answer in ((1, b"408"), (2, b"408"), (3, b"408")):
        assert received(half_sent[start]).startswith(b"HTTP/1.1 " + answer)
    lines = [line for line in server.lines if line.get("status") == 408]
    server.wait_for(lambda: len([line for line in server.lines if line.get("status") == 408]) >= 250, f"{len(lines)} bodies were ended")


def test_connections_beyond_the_limit_are_closed_and_places_come_back(server: Served) -> None:
    with ExitStack() as stack:
        peers = [stack.enter_context(server.open()) for _ in range(720)]
        assert received(peers[-1], 30).startswith(b"HTTP/1.1 503")
    assert ask(server)


def test_headers_and_bodies_that_never_end(server: Served) -> None:
    for start, more in ((b"GET / HTTP/1.1\r\nhost: localhost\r\n", b"x-a: " + b"y" * 8000 + b"\r\n"), (HEAD, b"x" * 1000)):
        with server.open(start) as peer:
            with pytest.raises(OSError):  # noqa: PT012 - whichever send finds the connection closed
                for _ in range(2000):
                    peer.sendall(more)
                    time.sleep(0.0005)
    with server.open(HEAD + b"transfer-encoding: chunked\r\n\r\n") as peer:
        for _ in range(20):
            peer.sendall(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
        peer.sendall(b"0\r\n\r\n")
        assert received(peer).startswith(b"HTTP/1.1 413")
    assert ask(server)


def test_a_client_that_does_not_read_its_answer_is_given_up(server: Served) -> None:
    body = json.dumps({**ASK, "max_tokens": 100, "n": 4, "logprobs": 5, "stream": True}).encode()
    with socket.socket() as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        peer.connect(server.address)
        for _ in range(8):  # several answers on one connection, more than the buffers of both sides hold
            peer.sendall(HEAD + b"content-length: %d\r\n\r\n%s" % (len(body), body))
        server.wait_until_idle()
        assert ask(server)


def test_random_bytes(server: Served) -> None:
    draw = random.Random(0)
    words = [
        b"GET",
        b"POST",
        b" ",
        b"/",
        b"HTTP/1.1",
        b"\r\n",
        b"\r\n\r\n",
        b":",
        b"content-length",
        b"-1",
        b"9" * 30,
        b"chunked",
        b"\x00",
        b"host",
        b"{",
        b"[" * 40,
    ]
    for _ in range(300):
        data = draw.randbytes(draw.randrange(200)) if draw.random() < 0.3 else b"".join(draw.choices(words, k=draw.randrange(1, 30)))
        with server.open(data) as peer:
            if draw.random() < 0.5:
                peer.shutdown(socket.SHUT_WR)
                try:
                    answer = received(peer)
                except OSError:
                    continue
                assert b"Traceback" not in answer and not answer.startswith(b"HTTP/1.1 5")
    assert ask(server) and server.process.poll() is None


def test_compressed_and_deeply_nested_bodies(server: Served) -> None:
    import gzip
    import zlib

    bomb = zlib.compress(b" " * 50_000_000)
    for encoding, raw in (("deflate", bomb), ("gzip", gzip.compress(b" " * 10_000_000)), ("br", b"x"), ("identity, gzip", b"x")):
        assert server.request("/v1/completions", raw=raw, headers={"content-encoding": encoding})[0] == 415
    for raw in (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", b'{"a":' * 50_000, b'{"prompt": "x", "seed": ' + b"9" * 500_000 + b"}"):
        status, body, _ = server.request("/v1/completions", raw=raw)
        assert status == 400 and len(json.dumps(body)) < 1000


def test_pages_of_other_sites_are_refused(server: Served) -> None:
    """A browser on the same machine would let any page ask, and a name that points at 127.0.0.1 would let it read."""
    host, port = server.address
    for headers, status in (
        ({"origin": "https://evil.example"}, 403), ({"host": "evil.example"}, 403), ({"host": f"evil.example:{port}"}, 403),
        ({"origin": "null"}, 403), ({"origin": f"http://{host}:{port}"}, 200), ({"host": "[::1]:80"}, 200),
        ({"host": f"localhost:{port}", "origin": f"http://localhost:{port}"}, 200),
    ):  # fmt: skip
        assert server.request("/v1/models", headers=headers)[0] == status, headers


def test_tokens_that_the_model_has_not_are_refused_before_they_reach_it(server: Served) -> None:
    restarts = server.metric("replica_restarts_total")
    for prompt in ([256], [10**12], [[1, 2], [3, 999]]):
        status, body, _ = server.request("/v1/completions", {**ASK, "prompt": prompt})
        assert status == 400 and "numbered from 0 to 255" in body["error"]["message"]
    assert ask(server) and server.metric("replica_restarts_total") == restarts


# -- replicas --


def _restarted(server: Served, restarts: float) -> None:
    server.wait_for(
        lambda: server.metric("replica_restarts_total") > restarts and server.request("/ready")[0] == 200, "the replica is not replaced", 120
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_replica_that_dies_or_hangs_is_replaced_and_its_answer_goes_on(server: Served, number: int) -> None:
    options = {"max_tokens": 110, "temperature": 1.0, "seed": 3}
    expected, restarts, found = ask(server, **options), server.metric("replica_restarts_total"), []
    rank = server.ranks()[0]
    thread = threading.Thread(target=lambda: found.append(ask(server, **options)))
    thread.start()
    server.wait_for(lambda: server.metric("sequences_running") > 0 or bool(found), "the request is not under way")
    os.kill(rank, number)
    thread.join(120)
    assert found == [expected]
    _restarted(server, restarts)


def test_the_process_from_which_ranks_are_forked_dies(server: Served) -> None:
    expected, restarts = ask(server), server.metric("replica_restarts_total")
    parent = int(Path(f"/proc/{server.ranks()[0]}/stat").read_text().rsplit(")", 1)[1].split()[1])
    os.kill(parent, signal.SIGKILL)
    _restarted(server, restarts)
    assert ask(server) == expected


def test_an_answer_that_takes_too_long_is_ended(serve: Serve, folder: Path) -> None:
    server = serve(str(folder), "--set", "request_timeout_s=0.3", "--set", "batch=4")
    body = {**ASK, "max_tokens": 120, "n": 4, "logprobs": 5}
    statuses = {server.request("/v1/completions", {**body, "stream": stream, "max_tokens": 120})[0] for stream in (False, False)}
    assert statuses <= {200, 504}
    text = server.request("/v1/completions", {**body, "stream": True})[1]
    assert "longer than 0.3 s" in text or text.rstrip().endswith("[DONE]")
    server.wait_until_idle()


# -- newer weights --


def _write(folder: Path, change: Any) -> None:
    file = folder / "model.safetensors"
    tensors = {name: change(name, tensor) for name, tensor in load_file(str(file)).items()}
    save_file(tensors, str(file.with_suffix(".new")), {"format": "pt"})
    os.replace(file.with_suffix(".new"), file)


def test_newer_weights_take_over_without_a_gap_and_broken_ones_do_not(serve: Serve, tmp_path: Path) -> None:
    _save_llama(tmp_path)
    server = serve(str(tmp_path), "--replicas", "2")
    before, found, stop = ask(server), [], threading.Event()

    def keep_asking() -> None:
        while not stop.is_set():
            found.append(ask(server))

    thread = threading.Thread(target=keep_asking)
    thread.start()
    try:
        assert server.request("/v1/reload", {})[1]["model"].endswith("nothing newer")
        good = (tmp_path / "model.safetensors").read_bytes()
        for change in (lambda name, t: t * float("nan"), lambda name, t: t[:, :-1].contiguous() if t.dim() == 2 else t):
            _write(tmp_path, change)
            status, body, _ = server.request("/v1/reload", {})
            assert status in (400, 500) and body["error"]["message"]
            (tmp_path / "model.safetensors").write_bytes(good)
        (tmp_path / "model.safetensors").write_bytes(good[: len(good) // 2])
        assert server.request("/v1/reload", {})[0] in (400, 500)
        (tmp_path / "model.safetensors").write_bytes(good)
        assert ask(server) == before
        _write(tmp_path, lambda name, t: -t)
        assert server.request("/v1/reload", {})[0] == 200
    finally:
        stop.set()
        thread.join()
    after = ask(server)
    assert after != before and all(tokens in (before, after) for tokens in found) and found[0] == before
    server.wait_for(lambda: len(server.ranks()) == 2, "the old replicas do not end")


def test_a_newer_model_that_fails_later_gives_way_to_the_former(serve: Serve, tmp_path: Path) -> None:
    _save_llama(tmp_path / "a")
    _save_llama(tmp_path / "b", seed=5)
    link = tmp_path / "served"
    link.symlink_to(tmp_path / "a")
    server = serve(str(link), "--set", "reload_every_s=0.3")
    before = ask(server)
    link.unlink()
    link.symlink_to(tmp_path / "b")
    server.wait_for(lambda: any(line.get("event") == "reload" for line in server.lines), "newer weights are not noticed", 120)
    assert ask(server) != before
    (tmp_path / "b" / "model.safetensors").unlink()
    server.kill_a_rank()
    server.wait_for(lambda: any(line.get("event") == "roll-back" for line in server.lines), "it does not go back", 120)
    server.wait_for(lambda: server.request("/ready")[0] == 200, "the former model does not come back", 120)
    assert ask(server) == before


def test_a_server_says_that_its_model_is_not_there_yet(tmp_path: Path, serve: Serve) -> None:
    from meshwright.core.errors import RequestError  # noqa: F401

    with socket.create_server(("127.0.0.1", 0)) as chosen:
        port = chosen.getsockname()[1]
    seen: list[tuple[int, int]] = []
    done = threading.Event()

    def look() -> None:
        probe = Served(None, f"http://127.0.0.1:{port}", tmp_path)  # type: ignore[arg-type]
        while not done.is_set():
            try:
                seen.append((probe.request("/health")[0], probe.request("/predict", {"instances": [[1.0]]})[0]))
            except OSError:
                time.sleep(0.02)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        serve("vae", "--port", str(port))
    finally:
        done.set()
        thread.join()
    assert (200, 503) in seen
