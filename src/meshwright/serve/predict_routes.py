"""`/predict` and `/v1/embeddings`: JSON in, batches to the replicas, JSON out."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pydantic_core

from meshwright.core.errors import RequestError, RunError
from meshwright.serve.input_specs import InputSpec, instance_schema, parse_instance, specs_from_data
from meshwright.serve.openai_schema import EmbeddingRequest
from meshwright.serve.predict_batcher import Batcher, SampleError
from meshwright.serve.replica_set import DeadlineError
from meshwright.serve.tensor_messages import Array
from meshwright.serve.text import TextCodec

_MAX_INSTANCES = 4096
_LONG_TEXT = 2000  # characters from which a text becomes tokens in a thread, not to hold up others
_FIRST_LENGTH = 16  # texts are padded to lengths of 16, 32, 64, …


class PredictService:
    """One model's answers to samples, and vectors of texts if it is an encoder of texts."""

    def __init__(self, batcher: Batcher, codec: TextCodec | None, timeout_s: float) -> None:
        self.batcher, self._codec, self._timeout_s = batcher, codec, timeout_s
        self._specs: tuple[InputSpec, ...] = ()
        self._specs_of: Any = None

    @property
    def specs(self) -> tuple[InputSpec, ...]:
        """What the model takes; empty while it is being loaded."""
        data = self.batcher.set.facts.get("inputs")
        if data is not self._specs_of:
            self._specs, self._specs_of = specs_from_data(data or ()), data
        return self._specs

    async def predict(self, raw: bytes, facts: dict[str, Any]) -> bytes:
        """The answer to a body of /predict."""
        self.batcher.check_room(1)
        samples = self._parse(raw)
        facts["samples"] = len(samples)
        self.batcher.check_room(len(samples))
        try:
            outputs = await self._within(self.batcher.compute("predict", samples))
        except SampleError as error:
            raise self._blame(error) from None
        return pydantic_core.to_json({"predictions": [output.plain() for output in outputs]}, inf_nan_mode="null")

    def _parse(self, raw: bytes) -> list[dict[str, Array]]:
        try:
            body = pydantic_core.from_json(raw, allow_inf_nan=False)
        except ValueError as error:
            raise RequestError(f"the body is no JSON: {str(error)[:200]}") from None
        instances = body.get("instances") if isinstance(body, dict) else None
        if not isinstance(instances, list) or not instances or set(body) != {"instances"}:
            raise RequestError('give {"instances": […]}, a list of samples, and nothing beside it: see /docs')
        if len(instances) > _MAX_INSTANCES:
            raise RequestError(f"instances: there are {len(instances)}, and {_MAX_INSTANCES} at most may come together: send several requests")
        has_booleans = b"true" in raw or b"false" in raw
        return [parse_instance(self.specs, value, f"instances[{i}]", has_booleans=has_booleans) for i, value in enumerate(instances)]

    def _blame(self, error: SampleError) -> Exception:
        """Whose fault it is that the model fails on a sample: the client's, where not all of what the model takes was known and checked."""
        if all(spec.is_fixed for spec in self.specs):
            return RunError(f"the model fails on instances[{error.place}]: {error}")
        return RequestError(f"instances[{error.place}]: the model does not take it: {error}")

    async def _within(self, work: Any) -> Any:
        try:
            return await asyncio.wait_for(work, self._timeout_s)
        except TimeoutError:
            raise DeadlineError(f"the answer took longer than {self._timeout_s:g} s: send less at once") from None

    # -- vectors of texts --

    @property
    def embedding(self) -> Mapping[str, Any] | None:
        return self.batcher.set.facts.get("embedding")

    async def embed(self, body: EmbeddingRequest, facts: dict[str, Any]) -> tuple[Array, int]:
        """A vector for each text, or list of tokens; and how many tokens there were."""
        inputs = body.inputs
        self.batcher.check_room(len(inputs))
        about = self.embedding
        if about is None or self._codec is None:
            raise RequestError("this model makes no embeddings of texts: serve an encoder, such as a folder of BERT with its tokenizer; see /predict")
        if body.dimensions not in (None, about["width"]):
            raise RequestError(f"dimensions: the model's vectors have {about['width']} numbers: leave it out")
        tokens = [await self._tokens(entry, place, about) for place, entry in enumerate(inputs)]
        facts["prompt_tokens"] = sum(map(len, tokens))
        try:
            outputs = await self._within(self.batcher.compute("embed", [_padded(ids, about) for ids in tokens]))
        except SampleError as error:
            raise RequestError(f"input[{error.place}]: the model does not take it: {error}") from None
        return np.stack([output.arrays[0] for output in outputs]), facts["prompt_tokens"]

    async def _tokens(self, entry: str | Sequence[int], place: int, about: Mapping[str, Any]) -> list[int]:
        assert self._codec is not None
        if isinstance(entry, str):
            ids = self._codec.encode(entry) if len(entry) < _LONG_TEXT else await asyncio.to_thread(self._codec.encode, entry)
        else:
            ids = list(entry)
        high = next(spec.high for spec in self.specs if spec.name == "input_ids")
        if not ids:
            raise RequestError(f"input[{place}]: it is empty: give some text")
        if about["max_tokens"] is not None and len(ids) > about["max_tokens"]:
            raise RequestError(f"input[{place}]: it has {len(ids)} tokens, and the model takes {about['max_tokens']}: shorten it")
        if max(ids) >= high:
            raise RequestError(f"input[{place}]: there is no token {max(ids)}: they are numbered from 0 to {high - 1}")
        return ids


def _padded(ids: Sequence[int], about: Mapping[str, Any]) -> dict[str, Array]:
    """A text's tokens, filled up to a length that others have too, where a mask can hide what is added."""
    if not about["pads"]:
        return {"input_ids": np.array(ids, dtype=np.int64)}
    length = _FIRST_LENGTH
    while length < len(ids):
        length *= 2
    length = max(len(ids), min(length, about["max_tokens"] or length))
    tokens = np.full(length, about["pad_token"], dtype=np.int64)
    tokens[: len(ids)] = ids
    mask = np.zeros(length, dtype=np.int64)
    mask[: len(ids)] = 1
    return {"input_ids": tokens, "attention_mask": mask}


def embedding_body(vectors: Array, tokens: int, body: EmbeddingRequest, model: str) -> bytes:
    """Vectors in the shape of OpenAI's API."""
    rows = [base64.b64encode(v.astype("<f4").tobytes()).decode() for v in vectors] if body.encoding_format == "base64" else vectors.tolist()
    data = [{"object": "embedding", "index": i, "embedding": row} for i, row in enumerate(rows)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return pydantic_core.to_json({"object": "list", "data": data, "model": model, "usage": usage}, inf_nan_mode="null")


def predict_schema(specs: Sequence[InputSpec]) -> dict[str, Any]:
    """JSON Schema of a body of /predict."""
    items = {"type": "array", "items": instance_schema(specs), "minItems": 1, "maxItems": _MAX_INSTANCES}
    return {"type": "object", "properties": {"instances": items}, "required": ["instances"], "additionalProperties": False}
