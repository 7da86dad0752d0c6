"""OpenAI's own Python client, unmodified, against a server: chats and completions, whole and streamed, and the errors that it raises."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
import tokenizers
import transformers

from tests import serve_models
from tests.procs.served import Serve, Served

_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
_PICTURE = [{"type": "image_url", "image_url": {"url": "x"}}]
HELLO: Any = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A small Llama with a tokenizer of single bytes and a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate([*letters, "<end>"])}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")
    tokenizer.chat_template = _TEMPLATE
    serve_models.build("llama", vocab_size=257, max_position_embeddings=256).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return serve(str(folder), "--set", "served_name=chatty", "--set", "batch=8")


def chat(server: Served, **options: Any) -> Any:
    given = {"model": "chatty", "messages": HELLO, "max_tokens": 12, "temperature": 0, "extra_body": {"ignore_end": True}, **options}
    return server.client.chat.completions.create(**given)


def test_a_chat_whole_and_streamed_is_the_same(server: Served) -> None:
    whole = chat(server)
    assert whole.object == "chat.completion" and whole.choices[0].message.role == "assistant" and whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 12 and whole.usage.total_tokens == 12 + whole.usage.prompt_tokens
    chunks = list(chat(server, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant" and {chunk.id for chunk in chunks} == {chunks[0].id}
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 12 and all(chunk.usage is None for chunk in chunks[:-1])
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]
    assert all(chunk.usage is None for chunk in chat(server, stream=True))
    assert chat(server).usage.prompt_tokens_details.cached_tokens > 0


def test_the_conversation_is_what_the_template_makes_of_it(server: Served) -> None:
    asked = "<system>Be kind.<user>Hello<assistant>"
    plain = server.client.completions.create(model="chatty", prompt=asked, max_tokens=12, temperature=0, extra_body={"ignore_end": True})
    assert plain.choices[0].text == chat(server).choices[0].message.content and plain.usage.prompt_tokens == len(asked)
    parts = [HELLO[0], {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}]
    assert chat(server, messages=parts).choices[0].message.content == plain.choices[0].text


def test_answers_by_seed_stops_and_log_probabilities(server: Served) -> None:
    several = chat(server, n=3, temperature=1.5, seed=11)
    assert len({choice.message.content for choice in several.choices}) == 3 and several.usage.completion_tokens == 36
    again = chat(server, n=3, temperature=1.5, seed=11)
    assert [c.message.content for c in again.choices] == [c.message.content for c in several.choices]
    found = chat(server, logprobs=True, top_logprobs=4)
    content = found.choices[0].logprobs.content
    assert len(content) == 12 and all(len(entry.top_logprobs) == 4 and entry.logprob == entry.top_logprobs[0].logprob <= 0 for entry in content)
    assert chat(server).choices[0].logprobs is None
    text = chat(server, max_tokens=60).choices[0].message.content
    letter = next(c for c in text[4:] if c.isascii())
    stopped = chat(server, max_tokens=60, stop=letter)
    assert stopped.choices[0].message.content == text[: text.index(letter)] and stopped.choices[0].finish_reason == "stop"
    assert chat(server, max_tokens=None, max_completion_tokens=5).usage.completion_tokens == 5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools are not supported"), ({"n": 0}, "n: "), ({"user": 7}, "user"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "tools are not supported"), ({"messages": []}, "messages"),
        ({"tool_choice": "required"}, "tools are not supported"), ({"response_format": {"type": "json_object"}}, "only"),
        ({"messages": [{"role": "user", "content": _PICTURE}]}, "messages"), ({"temperature": 3}, "temperature"), ({"seed": 2**70}, "seed"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "messages.0.role"), ({"top_logprobs": 3}, "needs logprobs"),
        ({"logit_bias": {"5": 10}}, "not supported"), ({"max_tokens": "many"}, "max_tokens"), ({"stop": ["a"] * 99}, "stop"),
        ({"extra_body": {"colour": 1}}, "colour: it is not known"), ({"messages": [{"role": "user", "content": "x" * 300}]}, "shorten"),
        ({"stream": "yes"}, "stream"), ({"store": True}, "nothing is stored"), ({"reasoning_effort": "high"}, "not supported"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_a_bad_request_that_says_so(server: Served, options: dict[str, Any], words: str) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as raised:
            chat(server, **{"stream": stream, **options})
        error: Any = raised.value.body
        assert words in error["message"] and error["type"] == "invalid_request_error"


def test_other_errors_are_those_of_the_client(server: Served) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        chat(server, model="gpt-9")
    assert missing.value.code == "model_not_found" and missing.value.param == "model"  # type: ignore[attr-defined]
    with pytest.raises(openai.BadRequestError, match="embeddings are for encoders"):
        server.client.embeddings.create(model="chatty", input="x")
    with pytest.raises(openai.NotFoundError):
        server.client.models.retrieve("gpt-9")
    with pytest.raises(openai.NotFoundError):
        server.client.files.list()
    assert server.client.models.retrieve("chatty").id == "chatty" and [model.id for model in server.client.models.list()] == ["chatty"]


def test_the_client_that_waits_for_many_at_once(server: Served) -> None:
    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            ask = lambda i: client.chat.completions.create(  # noqa: E731
                model="chatty", messages=[{"role": "user", "content": f"number {i}"}], max_tokens=15, temperature=0, extra_body={"ignore_end": True}
            )
            return [found.choices[0].message.content or "" for found in await asyncio.gather(*(ask(i) for i in range(24)))]

    together = asyncio.run(ask_all())
    alone = [chat(server, messages=[{"role": "user", "content": f"number {i}"}], max_tokens=15).choices[0].message.content for i in range(0, 24, 5)]
    assert alone == together[::5]


def test_a_stream_that_is_closed_and_a_client_that_waits_no_longer(server: Served) -> None:
    with chat(server, max_tokens=200, stream=True) as stream:
        next(iter(stream))
    server.wait_until_idle()
    with pytest.raises(openai.APITimeoutError):
        server.client.with_options(timeout=0.2).chat.completions.create(
            model="chatty", messages=HELLO, max_tokens=220, n=8, extra_body={"ignore_end": True}
        )
    server.wait_until_idle()
