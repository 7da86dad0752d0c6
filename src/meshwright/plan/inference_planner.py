"""Ranks plans for serving a model: over how many ranks a replica is split, by tensor or pipeline parallelism, and how many replicas there are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshwright.core.backends import backend_for, backend_traits
from meshwright.core.calibration import Calibration
from meshwright.core.cluster import Cluster
from meshwright.core.dataflow import Dataflow
from meshwright.core.errors import RequestError
from meshwright.core.inference import InferenceEstimate, InferenceLoad, InferenceModel
from meshwright.core.mesh import Mesh
from meshwright.core.model import ModelProfile
from meshwright.core.plan import CompileMode, MemoryPolicy, Plan, SyncPolicy
from meshwright.core.routes import Route
from meshwright.core.serve_policy import PAGE_TOKENS, Quantization, ServePolicy
from meshwright.core.workload import Precision
from meshwright.cost.inference_cost import estimate_inference
from meshwright.plan.objective import complexity_penalty
from meshwright.plan.pipeline_planner import cut_stages
from meshwright.plan.tensor_planner import choose_tensor_grid, reject_if_unsharded

_SHARED = ("all_reduce", "all_gather")  # what a replica's ranks on one host do through its memory
_OTHER_DEGREES = (2, 4, 8, 3, 6)  # suggested where the one that was asked for is impossible


@dataclass(frozen=True)
class InferenceConstraints:
    """What is fixed; None and empty: the planner's choice. `mesh` is one replica's ranks."""

    precision: Precision = "fp32"
    mesh: Mesh | None = None
    replicas: int | None = None
    backend: str = ""
    threads: int = 0
    compile: CompileMode = "none"
    page_tokens: int = PAGE_TOKENS
    kv_pages: int = 0
    quantize: Quantization = "none"


@dataclass(frozen=True)
class ScoredInferencePlan:
    """A plan with its estimate and the cost that it is ranked by; less is better."""

    plan: Plan
    estimate: InferenceEstimate
    cost: float


@dataclass(frozen=True)
class InferenceRanking:
    """Plans in order, best first, and why other meshes are impossible."""

    model: InferenceModel
    load: InferenceLoad
    cluster: Cluster
    calibration: Calibration
    scored: tuple[ScoredInferencePlan, ...]
    refused: tuple[str, ...] = ()

    @property
    def best(self) -> ScoredInferencePlan:
        return self.scored[0]


def rank_inference_plans(
    model: InferenceModel, load: InferenceLoad, cluster: Cluster, calibration: Calibration, constraints: InferenceConstraints
) -> InferenceRanking:
    """Every mesh of one replica on the cluster, with as many replicas as there are devices for, and with one."""
    found: list[ScoredInferencePlan] = []
    refused: list[str] = []
    for mesh, replicas in _candidates(len(cluster.devices), load, constraints):
        sequences = -(-load.batch // replicas)
        policy = ServePolicy(load.context, sequences, constraints.page_tokens, constraints.kv_pages, constraints.quantize, replicas=replicas)
        try:
            plan = make_inference_plan(model, mesh, cluster, policy, constraints)
        except RequestError as error:
            if constraints.mesh is not None:
                raise RequestError(f"{error}{_possible_degrees(model, mesh, cluster, policy, constraints)}") from None
            refused.append(f"{mesh}: {error}")
            continue
        found.append(_scored(plan, estimate_inference(plan, model, load, cluster, calibration), load))
    found.sort(key=lambda scored: (not scored.estimate.fits, scored.cost))
    return InferenceRanking(model, load, cluster, calibration, tuple(found), tuple(dict.fromkeys(refused)))


def make_inference_plan(
    model: InferenceModel, mesh: Mesh, cluster: Cluster, policy: ServePolicy, constraints: InferenceConstraints
) -> Plan:  # fmt: skip
    """The plan of one replica on the first devices of a cluster. RequestError if the model cannot be split so."""
    return split_model(unsplit_plan(model.name, mesh, cluster, policy, constraints), model.flow, model.prompt, cluster)


def unsplit_plan(name: str, mesh: Mesh, cluster: Cluster, policy: ServePolicy, constraints: InferenceConstraints) -> Plan:
    """The plan of one replica, but for how the model is split over its ranks."""
    check_inference_mesh(mesh)
    kind = cluster.devices[0].kind
    if policy.quantize == "fp8" and kind != "cuda":
        raise RequestError("quantize=fp8 is for GPUs, since a CPU converts fp8 slowly: use quantize=int8")
    backend = constraints.backend or backend_for(kind)
    threads = constraints.threads or cluster.threads_per_rank(min(mesh.size * policy.replicas, len(cluster.devices))) or 0
    memory = MemoryPolicy(precision=constraints.precision)
    plan = Plan(name, 1, mesh, schedule="gpipe", memory=memory, serve=policy, device=kind, backend=backend, threads=threads)
    return plan if mesh.pp > 1 else replace(plan, compile=constraints.compile)  # a stage's forward is left midway


def split_model(plan: Plan, flow: Dataflow | None, profile: ModelProfile, cluster: Cluster) -> Plan:
    """Split the model over the ranks of the plan's mesh. The profile's layers are those of the dataflow."""
    mesh = plan.mesh
    if mesh.size == 1:
        return plan
    assert flow is not None
    if mesh.degree("tp") > 1:
        grid = choose_tensor_grid(flow, mesh.tp, {}, profile.layer_names if mesh.pp > 1 else ())
        reject_if_unsharded(grid, mesh.tp)
        plan = replace(plan, tensor=grid[0])
    if mesh.pp > 1:
        plan = replace(plan, stages=cut_stages(flow, profile, mesh.pp, plan.tensor))
    if plan.device == "cpu" and len(cluster.nodes) == 1 and backend_traits(plan.backend).routable:
        routes = tuple(Route(op, plan.backend, 0, "shared") for op in _SHARED)
        plan = replace(plan, sync=SyncPolicy(routes=routes, ranks_per_node=(mesh.size,)))
    return plan


def check_inference_mesh(mesh: Mesh) -> None:
    """A replica is split over tp and pp."""
    others = [f"{axis}={mesh.degree(axis)}" for axis in ("dp", "shard", "cp", "ep") if mesh.degree(axis) > 1]
    if others or len(mesh.tp) > 1:
        raise RequestError(
            f"inference splits a model over tp (one dimension) and pp, and the mesh has {', '.join(others) or mesh}: use --mesh tp=N,pp=M, with dp=K "
            "for K replicas"
        )


def _candidates(devices: int, load: InferenceLoad, constraints: InferenceConstraints) -> Iterator[tuple[Mesh, int]]:
    if constraints.mesh is not None:
        yield constraints.mesh, constraints.replicas or 1
        return
    degrees = [n for n in range(1, devices + 1) if devices % n == 0 or n & (n - 1) == 0]
    for tp, pp in itertools.product(degrees, degrees):
        most = devices // (tp * pp)
        for replicas in {constraints.replicas} if constraints.replicas else {1, min(most, load.batch)}:
            if 1 <= replicas <= most:
                yield Mesh(pp=pp, tp=(tp,)).canonical(), replicas


def _scored(plan: Plan, estimate: InferenceEstimate, load: InferenceLoad) -> ScoredInferencePlan:
    cost = {"latency": estimate.answer_seconds(load), "throughput": 1.0 / max(estimate.tokens_per_s, 1e-30), "batch": 1.0 / (estimate.max_batch + 1)}
    return ScoredInferencePlan(plan, estimate, cost[load.objective] * complexity_penalty(plan.mesh, 0, 1, False, False))


def _possible_degrees(
    model: InferenceModel, mesh: Mesh, cluster: Cluster, policy: ServePolicy, constraints: InferenceConstraints
) -> str:  # fmt: skip
    """What can be used in place of a mesh that cannot."""
    axis = "tp" if mesh.degree("tp") > 1 else "pp"
    possible = ["--mesh tp=1"]
    for degree in _OTHER_DEGREES:
        other = Mesh(tp=(degree,)) if axis == "tp" else Mesh(pp=degree)
        try:
            make_inference_plan(model, other.canonical(), cluster, policy, constraints)
        except RequestError:
            continue
        possible.append(f"--mesh {axis}={degree}")
    return f"; what this model can be split by: {', '.join(possible)}"
