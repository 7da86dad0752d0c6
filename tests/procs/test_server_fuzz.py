"""Requests that a machine makes up from the server's own OpenAPI document, right ones and wrong ones, and bytes that are no requests at all: whatever
comes, the answer is one that the document allows, no failure is the server's own, and its memory does not grow.

`make test` sends some hundred, `make prove` more than 20,000.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.procs.served import Serve, Served

schemathesis = pytest.importorskip("schemathesis")
from schemathesis import GenerationMode, checks  # noqa: E402

LENIENT = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much, HealthCheck.large_base_example)
CHECKED = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance", "unsupported_method")
MODELS = {"text": ("llama-tiny", "--set", "context=32", "--set", "batch=8"), "predict": ("dlrm-tiny",)}


def plan(draws: int) -> settings:
    return settings(max_examples=draws, deadline=None, database=None, suppress_health_check=LENIENT, phases=[Phase.generate])


def fuzz_by_document(server: Served, draws: int) -> int:
    """Send so many right and so many wrong requests to every path; returns how many that were."""
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    wanted = [checks.CHECKS.get_one(name) for name in CHECKED]
    sent = 0
    for found in document.get_all_operations():
        operation = found.ok()
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE) if operation.body else (GenerationMode.POSITIVE,):

            @plan(draws if operation.body else max(draws // 20, 3))
            @given(case=operation.as_strategy(generation_mode=mode))
            def send(case: Any) -> None:
                nonlocal sent
                sent += 1
                answer = case.call(timeout=120)
                case.validate_response(answer, checks=wanted)
                assert b"Traceback" not in answer.content and b'File "' not in answer.content

            send()
    return sent


def fuzz_texts(server: Served, draws: int) -> int:
    """Right requests with all kinds of options, streamed or not, each of which must be answered."""
    options = st.fixed_dictionaries(
        {"prompt": st.text(min_size=1, max_size=6) | st.lists(st.integers(0, 255), min_size=1, max_size=20)},
        optional={
            "max_tokens": st.integers(1, 40), "n": st.integers(1, 8), "temperature": st.floats(0, 2), "top_p": st.floats(0.01, 1),
            "top_k": st.integers(0, 300), "min_p": st.floats(0, 1), "seed": st.integers(-(2**63), 2**63 - 1), "logprobs": st.integers(0, 5),
            "stop": st.lists(st.text(max_size=3), max_size=3),
            "stream": st.booleans(), "echo": st.booleans(), "ignore_end": st.booleans(), "presence_penalty": st.floats(-2, 2),
            "frequency_penalty": st.floats(-2, 2), "repetition_penalty": st.floats(0.01, 100),
        },
    )  # fmt: skip

    @plan(draws)
    @given(options)
    def send(body: dict[str, Any]) -> None:
        status, answer, _ = server.request("/v1/completions", body)
        assert status == 200, (body, answer)
        if body.get("stream"):
            events = [json.loads(event) for event in re.findall(r"^data: (\{.*\})$", answer, re.M)]
            assert answer.endswith("data: [DONE]\n\n") and not [event for event in events if "error" in event]
            ends = Counter(choice["index"] for event in events for choice in event["choices"] if choice["finish_reason"])
            assert ends == Counter(range(body.get("n", 1)))
        else:
            assert len(answer["choices"]) == body.get("n", 1)

    send()
    return draws


def fuzz_bytes(server: Served, draws: int) -> int:
    """Bytes on the socket: random ones, pieces of requests in any order, and right requests with some bytes changed."""
    draw = random.Random(1)
    body = b'{"prompt": "x", "max_tokens": 2}'
    right = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    right += b"content-length: %d\r\n\r\n%s" % (len(body), body)
    pieces = [
        b"GET", b"POST", b" ", b"/", b"/predict", b" HTTP/1.1\r\n", b"\r\n", b":", b"content-length", b"-1", b"9" * 30, b"\x00", b"0\r\n\r\n",
        b"transfer-encoding: chunked\r\n", b"host: localhost\r\n", b"expect: 100-continue\r\n", b"upgrade: websocket\r\n",
        b"connection: upgrade\r\n", b"ffffffffff\r\n",
    ]  # fmt: skip
    for _ in range(draws):
        kind = draw.randrange(3)
        data = draw.randbytes(draw.randrange(300)) if kind == 0 else b"".join(draw.choices(pieces, k=draw.randrange(1, 25)))
        if kind == 2:
            changed = bytearray(right)
            for _ in range(draw.randrange(1, 4)):
                changed[draw.randrange(len(changed))] = draw.randrange(256)
            data = bytes(changed)
        with server.open() as peer:
            peer.settimeout(60)
            try:
                peer.sendall(data)
                if draw.random() < 0.5:
                    peer.shutdown(1)
                    answer = peer.recv(65536)
                    assert b"Traceback" not in answer and not re.match(rb"HTTP/1.1 5(?!03)", answer), (data, answer)
            except OSError:
                continue
    return draws


def resident_bytes(pids: list[int]) -> int:
    found = [re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text()) for pid in pids]
    return sum(int(match.group(1)) * 1024 for match in found if match)


@pytest.fixture(params=MODELS)
def server(serve: Serve, request: pytest.FixtureRequest) -> Served:
    return serve(*MODELS[request.param])


def fuzz(server: Served, draws: int) -> int:
    pids = [server.process.pid, *server.ranks()]
    is_text = server.request("/v1/plan")[1]["kind"] == "text"
    fuzz_bytes(server, 20)
    before = resident_bytes(pids)
    sent = fuzz_by_document(server, draws) + fuzz_bytes(server, draws * 2) + (fuzz_texts(server, draws) if is_text else 0)
    assert resident_bytes(pids) - before < 200e6
    assert server.process.poll() is None and pids == [server.process.pid, *server.ranks()]  # nothing died
    server.wait_until_idle()
    counts = Counter(line["status"] for line in server.lines if "status" in line)
    assert all(status < 500 for status in counts), counts
    ids = [line["id"] for line in server.lines if "id" in line]
    assert len(ids) == len(set(ids))
    print(f"{sent} requests: {dict(counts)}, memory {(resident_bytes(pids) - before) / 1e6:+.0f} MB")
    return sent


def test_requests_that_a_machine_makes_up(server: Served) -> None:
    fuzz(server, int(os.environ.get("MESHWRIGHT_FUZZ", "40")))


@pytest.mark.prove
def test_more_than_20000_requests_that_a_machine_makes_up(serve: Serve) -> None:
    assert sum(fuzz(serve(*arguments), 1600) for arguments in MODELS.values()) > 20_000
