"""Expert and table parallelism: each rank of the `ep` axis keeps its share of the experts and embedding tables, and rows go there by all-to-all.

[Note: expert-parallel forward]
Pairs of a token and an expert are sorted by expert, so that the pairs for one rank are contiguous. Ranks first exchange the number of tokens per
expert, then the tokens. The module's own code runs on the local experts, with one choice of weight 1 per token, as if it had no other experts.
The results go back by all-to-all; there the routing weights are applied and each token's results are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from meshwright.core.comm import Comm
from meshwright.core.errors import RequestError
from meshwright.core.expert_policy import ExpertPolicy, MoELayer
from meshwright.execute.all_to_all import all_to_all, all_to_all_no_grad
from meshwright.execute.autograd_collectives import all_gather_uneven
from meshwright.execute.recompute_runtime import RecomputeCache
from meshwright.execute.table_parallel import TableParallelForward
from meshwright.execute.tensor_parallel import shard_tensors

_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class ExpertParallelShards:
    """How expert-parallel parameters are sharded: by parameter name, the rows of dim 0 that each rank of the `ep` axis holds."""

    comm: Comm
    policy: ExpertPolicy
    rows_per_rank: dict[str, tuple[int, ...]]

    def shard(self, name: str, full: Tensor) -> Tensor:
        """This rank's rows of a full tensor: some, all, or none."""
        mine = self.rows_per_rank[name]
        return full.narrow(0, sum(mine[: self.comm.rank]), mine[self.comm.rank]).clone()

    def unshard(self, name: str, shard: Tensor) -> Tensor:
        """The full tensor of a parameter that several ranks share; collective over them. A table is on one rank, which has all of it."""
        shares = self.rows_per_rank.get(name, ())
        return torch.cat(all_gather_uneven(shard, self.comm, 0, list(shares))) if sum(map(bool, shares)) > 1 else shard

    def holder_rank(self, name: str) -> int | None:
        """The one rank that has a parameter; None if all ranks have it, or a part of it."""
        shares = self.rows_per_rank.get(name, ())
        return next(i for i, n in enumerate(shares) if n) if sum(map(bool, shares)) == 1 else None


def shard_experts(
    model: nn.Module, optimizer: torch.optim.Optimizer, policy: ExpertPolicy, comm: Comm, cache: RecomputeCache, compiled: bool = False
) -> ExpertParallelShards:  # fmt: skip
    """Keep this rank's share of experts and tables, in place; `optimizer` steps that share only. Collective: every rank calls it with the same
    policy. A pipeline rank has the MoE layers of its own stages.

    If blocks will be `compiled`, all-to-alls are kept out of the graphs: the number of rows is known only at run time.
    """
    if optimizer.state:
        raise RequestError("expert-parallel ranks keep their part of the optimizer's state: apply the plan before the optimizer's first step")
    apart: _Decorator = torch.compiler.disable if compiled else lambda function: function
    parts = ExpertParallelShards(comm, policy, policy.rows_per_rank(comm.size))
    modules = dict(model.named_modules())
    mixtures = [m for m in policy.moe_layers if next(modules[m.module].parameters(), None) is not None]
    trials = [_MoEProbe(modules[m.module], m, comm.rank) for m in mixtures]
    shard_tensors(model, optimizer, parts.rows_per_rank, parts.shard)
    for mixture, trial in zip(mixtures, trials, strict=True):
        module = modules[mixture.module]
        module.forward = apart(_ExpertParallelForward(module, mixture, comm, cache, trial.find_expert_count_attrs()))
    if policy.tables:
        container = modules[policy.lookup_module]
        container.forward = apart(TableParallelForward(container, modules, policy, comm, cache))
    return parts


class _ExpertParallelForward:
    """An MoE layer's forward on one rank (see [Note: expert-parallel forward])."""

    def __init__(self, module: nn.Module, moe_layer: MoELayer, comm: Comm, cache: RecomputeCache, expert_count_attrs: tuple[str, ...]) -> None:
        self.module, self.moe_layer, self.comm, self.cache, self.expert_count_attrs = (module, moe_layer, comm, cache, expert_count_attrs)
        self.original_forward = module.forward
        self.num_local_experts = moe_layer.experts_per_rank[comm.rank]

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        mixture, comm, name = self.moe_layer, self.comm, self.moe_layer.module
        given = _MoEArguments(mixture, args, kwargs)
        tokens, choices = given.tokens, given.expert_ids
        flat = choices.reshape(-1)
        counts = torch.bincount(flat, minlength=mixture.num_experts)[: mixture.num_experts]  # an id past the last expert means no expert
        told = all_to_all_no_grad(counts, comm, f"counts/{name}", [self.num_local_experts] * comm.size, mixture.experts_per_rank, self.cache)
        arrivals = told.view(comm.size, self.num_local_experts)
        sends = [int(part.sum()) for part in counts.cpu().split(mixture.experts_per_rank)]
        receives = arrivals.sum(1).tolist()
        order = flat.argsort(stable=True)[: sum(sends)]
        home = order // choices.shape[1]
        rows = all_to_all(tokens[home], comm, f"tokens/{name}", receives, sends, self.cache)
        experts = torch.arange(self.num_local_experts, device=flat.device, dtype=flat.dtype).repeat(comm.size).repeat_interleave(arrivals.reshape(-1))
        results = all_to_all(self._run_local_experts(given, rows, experts), comm, f"results/{name}", sends, receives, self.cache)
        if given.routing_weights is not None:
            results = results * given.routing_weights.reshape(-1)[order].unsqueeze(1)
        return torch.zeros_like(tokens).index_add(0, home, results.to(tokens.dtype))

    def _run_local_experts(self, arguments: _MoEArguments, tokens: Tensor, experts: Tensor) -> Tensor:
        """Run the module's own code on the received tokens. Without any, its parameters get a zero gradient, because every parameter must get
        one."""
        if not tokens.shape[0]:
            return _ZeroExpertGrad.apply(tokens, *(p for p in self.module.parameters() if p.requires_grad))
        args, kwargs = arguments.with_tokens(tokens, experts)
        with _override_expert_count(self.module, self.expert_count_attrs, self.num_local_experts):
            out: Tensor = self.original_forward(*args, **kwargs)
        return out.to(tokens.dtype)


