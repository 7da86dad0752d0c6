"""Traces a model for the inference planner: with one prompt, with one token, and what its attention keeps of each token. Nothing is allocated."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.errors import RequestError
from meshwright.core.inference import InferenceModel, KVLayer
from meshwright.core.mesh import Mesh
from meshwright.core.plan import Plan
from meshwright.core.task import Batch, Field, Task
from meshwright.core.workload import Precision
from meshwright.describe import fake_tensors
from meshwright.describe.dataflow_tracer import trace_dataflow
from meshwright.describe.profile_tracer import trace_task
from meshwright.execute.apply import apply
from meshwright.serve.decoders import PackedDecoder, decoder_start, inference, is_encoder_decoder, plain_logits
from meshwright.serve.loading import PRECISIONS
from meshwright.serve.model_source import ModelSource
from meshwright.serve.steps import Chunk, Step

TRACED_TOKENS = 64  # of a dataflow: longer samples have the same
_KV_TOKENS = 3  # of the pass that shows the shapes of keys and values


def trace_inference_model(source: ModelSource, prompt_tokens: int, precision: Precision, device: str, *, split: bool) -> InferenceModel:
    """What the planner needs of a language model. `split`: it may be split over ranks, so its dataflow is traced too."""
    whole = source.load_task()
    if whole.tokens_per_sample is None:
        raise RequestError(
            f"{source.name} is no language model: kind=serve plans prompts and answers; `meshwright serve {source.name}` serves it as is"
        )
    prompt, token = (_inference_task(whole, tokens, precision) for tokens in (prompt_tokens, 1))
    traced = "fp64" if precision == "fp64" else "fp32"  # without autocast: the model itself has the precision
    flow = trace_dataflow(source.load_task(seq=min(whole.tokens_per_sample, TRACED_TOKENS))) if split else None
    return InferenceModel(
        name=whole.name,
        prompt=trace_task(prompt, precision=traced, device=device),
        token=trace_task(token, precision=traced, device=device),
        prompt_tokens=prompt_tokens,
        kv_layers=trace_kv_layers(prompt),
        flow=flow,
    )


def _inference_task(task: Task, tokens: int, precision: Precision) -> Task:
    """The model in the precision of serving, with the logits of a sequence for its loss. An encoder–decoder reads it, and begins its answer."""
    build, dtype = task.architecture if task.architecture is not None else task.build, PRECISIONS[precision]
    high = next((field.high for field in task.fields.values() if field.dtype == "int64"), 0)
    fields = {"tokens": Field((tokens,), "int64", high), "answer": Field((1,), "int64", high)}
    return replace(task, build=lambda: build().to(dtype), architecture=None, weights="", fields=fields, loss=_sum_of_logits, tokens_per_sample=tokens)


def _sum_of_logits(model: nn.Module, batch: Batch) -> Tensor:
    if is_encoder_decoder(model):
        logits: Tensor = model(input_ids=batch["tokens"], decoder_input_ids=batch["answer"], use_cache=False).logits
        return logits.sum()
    return plain_logits(model, batch["tokens"]).sum()


def trace_kv_layers(task: Task) -> tuple[KVLayer, ...]:
    """The keys and values that the model's attention keeps of a token: from a pass of packed tokens, or else from the cache that it makes itself.
    Empty for a model that keeps nothing."""
    model, mode = fake_tensors.cached_fake_model(task)
    with mode, fake_tensors.fake_parameters(model), fake_tensors.silence_torch_logging(), inference(model):
        try:
            return _packed_kv_layers(model)
        except Exception:  # a model's code meets arguments that it was not written for: another way is tried
            return _cached_kv_layers(model)


def _packed_kv_layers(model: nn.Module) -> tuple[KVLayer, ...]:
    decoder = PackedDecoder(apply(Plan("shapes", 1, Mesh()), model, None), _KV_TOKENS, torch.device("cpu"))
    try:
        decoder.forward(Step((Chunk(0, 0, (0,) * _KV_TOKENS),)))
        return tuple(KVLayer(s.heads, s.key_width, s.value_width) for _, s in sorted(decoder.memory.shapes.items()))
    finally:
        decoder.close()


def _cached_kv_layers(model: Any) -> tuple[KVLayer, ...]:
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        return ()
    tokens = torch.zeros((1, _KV_TOKENS), dtype=torch.int64)
    given = (
        {"input_ids": tokens, "decoder_input_ids": torch.full_like(tokens, decoder_start(model))}
        if is_encoder_decoder(model)
        else {"input_ids": tokens}
    )
    try:
        cache = model(**given, use_cache=True).past_key_values
        layers = getattr(cache, "self_attention_cache", cache).layers
        return tuple(KVLayer(layer.keys.shape[1], layer.keys.shape[-1], layer.values.shape[-1]) for layer in layers)
    except Exception:  # its cache has another form: its size is not known
        return ()
