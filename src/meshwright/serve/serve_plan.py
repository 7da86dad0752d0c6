"""A plan for inference: the model cut over the ranks of one replica, from the same dataflow as a plan for training."""

from __future__ import annotations

from dataclasses import replace

from meshwright.core.backends import backend_for, backend_traits
from meshwright.core.cluster import Cluster
from meshwright.core.errors import RequestError
from meshwright.core.mesh import Mesh
from meshwright.core.plan import MemoryPolicy, Plan, SyncPolicy
from meshwright.core.routes import Route
from meshwright.core.serve_policy import ServePolicy
from meshwright.core.task import Task
from meshwright.core.workload import Precision
from meshwright.describe.dataflow_tracer import trace_dataflow
from meshwright.describe.profile_tracer import trace_task
from meshwright.plan import choose_tensor_grid, cut_stages, reject_if_unsharded

_SHARED = ("all_reduce", "all_gather")  # what a replica's ranks on one host do through its memory
_TRACED_TOKENS = 64


def check_serve_mesh(mesh: Mesh) -> None:
    """A replica is cut over tp and pp; several replicas are several servers' business."""
    others = [f"{axis}={mesh.degree(axis)}" for axis in ("dp", "shard", "cp", "ep") if mesh.degree(axis) > 1]
    if others or len(mesh.tp) > 1:
        raise RequestError(
            f"inference splits a model over tp (one dimension) and pp, and the mesh has {', '.join(others) or mesh}: use --mesh tp=N,pp=M"
        )


def make_serve_plan(task: Task, mesh: Mesh, cluster: Cluster, precision: Precision, policy: ServePolicy, backend: str = "", threads: int = 0) -> Plan:
    """The plan of one replica on the first devices of a cluster."""
    check_serve_mesh(mesh)
    kind = cluster.devices[0].kind
    backend = backend or backend_for(kind)
    memory = MemoryPolicy(precision=precision)
    plan = Plan(task.name, 1, mesh, schedule="gpipe", memory=memory, serve=policy, device=kind, backend=backend, threads=threads)
    if mesh.size == 1:
        return plan
    dataflow, profile = trace_dataflow(task), trace_task(task, device=kind)
    grid = choose_tensor_grid(dataflow, mesh.tp, {}, profile.layer_names if mesh.pp > 1 else ()) if mesh.degree("tp") > 1 else None
    if grid is not None:
        reject_if_unsharded(grid, mesh.tp)
        plan = replace(plan, tensor=grid[0])
    if mesh.pp > 1:
        plan = replace(plan, stages=cut_stages(dataflow, profile, mesh.pp, plan.tensor))
    if kind == "cpu" and len(cluster.nodes) == 1 and backend_traits(backend).routable:
        routes = tuple(Route(op, backend, 0, "shared") for op in _SHARED)
        plan = replace(plan, sync=SyncPolicy(routes=routes, ranks_per_node=(mesh.size,)))
    return plan


def traced_length(task: Task) -> int | None:
    """The length of samples to trace a language model with: shorter ones have the same dataflow."""
    return min(task.tokens_per_sample, _TRACED_TOKENS) if task.tokens_per_sample else None
