"""Table parallelism: each embedding table is on one rank of the `ep` axis. All lookups of a forward pass share one all-to-all of indices and one
of rows.

[Note: lookups in one exchange]
A model looks up its tables one by one. To batch the lookups, the module around all tables first does a dry run with table stubs that only record
their indices; the last lookup ends the dry run. The queries go to the ranks that hold the tables in one all-to-all, and the rows come back in
another. Then the module runs for real, with stubs that return these rows. Indices do not depend on anything learned (the planner checks this), so
a dry run without the tables' values records the same indices. It needs no other learned values either: it uses meta tensors for them and costs
next to nothing. If the code reads such values, the dry run uses real tensors.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from meshwright.core.comm import Comm
from meshwright.core.errors import RunError
from meshwright.core.expert_policy import ExpertPolicy
from meshwright.execute.all_to_all import all_to_all, all_to_all_no_grad
from meshwright.execute.recompute_runtime import RecomputeCache


class _QueriesCollectedError(BaseException):
    """Ends a dry run when all queries are recorded. Not an Exception, so that no handler in a model's code catches it."""


@dataclass(frozen=True)
class _LookupQuery:
    """One recorded call of a table. Its result has one row per index or, for an EmbeddingBag, one row per bag."""

    table: str
    indices: Tensor
    shape: tuple[int, ...]  # of the result

    @property
    def num_rows(self) -> int:
        return self.shape[0] if len(self.shape) == 2 else self.indices.numel()