class _MoEArguments:
    """A call's arguments, and which of their tensors are tokens, expert ids and routing weights."""

    def __init__(self, moe_layer: MoELayer, args: Any, kwargs: Any) -> None:
        self.leaves, self.spec = pytree.tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(self.leaves) if torch.is_tensor(leaf)]
        self.leaf_indices = tuple(
            None if at is None else places[at] for at in (moe_layer.tokens_input, moe_layer.expert_ids_input, moe_layer.routing_weights_input)
        )
        found: list[Any] = [None if at is None else self.leaves[at] for at in self.leaf_indices]
        self.tokens, self.expert_ids, self.routing_weights = found

    def with_tokens(self, tokens: Tensor, experts: Tensor) -> Any:
        """The same call on other tokens, each with one expert of weight 1."""
        leaves = list(self.leaves)
        ones = None if self.routing_weights is None else self.routing_weights.new_ones((tokens.shape[0], 1))
        for at, value in zip(self.leaf_indices, (tokens, experts.unsqueeze(1), ones), strict=True):
            if at is not None:
                leaves[at] = value
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


# -- checks that a module can run on a part of its experts --


class _MoEProbe:
    """Runs a few tokens through an MoE layer before and after it is sharded: its code may depend on the number of experts, and may weight their
    results in its own way."""

    def __init__(self, module: nn.Module, moe_layer: MoELayer, rank: int) -> None:
        self.module, self.moe_layer, self.num_local_experts = module, moe_layer, moe_layer.experts_per_rank[rank]
        like = next(module.parameters())
        made = torch.randn(max(moe_layer.num_experts, 2), moe_layer.hidden_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.tokens = made.to(like.device, like.dtype)
        self.expert_ids = torch.arange(len(made), device=like.device) % moe_layer.num_experts
        first = moe_layer.first_expert(rank)
        whole = self._run(self.tokens, self.expert_ids.unsqueeze(1), 1.0)
        self.expected = whole[first : first + self.num_local_experts]
        if moe_layer.routing_weights_input is not None:
            pairs = torch.stack([self.expert_ids, self.expert_ids.roll(1)], 1)
            other = self._run(self.tokens, self.expert_ids.roll(1).unsqueeze(1), 1.0)
            if not _allclose(self._run(self.tokens, pairs, 0.5), 0.5 * whole + 0.5 * other):
                raise RequestError(f"ep: {moe_layer.module} does not add up its experts' results by their weights: use dp instead")
        self.tokens = self.tokens[first : first + self.num_local_experts]

    def find_expert_count_attrs(self) -> tuple[str, ...]:
        """The module's int attributes that must hold the number of local experts while the sharded module runs."""
        numbers = [key for key, value in vars(self.module).items() if type(value) is int and value == self.moe_layer.num_experts]
        choices = self.expert_ids[: self.num_local_experts].unsqueeze(1)
        for names in dict.fromkeys([*((n,) for n in numbers), tuple(numbers), ()]):
            try:
                with _override_expert_count(self.module, names, self.num_local_experts):
                    if _allclose(self._run(self.tokens, choices, 1.0), self.expected):
                        return names
            except (RuntimeError, IndexError, ValueError):
                continue
        raise RequestError(f"ep: the code of {self.moe_layer.module} does not run on a part of its experts: use dp instead")

    @torch.no_grad()
    def _run(self, tokens: Tensor, expert_ids: Tensor, weight: float) -> Tensor:
        given = {self.moe_layer.tokens_input: tokens, self.moe_layer.expert_ids_input: expert_ids}
        if self.moe_layer.routing_weights_input is not None:
            given[self.moe_layer.routing_weights_input] = torch.full(expert_ids.shape, weight, dtype=tokens.dtype, device=tokens.device)
        training = {m: m.training for m in self.module.modules()}
        self.module.eval()
        try:
            out: Tensor = self.module(*(given[at] for at in sorted(given)))
            return out
        finally:
            for module, was in training.items():
                module.training = was


def _allclose(a: Tensor, b: Tensor) -> bool:
    """Whether `a` and `b` are equal up to rounding; other experts' results would differ by their own size."""
    near = 0.05 if a.element_size() < 4 else 1e-3
    return a.shape == b.shape and bool((a - b).abs().nan_to_num().max() <= near * b.abs().nan_to_num().max())


@contextmanager
def _override_expert_count(module: nn.Module, names: tuple[str, ...], count: int) -> Iterator[None]:
    before = {name: vars(module)[name] for name in names}
    vars(module).update(dict.fromkeys(names, count))
    try:
        yield
    finally:
        vars(module).update(before)
