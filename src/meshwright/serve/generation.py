"""`generate`: prompts in, answers out, as text. Plans, loads the model, runs all prompts together, and counts what was really produced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.core.cluster import Cluster
from meshwright.core.errors import RequestError
from meshwright.core.mesh import Mesh
from meshwright.core.plan import Plan
from meshwright.core.serve_policy import ServePolicy, Speculation
from meshwright.describe.discover import discover
from meshwright.launch import ForkServer
from meshwright.plan import check_inference_mesh, describe_plan
from meshwright.serve.config import ServeConfig
from meshwright.serve.model_source import ModelSource, describe_source, find_model
from meshwright.serve.replica_client import LocalReplica, ReplicaClient, ReplicaProcesses
from meshwright.serve.requests import FinishReason
from meshwright.serve.serve_plan import make_constraints, make_serve_plan, requested_mesh, traced_length
from meshwright.serve.text import TextCodec, TextStream, find_codec

Say = Callable[[str], None]
_PRELOAD = ("meshwright.serve.replica_process",)


@dataclass(frozen=True)
class PreparedModel:
    """What is to be loaded, under which plan, and how its text becomes tokens."""

    config: ServeConfig
    source: ModelSource
    plan: Plan
    cluster: Cluster
    codec: TextCodec


@dataclass(frozen=True)
class Answer:
    """One prompt's answer. `num_prompt` and `tokens` are what the model read and produced."""

    prompt: str
    text: str
    tokens: tuple[int, ...]
    num_prompt: int
    finish: FinishReason


@dataclass(frozen=True)
class Piece:
    """Text that was added to the answer of one prompt, and the answer when it is whole."""

    index: int
    text: str
    answer: Answer | None = None


def prepare_model(config: ServeConfig, run_dir: Path, environ: Mapping[str, str], say: Say = lambda _: None) -> PreparedModel:
    """Find the model and plan a replica. Nothing is loaded."""
    source = find_model(config.model, run_dir, environ)
    if config.random_init:
        source = replace(source, weights="", checkpoint="")
    if config.speculate not in ("none", "prompt"):
        source = replace(source, draft=find_model(config.speculate, run_dir, environ))
    mesh, replicas = requested_mesh(config)
    mesh = mesh or Mesh()
    cluster = discover(environ, ranks=mesh.size * (replicas or 1))
    constraints = make_constraints(config, cluster.devices[0].kind)
    if config.plan != "auto":
        plan = Plan.load(Path(config.plan))
        check_inference_mesh(plan.mesh)
        replicas = replicas or plan.serve.replicas
        policy = plan.serve or _policy(config, replicas)
        plan = replace(plan, serve=replace(policy, replicas=replicas), compile="model" if config.compile else plan.compile)
    else:
        task = source.load_task(seq=traced_length(source.load_task())) if mesh.size > 1 else source.load_task()
        if mesh.size > 1:
            say(f"planning {mesh} for {source.name}")
        plan = make_serve_plan(task, mesh, cluster, _policy(config, replicas or 1), constraints)
    codec = find_codec(Path(source.tokenizer) if source.tokenizer else None, 256)
    say(f"{source.name}: {describe_source(source)}; {describe_plan(plan)}")
    return PreparedModel(config, source, plan, cluster, codec)


def _policy(config: ServeConfig, replicas: int) -> ServePolicy:
    speculate: Speculation = config.speculate if config.speculate in ("none", "prompt") else "model"  # type: ignore[assignment]
    memory = config.page_tokens, config.kv_pages, config.quantize
    return ServePolicy(config.context or 0, -(-config.batch // replicas), *memory, speculate, config.guesses, replicas)


@contextmanager
def open_replica(prepared: PreparedModel, environ: Mapping[str, str], say: Say = lambda _: None) -> Iterator[ReplicaClient]:
    """A replica that is ready: in this process if it has one rank, else in processes that end with the context."""
    end_tokens = prepared.codec.end_tokens
    if prepared.plan.world == 1:
        local = LocalReplica(prepared.source, prepared.plan, end_tokens, say)
        try:
            yield local
        finally:
            local.close()
        return
    fork_server = ForkServer(prepared.plan.threads or 1, environ, _PRELOAD)
    try:
        replica = ReplicaProcesses(fork_server, prepared.source, prepared.plan, end_tokens)
        try:
            replica.wait_until_ready()
            yield replica
        finally:
            replica.close()
    finally:
        fork_server.close()


def encode_prompt(prepared: PreparedModel, prompt: str) -> list[int]:
    """A prompt as tokens: as a chat with one message, where the model is made for chats."""
    config, codec = prepared.config, prepared.codec
    if not (codec.has_chat if config.chat is None else config.chat):
        if config.system:
            raise RequestError("a system message needs a chat template: the model has none, or chat is off: leave --system out")
        return codec.encode(prompt)
    system = [{"role": "system", "content": config.system}] if config.system else []
    return codec.encode_chat([*system, {"role": "user", "content": prompt}])


def generate(prepared: PreparedModel, replica: ReplicaClient, prompts: Sequence[str]) -> Iterator[Piece]:
    """Pieces of the answers to all prompts, as they come."""
    params = prepared.config.sampling()
    running: dict[int, _Running] = {}
    for index, prompt in enumerate(prompts):
        tokens = encode_prompt(prepared, prompt)
        running[replica.submit(tokens, params)] = _Running(index, prompt, len(tokens), TextStream(prepared.codec, prepared.config.stop))
    for event in replica.events():
        found = running.get(event.request)
        if found is None:  # its stop text has come
            continue
        if event.error:
            raise RequestError(f"prompt {found.index + 1}: {event.error}")
        is_end = event.finish == "stop"
        found.tokens += [event.token] if event.token >= 0 else []
        text = "" if is_end and event.token in prepared.codec.end_tokens else found.stream.add(event.token)
        finish: FinishReason | None = "stop" if found.stream.stopped else event.finish
        if finish is None:
            if text:
                yield Piece(found.index, text)
            continue
        if event.finish is None:
            replica.cancel(event.request)
        del running[event.request]
        text += found.stream.finish()
        yield Piece(found.index, text, Answer(found.prompt, found.stream.text, tuple(found.tokens), found.num_prompt, finish))


class _Running:
    """One prompt under way."""

    def __init__(self, index: int, prompt: str, num_prompt: int, stream: TextStream) -> None:
        self.index, self.prompt, self.num_prompt, self.stream = index, prompt, num_prompt, stream
        self.tokens: list[int] = []


def rates(stats: Mapping[str, Any]) -> dict[str, float | None]:
    """Tokens a second that the model read in prompts, and that it produced after the first ones of answers."""
    return {
        "prefill_tokens_per_s": _rate(stats.get("prompt_tokens", 0) - stats.get("mixed_prompt_tokens", 0), stats.get("prompt_s", 0.0)),
        "decode_tokens_per_s": _rate(stats.get("decoded_tokens", 0), stats.get("decode_s", 0.0)),
    }


def _rate(count: float, seconds: float) -> float | None:
    return count / seconds if seconds > 0 and count > 0 else None


def read_prompts(file: Path) -> list[str]:
    """Prompts from a text file, one a line."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise RequestError(f"{file}: no such file: give a text file with one prompt a line") from None
    except UnicodeDecodeError:
        raise RequestError(f"{file}: this is no text in UTF-8: give a text file with one prompt a line") from None
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise RequestError(f"{file}: there are no prompts in it: write one a line")
    return prompts
