"""Forward passes of a model that is split into pipeline stages, for inference: tokens of any number go through all stages, one after the other.

What stands in for the modules of earlier stages must have the right shapes. They are inferred from fake passes with two numbers of tokens; each
size is then linear in the number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.errors import RequestError
from meshwright.execute.apply import AppliedPlan
from meshwright.execute.pipeline_parallel import StageShapes, TensorMeta
from meshwright.execute.stage_placeholders import PlaceholderTree, SkippedCall

Inputs = Mapping[str, Tensor]
_SAMPLED = (24, 40)  # numbers of tokens


class PipelineForward:
    """`forward(model, inputs)` computes the result from the model's unchanged code; `make_inputs(n)` gives inputs of n tokens, all of whose rows are
    wanted."""

    def __init__(self, applied: AppliedPlan, forward: Callable[[nn.Module, Inputs], Tensor], make_inputs: Callable[[int], Inputs]) -> None:
        assert applied.pipeline is not None
        self._runtime, self._groups, self._model = applied.pipeline, applied.groups, applied.model
        self._forward = forward
        if len(applied.plan.stages) != applied.plan.mesh.pp:
            raise RequestError(f"inference has one stage a rank, and the plan has {len(applied.plan.stages)} stages for pp={applied.plan.mesh.pp}")
        self._few, self._many = (applied.pipeline.infer_shapes(forward, make_inputs(count), nullcontext) for count in _SAMPLED)

    def run(self, inputs: Inputs, count: int, rows: int) -> Tensor:
        """The result for inputs of `count` tokens, on every rank of the pipeline: `rows` of what `forward` gives for each token. Collective."""
        comm, stage = self._groups.pp, self._groups.pp.rank
        shapes = _between(self._few, self._many, count)
        device = self._runtime.p2p_device
        received: tuple[Tensor, ...] = ()
        stages = self._runtime.plan.stages
        if stage:
            metas = [shapes.boundary_metas[a.name] for a in stages[stage].boundary_activations]
            received = tuple(torch.empty(m.shape, dtype=m.dtype, device=device) for m in metas)
            comm.exchange([], [(stage - 1, tensor) for tensor in received], f"activations/{stage}").wait()
        out = self._runtime.run_stage(stage, received, shapes, lambda: self._forward(self._model, inputs))
        if stage < comm.size - 1:
            comm.exchange([(stage + 1, tensor.contiguous()) for tensor in out], [], f"activations/{stage + 1}").wait()
            meta = shapes.loss
            out = torch.empty((rows, *meta.shape[1:]), dtype=meta.dtype, device=self._runtime.plan.device)
        result: Tensor = out.contiguous()
        comm.sync.broadcast(result, "logits", comm.size - 1).wait()
        return result


def _between(few: StageShapes, many: StageShapes, count: int) -> StageShapes:
    """The shapes for `count` tokens."""
    return StageShapes(
        {
            name: tuple(_call(a, b, count) for a, b in zip(few.skipped_calls[name], many.skipped_calls[name], strict=True))
            for name in few.skipped_calls
        },
        {name: _meta(meta, many.boundary_metas[name], count) for name, meta in few.boundary_metas.items()},
        _meta(few.loss, many.loss, count),
    )


def _call(few: SkippedCall, many: SkippedCall, count: int) -> SkippedCall:
    return SkippedCall(few.module, *(_tree(getattr(few, key), getattr(many, key), count) for key in ("args", "kwargs", "output")))


def _tree(few: PlaceholderTree, many: PlaceholderTree, count: int) -> PlaceholderTree:
    leaves: list[Any] = []
    for a, b in zip(few.leaves, many.leaves, strict=True):
        leaves.append(partial(a.func, _shape(a.args[0], b.args[0], count), **a.keywords) if isinstance(a, partial) else a)
    return PlaceholderTree(tuple(leaves), few.spec)


def _meta(few: TensorMeta, many: TensorMeta, count: int) -> TensorMeta:
    return replace(few, shape=_shape(few.shape, many.shape, count))


def _shape(few: tuple[int, ...], many: tuple[int, ...], count: int) -> tuple[int, ...]:
    first, second = _SAMPLED
    return tuple(a + (b - a) * (count - first) // (second - first) for a, b in zip(few, many, strict=True))
