"""Owners of experts and tables, acting half: each rank of the `ep` axis keeps its part of what is owned, and rows travel to it.

[Note: a mixture at its owners]
Pairs of a token and an expert are sorted by expert, so that what goes to one owner lies together. How many go to each expert is told
first; then the tokens travel. The module's own code runs on its owner's experts, with one choice of weight 1 a token, as if it had no
others. What it gives travels home, and there the routing weights are applied and a token's results are added up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from meshwright.core.comm import Comm
from meshwright.core.errors import RequestError
from meshwright.core.owners import Mixture, OwnerPolicy
from meshwright.execute.exchange import exchange, exchange_numbers
from meshwright.execute.lookups import Lookups
from meshwright.execute.meet import gather_pieces
from meshwright.execute.recompute import Recall
from meshwright.execute.tensor import replace_tensors

_Apart = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class OwnedParts:
    """What was dealt out: by parameter name, how much of dim 0 each owner holds."""

    comm: Comm
    policy: OwnerPolicy
    rows: dict[str, tuple[int, ...]]

    def local(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor: some rows, all, or none."""
        mine = self.rows[name]
        return whole.narrow(0, sum(mine[: self.comm.rank]), mine[self.comm.rank]).clone()

    def whole(self, name: str, piece: torch.Tensor) -> torch.Tensor:
        """The whole of what several owners share. Collective over them. A table has one owner, who has all of it."""
        shares = self.rows.get(name, ())
        return torch.cat(gather_pieces(piece, self.comm, 0, list(shares))) if sum(map(bool, shares)) > 1 else piece

    def owner(self, name: str) -> int | None:
        """The one rank that has a parameter; None where all have it, or a part of it."""
        shares = self.rows.get(name, ())
        return next(i for i, n in enumerate(shares) if n) if sum(map(bool, shares)) == 1 else None


def own_parts(
    model: nn.Module, optimizer: torch.optim.Optimizer, policy: OwnerPolicy, comm: Comm, recall: Recall, compiled: bool = False
) -> OwnedParts:  # fmt: skip
    """Keep this rank's part, in place; `optimizer` steps that alone. Collective: every rank calls it with the same policy. Of a pipeline's
    ranks each has the mixtures of its stages.

    If blocks will be `compiled`, exchanges are kept out of the graphs: how many rows travel is known only when they do.
    """
    if optimizer.state:
        raise RequestError("owners keep their part of the optimizer's state: apply the plan before the optimizer's first step")
    apart: _Apart = torch.compiler.disable if compiled else lambda function: function
    parts = OwnedParts(comm, policy, policy.rows(comm.size))
    modules = dict(model.named_modules())
    mixtures = [m for m in policy.mixtures if next(modules[m.module].parameters(), None) is not None]
    trials = [_Trial(modules[m.module], m, comm.rank) for m in mixtures]
    replace_tensors(model, optimizer, parts.rows, parts.local)
    for mixture, trial in zip(mixtures, trials, strict=True):
        module = modules[mixture.module]
        module.forward = apart(_Experts(module, mixture, comm, recall, trial.counting()))
    if policy.tables:
        container = modules[policy.container]
        container.forward = apart(Lookups(container, modules, policy, comm, recall))
    return parts


class _Experts:
    """A mixture's forward on one rank (see [Note: a mixture at its owners])."""

    def __init__(self, module: nn.Module, mixture: Mixture, comm: Comm, recall: Recall, counting: tuple[str, ...]) -> None:
        self.module, self.mixture, self.comm, self.recall, self.counting = module, mixture, comm, recall, counting
        self.inner = module.forward
        self.mine = mixture.counts[comm.rank]

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        mixture, comm, name = self.mixture, self.comm, self.mixture.module
        given = _Given(mixture, args, kwargs)
        tokens, choices = given.tokens, given.choices
        flat = choices.reshape(-1)
        counts = torch.bincount(flat, minlength=mixture.experts)[: mixture.experts]  # a choice past the last expert means none
        told = exchange_numbers(counts, comm, f"counts/{name}", [self.mine] * comm.size, mixture.counts, self.recall)
        arrivals = told.view(comm.size, self.mine)
        sends = [int(part.sum()) for part in counts.cpu().split(mixture.counts)]
        receives = arrivals.sum(1).tolist()
        order = flat.argsort(stable=True)[: sum(sends)]
        home = order // choices.shape[1]
        rows = exchange(tokens[home], comm, f"tokens/{name}", receives, sends, self.recall)
        experts = torch.arange(self.mine, device=flat.device, dtype=flat.dtype).repeat(comm.size).repeat_interleave(arrivals.reshape(-1))
        results = exchange(self._run(given, rows, experts), comm, f"results/{name}", sends, receives, self.recall)
        if given.weights is not None:
            results = results * given.weights.reshape(-1)[order].unsqueeze(1)
        return torch.zeros_like(tokens).index_add(0, home, results.to(tokens.dtype))

    def _run(self, given: _Given, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """The module's own code on what came. When nothing did, its parameters have a gradient of zero, as everywhere else they have one."""
        if not rows.shape[0]:
            return _Idle.apply(rows, *(p for p in self.module.parameters() if p.requires_grad))  # type: ignore[no-any-return]
        args, kwargs = given.instead(rows, experts)
        with _counting(self.module, self.counting, self.mine):
            out: torch.Tensor = self.inner(*args, **kwargs)
        return out.to(rows.dtype)


class _Given:
    """A call's arguments, and which of their tensors are tokens, choices and weights."""

    def __init__(self, mixture: Mixture, args: Any, kwargs: Any) -> None:
        self.leaves, self.spec = pytree.tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(self.leaves) if torch.is_tensor(leaf)]
        self.places = tuple(None if at is None else places[at] for at in (mixture.tokens, mixture.choices, mixture.weights))
        found: list[Any] = [None if at is None else self.leaves[at] for at in self.places]
        self.tokens, self.choices, self.weights = found

    def instead(self, rows: torch.Tensor, experts: torch.Tensor) -> Any:
        """The same call on other tokens, each with one choice of weight 1."""
        leaves = list(self.leaves)
        ones = None if self.weights is None else self.weights.new_ones((rows.shape[0], 1))
        for at, value in zip(self.places, (rows, experts.unsqueeze(1), ones), strict=True):
            if at is not None:
                leaves[at] = value
        return pytree.tree_unflatten(leaves, self.spec)


