"""Ways to run a causal language model step by step: packed, with the model's own cache, or by computing everything again.

All take a `Step` and return the logits after the last token of each chunk that wants them. Which one a model can use is found out by trying it
against the model's plain forward pass (`decoder_check.py`).
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meshwright.core.errors import RequestError
from meshwright.execute.apply import AppliedPlan
from meshwright.execute.pipeline_forward import Inputs, PipelineForward
from meshwright.serve.compiled_attention import AttentionSite
from meshwright.serve.decode_batch import DecodeBatch, choose_kernels
from meshwright.serve.decode_graphs import DecodeGraphs
from meshwright.serve.kv_memory import KVMemory
from meshwright.serve.packed_attention import DEFAULT_OPTIONS, AttentionOptions, PackedBatch
from meshwright.serve.steps import Chunk, Step

# Arguments of transformers' attention functions that change nothing here: positions are the batch's own, dropout is off.
_HARMLESS = {"dropout", "position_ids", "use_cache", "cache_position", "is_causal", "layer_idx"}
_KNOWN = _HARMLESS | {"scaling", "softcap", "sliding_window"}
_MOST_REPEATS = 16  # tokens that come late to the host at most
_attention_names = itertools.count()


class Decoder(Protocol):
    """Runs steps. `memory` has pages to allocate, if the decoder keeps keys and values in them. `splits_prompts`: a prompt may come in several
    chunks, a sequence may begin again with what it has generated, and go back by some tokens."""

    @property
    def memory(self) -> KVMemory | None: ...

    @property
    def splits_prompts(self) -> bool: ...

    @property
    def most_repeats(self) -> int:
        """How often it can repeat a step of next tokens by itself."""

    def forward(self, step: Step) -> Tensor:
        """Logits (chunks that want them, vocabulary)."""

    def close(self) -> None: ...


class UnsupportedAttentionError(RequestError):
    """The model's attention does something that packed attention does not."""


