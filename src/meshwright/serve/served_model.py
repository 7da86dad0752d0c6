"""What a server is told, made into what its replicas are started with: which kind of model it is, where its weights are, and its plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright import zoo
from meshwright.core.errors import RequestError
from meshwright.core.mesh import Mesh
from meshwright.core.plan import Plan
from meshwright.core.serialization import to_data
from meshwright.core.serve_policy import ServePolicy
from meshwright.core.workload import Precision
from meshwright.describe.discover import discover
from meshwright.plan import check_inference_mesh
from meshwright.serve.async_replica import ReplicaJob
from meshwright.serve.config import ServeConfig
from meshwright.serve.generation import Say, prepare_model
from meshwright.serve.model_source import MODEL_FOLDER, ModelSource, describe_source, find_model
from meshwright.serve.predict_replica import PredictOptions
from meshwright.serve.serve_plan import make_constraints, make_serve_plan, requested_mesh
from meshwright.serve.text import TextCodec, find_codec, has_tokenizer

_MOST_SIZES = 64


@dataclass(frozen=True)
class ServedModel:
    """A model that is to be served. `codec` is None where nothing becomes tokens."""

    source: ModelSource
    job: ReplicaJob
    codec: TextCodec | None
    replicas: int

    @property
    def plan(self) -> Plan:
        return self.job.plan


def prepare_served(config: ServeConfig, run_dir: Path, environ: Mapping[str, str], say: Say = lambda _: None) -> ServedModel:
    """Find the model, decide what it is, and plan a replica. Nothing is loaded."""
    source = find_served(config, run_dir, environ)
    if source.kind == "text":
        prepared = prepare_model(config, run_dir, environ, say)
        end_tokens = list(prepared.codec.end_tokens)
        job = ReplicaJob("meshwright.serve.replica_process:serve_rank", prepared.source, prepared.plan, {"end_tokens": end_tokens})
        return ServedModel(prepared.source, job, prepared.codec, prepared.plan.serve.replicas)
    plan, replicas = plan_predictions(config, source, environ, say)
    folder = Path(source.tokenizer) if source.tokenizer else None
    codec = find_codec(folder, 256) if has_tokenizer(folder) else None
    options = PredictOptions(_batch_sizes(config), config.pooling, codec is not None)
    say(f"{source.name}: {describe_source(source)}; {plan.summary()}")
    job = ReplicaJob("meshwright.serve.predict_replica:serve_predict_rank", source, plan, {"options": to_data(options)})
    return ServedModel(source, job, codec, replicas)


def find_served(config: ServeConfig, run_dir: Path, environ: Mapping[str, str]) -> ModelSource:
    """The model's newest weights, as of now."""
    source = find_model(config.model, run_dir, environ)
    if config.random_init:
        source = replace(source, weights="", checkpoint="")
    is_trained_text = source.model.startswith("hf:") and (bool(source.checkpoint) or Path(source.weights).name == MODEL_FOLDER)
    kind = config.kind if config.kind != "auto" else "text" if is_trained_text else zoo.kind_of(source.model)
    return replace(source, kind=kind)


def plan_predictions(config: ServeConfig, source: ModelSource, environ: Mapping[str, str], say: Say) -> tuple[Plan, int]:
    """The plan of a replica, and how many there are."""
    if config.quantize != "none" or config.speculate != "none":
        raise RequestError(f"{source.name}: quantize and speculate are for models that generate text: leave them out")
    requested, replicas = requested_mesh(config)
    mesh = requested or Mesh()
    if mesh.pp > 1:
        raise RequestError(f"--mesh {mesh}: a model that answers samples is split over tp alone: use --mesh tp={mesh.size}, or dp=K for K replicas")
    if config.plan != "auto":
        plan = Plan.load(Path(config.plan))
        check_inference_mesh(plan.mesh)
        return replace(plan, compile="model" if config.compile else plan.compile), replicas or plan.serve.replicas
    cluster = discover(environ, ranks=mesh.size * (replicas or 1))
    constraints = make_constraints(config, cluster.devices[0].kind)
    precision: Precision = "fp32" if config.precision == "auto" else config.precision
    constraints = replace(constraints, precision=precision, compile="model" if config.compile else "none")  # each size of a batch takes a minute
    task = source.load_task()
    if mesh.size > 1 and not task.fields:
        raise RequestError(f"{source.name}: to split it, its inputs must be known: give the module `fields`, a mapping of names to meshwright Field")
    if mesh.size > 1:
        say(f"planning {mesh} for {source.name}")
    return make_serve_plan(task, mesh, cluster, ServePolicy(replicas=replicas or 1), constraints), replicas or 1


def _batch_sizes(config: ServeConfig) -> tuple[int, ...]:
    """The sizes that batches are filled up to: those that were given; with `compile` powers of two, because each size is compiled."""
    if any(size < 1 for size in config.batch_sizes) or len(config.batch_sizes) > _MOST_SIZES:
        raise RequestError(f"batch_sizes={list(config.batch_sizes)}: give from 1 to {_MOST_SIZES} sizes of at least 1")
    if config.batch_sizes or not config.compile:
        return tuple(sorted(config.batch_sizes))
    return (*(2**i for i in range(config.max_batch.bit_length()) if 2**i < config.max_batch), config.max_batch)
