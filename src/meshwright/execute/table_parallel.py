"""Tables at their owners: all lookups of a forward pass travel together, indices there and rows back.

[Note: lookups in one exchange]
A model looks its tables up one by one. So the module around them is first run dry, with tables that only note what they are asked;
when the last has been asked, that run is left. The questions travel to the owners in one exchange and the answers back in another,
and the module is run again, in earnest, with tables that give these answers. What they are asked does not depend on anything
learned (the planner sees to that), so a dry run without the tables' values asks the same. Nor need it compute anything else that is
learned: of that it has shapes only, and costs next to nothing. Code that looks at such values all the same is run dry as it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from meshwright.core.comm import Comm
from meshwright.core.errors import RunError
from meshwright.core.expert_policy import ExpertPolicy
from meshwright.execute.all_to_all import all_to_all, all_to_all_no_grad
from meshwright.execute.recompute_runtime import RecomputeCache


class _QueriesCollectedError(BaseException):
    """All questions are known. Not an Exception, so that no handler in a model's code keeps it."""


@dataclass(frozen=True)
class _LookupQuery:
    """What one call of a table asked: rows of the answer, one an index, or one a bag of them."""

    table: str
    indices: torch.Tensor
    shape: tuple[int, ...]  # of the answer

    @property
    def num_rows(self) -> int:
        return self.shape[0] if len(self.shape) == 2 else self.indices.numel()


