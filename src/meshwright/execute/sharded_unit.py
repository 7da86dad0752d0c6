"""Units of ZeRO-3: modules whose parameters are unsharded and resharded together, and the order in which they run."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from meshwright.core.comm import Comm
from meshwright.core.errors import RequestError
from meshwright.core.plan import Plan
from meshwright.execute.flat_buffer import FlatBuffer, FlatBufferFactory
from meshwright.execute.process_groups import ProcessGroups

ROOT = "root"  # the unit of parameters that are in no other unit


@dataclass
class ShardedUnit:
    """A module whose parameters are gathered together; the rest of the model is one unit too."""

    name: str
    flat_buffers: tuple[FlatBuffer, ...]
    is_expert_parallel: bool
    is_unsharded: bool = False  # parameters are views of gathered values
    in_backward: bool = False
    last_backward_id: int = -1  # autograd's graph task id of the last backward in which all its gradients have arrived
    prev_unit: ShardedUnit | None = None
    next_unit: ShardedUnit | None = None

    @property
    def has_frozen_params(self) -> bool:
        """Whether some parameters are frozen: backward may then need values after the last gradient has arrived."""
        return any(not flat.optimizer_shards for flat in self.flat_buffers)

    def start_unshard(self, comm: Comm) -> None:
        """Launch the all-gathers, unless the values are gathered or in flight."""
        for flat in self.flat_buffers if not self.is_unsharded else ():
            flat.start_unshard(comm, self.name)

    def unshard(self, comm: Comm) -> None:
        if self.is_unsharded:
            return
        self.start_unshard(comm)
        for flat in self.flat_buffers:
            flat.finish_unshard()
        self.is_unsharded = True

    def reshard(self) -> None:
        for flat in self.flat_buffers if self.is_unsharded else ():
            flat.reshard()
        self.is_unsharded = False

    def discard_prefetched(self, comm: Comm) -> None:
        """Drop values that were prefetched and not used: the optimizer's step has made them stale."""
        if any(flat.pending_gather is not None for flat in self.flat_buffers):
            self.unshard(comm)
        self.reshard()

    def end_backward(self, backward_id: int) -> None:
        self.reshard()
        self.in_backward, self.last_backward_id = False, backward_id
        for flat in self.flat_buffers:
            flat.await_gradients()


def make_units(
    model: nn.Module, plan: Plan, groups: ProcessGroups, factory: FlatBufferFactory, tied: Collection[str]
) -> Iterator[tuple[ShardedUnit, nn.Module]]:  # fmt: skip
    """Yield every unit with its module; a parameter is in the first unit that contains it. `tied` parameters are shared by pipeline stages."""
    names = {id(p): name for name, p in model.named_parameters()}
    experts = _expert_units(model, plan) if groups.ep.size > 1 else []
    units = _stage_units(model, plan, groups) if groups.pp.size > 1 else [*plan.memory.units, ""]
    remaining = {id(p) for p in model.parameters() if p.numel()}
    for name in dict.fromkeys([*experts, *units]):
        module = model.get_submodule(name)
        params = [p for p in module.parameters() if id(p) in remaining]
        remaining -= {id(p) for p in params}
        if params:
            tied_names = {id(p): names[id(p)] for p in params if names[id(p)] in tied}
            yield ShardedUnit(name or ROOT, factory.make(params, tied_names), name in experts), module


def link_units(units: Sequence[ShardedUnit]) -> None:
    """Set each unit's predecessor and successor, for prefetching. The root unit's code runs around all others."""
    chain = [unit for unit in units if not unit.is_expert_parallel and unit.name != ROOT]
    for unit, next_unit in itertools.pairwise(chain):
        unit.next_unit, next_unit.prev_unit = next_unit, unit
    root = next((unit for unit in units if unit.name == ROOT), None)
    if root is not None and chain:
        root.next_unit, root.prev_unit = chain[0], chain[-1]


def _expert_units(model: nn.Module, plan: Plan) -> list[str]:
    """MoE layers of which this rank holds experts. They are units of their own, because their replicas are on other ranks than those of the rest."""
    param_names = {m.module: [n for n, _ in model.get_submodule(m.module).named_parameters()] for m in plan.expert.moe_layers}
    for module, names in param_names.items():
        for name in (n for n in names if f"{module}.{n}" not in plan.expert.parameters):
            raise RequestError(f"zero=3 with ep: {module} has experts and, in {name}, a replicated parameter: use zero=1 or zero=2")
    return [module for module, names in param_names.items() if names]


def _stage_units(model: nn.Module, plan: Plan, groups: ProcessGroups) -> list[str]:
    """Units of a pipeline rank. A stage leaves the model's forward midway, so the model itself is no unit, and every layer of the stage is one."""
    modules = dict(model.named_modules())
    layers = {n for i, stage in enumerate(plan.stages) if plan.stage_rank(i) == groups.pp.rank for n in stage.layers if n in modules}
    return sorted(layers, key=lambda n: (-n.count("."), n))  # inner modules first