class _Idle(torch.autograd.Function):
    """Experts that no token chose. Their gradients arrive all the same: buckets go in order, and others' are under way."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*parameters)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad, *(torch.zeros_like(p) for p in ctx.saved_tensors)


# -- does the module do what is assumed of it? --


class _Trial:
    """A few tokens through a mixture before and after it is cut: its code may count experts, and may weigh their results as it likes."""

    def __init__(self, module: nn.Module, mixture: Mixture, rank: int) -> None:
        self.module, self.mixture, self.mine = module, mixture, mixture.counts[rank]
        like = next(module.parameters())
        made = torch.randn(max(mixture.experts, 2), mixture.width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.tokens = made.to(like.device, like.dtype)
        self.every = torch.arange(len(made), device=like.device) % mixture.experts
        first = mixture.first(rank)
        whole = self._run(self.tokens, self.every.unsqueeze(1), 1.0)
        self.expected = whole[first : first + self.mine]
        if mixture.weights is not None:
            pairs = torch.stack([self.every, self.every.roll(1)], 1)
            other = self._run(self.tokens, self.every.roll(1).unsqueeze(1), 1.0)
            if not _close(self._run(self.tokens, pairs, 0.5), 0.5 * whole + 0.5 * other):
                raise RequestError(f"ep: {mixture.module} does not add up its experts' results by their weights: use dp instead")
        self.tokens = self.tokens[first : first + self.mine]

    def counting(self) -> tuple[str, ...]:
        """The module's own numbers that must count this rank's experts while it runs, now that it is cut."""
        numbers = [key for key, value in vars(self.module).items() if type(value) is int and value == self.mixture.experts]
        choices = self.every[: self.mine].unsqueeze(1)
        for names in dict.fromkeys([*((n,) for n in numbers), tuple(numbers), ()]):
            try:
                with _counting(self.module, names, self.mine):
                    if _close(self._run(self.tokens, choices, 1.0), self.expected):
                        return names
            except (RuntimeError, IndexError, ValueError):
                continue
        raise RequestError(f"ep: the code of {self.mixture.module} does not run on a part of its experts: use dp instead")

    @torch.no_grad()
    def _run(self, tokens: torch.Tensor, choices: torch.Tensor, weight: float) -> torch.Tensor:
        given = {self.mixture.tokens: tokens, self.mixture.choices: choices}
        if self.mixture.weights is not None:
            given[self.mixture.weights] = torch.full(choices.shape, weight, dtype=tokens.dtype, device=tokens.device)
        training = {m: m.training for m in self.module.modules()}
        self.module.eval()
        try:
            out: torch.Tensor = self.module(*(given[at] for at in sorted(given)))
            return out
        finally:
            for module, was in training.items():
                module.training = was


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal but for rounding; other experts' results would be off by their own size."""
    near = 0.05 if a.element_size() < 4 else 1e-3
    return a.shape == b.shape and bool((a - b).abs().nan_to_num().max() <= near * b.abs().nan_to_num().max())


@contextmanager
def _counting(module: nn.Module, names: tuple[str, ...], number: int) -> Iterator[None]:
    before = {name: vars(module)[name] for name in names}
    vars(module).update(dict.fromkeys(names, number))
    try:
        yield
    finally:
        vars(module).update(before)
