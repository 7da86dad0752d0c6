"""The server, as a user starts it: OpenAI's own client, streams, errors, replicas that die, clients that go away or send what they should not."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.procs.served import Serve, Served


@pytest.fixture(scope="module")
def server(serve: Serve) -> Served:
    return serve("llama-tiny", "--replicas", "2", "--set", "context=512", "--set", "batch=8", "--set", "max_waiting=8")


def complete(server: Served, prompt: str = "def ", **options: Any) -> Any:
    return server.client.completions.create(**{"model": "llama-tiny", "prompt": prompt, "max_tokens": 20, "temperature": 0, **options})


# -- OpenAI's client --


def test_completions_whole_and_streamed_are_the_same(server: Served) -> None:
    whole = complete(server)
    chunks = list(complete(server, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert whole.choices[0].finish_reason == "length" and whole.usage.completion_tokens == 20 and whole.usage.prompt_tokens == 4
    assert chunks[-1].usage.completion_tokens == 20 and not chunks[-1].choices


def test_several_prompts_and_answers(server: Served) -> None:
    found = complete(server, ["one", "two"], n=2, temperature=1.0, seed=4, echo=True)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3] and found.usage.completion_tokens == 80
    assert [choice.text[:3] for choice in found.choices] == ["one", "one", "two", "two"]
    assert found.choices[0].text != found.choices[1].text
    again = complete(server, ["one", "two"], n=2, temperature=1.0, seed=4, echo=True)
    assert [c.text for c in again.choices] == [c.text for c in found.choices]
    tokens = complete(server, [list(b"one")], temperature=0)
    assert tokens.choices[0].text == complete(server, "one").choices[0].text


def test_logprobs(server: Served) -> None:
    found = complete(server, logprobs=3).choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == 20 and all(p <= 0 for p in found.token_logprobs)
    assert all(max(top.values()) == pytest.approx(p) for top, p in zip(found.top_logprobs, found.token_logprobs, strict=True))  # greedy


def test_stop_texts(server: Served) -> None:
    text = complete(server).choices[0].text
    stop = text[6:8]
    found = complete(server, stop=[stop])
    assert found.choices[0].text == text[: text.index(stop)] and found.choices[0].finish_reason == "stop"
    assert found.usage.completion_tokens < 20
    server.wait_until_idle()


def test_errors_are_those_that_the_client_knows(server: Served) -> None:
    for error, options in (
        (openai.NotFoundError, {"model": "gpt-9"}), (openai.BadRequestError, {"max_tokens": -1}), (openai.BadRequestError, {"prompt": "x" * 600}),
        (openai.BadRequestError, {"prompt": []}), (openai.BadRequestError, {"extra_body": {"colour": "red"}}),
        (openai.BadRequestError, {"stream": True, "prompt": "x" * 600}),
    ):  # fmt: skip
        with pytest.raises(error) as raised:
            complete(server, **options)
        assert raised.value.body["message"]  # type: ignore[index]
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        server.client.chat.completions.create(model="llama-tiny", messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(openai.BadRequestError, match="tools are not supported"):
        server.client.chat.completions.create(
            model="llama-tiny", messages=[{"role": "user", "content": "hi"}], tools=[{"type": "function", "function": {"name": "f"}}]
        )
    assert server.client.models.list().data[0].id == "llama-tiny"


# -- bodies --


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"", 400), (b"{", 400), (b"[]", 400), (b"null", 400), (b"\xff\xfe", 400), (b'{"prompt": NaN}', 400), (b'{"prompt": 1e999}', 400),
        (b"[" * 200_000, 400), (b'{"prompt": "' + b"x" * 5_000_000 + b'"}', 413), (b'{"prompt": "a", "temperature": Infinity}', 400),
    ],
)  # fmt: skip
def test_broken_bodies_are_refused(server: Served, raw: bytes, status: int) -> None:
    found, body, _ = server.request("/v1/completions", raw=raw)
    assert (found, "error" in body) == (status, True)
    assert "Traceback" not in json.dumps(body)


def test_compressed_bodies_and_unknown_paths_are_refused(server: Served) -> None:
    assert server.request("/v1/completions", raw=b"x", headers={"content-encoding": "gzip"})[0] == 415
    assert server.request("/v1/nothing")[0] == 404 and server.request("/v1/completions")[0] == 405


# -- load --


def _asking(body: dict[str, Any]) -> bytes:
    """A request as bytes."""
    data = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(data) + data


def test_too_many_requests_are_told_to_come_again(server: Served) -> None:
    """Two replicas of four sequences, and eight that wait."""
    given = {"prompt": "x", "max_tokens": 30, "ignore_end": True}
    status, body, _ = server.request("/v1/completions", {**given, "n": 17})
    assert status == 400 and "17 answers, and this server takes 16 at once" in body["error"]["message"]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: server.request("/v1/completions", {**given, "n": 16}), range(4)))
    refused = [(body, headers) for status, body, headers in found if status == 429]
    assert 1 <= len(refused) <= 3 and all(body["usage"]["completion_tokens"] == 16 * 30 for status, body, _ in found if status == 200)
    assert all(int(headers["retry-after"]) >= 1 and "too many" in body["error"]["message"] for body, headers in refused)
    with pytest.raises(openai.RateLimitError):  # noqa: PT012 - the place may be free again
        for _ in range(50):
            with server.open(_asking({**given, "n": 16, "max_tokens": 400})):
                time.sleep(0.1)
                complete(server)
    server.wait_until_idle()


def test_a_client_that_goes_away_frees_its_place(server: Served) -> None:
    for stream in (True, False):
        with server.open(_asking({"prompt": "x", "max_tokens": 450, "n": 16, "ignore_end": True, "stream": stream})):
            time.sleep(0.3)
        server.wait_until_idle()
    lines = [line for line in server.lines if line.get("path") == "/v1/completions"][-2:]
    assert all(line.get("answer_tokens", 0) < 16 * 450 for line in lines)


# -- replicas --


def test_a_replica_that_is_killed_is_replaced_and_its_requests_are_answered(server: Served) -> None:
    expected = [complete(server, f"number {i}", max_tokens=120, temperature=0.8, seed=i).choices[0].text for i in range(6)]
    restarts = server.metric("replica_restarts_total")
    found: dict[int, str] = {}

    def ask(i: int) -> None:
        chunks = complete(server, f"number {i}", max_tokens=120, temperature=0.8, seed=i, stream=True)
        found[i] = "".join(c.choices[0].text for c in chunks)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    time.sleep(0.15)
    server.kill_a_rank()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(6)] == expected
    server.wait_for(lambda: server.metric("replica_restarts_total") > restarts, "the replica is not replaced")
    assert server.metric("replica_ready") == 2


# -- status --


def test_health_metrics_and_the_page(server: Served) -> None:
    assert server.request("/health")[:2] == (200, {"status": "ok"}) and server.request("/ready")[0] == 200
    assert server.metric("answer_tokens_total") > 0 and server.metric("requests_total") > 0
    plan = server.request("/v1/plan")[1]
    assert plan["model"] == "llama-tiny" and plan["decoding"] == "packed" and len(plan["replicas"]) == 2
    status, page, _ = server.request("/")
    assert status == 200 and "<title>" in page and "http://" not in page and "https://" not in page  # nothing from elsewhere
    assert "/v1/completions" in server.request("/openapi.json")[1]["paths"]


def test_every_request_is_one_line_of_the_log(server: Served) -> None:
    answer = server.client.completions.with_raw_response.create(model="llama-tiny", prompt="def ", max_tokens=20, temperature=0)
    line = server.line(answer.headers["x-request-id"])
    assert line["status"] == 200 and line["prompt_tokens"] == 4 and line["answer_tokens"] == 20 and line["seconds"] >= line["first_token_s"]


def test_a_key_is_demanded_of_those_who_listen_wider(serve: Serve, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "meshwright.cli.main", "serve", "gpt-tiny", "--port", "0", "--host", "0.0.0.0"]
    refused = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert refused.returncode == 2 and "--api-key" in refused.stderr
    keyed = serve("gpt-tiny", "--api-key", "s3cret")
    assert keyed.request("/v1/models")[0] == 401 and keyed.request("/v1/models", headers={"authorization": "Bearer wrong"})[0] == 401
    assert keyed.request("/v1/models", headers={"authorization": "Bearer s3cret"})[0] == 200
    assert keyed.request("/health")[0] == 200


def test_a_server_that_is_told_to_stop_answers_what_it_has(serve: Serve) -> None:
    stopping = serve("llama-tiny", "--set", "context=512")
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(complete(stopping, max_tokens=300, extra_body={"ignore_end": True})))
    thread.start()
    time.sleep(0.3)
    ranks = stopping.ranks()
    stopping.process.terminate()
    thread.join(60)
    assert found and found[0].usage.completion_tokens == 300
    assert stopping.process.wait(60) == 143
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]
