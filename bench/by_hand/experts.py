"""Expert parallelism: each rank holds half of the experts; all-to-alls send tokens to their experts and back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from by_hand.ours import Job, Step
from cases import Case, optimizer_of
from meshwright.core.mesh import Mesh
from rounds import Batch, Trial

_CASE = Case(batch=2, layers=2, vocab=2048)
_EXPERTS = 8


def experts(block: str, rank: int, world: int) -> Trial:
    job = Job(_mixtral, _loss, _CASE.data(0, 0), _CASE.batch)
    engines = job.engines(block, lambda: _expert_parallel(rank, world), job.plan(Mesh(ep=world)), ("gradients",))
    return Trial(list(engines), lambda number: _CASE.data(rank, number))


def _mixtral() -> nn.Module:
    import transformers

    sizes = {"num_hidden_layers": _CASE.layers, "hidden_size": _CASE.width, "intermediate_size": 2 * _CASE.width, "vocab_size": _CASE.vocab}
    heads = {"num_attention_heads": _CASE.heads, "num_key_value_heads": _CASE.heads // 2, "num_local_experts": _EXPERTS}
    config = transformers.MixtralConfig(**sizes, **heads)
    config._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    model: nn.Module = transformers.MixtralForCausalLM(config)
    return model


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    tokens = batch["tokens"]
    return F.cross_entropy(model(input_ids=tokens[:, :-1], use_cache=False).logits.flatten(0, 1), tokens[:, 1:].flatten())


def _expert_parallel(rank: int, world: int) -> Step:
    """DDP replicates all but the experts. A loss is a rank's mean, so an expert's gradient, a sum over all ranks' tokens, is divided by the ranks."""
    model: Any = _mixtral()
    for layer in model.model.layers:
        layer.mlp.experts = _Experts(layer.mlp.experts, rank, world)
    expert_parameters = {name: p for name, p in model.named_parameters() if ".experts." in name}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(expert_parameters))
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = optimizer_of(replica)

    def step(batch: Batch) -> Tensor:
        loss = _loss(replica, batch)
        loss.backward()
        torch._foreach_mul_([p.grad for p in expert_parameters.values() if p.grad is not None], 1.0 / world)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


class _Experts(nn.Module):
    def __init__(self, full: Any, rank: int, world: int) -> None:
        super().__init__()
        self.num_local, self.world = _EXPERTS // world, world
        self.gate_up, self.down = (nn.Parameter(w.detach().chunk(world)[rank].clone()) for w in (full.gate_up_proj, full.down_proj))

    def forward(self, tokens: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
        flat = choices.flatten()
        order = flat.argsort(stable=True)
        token_index = order // choices.shape[1]
        counts = flat.bincount(minlength=_EXPERTS)
        received_counts = torch.empty_like(counts)
        dist.all_to_all_single(received_counts, counts)
        received_counts = received_counts.view(self.world, self.num_local)
        sends, receives = counts.view(self.world, -1).sum(1).tolist(), received_counts.sum(1).tolist()
        rows = _Exchange.apply(tokens[token_index], sends, receives)
        results = _Exchange.apply(self._run(rows, received_counts), receives, sends)
        results = results * weights.flatten()[order].unsqueeze(1)
        return torch.zeros_like(tokens).index_add_(0, token_index, results)

    def _run(self, rows: Tensor, received_counts: Tensor) -> Tensor:
        """Rows arrive by rank, then by expert; they are sorted by expert."""
        experts = torch.arange(self.num_local).repeat(self.world).repeat_interleave(received_counts.flatten())
        order = experts.argsort(stable=True)
        ends = received_counts.sum(0).cumsum(0).to(torch.int32)
        gate, up = F.grouped_mm(rows[order], self.gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
        outputs = F.grouped_mm(F.silu(gate) * up, self.down.transpose(1, 2), offs=ends)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order))
        return outputs[inverse]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sends: list[int], receives: list[int]) -> Tensor:
        ctx.sends, ctx.receives = sends, receives
        return _all_to_all(x, sends, receives)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return _all_to_all(grad.contiguous(), ctx.receives, ctx.sends), None, None


def _all_to_all(x: Tensor, sends: list[int], receives: list[int]) -> Tensor:
    out = x.new_empty((sum(receives), *x.shape[1:]))
    dist.all_to_all_single(out, x, receives, sends)
    return out
