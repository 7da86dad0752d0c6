"""Expert and table parallelism: each rank of the `ep` axis holds some of the experts and embedding tables, and all-to-alls send rows there.

[Note: expert-parallel forward]
Pairs of a token and an expert are sorted by expert, so that the pairs for one rank are contiguous. Ranks first exchange the number of tokens per
expert, then the tokens. The module's own code runs on the local experts, with one choice of weight 1 per token, as if it had no other experts.
The results go back by all-to-all; there the routing weights are applied and each token's results are summed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from meshwright.core.comm import Comm
from meshwright.core.errors import RequestError
from meshwright.core.expert_policy import ExpertPolicy, MoELayer
from meshwright.core.tensor_layout import TensorLayout
from meshwright.execute.all_to_all import all_to_all, all_to_all_no_grad
from meshwright.execute.module_hooks import eager_decorator
from meshwright.execute.placeholders import is_placeholder
from meshwright.execute.recompute_runtime import RecomputeCache
from meshwright.execute.table_parallel import TableParallelForward
from meshwright.execute.tensor_parallel import shard_tensors


@dataclass(frozen=True)
class ExpertParallelShards:
    """How expert-parallel parameters are sharded: by parameter name, the rows of dim 0 that each rank of the `ep` axis holds."""

    comm: Comm
    rows_per_rank: dict[str, tuple[int, ...]]

    def shard(self, name: str, full: Tensor) -> Tensor:
        """This rank's rows of a full tensor: some, all, or none."""
        rows = self.rows_per_rank[name]
        return full.narrow(0, sum(rows[: self.comm.rank]), rows[self.comm.rank]).clone()

    def layout(self, name: str, layout: TensorLayout) -> TensorLayout:
        """Where this rank's rows of a tensor with this layout lie in the whole one."""
        rows = self.rows_per_rank.get(name)
        return layout if rows is None else layout.cut(0, sum(rows), sum(rows[: self.comm.rank]), rows[self.comm.rank])


def shard_experts(
    model: nn.Module, optimizer: torch.optim.Optimizer, policy: ExpertPolicy, comm: Comm, cache: RecomputeCache, compiled: bool = False
) -> ExpertParallelShards:  # fmt: skip
    """Keep this rank's experts and tables, in place; `optimizer` steps these only. Collective: every rank calls it with the same policy. A
    pipeline rank has the MoE layers of its own stages.

    If blocks will be `compiled`, all-to-alls are kept out of the graphs: the number of rows is known only at run time.
    """
    if optimizer.state:
        raise RequestError("expert parallelism shards the optimizer's state: apply the plan before the optimizer's first step")
    eager = eager_decorator(compiled)
    shards = ExpertParallelShards(comm, policy.rows_per_rank(comm.size))
    modules = dict(model.named_modules())
    layers = [layer for layer in policy.moe_layers if next(modules[layer.module].parameters(), None) is not None]
    probes = [_MoEProbe(modules[layer.module], layer, comm.rank) for layer in layers]
    shard_tensors(model, optimizer, shards.rows_per_rank, shards.shard)
    for layer, probe in zip(layers, probes, strict=True):
        module = modules[layer.module]
        module.forward = eager(_ExpertParallelForward(module, layer, comm, cache, probe.find_expert_count_attrs()))
    if policy.tables:
        container = modules[policy.lookup_module]
        container.forward = eager(TableParallelForward(container, modules, policy, comm, cache))
    return shards


