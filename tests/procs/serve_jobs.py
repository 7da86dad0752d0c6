"""What worker processes do in tests of inference: one rank of a replica that answers prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from meshwright.core.plan import Plan
from meshwright.core.serialization import from_data
from meshwright.execute.rank_device import setup_device
from meshwright.launch import Rendezvous, join_process_group, leave_process_group
from meshwright.serve.decoders import plain_logits
from meshwright.serve.loading import load_model
from meshwright.serve.model_source import ModelSource
from meshwright.serve.replica import StepSender, follow_steps, make_replica
from meshwright.serve.requests import SamplingParams


def answer(
    rank: int, world: int, init_method: str, source: dict[str, Any], plan: dict[str, Any], prompts: Sequence[list[int]], params: dict[str, Any]
) -> dict[str, Any]:  # fmt: skip
    """Load the model, answer all prompts together; the first rank has the answers, each rank says what it holds."""
    own = from_data(Plan, plan, "plan")
    join_process_group(Rendezvous(rank, world, init_method, own.backend, setup_device("cpu", 1).type, rank, 60.0))
    try:
        replica = make_replica(from_data(ModelSource, source, "source"), own)
        memory, model = replica.decoder.memory, replica.loaded.model
        held = {
            "decoding": replica.chosen.kind, "reasons": list(replica.chosen.reasons), "parameters": sum(p.numel() for p in model.parameters()),
            "kv_heads": sorted({shape.heads for shape in memory.shapes.values()}) if memory is not None else [],
            "kv_layers": len(memory.shapes) if memory is not None else 0,
        }  # fmt: skip
        if rank:
            follow_steps(replica.decoder, replica.loaded.applied.groups.world)
            return held
        engine = replica.make_engine(())
        found = {engine.submit(prompt, SamplingParams(**{"ignore_end": True, **params})).id: list[int]() for prompt in prompts}
        for event in engine.drain():
            found[event.request].append(event.token)
        assert isinstance(engine.runner, StepSender)
        engine.runner.stop()
        return {**held, "answers": list(found.values())}
    finally:
        leave_process_group()


def compiled(rank: int, world: int, init_method: str, source: dict[str, Any], plan: dict[str, Any], prompts: Sequence[list[int]]) -> dict[str, Any]:
    """Logits and gradients of a cut model, as it is and compiled whole; a graph break is an error."""
    own = from_data(Plan, plan, "plan")
    join_process_group(Rendezvous(rank, world, init_method, own.backend, setup_device("cpu", 1).type, rank, 60.0))
    try:
        made = from_data(ModelSource, source, "source")
        loaded = load_model(made, made.load_task(), own, torch.device("cpu"))
        model, ledger = loaded.model, loaded.applied.groups.ledger
        tokens = torch.tensor([prompts[0]])
        run = lambda tokens: plain_logits(model, tokens)  # noqa: E731
        found: dict[str, Any] = {}
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        for way, function in (("eager", run), ("compiled", torch.compile(run, fullgraph=True, backend="aot_eager"))):
            function(tokens).square().mean().backward()  # warm up
            model.zero_grad()
            ledger.drain()
            logits = function(tokens)
            logits.square().mean().backward()
            calls = sorted((line.name, line.op, line.calls, line.bytes) for line in ledger.drain())
            found[way] = (logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}, calls)
            model.zero_grad()
        (a, b, c), (x, y, z) = found["eager"], found["compiled"]
        worst = max(float((b[name] - y[name]).norm() / b[name].norm().clamp_min(1e-12)) for name in b)
        logits = float((a - x).abs().max())
        return {"logits": logits, "gradients": worst, "same_parameters": b.keys() == y.keys(), "same_calls": c == z, "calls": len(c)}
    finally:
        leave_process_group()
