"""Meshwright's engine of every block: the unchanged module, and a plan derived from its dataflow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from cases import optimizer_of
from meshwright.core.expert_policy import ExpertPolicy
from meshwright.core.mesh import Mesh
from meshwright.core.plan import OVERLAPS, MemoryPolicy, Overlap, Plan, SyncPolicy
from meshwright.core.task import Loss
from meshwright.core.tensor_policy import TensorPolicy
from meshwright.describe.dataflow_tracer import trace_module_dataflow
from meshwright.describe.profile_tracer import trace_module
from meshwright.execute.session import Session
from meshwright.plan import choose_cp_policies, choose_expert_parallel, choose_tensor_grid, cut_stages
from rounds import Batch, Engine

Step = Callable[[Batch], Tensor]


@dataclass(frozen=True)
class Job:
    """What a block trains: how its model is made, its loss, and one rank's batch."""

    build: Callable[[], nn.Module]
    loss: Loss
    example: Batch
    samples: int  # of one rank

    def plan(self, mesh: Mesh, *, micro: int = 1, units: tuple[str, ...] = (), placements: Mapping[str, str] | None = None) -> Plan:
        """With the planner's policies; ZeRO-3 shards `units` over the shard axis."""
        model = self.build()
        flow, profile = (trace(model, self.loss, self.example) for trace in (trace_module_dataflow, _profile))
        none = TensorPolicy(), TensorPolicy()
        tensor = choose_tensor_grid(flow, mesh.tp, placements, profile.layer_names if mesh.pp > 1 else ()) if mesh.degree("tp") > 1 else none
        (first, second), context, spatial = choose_cp_policies(mesh, flow, tensor, "fp32")
        expert = choose_expert_parallel(flow, mesh.ep) if mesh.ep > 1 else ExpertPolicy()
        stages = cut_stages(flow, profile, mesh.pp, first, second) if mesh.pp > 1 else ()
        memory = MemoryPolicy(zero=3, units=units) if mesh.shard > 1 else MemoryPolicy()
        policies: dict[str, Any] = {"tensor": first, "tensor_y": second, "context": context, "spatial": spatial, "expert": expert}
        return Plan("bench", self.samples * mesh.data_parallel_size, mesh, micro, stages, memory=memory, **policies)

    def engines(self, block: str, by_hand: Callable[[], Step], plan: Plan, overlaps: tuple[Overlap, ...]) -> Iterator[Engine]:
        """By hand, the same again, Meshwright with all overlap, and without each of `overlaps` and without all of them."""
        yield Engine("by hand", block, by_hand())
        yield Engine("by hand, again", block, by_hand())
        yield Engine("Meshwright", block, self.run(plan), ours=True)
        for left_out in overlaps if len(overlaps) > 1 else ():
            overlap = tuple(o for o in OVERLAPS if o != left_out)
            yield Engine(f"Meshwright, all but {left_out}", block, self.run(_overlapping(plan, overlap)), ours=True)
        if overlaps:
            yield Engine("Meshwright, no overlap", block, self.run(_overlapping(plan, ())), ours=True)

    def run(self, plan: Plan) -> Step:
        model = self.build()
        session = Session(plan, model, optimizer_of(model))
        return lambda batch: session.step(batch, self.loss).loss


def _profile(model: nn.Module, loss: Loss, example: Batch) -> Any:
    return trace_module(model, loss, example, name="bench")


def _overlapping(plan: Plan, overlap: tuple[Overlap, ...]) -> Plan:
    return replace(plan, sync=SyncPolicy(overlap=overlap))
