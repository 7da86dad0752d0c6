"""The objective of a search: step time, throughput per device, memory, money or energy; and the gain that each added mechanism of a plan, and
tensor parallelism across nodes, must bring."""

from __future__ import annotations

import math

from meshwright.core.errors import RequestError
from meshwright.core.mesh import Mesh
from meshwright.core.pipeline_schedules import schedule_traits
from meshwright.core.quantities import show_bytes, show_seconds
from meshwright.core.workload import Workload

_SECONDS_PER_HOUR = 3600.0
MAX_COMPLEXITY_PENALTY = 0.02  # of all mechanisms together
TENSOR_ACROSS_NODES_PENALTY = 0.05  # its collectives stand in the way of every layer, on links that are shared and the least predictable


def check_objective(workload: Workload) -> None:
    """Raise if the objective is money without a price, or energy without a power."""
    if workload.objective == "money" and not workload.price:
        raise RequestError("objective=money needs the price of a device for an hour: --set price=2.5")
    if workload.objective == "energy" and not workload.watts:
        raise RequestError("objective=energy needs the power of a device in watts: --set watts=700")


def complexity_penalty(
    mesh: Mesh, zero: int, micro_batches: int, sequence_parallel: bool, recomputes: bool, schedule: str = "1f1b", stages_per_rank: int = 2
) -> float:
    """The factor by which a plan's cost is multiplied for its mechanisms, at most 1 + `MAX_COMPLEXITY_PENALTY`; `stages_per_rank` is the number of
    pipeline stages on a rank."""
    # The relative gain that each added mechanism must bring, where it is the first: predictions are not more precise, and simple plans break less.
    # Splitting a batch into micro-batches or recomputing never makes a real device much faster; where a prediction says so, it is noise in a
    # curve. Further mechanisms add less and less, so that a plan of many is preferred as soon as it is clearly faster.
    penalties = [
        0.004 * zero,
        0.004 * (mesh.dp > 1 < mesh.shard),  # hybrid sharding
        0.03 * (mesh.pp > 1),
        0.02 * (mesh.degree("tp") > 1),
        0.02 * (len(mesh.tp) > 1),  # 2D tensor parallelism
        0.01 * sequence_parallel,
        0.03 * (mesh.cp > 1),
        0.02 * (mesh.ep > 1),
        0.01 * bool(mesh.order),
        0.04 * (micro_batches.bit_length() - 1),
        0.04 * recomputes,
        schedule_traits(schedule).added_cost * (stages_per_rank.bit_length() - 1) if mesh.pp > 1 else 0.0,
    ]
    return 1.0 + MAX_COMPLEXITY_PENALTY * -math.expm1(-sum(penalties) / MAX_COMPLEXITY_PENALTY)


def placement_penalty(mesh: Mesh, node_size: int) -> float:
    """The factor by which a plan's cost is multiplied if its tensor-parallel groups leave their node, on nodes of `node_size` devices."""
    span = mesh.stride("tp") * mesh.degree("tp")
    leaves = mesh.degree("tp") > 1 and mesh.size > node_size > 1 and node_size % span != 0
    return 1.0 + TENSOR_ACROSS_NODES_PENALTY * leaves


def objective_cost(workload: Workload, step_s: float, world: int, memory: float) -> float:
    """The quantity to minimize, for one step: seconds, device-seconds, bytes, money or joules."""
    if workload.objective == "memory":
        return memory
    factors = {"time": 1.0 / world, "throughput": 1.0, "money": workload.price / _SECONDS_PER_HOUR, "energy": workload.watts}
    return step_s * world * factors[workload.objective]


def show_cost(workload: Workload, step_s: float, world: int, memory: float) -> str:
    """The cost, worded for messages."""
    cost = objective_cost(workload, step_s, world, memory)
    if workload.objective == "throughput":
        return f"{workload.global_batch / cost:,.4g} samples/s a device"
    if workload.objective == "money":
        return f"{cost:,.4g} a step"
    if workload.objective == "energy":
        return f"{cost / 1e3:,.4g} kJ a step"
    return f"{show_bytes(cost)} a device" if workload.objective == "memory" else f"{show_seconds(cost)} a step"
