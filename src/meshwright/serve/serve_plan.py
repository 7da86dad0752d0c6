"""Plans for inference: a replica on given ranks, or the best of all plans for a cluster."""

from __future__ import annotations

from dataclasses import replace

from meshwright.core.calibration import Calibration
from meshwright.core.cluster import Cluster
from meshwright.core.errors import RequestError
from meshwright.core.inference import InferenceLoad
from meshwright.core.mesh import Mesh
from meshwright.core.plan import Plan
from meshwright.core.serve_policy import ServePolicy
from meshwright.core.task import Task
from meshwright.core.workload import Precision
from meshwright.describe.dataflow_tracer import trace_dataflow
from meshwright.describe.profile_tracer import trace_task
from meshwright.plan import InferenceConstraints, InferenceRanking, check_inference_mesh, rank_inference_plans, split_model, unsplit_plan
from meshwright.serve.config import ServeConfig
from meshwright.serve.inference_model import TRACED_TOKENS, trace_inference_model
from meshwright.serve.model_source import ModelSource

_DEFAULT_CONTEXT = 2048


def requested_mesh(config: ServeConfig) -> tuple[Mesh | None, int | None]:
    """The ranks of one replica and the number of replicas, where the request says so: dp=K in a mesh is K replicas."""
    if config.mesh is None:
        return (Mesh(tp=(config.nproc,)).canonical() if config.nproc is not None else None), config.replicas
    mesh = Mesh.parse(config.mesh)
    replicas = mesh.dp if mesh.dp > 1 else config.replicas
    if config.replicas not in (None, replicas):
        raise RequestError(f"--mesh {config.mesh} has {mesh.dp} replicas and --replicas {config.replicas} others: leave one of them out")
    mesh = replace(mesh, dp=1)
    check_inference_mesh(mesh)
    if config.nproc not in (None, mesh.size):
        raise RequestError(f"--nproc {config.nproc} and --mesh {config.mesh} ({mesh.size} ranks a replica) disagree: change one of them")
    return mesh, replicas


def compiles(config: ServeConfig, kind: str) -> bool:
    return kind == "cuda" if config.compile is None else config.compile


def make_constraints(config: ServeConfig, kind: str) -> InferenceConstraints:
    mesh, replicas = requested_mesh(config)
    precision: Precision = ("bf16" if kind == "cuda" else "fp32") if config.precision == "auto" else config.precision
    return InferenceConstraints(
        precision,
        mesh,
        replicas,
        config.backend or "",
        config.threads,
        "model" if compiles(config, kind) else "none",
        config.page_tokens,
        config.kv_pages,
        config.quantize,
    )


def make_serve_plan(task: Task, mesh: Mesh, cluster: Cluster, policy: ServePolicy, constraints: InferenceConstraints) -> Plan:
    """The plan of a replica on the first devices of a cluster, without an estimate: nothing is traced for a single rank."""
    plan = unsplit_plan(task.name, mesh, cluster, policy, constraints)
    if mesh.size == 1:
        return plan
    return split_model(plan, trace_dataflow(task), trace_task(task, device=plan.device), cluster)


def rank_serve_plans(config: ServeConfig, source: ModelSource, cluster: Cluster, calibration: Calibration) -> InferenceRanking:
    """All plans for serving a model on a cluster, best first."""
    kind = cluster.devices[0].kind
    constraints, context = make_constraints(config, kind), config.context or _own_context(source)
    load = InferenceLoad(config.batch, context, config.prompt or max(context // 2, 1), config.objective)
    split = len(cluster.devices) > 1 and (constraints.mesh is None or constraints.mesh.size > 1)
    model = trace_inference_model(source, load.prompt_tokens, constraints.precision, kind, split=split)
    return rank_inference_plans(model, load, cluster, calibration, constraints)


def _own_context(source: ModelSource) -> int:
    return source.load_task().tokens_per_sample or _DEFAULT_CONTEXT


def traced_length(task: Task) -> int | None:
    """The length of samples to trace a language model with."""
    return min(task.tokens_per_sample, TRACED_TOKENS) if task.tokens_per_sample else None