class TableParallelForward:
    """The forward of the module around all tables (see [Note: lookups in one exchange])."""

    def __init__(self, container: nn.Module, modules: Mapping[str, nn.Module], policy: ExpertPolicy, comm: Comm, cache: RecomputeCache) -> None:
        self.container, self.policy, self.comm, self.cache = container, policy, comm, cache
        self.name = policy.lookup_module or "model"
        self.original_forward = container.forward
        self.tables = {t.module: modules[t.module] for t in policy.tables}
        self.table_forwards = {name: table.forward for name, table in self.tables.items()}
        self._queries: list[_LookupQuery] | None = None
        self._meta_suffices = True  # the dry run may use meta tensors for learned values
        self._meta_mode = _MetaTensorMode()
        self._results: deque[tuple[str, Tensor]] = deque()
        rank_of = {t.module: t.ep_rank for t in policy.tables}
        self.lookups_by_rank = sorted(range(len(policy.lookups)), key=lambda i: rank_of[policy.lookups[i].module])  # queries in send order
        self.lookups_per_rank = [len(policy.lookups_on(rank)) for rank in range(comm.size)]
        for name, table in self.tables.items():
            table.forward = self._make_table_stub(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        queries = self._collect_queries(args, kwargs)
        results = dict(zip(self.lookups_by_rank, self._exchange_lookups([queries[i] for i in self.lookups_by_rank]), strict=True))
        self._results = deque((query.table, results[i]) for i, query in enumerate(queries))
        try:
            return self.original_forward(*args, **kwargs)
        finally:
            self._results.clear()

    def _make_table_stub(self, name: str) -> Any:
        def forward(input: Tensor) -> Tensor:  # torch's name of this argument
            if self._queries is None:
                return self._pop_result(name)
            table: Any = self.tables[name]
            shape = (*(input.shape[:1] if isinstance(table, nn.EmbeddingBag) else input.shape), table.embedding_dim)
            self._queries.append(_LookupQuery(name, input.clone(), shape))
            if len(self._queries) == len(self.policy.lookups):
                raise _QueriesCollectedError
            return torch.zeros(shape, dtype=table.weight.dtype, device="meta" if self._meta_suffices else input.device)

        return forward

    def _pop_result(self, name: str) -> Tensor:
        if not self._results or self._results[0][0] != name:
            raise RunError(f"table {name} was looked up outside the forward of {self.name}, or in another order than in its dry run: use dp instead")
        return self._results.popleft()[1]

    # -- queries --

    def _collect_queries(self, args: Any, kwargs: Any) -> list[_LookupQuery]:
        if self._meta_suffices:
            try:
                queries = self._dry_run(args, kwargs, self._meta_mode)
                self._meta_suffices = not any(q.indices.is_meta for q in queries)
            except Exception:  # an error of the model's own recurs in the dry run on real tensors
                self._meta_suffices = False
        if not self._meta_suffices:
            queries = self._dry_run(args, kwargs, nullcontext())
        tables, planned = [q.table for q in queries], [lookup.module for lookup in self.policy.lookups]
        if tables != planned:
            raise RunError(f"{self.name} looked up {tables}, and the plan has lookups of {planned}: plan again")
        return queries

    def _dry_run(self, args: Any, kwargs: Any, mode: AbstractContextManager[Any]) -> list[_LookupQuery]:
        queries = self._queries = []
        args, kwargs = pytree.tree_map(lambda t: t.clone() if torch.is_tensor(t) else t, (args, kwargs))  # code may change its inputs in place
        try:
            with torch.no_grad(), _preserve_state(self.container), mode:
                self.original_forward(*args, **kwargs)
        except _QueriesCollectedError:
            pass
        finally:
            self._queries = None
        return queries

    def _exchange_lookups(self, queries: list[_LookupQuery]) -> list[Tensor]:
        """Send queries, given in send order, to the ranks that hold their tables; return the rows that come back, in the same order."""
        comm, num_local = self.comm, self.lookups_per_rank[self.comm.rank]
        sizes = torch.tensor([(q.indices.numel(), q.num_rows) for q in queries], device=queries[0].indices.device)
        sizes = all_to_all_no_grad(sizes, comm, f"counts/{self.name}", [num_local] * comm.size, self.lookups_per_rank, self.cache)
        counts = sizes.view(comm.size, num_local, 2).tolist()  # (indices, rows) by sending rank, then by query
        indices = torch.cat([q.indices.reshape(-1).long() for q in queries])
        receives, sends = [sum(n for n, _ in c) for c in counts], self._sum_by_rank([q.indices.numel() for q in queries])
        received = all_to_all_no_grad(indices, comm, f"indices/{self.name}", receives, sends, self.cache).split([n for c in counts for n, _ in c])
        first = sum(self.lookups_per_rank[: comm.rank])
        local_queries = enumerate(queries[first : first + num_local])
        rows = [self._lookup_rows(q.table, list(received[i::num_local]), [c[i][1] for c in counts]) for i, q in local_queries]
        replies = [[row[rank].reshape(-1) for row in rows] for rank in range(comm.size)]
        sends = [sum(t.numel() for t in reply) for reply in replies]
        numels = [q.num_rows * q.shape[-1] for q in queries]
        flat = torch.cat([t for reply in replies for t in reply])
        results = all_to_all(flat, comm, f"results/{self.name}", self._sum_by_rank(numels), sends, self.cache)
        return [t.view(q.shape) for t, q in zip(results.split(numels), queries, strict=True)]

    def _sum_by_rank(self, sizes: list[int]) -> list[int]:
        """Sum the queries' sizes by the rank that holds their table."""
        remaining = iter(sizes)
        return [sum(itertools.islice(remaining, n)) for n in self.lookups_per_rank]

    def _lookup_rows(self, table: str, indices: list[Tensor], row_counts: list[int]) -> list[Tensor]:
        """One table's rows for every rank: one call for an Embedding; one per rank for an EmbeddingBag, since bags may differ in length."""
        look_up = self.table_forwards[table]
        if not isinstance(self.tables[table], nn.EmbeddingBag):
            return list(look_up(torch.cat(indices)).split(row_counts))
        return [look_up(bags.view(n, bags.numel() // n if n else 1)) for bags, n in zip(indices, row_counts, strict=True)]


class _MetaTensorMode(TorchFunctionMode):
    """Runs ops on learned values, and on their results, on the meta device. Caches output shapes: inferring them takes as long as a small matmul."""

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
        if in_place or not all(isinstance(argument, Hashable) for argument in call[2:]):
            return self._run_on_meta(func, leaves, spec)
        if call not in self._cache:
            self._cache[call] = self._run_on_meta(func, leaves, spec)
        return pytree.tree_map(lambda t: t.detach() if torch.is_tensor(t) else t, self._cache[call])

    def _run_on_meta(self, func: Any, leaves: list[Any], spec: Any) -> Any:
        args, kwargs = pytree.tree_unflatten([t.to("meta") if torch.is_tensor(t) else t for t in leaves], spec)
        return func(*args, **kwargs)


@contextmanager
def _preserve_state(module: nn.Module) -> Iterator[None]:
    """Restore RNG states and buffers on exit."""
    copies = [(b, b.clone()) for b in module.buffers()]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for buffer, copy in copies:
            buffer.copy_(copy)