class _ExpertParallelForward:
    """An MoE layer's forward on one rank (see [Note: expert-parallel forward])."""

    def __init__(self, module: nn.Module, layer: MoELayer, comm: Comm, cache: RecomputeCache, expert_count_attrs: tuple[str, ...]) -> None:
        self.module, self.layer, self.comm, self.cache, self.expert_count_attrs = module, layer, comm, cache, expert_count_attrs
        self.original_forward = module.forward
        self.num_local_experts = layer.experts_per_rank[comm.rank]

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        layer, comm, cache, name = self.layer, self.comm, self.cache, self.layer.module
        call = _MoEArguments(layer, args, kwargs)
        ids = call.expert_ids.reshape(-1)
        counts = torch.bincount(ids, minlength=layer.num_experts)[: layer.num_experts]  # an id past the last expert means no expert
        recv_counts = all_to_all_no_grad(counts, comm, f"counts/{name}", [self.num_local_experts] * comm.size, layer.experts_per_rank, cache)
        sends = [int(rank_counts.sum()) for rank_counts in counts.cpu().split(layer.experts_per_rank)]
        receives = recv_counts.view(comm.size, self.num_local_experts).sum(1).tolist()
        order = ids.argsort(stable=True)[: sum(sends)]
        sources = order // call.expert_ids.shape[1]
        tokens = all_to_all(call.tokens[sources], comm, f"tokens/{name}", receives, sends, cache)
        experts = torch.arange(self.num_local_experts, device=ids.device, dtype=ids.dtype).repeat(comm.size).repeat_interleave(recv_counts)
        results = all_to_all(self._run_local_experts(call, tokens, experts), comm, f"results/{name}", sends, receives, cache)
        if call.routing_weights is not None:
            results = results * call.routing_weights.reshape(-1)[order].unsqueeze(1)
        return torch.zeros_like(call.tokens).index_add(0, sources, results.to(call.tokens.dtype))

    def _run_local_experts(self, call: _MoEArguments, tokens: Tensor, experts: Tensor) -> Tensor:
        """Run the module's own code on the received tokens. Without any, its parameters get zero gradients, because every parameter must get one."""
        if not tokens.shape[0]:
            return _ZeroExpertGrad.apply(tokens, *(p for p in self.module.parameters() if p.requires_grad))
        args, kwargs = call.with_tokens(tokens, experts)
        with _override_expert_count(self.module, self.expert_count_attrs, self.num_local_experts):
            return self.original_forward(*args, **kwargs).to(tokens.dtype)


class _MoEArguments:
    """A call's arguments, and which of their tensors are tokens, expert ids and routing weights."""

    def __init__(self, layer: MoELayer, args: Any, kwargs: Any) -> None:
        self.leaves, self.spec = pytree.tree_flatten((args, kwargs))
        tensors = [i for i, leaf in enumerate(self.leaves) if torch.is_tensor(leaf)]
        inputs = (layer.tokens_input, layer.expert_ids_input, layer.routing_weights_input)
        self.leaf_indices = tuple(None if i is None else tensors[i] for i in inputs)
        arguments: list[Any] = [None if i is None else self.leaves[i] for i in self.leaf_indices]
        self.tokens, self.expert_ids, self.routing_weights = arguments

    def with_tokens(self, tokens: Tensor, experts: Tensor) -> Any:
        """The same call on other tokens, each with one expert of weight 1."""
        leaves = list(self.leaves)
        ones = None if self.routing_weights is None else self.routing_weights.new_ones((tokens.shape[0], 1))
        for i, value in zip(self.leaf_indices, (tokens, experts.unsqueeze(1), ones), strict=True):
            if i is not None:
                leaves[i] = value
        return pytree.tree_unflatten(leaves, self.spec)


