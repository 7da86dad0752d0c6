"""The configuration of inference: which model, on which ranks, how much memory, and how answers are sampled. Every field has a default."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from meshwright.core.backends import Backend
from meshwright.core.errors import RequestError, unknown_name_error
from meshwright.core.inference import InferenceObjective
from meshwright.core.serialization import read_json, show_json
from meshwright.core.serve_policy import PAGE_TOKENS, Quantization
from meshwright.serve.requests import SamplingParams

ServePrecision = Literal["auto", "fp64", "fp32", "bf16", "fp16"]


class ServeConfig(BaseModel):
    """What `generate` and `serve` can be told, by file, flag or --set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field("smollm2", description="a run, a checkpoint, a folder with config.json, *.gguf, a model of the zoo, or package.module:factory")
    random_init: bool = Field(False, description="random weights, whatever the folder has")
    plan: str = Field("auto", description="auto, or a plan.json for inference")
    mesh: str | None = Field(None, description="ranks of one replica, like tp=2 or tp=2,pp=2; dp=K: K replicas")
    nproc: int | None = Field(None, ge=1, le=65536, description="ranks of one replica, as tp")
    backend: Backend | None = Field(None, description="gloo or nccl, by device unless given")
    precision: ServePrecision = Field("auto", description="of weights and arithmetic; auto: bf16 on GPUs, fp32 on CPUs")
    quantize: Quantization = Field("none", description="weights of linear layers in 8 bits: int8 or, on GPUs, fp8; answers are not quite the same")
    speculate: str = Field("none", description="guess the next tokens: none, prompt (as the text went on before), or a smaller model's name")
    guesses: int = Field(4, ge=1, le=64, description="tokens that are guessed at once")
    context: int | None = Field(None, ge=2, le=10_000_000, description="most tokens of prompt and answer together; the model's own unless given")
    batch: int = Field(
        16, ge=1, le=65536, description="most answers that are generated at once, over all replicas; samples of a batch in batch inference"
    )
    prompt: int | None = Field(None, ge=1, le=10_000_000, description="tokens of a usual prompt, to plan for; half of context unless given")
    objective: InferenceObjective = Field("latency", description="what plans are ranked by: latency, throughput, or batch (the largest)")
    page_tokens: int = Field(
        PAGE_TOKENS, ge=1, le=1_000_000, description="tokens in a page of key-value memory; as many as context: one page a sequence"
    )
    kv_pages: int = Field(0, ge=0, description="pages of key-value memory; 0: what the sequences can need, as far as it fits")
    compile: bool | None = Field(None, description="quicker steps, after a minute or more at the start; unless given, for texts on GPUs")
    threads: int = Field(0, ge=0, le=4096, description="CPU threads of a rank; 0: its share of the cores")
    seed: int | None = Field(None, ge=0, le=2**63 - 1, description="of sampling; answers are then the same each time")

    kind: Literal["auto", "text", "predict"] = Field(
        "auto", description="whether a server's model generates text or answers samples; auto: by the model"
    )
    max_batch: int = Field(32, ge=1, le=65536, description="most samples that go through a model together, in /predict and /v1/embeddings")
    max_wait_ms: float = Field(0.0, ge=0, le=60_000, description="how long an idle replica waits for a fuller batch; a busy one gathers them anyway")
    batch_sizes: tuple[int, ...] = Field((), description="sizes that a batch is filled up to, like [1,8,32]; any size unless given or compiled")
    pooling: Literal["auto", "mean", "pooler", "cls", "max"] = Field("auto", description="of embeddings; auto: as the folder says, or the mean")

    data: str | None = Field(None, description="data set of batch inference; the run's own, or the model's, unless given")
    data_dir: str | None = Field(None, description="folder for mnist or cifar10")
    split: Literal["validation", "train"] = Field("validation", description="which part of the data set")
    samples: int | None = Field(None, ge=1, description="the first so many samples; all of the part unless given")

    replicas: int | None = Field(None, ge=1, le=4096, description="copies of the model that a server has, each with ranks of its own; 1 unless given")
    served_name: str = Field("", description="the model's name in requests; as it was given unless set")
    max_waiting: int = Field(256, ge=0, le=1_000_000, description="requests that wait for a place; further ones get 429")
    max_body_mb: float = Field(4.0, gt=0, le=4096, description="largest body of a request")
    body_timeout_s: float = Field(30.0, gt=0, le=3600, description="how long a body may take to arrive")
    header_timeout_s: float = Field(15.0, gt=0, le=3600, description="how long a connection may be silent before its request is there")
    request_timeout_s: float = Field(600.0, gt=0, le=86_400, description="how long an answer may take; its place is then given to another")
    hang_timeout_s: float = Field(300.0, gt=0, le=86_400, description="a replica that has work and says nothing for so long is started again")
    max_connections: int = Field(4096, ge=1, le=1_000_000, description="connections at once; further ones are closed")
    reload_every_s: float = Field(
        0.0, ge=0, le=86_400, description="look so often for newer weights and put them in place; 0: only POST /v1/reload does"
    )
    grace_s: float = Field(30.0, ge=0, le=3600, description="how long a server that stops waits for answers under way")

    max_tokens: int = Field(256, ge=1, description="most tokens of an answer")
    temperature: float = Field(0.0, ge=0, le=100, description="0: the most likely token each time")
    top_k: int = Field(0, ge=0, description="sample from the k most likely tokens; 0: from all")
    top_p: float = Field(1.0, gt=0, le=1, description="sample from the smallest set of tokens with this probability")
    min_p: float = Field(0.0, ge=0, le=1, description="leave out tokens below this part of the most likely one's probability")
    repetition_penalty: float = Field(1.0, gt=0, le=100, description="above 1: tokens that were there already are less likely")
    stop: tuple[str, ...] = Field((), description='texts that end an answer, like ["\\n\\n"]')
    stop_tokens: tuple[int, ...] = Field((), description="tokens that end an answer, beside the model's own")
    ignore_end: bool = Field(False, description="go on to max_tokens, whatever the model says")
    chat: bool | None = Field(None, description="wrap prompts in the model's chat template; where it has one unless given")
    system: str = Field("", description="a system message for chats")

    def sampling(self) -> SamplingParams:
        names = SamplingParams.__dataclass_fields__.keys() & set(type(self).model_fields)
        return replace(SamplingParams(), **{name: getattr(self, name) for name in names})