class PackedDecoder:
    """Runs all chunks in one pass without padding. For models of transformers whose attention is a replaceable function, and for any model whose
    forward takes `positions`, `attend` and `rows`, as the zoo's do ([Note: models that attend]).

    [Note: models that attend]
    `model(tokens, positions=…, attend=…, rows=…)`: tokens and positions are (1, N); each attention layer calls `attend(layer, query, key, value)`
    with its index and tensors (heads, N, width), and gets (N, heads, width); logits are computed for `rows` of the N alone.
    """

    memory: KVMemory
    splits_prompts = True
    most_repeats = 1

    def __init__(self, applied: AppliedPlan, page_tokens: int, device: torch.device) -> None:
        self.memory = KVMemory(page_tokens, device)
        model = self._model = applied.model
        self._batch: PackedBatch | DecodeBatch | None = None
        self._graphs: DecodeGraphs | None = None
        parameters = inspect.signature(model.forward).parameters
        self._is_own = "attend" in parameters
        if not self._is_own and not getattr(model, "_supports_attention_backend", False):
            raise UnsupportedAttentionError(f"{type(model).__name__} computes its attention itself")
        self._keeps_rows = "logits_to_keep" in parameters
        self._restore = (lambda: None) if self._is_own else self._take_attention()
        self._pipeline = PipelineForward(applied, self._logits, _example_inputs) if applied.pipeline is not None else None
        self._compiled: Any = None
        if applied.plan.compile == "model":
            self._site = AttentionSite(self._attend)
            options: Any = {"coordinate_descent_tuning": True} if device.type == "cuda" else {}  # products of one row need it
            self._compiled = torch.compile(self._logits_of_tensors, options=options)

    def use_graphs(self, most_rows: int, context: int) -> str:
        """From now on, run steps of single tokens for up to so many sequences in fixed shapes, repeated without the host where that is possible.
        Memory is allocated before. Returns why the model is not compiled or its steps are not captured, if they should be and cannot."""
        problems = []
        for attempt in ("compiled", "captured") if self._compiled is not None else ("captured",):
            self._graphs = DecodeGraphs(self._run, self.memory, choose_kernels(self.memory.device), most_rows, context, self.memory.num_pages)
            self.most_repeats = _MOST_REPEATS
            try:
                self._graphs.capture_all()
                break
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # of the compiler, or of operations that no graph can hold
                problems.append(f"not {attempt}: {' '.join(str(error).split())[:200]}")
                self._graphs, self.most_repeats, self._compiled = None, 1, None
        return "; ".join(problems)

    def forward(self, step: Step) -> Tensor:
        if not step.chunks:
            return torch.empty(0)
        if self._graphs is None:
            return self._run(PackedBatch(step.chunks, self.memory))
        tokens, rest = self._graphs.split(step)
        found = [self._graphs.run(tokens)] if tokens.chunks else []
        if rest.chunks:
            found.append(self._run(PackedBatch(rest.chunks, self.memory)))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _run(self, batch: PackedBatch | DecodeBatch) -> Tensor:
        self._batch = batch
        try:
            inputs = {"tokens": batch.tokens, "positions": batch.positions, "rows": batch.logit_rows}
            if self._is_compiled_for(batch):
                return self._compiled(*inputs.values())  # type: ignore[no-any-return]
            if self._pipeline is None:
                return self._logits(self._model, inputs)
            return self._pipeline.run(inputs, inputs["tokens"].shape[1], len(inputs["rows"]))
        finally:
            self._batch = None

    def _is_compiled_for(self, batch: PackedBatch | DecodeBatch) -> bool:
        """On a GPU only steps of fixed shapes: prompts of ever new lengths would be compiled again."""
        return self._compiled is not None and self.memory.is_allocated and (self.memory.device.type == "cpu" or isinstance(batch, DecodeBatch))

    def close(self) -> None:
        self._restore()
        self.memory.free()

    def _logits_of_tensors(self, tokens: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        return self._logits(self._model, {"tokens": tokens, "positions": positions, "rows": rows})

    def _logits(self, model: Any, inputs: Inputs) -> Tensor:
        """Logits of the rows that are asked for. Where shapes are inferred, `model` is a copy without values, and attends on its own."""
        tokens, positions, rows = inputs["tokens"], inputs["positions"], inputs["rows"]
        if self._is_own:
            attend = self._attend_layer if self._batch is not None and model is self._model else None
            return model(tokens, positions=positions, attend=attend, rows=rows)[0]  # type: ignore[no-any-return]
        kept = {"logits_to_keep": rows} if self._keeps_rows else {}
        logits: Tensor = model(input_ids=tokens, position_ids=positions, use_cache=False, **kept).logits
        return logits[0] if kept else logits[0, rows]

    def _take_attention(self) -> Callable[[], None]:
        """Make the model's layers call this decoder's attention; returns what undoes it."""
        from transformers import AttentionInterface

        name = f"meshwright_packed_{next(_attention_names)}"
        model: Any = self._model
        before = model.config._attn_implementation
        AttentionInterface.register(name, self._attention)
        model.set_attn_implementation(name)

        def restore() -> None:
            model.set_attn_implementation(before)
            AttentionInterface._global_mapping.pop(name, None)

        return restore

    def _attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        """transformers' attention function: query, key and value (1, heads, tokens, width); returns (1, tokens, heads, width)."""
        for name, given in options.items():
            if name not in _KNOWN and not name.startswith("output_") and given is not None:
                raise UnsupportedAttentionError(f"{type(module).__name__} gives its attention {name}")
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or not getattr(module, "is_causal", True) or attention_mask is not None:
            raise UnsupportedAttentionError(f"{type(module).__name__} is no causal self-attention with a layer index")
        chosen = AttentionOptions(options.get("scaling"), options.get("sliding_window") or 0, options.get("softcap") or 0.0)
        return self._attend_layer(layer, query[0], key[0], value[0], chosen).unsqueeze(0), None

    def _attend_layer(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions = DEFAULT_OPTIONS) -> Tensor:
        if self._compiled is not None and torch.compiler.is_compiling():
            return self._site.attend(layer, query, key, value, options)
        return self._attend(layer, query, key, value, options)

    def _attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        assert self._batch is not None
        return self._batch.attend(layer, query, key, value, options)


class CachedDecoder:
    """Runs each sequence on its own, with the cache that transformers makes for the model. For attention with biases of its own (ALiBi, relative
    positions), and for encoder–decoders: the encoder reads the prompt, and the decoder begins with its start token."""

    memory = None
    splits_prompts = False
    most_repeats = 1

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        parameters = inspect.signature(model.forward).parameters
        if "past_key_values" not in parameters or not hasattr(model, "config"):
            raise UnsupportedAttentionError(f"{type(model).__name__} takes no cache")
        self._model: Any = model
        self._device = device
        self._options = {"use_cache": True, **({"logits_to_keep": 1} if "logits_to_keep" in parameters else {})}
        self._caches: dict[int, dict[str, Any]] = {}  # by sequence: the arguments that continue it
        self.has_encoder = is_encoder_decoder(model)

    def forward(self, step: Step) -> Tensor:
        for sequence in step.ended:
            self._caches.pop(sequence, None)
        found = [self._run(chunk) for chunk in step.chunks]
        wanted = [logits for chunk, logits in zip(step.chunks, found, strict=True) if chunk.num_logits]
        return torch.stack(wanted) if wanted else torch.empty(0)

    def close(self) -> None:
        self._caches.clear()

    def _run(self, chunk: Chunk) -> Tensor:
        tokens = torch.tensor([chunk.tokens], device=self._device)
        given = self._caches.get(chunk.sequence, {}) if chunk.start else {}
        if self.has_encoder and not chunk.start:
            given = {"encoder_outputs": self._model.get_encoder()(input_ids=tokens)}
            tokens = torch.tensor([[decoder_start(self._model)]], device=self._device)
        out = self._model(**{"decoder_input_ids" if self.has_encoder else "input_ids": tokens}, **given, **self._options)
        self._caches[chunk.sequence] = {**given, "past_key_values": out.past_key_values}
        return out.logits[0, -1]  # type: ignore[no-any-return]


class RecomputeDecoder:
    """Runs each sequence whole in every step: for models without any cache. Slow, and right for any model."""

    memory = None
    splits_prompts = True
    most_repeats = 1

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self._tokens: dict[int, list[int]] = {}

    def forward(self, step: Step) -> Tensor:
        for sequence in step.ended:
            self._tokens.pop(sequence, None)
        by_length: dict[int, list[tuple[int, list[int]]]] = {}
        for place, chunk in enumerate(step.chunks):
            tokens = self._tokens[chunk.sequence] = [*self._tokens.get(chunk.sequence, ())[: chunk.start], *chunk.tokens]
            if chunk.num_logits:
                by_length.setdefault(len(tokens), []).append((place, tokens))
        found: dict[int, Tensor] = {}
        for group in by_length.values():  # sequences of one length are a batch
            logits = plain_logits(self._model, torch.tensor([tokens for _, tokens in group], device=self._device))
            found.update((place, logits[i, -step.chunks[place].num_logits :]) for i, (place, _) in enumerate(group))
        return torch.cat([found[place] for place in sorted(found)]) if found else torch.empty(0)

    def close(self) -> None:
        self._tokens.clear()


def is_encoder_decoder(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def decoder_start(model: nn.Module) -> int:
    """The token with which an encoder–decoder's answers begin."""
    for holder in (getattr(model, "generation_config", None), model.config):
        for name in ("decoder_start_token_id", "bos_token_id", "pad_token_id"):
            token = getattr(holder, name, None)
            if isinstance(token, int):
                return token
    raise RequestError(f"{type(model).__name__} has no decoder_start_token_id: set it in the folder's config.json")


def _example_inputs(count: int) -> Inputs:
    """Packed tokens of one sequence, with all logits."""
    positions = torch.arange(count)
    return {"tokens": torch.zeros((1, count), dtype=torch.int64), "positions": positions.unsqueeze(0), "rows": positions}


def make_plain_forward(applied: AppliedPlan) -> Callable[[Tensor], Tensor]:
    """Logits (S, vocabulary) of tokens (1, S) by a forward pass without any cache, under the plan."""
    if applied.pipeline is None:
        return lambda tokens: plain_logits(applied.model, tokens)[0]
    forward = PipelineForward(applied, lambda model, inputs: plain_logits(model, inputs["tokens"])[0], _example_inputs)
    return lambda tokens: forward.run({"tokens": tokens}, tokens.shape[1], tokens.shape[1])


def plain_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Logits (B, S, vocabulary) of a forward pass without any cache."""
    if hasattr(model, "config") and "use_cache" in inspect.signature(model.forward).parameters:
        return model(input_ids=tokens, use_cache=False).logits  # type: ignore[no-any-return]
    return model(tokens)  # type: ignore[no-any-return]


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Without gradients, in evaluation mode."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