class TableParallelForward:
    """The forward of the module around all tables (see [Note: lookups in one exchange])."""

    def __init__(
        self, container: nn.Module, modules: Mapping[str, nn.Module], policy: ExpertPolicy, comm: Comm, recompute_cache: RecomputeCache
    ) -> None:
        self.container, self.policy, self.comm, self.recompute_cache = container, policy, comm, recompute_cache
        self.name = policy.lookup_module or "model"
        self.original_forward = container.forward
        self.tables = {t.module: modules[t.module] for t in policy.tables}
        self.table_forwards = {name: table.forward for name, table in self.tables.items()}
        self._queries: list[_LookupQuery] | None = None
        self._meta_suffices = True  # a dry run may have shapes alone of what is learned
        self._meta_mode = _MetaTensorMode()
        self._results: deque[tuple[str, torch.Tensor]] = deque()
        owners = {t.module: t.ep_rank for t in policy.tables}
        self.lookups_by_rank = sorted(range(len(policy.lookups)), key=lambda i: owners[policy.lookups[i].module])  # the questions as they travel
        self.lookups_per_rank = [len(policy.lookups_on(owner)) for owner in range(comm.size)]
        for name, table in self.tables.items():
            table.forward = self._make_table_stub(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        questions = self._collect_queries(args, kwargs)
        answers = self._exchange_lookups([questions[i] for i in self.lookups_by_rank])
        found = dict(zip(self.lookups_by_rank, answers, strict=True))
        self._results = deque((q.table, found[i]) for i, q in enumerate(questions))
        try:
            return self.original_forward(*args, **kwargs)
        finally:
            self._results.clear()

    def _make_table_stub(self, name: str) -> Any:
        def forward(input: torch.Tensor) -> torch.Tensor:  # named as torch's own is
            if self._queries is None:
                return self._pop_result(name)
            table: Any = self.tables[name]
            lead = input.shape[:1] if isinstance(table, nn.EmbeddingBag) else input.shape
            self._queries.append(_LookupQuery(name, input.clone(), (*lead, table.embedding_dim)))
            if len(self._queries) == len(self.policy.lookups):
                raise _QueriesCollectedError
            return torch.zeros((*lead, table.embedding_dim), dtype=table.weight.dtype, device="meta" if self._meta_suffices else input.device)

        return forward

    def _pop_result(self, name: str) -> torch.Tensor:
        if not self._results or self._results[0][0] != name:
            raise RunError(f"{name} was looked up outside the forward of {self.name}, or in another order than at first: its owner was not asked")
        return self._results.popleft()[1]

    # -- asking --

    def _collect_queries(self, args: Any, kwargs: Any) -> list[_LookupQuery]:
        if self._meta_suffices:
            try:
                asked = self._dry_run(args, kwargs, self._meta_mode)
                self._meta_suffices = not any(q.indices.is_meta for q in asked)
            except Exception:  # whatever it is: if it does not come from here, the next run has it too
                self._meta_suffices = False
        if not self._meta_suffices:
            asked = self._dry_run(args, kwargs, nullcontext())
        if [q.table for q in asked] != [lookup.module for lookup in self.policy.lookups]:
            raise RunError(f"{self.name} looked up {[q.table for q in asked]}, and {len(self.policy.lookups)} other lookups were planned: plan again")
        return asked

    def _dry_run(self, args: Any, kwargs: Any, mode: AbstractContextManager[Any]) -> list[_LookupQuery]:
        asked = self._queries = []
        args, kwargs = pytree.tree_map(lambda t: t.clone() if torch.is_tensor(t) else t, (args, kwargs))  # code may change what it is given
        try:
            with torch.no_grad(), _preserve_state(self.container), mode:
                self.original_forward(*args, **kwargs)
        except _QueriesCollectedError:
            pass
        finally:
            self._queries = None
        return asked

    def _exchange_lookups(self, queries: list[_LookupQuery]) -> list[torch.Tensor]:
        """Questions in the order in which they travel; their answers."""
        comm, mine = self.comm, self.lookups_per_rank[self.comm.rank]
        device = queries[0].indices.device
        sizes = torch.tensor([(q.indices.numel(), q.num_rows) for q in queries], device=device)
        counts = all_to_all_no_grad(sizes, comm, f"counts/{self.name}", [mine] * comm.size, self.lookups_per_rank, self.recompute_cache)
        told = counts.view(comm.size, mine, 2).tolist()
        indices = torch.cat([q.indices.reshape(-1).long() for q in queries])
        receives, sends = [sum(n for n, _ in r) for r in told], self._sum_by_rank([q.indices.numel() for q in queries])
        there = all_to_all_no_grad(indices, comm, f"indices/{self.name}", receives, sends, self.recompute_cache)
        pieces = iter(there.split([n for r in told for n, _ in r]))
        parts = [[next(pieces) for _ in r] for r in told]  # by who asked, then by question
        first = sum(self.lookups_per_rank[: comm.rank])
        rows = [self._lookup_rows(q.table, [p[j] for p in parts], [r[j][1] for r in told]) for j, q in enumerate(queries[first : first + mine])]
        flat = [[row[r].reshape(-1) for row in rows] for r in range(comm.size)]
        sends = [sum(t.numel() for t in part) for part in flat]
        answers = [q.num_rows * q.shape[-1] for q in queries]
        home = all_to_all(
            torch.cat([t for part in flat for t in part]), comm, f"results/{self.name}", self._sum_by_rank(answers), sends, self.recompute_cache
        )
        return [t.view(q.shape) for t, q in zip(home.split(answers), queries, strict=True)]

    def _sum_by_rank(self, sizes: list[int]) -> list[int]:
        """Sizes of questions, added up by owner."""
        found = iter(sizes)
        return [sum(next(found) for _ in range(n)) for n in self.lookups_per_rank]

    def _lookup_rows(self, table: str, indices: list[torch.Tensor], row_counts: list[int]) -> list[torch.Tensor]:
        """One table's answers to every rank: a single call where each index is a row, else one for each rank, whose bags may be longer."""
        look_up = self.table_forwards[table]
        if not isinstance(self.tables[table], nn.EmbeddingBag):
            return list(look_up(torch.cat(indices)).split(row_counts))
        return [look_up(part.view(n, part.numel() // n if n else 1)) for part, n in zip(indices, row_counts, strict=True)]


class _MetaTensorMode(TorchFunctionMode):
    """While it runs, what is made of anything learned has a shape and no values. Shapes are found once for each call with the same ones:
    torch takes as long for it as for a small product."""

    def __init__(self) -> None:
        super().__init__()
        self._cache: dict[Any, Any] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "__get__":  # an attribute, such as a parameter's device
            return func(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if not any(torch.is_tensor(t) and (t.requires_grad or t.is_meta) for t in leaves):
            return func(*args, **kwargs)
        call = (func, spec, *((t.shape, t.dtype) if torch.is_tensor(t) else t for t in leaves))
        in_place = name.endswith("_") and not name.endswith("__")
        if in_place or not all(isinstance(part, Hashable) for part in call[2:]):
            return self._run_on_meta(func, leaves, spec)
        if call not in self._cache:
            self._cache[call] = self._run_on_meta(func, leaves, spec)
        return pytree.tree_map(lambda t: t.detach() if torch.is_tensor(t) else t, self._cache[call])

    def _run_on_meta(self, func: Any, leaves: list[Any], spec: Any) -> Any:
        args, kwargs = pytree.tree_unflatten([t.to("meta") if torch.is_tensor(t) else t for t in leaves], spec)
        return func(*args, **kwargs)


@contextmanager
def _preserve_state(module: nn.Module) -> Iterator[None]:
    """Random states and buffers are afterwards what they were."""
    kept = [(b, b.clone()) for b in module.buffers()]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for buffer, before in kept:
            buffer.copy_(before)