def load_serve_config(settings: Mapping[str, Any], file: Path | None = None) -> ServeConfig:
    """The configuration from a file and settings that override it. Every wrong key or value is one line that says what to change."""
    data: Any = read_json(file) if file is not None else {}
    if not isinstance(data, dict):
        raise RequestError(f"{file}: a configuration is one JSON object")
    for keys, where in ((data, str(file)), (settings, "--set")):
        for key in keys:
            if key not in ServeConfig.model_fields:
                raise unknown_name_error("key", key, ServeConfig.model_fields, where)
    try:
        return ServeConfig(**{**data, **settings})
    except ValidationError as error:
        first = error.errors()[0]
        key, reason = str(first["loc"][0]), str(first["msg"]).removeprefix("Value error, ")
        where = f"{file}: " if file is not None and key in data and key not in settings else ""
        raise RequestError(f"{where}{key}={show_json(first.get('input'))}: {reason[0].lower()}{reason[1:]}") from None


def parse_setting(text: str) -> tuple[str, Any]:
    """'top_p=0.9' → ('top_p', 0.9); the value is parsed as JSON if possible, otherwise kept as text."""
    key, equals, value = text.partition("=")
    if not equals:
        raise RequestError(f"--set {text}: write it as key=value")
    try:
        return key, json.loads(value)
    except (ValueError, RecursionError):
        return key, value