class _ZeroExpertGrad(torch.autograd.Function):
    """Gives zero gradients to experts that no token chose: buckets are reduced in order, and other ranks' are already in flight."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return tokens.view_as(tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, *(torch.zeros_like(p) for p in ctx.saved_tensors)


# -- checks that a module can run on some of its experts --


class _MoEProbe:
    """Runs tokens through an MoE layer before and after it is sharded: its code may depend on the number of experts, or weight their results.

    Parameters that have no values yet get one number for each expert meanwhile, which tells experts apart; one layer at a time is whole.
    """

    def __init__(self, module: nn.Module, layer: MoELayer, rank: int) -> None:
        self.module, self.layer, self.num_local_experts = module, layer, layer.experts_per_rank[rank]
        self.first = layer.first_expert(rank)
        param, generator = next(module.parameters()), torch.Generator().manual_seed(0)
        tokens = torch.randn(max(layer.num_experts, 2), layer.hidden_size, generator=generator, dtype=torch.float64).to(param)
        self.expert_ids = torch.arange(len(tokens), device=param.device) % layer.num_experts
        without_values = {name: p.data for name, p in module.named_parameters() if is_placeholder(p)}
        self._numbers = torch.rand(layer.num_experts, generator=generator).add_(0.5).div_(layer.hidden_size**0.5).to(param)
        self._numbered = [name for name in without_values if module.get_parameter(name).shape[0] == layer.num_experts]
        for name in self._numbered:
            number = self._numbers.view(-1, *[1] * (without_values[name].dim() - 1))
            module.get_parameter(name).data = number.expand(without_values[name].shape).contiguous()
        try:
            self._run_all(tokens)
        finally:
            for name, placeholder in without_values.items():
                module.get_parameter(name).data = placeholder

    def _run_all(self, tokens: Tensor) -> None:
        layer = self.layer
        results = self._run(tokens, self.expert_ids.unsqueeze(1), 1.0)
        if layer.routing_weights_input is not None:
            pairs = torch.stack([self.expert_ids, self.expert_ids.roll(1)], 1)
            others = self._run(tokens, pairs[:, 1:], 1.0)
            if not _allclose(self._run(tokens, pairs, 0.5), 0.5 * results + 0.5 * others):
                raise RequestError(f"ep: {layer.module} does not sum its experts' results by their weights: use dp instead")
        self.tokens, self.expected = (t[self.first : self.first + self.num_local_experts] for t in (tokens, results))

    def find_expert_count_attrs(self) -> tuple[str, ...]:
        """The module's int attributes that must hold the number of local experts while the sharded module runs."""
        candidates = [key for key, value in vars(self.module).items() if type(value) is int and value == self.layer.num_experts]
        expert_ids = self.expert_ids[: self.num_local_experts].unsqueeze(1)
        for param in map(self.module.get_parameter, self._numbered):
            param.data.copy_(self._numbers[self.first : self.first + len(param)].view(-1, *[1] * (param.dim() - 1)).expand(param.shape))
        for names in dict.fromkeys([*((n,) for n in candidates), tuple(candidates), ()]):
            try:
                with _override_expert_count(self.module, names, self.num_local_experts):
                    if _allclose(self._run(self.tokens, expert_ids, 1.0), self.expected):
                        return names
            except (RuntimeError, IndexError, ValueError):
                continue
        raise RequestError(f"ep: the code of {self.layer.module} does not run on some of its experts only: use dp instead")

    @torch.no_grad()
    def _run(self, tokens: Tensor, expert_ids: Tensor, weight: float) -> Tensor:
        inputs = {self.layer.tokens_input: tokens, self.layer.expert_ids_input: expert_ids}
        if self.layer.routing_weights_input is not None:
            inputs[self.layer.routing_weights_input] = torch.full(expert_ids.shape, weight, dtype=tokens.dtype, device=tokens.device)
        training = {m: m.training for m in self.module.modules()}
        self.module.eval()
        try:
            return self.module(*(inputs[i] for i in sorted(inputs)))
        finally:
            for module, was_training in training.items():
                module.training = was_training


def _allclose(a: Tensor, b: Tensor) -> bool:
    """Whether `a` and `b` are equal up to rounding; other experts' results would differ by their own size."""
    tolerance = 0.05 if a.element_size() < 4 else 1e-3
    return a.shape == b.shape and bool((a - b).abs().nan_to_num().max() <= tolerance * b.abs().nan_to_num().max())


@contextmanager
def _override_expert_count(module: nn.Module, names: tuple[str, ...], count: int) -> Iterator[None]:
    before = {name: vars(module)[name] for name in names}
    vars(module).update(dict.fromkeys(names, count))
    try:
        yield
    finally:
        vars(module).update(before)
