"""Text to tokens and back: the tokenizer of a model's folder or plain bytes, chat templates, and answers as they come, token by token."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from meshwright.core.errors import RequestError
from meshwright.core.serialization import read_json

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_INCOMPLETE = "\ufffd"  # what a part of a character decodes to


class TextCodec(Protocol):
    """`end_tokens` end an answer. `has_chat`: the model's folder says how a conversation becomes a prompt."""

    end_tokens: tuple[int, ...]
    has_chat: bool

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """A conversation as the prompt for its next answer."""


class ByteCodec:
    """Each byte is a token, as in the zoo's models that learn from bytes. Nothing ends an answer but its length."""

    end_tokens: tuple[int, ...] = ()
    has_chat = False

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(t for t in tokens if t < 256).decode(errors="replace")

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        raise _no_template()


class PretrainedCodec:
    """The tokenizer in a Hugging Face folder."""

    def __init__(self, folder: Path) -> None:
        try:
            auto = importlib.import_module("transformers").AutoTokenizer
            self._tokenizer: Any = auto.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except ImportError as error:
            raise RequestError(f"the tokenizer in {folder} needs a package that is not installed: {_one_line(error)}") from None
        except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
            raise RequestError(f"the tokenizer in {folder} cannot be read: {_one_line(error)}") from None
        self.end_tokens = _end_tokens(folder, self._tokenizer.eos_token_id)
        self.has_chat = bool(self._tokenizer.chat_template)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text).input_ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        if not self.has_chat:
            raise _no_template()
        try:
            text = self._tokenizer.apply_chat_template([dict(m) for m in messages], add_generation_prompt=True, tokenize=False)
        except Exception as error:  # templates raise errors of their own for roles or orders that they do not know
            raise RequestError(f"the model's chat template refuses these messages: {_one_line(error)}") from None
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)


def has_tokenizer(folder: Path | None) -> bool:
    return folder is not None and any((folder / name).exists() for name in _TOKENIZER_FILES)


def find_codec(folder: Path | None, vocabulary: int) -> TextCodec:
    """The folder's tokenizer, or bytes where it has none and the vocabulary holds them."""
    if folder is not None and has_tokenizer(folder):
        return PretrainedCodec(folder)
    if vocabulary < 256:
        raise RequestError(f"there is no tokenizer in {folder}, and a vocabulary of {vocabulary} is too small for bytes: add tokenizer.json")
    return ByteCodec()


def _end_tokens(folder: Path, eos: int | None) -> tuple[int, ...]:
    """The tokens that end an answer: the tokenizer's, and those of generation_config.json and config.json."""
    found: list[Any] = [eos]
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            data = read_json(folder / name)
            value = data.get("eos_token_id") if isinstance(data, dict) else None
            found += value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(t for t in found if isinstance(t, int) and not isinstance(t, bool)))


class TextStream:
    """An answer as text while its tokens come. What may still change is held back: parts of characters, and what may be the start of a stop string.

    Tokens are decoded from a little before the last text that was given, because a tokenizer may join them differently at the start of a text.
    """

    def __init__(self, codec: TextCodec, stops: Sequence[str] = ()) -> None:
        self._codec, self._stops = codec, [stop for stop in stops if stop]
        self._tokens: list[int] = []
        self._begin = self._read = 0  # tokens from `_begin` on are decoded; those before `_read` have been given
        self._held = ""
        self.text = ""
        self.stopped = ""  # the stop string that was found

    def add(self, token: int) -> str:
        """The text that a token adds; empty if it must be held back."""
        self._tokens.append(token)
        before = self._codec.decode(self._tokens[self._begin : self._read])
        now = self._codec.decode(self._tokens[self._begin :])
        if now.endswith(_INCOMPLETE) or len(now) < len(before):
            return ""
        self._begin, self._read = self._read, len(self._tokens)
        return self._give(now[len(before) :])

    def finish(self) -> str:
        """What was held back, when no more tokens come."""
        if self.stopped:
            return ""
        before = self._codec.decode(self._tokens[self._begin : self._read])
        rest = self._held + self._codec.decode(self._tokens[self._begin :])[len(before) :]
        self._begin = self._read = len(self._tokens)
        self._held = ""
        cut = min((rest.find(stop) for stop in self._stops if stop in rest), default=-1)
        rest = rest if cut < 0 else rest[:cut]
        self.text += rest
        return rest

    def _give(self, new: str) -> str:
        if self.stopped:
            return ""
        pending = self._held + new
        found = [(pending.find(stop), stop) for stop in self._stops if stop in pending]
        if found:
            cut, self.stopped = min(found)
            pending, self._held = pending[:cut], ""
        else:
            keep = max((_overlap(pending, stop) for stop in self._stops), default=0)
            pending, self._held = pending[: len(pending) - keep], pending[len(pending) - keep :]
        self.text += pending
        return pending


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text may be the start of a stop string."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if stop.startswith(text[len(text) - n :])), 0)


def _no_template() -> RequestError:
    return RequestError("the model has no chat template, so it takes prompts, not messages: use /v1/completions, or --prompt without --chat")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
