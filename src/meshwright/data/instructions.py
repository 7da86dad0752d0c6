"""Instructions and answers from a JSON file in Alpaca's format, as tokens and targets: only the answer's tokens are predicted.

A sample is tokenized on access, and has a fixed length, so that a plan's predicted time and memory hold for every batch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from meshwright.core.errors import RequestError
from meshwright.core.serialization import read_json
from meshwright.core.task import Field

IGNORE_INDEX = -100  # the default ignore_index of torch's cross entropy
_MAX_BYTES = 4 * 2**30  # of a file, which is read whole
_VALIDATION_FRACTION = 0.05
_PROMPT_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
_PROMPT_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class InstructionRecord:
    """One instruction with its answer. Most have no input."""

    instruction: str
    output: str
    input: str = ""

    @property
    def prompt(self) -> str:
        return (_PROMPT_WITH_INPUT if self.input else _PROMPT_WITHOUT_INPUT).format(instruction=self.instruction, input=self.input)


class Tokenizer(Protocol):
    """Text to token ids below `vocab_size`; `eos_id` ends an answer."""

    vocab_size: int
    eos_id: int

    def encode(self, text: str) -> list[int]: ...

    def prompt(self, record: InstructionRecord) -> str:
        """What comes before the answer."""


class ByteTokenizer:
    """The fallback without a tokenizer: each byte is a token. Zero, which no text contains, is the end of text."""

    vocab_size = 256
    eos_id = 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def prompt(self, record: InstructionRecord) -> str:
        return record.prompt


class PretrainedTokenizer:
    """The tokenizer in a Hugging Face folder. Models that are made for chats get instructions in their own chat template, others in Alpaca's."""

    def __init__(self, folder: Path) -> None:
        try:
            auto = importlib.import_module("transformers").AutoTokenizer
            self._tokenizer = auto.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except ImportError as error:
            raise RequestError(f"the tokenizer in {folder} needs a package that is not installed: {_one_line(error)}") from None
        except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
            raise RequestError(f"the tokenizer in {folder} cannot be read: {_one_line(error)}") from None
        if self._tokenizer.eos_token_id is None:
            raise RequestError(f"the tokenizer in {folder} has no end of text: set eos_token in its tokenizer_config.json")
        self.eos_id = int(self._tokenizer.eos_token_id)
        self.vocab_size = max(len(self._tokenizer), self.eos_id + 1)
        self._has_chat = bool(getattr(self._tokenizer, "chat_template", None))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=not self._has_chat).input_ids  # a template has its own
        return ids[:-1] if ids and ids[-1] == self.eos_id else ids

    def prompt(self, record: InstructionRecord) -> str:
        if not self._has_chat:
            return record.prompt
        content = f"{record.instruction}\n\n{record.input}" if record.input else record.instruction
        text: str = self._tokenizer.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False)
        return text


def find_tokenizer(folder: Path | None) -> Tokenizer:
    """The folder's tokenizer, or a ByteTokenizer."""
    if folder is not None and any((folder / name).exists() for name in _TOKENIZER_FILES):
        return PretrainedTokenizer(folder)
    return ByteTokenizer()


class InstructionDataset:
    """Samples of `length` tokens: prompt, answer, end, padding. `targets` holds the next token at each position, IGNORE_INDEX outside the answer."""

    def __init__(self, records: Sequence[InstructionRecord], tokenizer: Tokenizer, length: int) -> None:
        self._records, self._tokenizer, self._length = records, tokenizer, length

    def __len__(self) -> int:
        return len(self._records)

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        samples = [self.tokenize(self._records[i]) for i in indices.tolist()]
        return {"tokens": torch.tensor([s[0] for s in samples]), "targets": torch.tensor([s[1] for s in samples])}

    def tokenize(self, record: InstructionRecord) -> tuple[list[int], list[int]]:
        """(tokens, targets). A long answer is truncated at its end; a prompt that leaves no room for an answer, at its beginning."""
        prompt = self._tokenizer.prompt(record)
        tokens = [*self._tokenizer.encode(prompt + record.output), self._tokenizer.eos_id]
        prompt_length = min(len(self._tokenizer.encode(prompt)), len(tokens) - 1)
        dropped = max(prompt_length + 1 - self._length, 0)
        tokens, prompt_length = tokens[dropped : dropped + self._length], prompt_length - dropped
        targets = [IGNORE_INDEX] * (prompt_length - 1) + tokens[max(prompt_length, 1) :]
        padding = [self._tokenizer.eos_id] * (self._length - len(tokens))
        return tokens + padding, targets + [IGNORE_INDEX] * (self._length - len(targets))


def load(path: Path, fields: Mapping[str, Field], split: str, *, tokenizer: Path | None = None, hold_out: bool = True) -> InstructionDataset:
    """The file's records for a task with the fields tokens and targets. With `hold_out`, the last 5% are the validation part."""
    if set(fields) != {"tokens", "targets"}:
        raise RequestError(f"{path}: instructions and answers need a model with the fields tokens and targets, not {', '.join(fields) or 'none'}")
    records = read_records(path)
    chosen = find_tokenizer(tokenizer)
    (width,), high = fields["tokens"].shape, fields["tokens"].high
    if chosen.vocab_size > high:
        is_bytes = isinstance(chosen, ByteTokenizer)
        needs = "without a tokenizer bytes are tokens, which need" if is_bytes else f"the tokenizer in {tokenizer} needs"
        text = f"{path}: {needs} a vocabulary of {chosen.vocab_size}, and the model's is {high}"
        raise RequestError(f"{text}: use another tokenizer or a model with a larger vocabulary")
    if width < 2:
        raise RequestError(f"{path}: a sample needs at least 2 tokens: use --seq 2 or more")
    border = len(records) - max(int(_VALIDATION_FRACTION * len(records)), 1) if hold_out else len(records)
    part = records[:border] if split == "train" else records[border:]
    if not part:
        raise RequestError(f"{path}: {len(records)} record leaves none for the {split} part: give more, or --set validate_batches=0")
    return InstructionDataset(part, chosen, width)


def read_records(path: Path) -> list[InstructionRecord]:
    """The list in the file; the error names the first invalid record."""
    data = read_json(path, _MAX_BYTES)
    if not isinstance(data, list) or not data:
        raise RequestError(f"{path}: expected a JSON list of objects with instruction, input and output")
    return [_parse_record(entry, f"{path}: record {number}") for number, entry in enumerate(data)]


def _parse_record(entry: Any, where: str) -> InstructionRecord:
    if not isinstance(entry, dict):
        raise RequestError(f"{where} is not an object with instruction, input and output")
    values = {"input": "", **{key: entry[key] for key in ("instruction", "input", "output") if key in entry}}
    for key in ("instruction", "output"):
        if key not in values:
            raise RequestError(f"{where} has no '{key}'; it has {', '.join(map(str, entry)) or 'nothing'}")
    for key, value in values.items():
        if not isinstance(value, str):
            raise RequestError(f"{where}: '{key}' must be a text, not {type(value).__name__}")
    return InstructionRecord(**values)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
