"""One replica on this rank: the loaded model, the way to run it, its key-value memory, and the steps that the first rank sends to the others."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.core.backends import backend_traits
from meshwright.core.comm import Comm
from meshwright.core.errors import RequestError
from meshwright.core.plan import Plan
from meshwright.core.serve_policy import ServePolicy
from meshwright.execute.process_groups import process_group
from meshwright.observe.process_memory import available_memory
from meshwright.serve.compile_cache import keep_compiled_code
from meshwright.serve.decoder_check import ChosenDecoder, choose_decoder
from meshwright.serve.decoders import Decoder, PackedDecoder
from meshwright.serve.draft_model import DraftModel
from meshwright.serve.engine import Engine
from meshwright.serve.loading import LoadedModel, load_model
from meshwright.serve.model_source import ModelSource
from meshwright.serve.page_pool import PagePool
from meshwright.serve.scheduler import Limits, Scheduler
from meshwright.serve.speculation import PromptLookup
from meshwright.serve.steps import Step

_KV_FRACTION = {"cpu": 0.4, "cuda": 0.9}  # of the memory that is free once the model is loaded
_STEP_TOKENS = {"cpu": 256, "cuda": 4096}  # of one step
_HEADER = 512  # numbers in the first message of a step; a longer one takes a second
_DEFAULT_CONTEXT = 2048  # where neither the model nor the request says

RUN, STOP = 1, 2  # kinds of messages


@dataclass
class Replica:
    """A model that is ready for requests. `policy` has what was left open filled in."""

    loaded: LoadedModel
    chosen: ChosenDecoder
    policy: ServePolicy
    limits: Limits
    pool: PagePool
    load_s: float
    draft: DraftModel | None = None
    note: str = ""  # what was not as usual

    @property
    def decoder(self) -> Decoder:
        return self.chosen.decoder

    def make_engine(self, end_tokens: tuple[int, ...]) -> Engine:
        """The engine of the first rank."""
        scheduler = Scheduler(self.pool, self.limits, end_tokens, splits_prompts=self.decoder.splits_prompts)
        proposer = PromptLookup() if self.policy.speculate == "prompt" else self.draft
        return Engine(StepSender(self.decoder, self.loaded.applied.groups.world), scheduler, proposer, self.policy.guesses)

    def facts(self) -> dict[str, Any]:
        """What the replica is, for people and metrics."""
        memory, pool = self.decoder.memory, self.pool
        return {
            "plan": self.loaded.applied.plan.summary(), "decoding": self.chosen.kind, "difference": self.chosen.difference,
            "reasons": list(self.chosen.reasons), "context": self.policy.context, "sequences": self.policy.sequences,
            "kv_tokens": pool.count * pool.page_tokens, "kv_bytes": memory.nbytes if memory is not None else None, "load_s": self.load_s,
            "note": self.note, "vocabulary": self.loaded.vocabulary,
        }  # fmt: skip


def make_replica(source: ModelSource, plan: Plan, device: torch.device | None = None, *, say: Callable[[str], None] = lambda _: None) -> Replica:
    """Load the model, find the quickest right way to run it, and give it key-value memory. Collective: every rank of the plan calls it, with its
    device, which is the first one unless given."""
    started = time.perf_counter()
    if plan.compile != "none":
        keep_compiled_code()
    device = device or torch.device(plan.device_of(0, 0))
    task = source.load_task()
    loaded = load_model(source, task, plan, device)
    say(f"loaded in {time.perf_counter() - started:.1f} s")
    world = loaded.applied.groups.world
    page_tokens = plan.serve.page_tokens
    with torch.inference_mode():
        chosen = choose_decoder(loaded.applied, loaded.vocabulary, page_tokens, device)
    loaded.quantize()  # what is quantized differs by a little from row to row, so decoders were compared without
    policy = _filled(plan.serve, loaded.model)
    step_tokens = min(_STEP_TOKENS[device.type], policy.context * policy.sequences)
    limits = Limits(policy.context, policy.sequences, max(step_tokens, policy.sequences), step_tokens)
    draft = _make_draft(source.draft, plan, loaded.vocabulary, limits, device) if source.draft is not None else None
    pages = _num_pages(chosen.decoder, policy, device, world)
    pool = PagePool(pages, page_tokens, shares=chosen.decoder.memory is not None, in_runs=device.type == "cpu")
    if chosen.decoder.memory is not None:
        chosen.decoder.memory.allocate(pages)
    notes = [loaded.note]
    if device.type == "cuda" and plan.world == 1 and isinstance(chosen.decoder, PackedDecoder):
        with torch.inference_mode():
            problem = chosen.decoder.use_graphs(limits.max_sequences, limits.context)
        notes.append(problem)
        say(f"{problem or 'steps of next tokens are captured as CUDA graphs'} after {time.perf_counter() - started:.1f} s")
    return Replica(
        loaded, chosen, replace(policy, kv_pages=pages), limits, pool, time.perf_counter() - started, draft, "; ".join(filter(None, notes))
    )


def _make_draft(source: ModelSource, plan: Plan, vocabulary: int, limits: Limits, device: torch.device) -> DraftModel:
    """The model that guesses, with memory for as many sequences."""
    if plan.world > 1:
        raise RequestError(f"speculate={source.name}: a model that guesses needs a replica of one rank: use speculate=prompt, or leave out --mesh")
    task = source.load_task()
    alone = replace(plan, model=task.name, serve=replace(plan.serve, quantize="none"))
    loaded = load_model(source, task, alone, device)
    if loaded.vocabulary != vocabulary:
        raise RequestError(f"speculate={source.name} has {loaded.vocabulary} tokens, and the model {vocabulary}: use a model with the same tokenizer")
    with torch.inference_mode():
        decoder = choose_decoder(loaded.applied, vocabulary, plan.serve.page_tokens, device).decoder
    if decoder.memory is None:
        raise RequestError(f"speculate={source.name}: that model keeps no pages of keys and values: use another, or speculate=prompt")
    pages = limits.max_sequences * -(-limits.context // plan.serve.page_tokens)
    decoder.memory.allocate(pages)
    return DraftModel(decoder, PagePool(pages, plan.serve.page_tokens, shares=False, in_runs=device.type == "cpu"), limits.step_tokens)


def _filled(policy: ServePolicy, model: torch.nn.Module) -> ServePolicy:
    """The policy with the model's own context where none was given."""
    own = model_context(model)
    config = getattr(model, "config", None)
    is_rotary = any(getattr(config, name, None) for name in ("rope_parameters", "rope_theta", "rope_scaling"))
    if own is not None and policy.context > own and not is_rotary:  # rotary positions have no end, though quality may
        raise RequestError(f"context={policy.context} is more than the {own} tokens that the model has positions for: use context={own} or less")
    return replace(policy, context=policy.context or own or _DEFAULT_CONTEXT)


def model_context(model: torch.nn.Module) -> int | None:
    """The longest sequence that the model was made for; None if its configuration does not say."""
    config = getattr(model, "config", None)
    for name in ("max_position_embeddings", "n_positions", "context", "n_ctx", "max_seq_len"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _num_pages(decoder: Decoder, policy: ServePolicy, device: torch.device, world: Comm) -> int:
    """Pages of key-value memory: what all sequences can need, and at most what fits. The same on every rank."""
    size = policy.page_tokens
    wanted = policy.kv_pages or policy.sequences * -(-policy.context // size)
    if decoder.memory is None:
        return wanted
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory() // max(world.size, 1)
    fitting = decoder.memory.pages_in(free * _KV_FRACTION[device.type])
    agreed = torch.tensor([min(wanted, fitting)], device=device)
    world.all_reduce(agreed, "serve/pages", "min").wait()
    pages = int(agreed)
    if pages * size < 2 * size:
        need = decoder.memory.token_bytes * size
        raise RequestError(f"there is no memory for keys and values: a page of {size} tokens needs {need:,} bytes, and {int(free):,} are free")
    return pages


class StepSender:
    """Runs steps on the first rank, after sending them to the others. A message is a sum to which they add zeros: unlike a broadcast, a sum goes
    through the shared memory of a host where there is any."""

    def __init__(self, decoder: Decoder, world: Comm) -> None:
        self._decoder, self._world = decoder, world
        self._device = _message_device(world)

    @property
    def most_repeats(self) -> int:
        return self._decoder.most_repeats if self._world.size == 1 else 1

    @torch.inference_mode()
    def run(self, step: Step) -> Tensor:
        self._send(RUN, step.encode())
        return self._decoder.forward(step)

    def stop(self) -> None:
        """Let the other ranks end."""
        self._send(STOP, [])

    def keep_alive(self) -> None:
        """Tell the other ranks, which wait for a step, that this one is there."""
        self._send(RUN, Step().encode())

    def _send(self, kind: int, numbers: list[int]) -> None:
        if self._world.size == 1:
            return
        header = [kind, len(numbers), *numbers[: _HEADER - 2]]
        header += [0] * (_HEADER - len(header))
        self._world.sync.all_reduce(torch.tensor(header, device=self._device), "serve/step").wait()
        if rest := numbers[_HEADER - 2 :]:
            self._world.sync.all_reduce(torch.tensor(rest, device=self._device), "serve/step").wait()


@torch.inference_mode()
def follow_steps(decoder: Decoder, world: Comm) -> None:
    """Run the steps that the first rank sends, until it says stop."""
    device = _message_device(world)
    while True:
        header = torch.zeros(_HEADER, dtype=torch.int64, device=device)
        world.sync.all_reduce(header, "serve/step").wait()
        kind, length, *numbers = header.tolist()
        if kind == STOP:
            return
        if length > _HEADER - 2:
            rest = torch.zeros(length - (_HEADER - 2), dtype=torch.int64, device=device)
            world.sync.all_reduce(rest, "serve/step").wait()
            numbers += rest.tolist()
        step = Step.decode(numbers[:length])
        if step.chunks or step.ended:
            decoder.forward(step)


def _message_device(world: Comm) -> str:
    """Where messages between ranks have to be."""
    return "cpu" if world.size == 1 or "cpu" in backend_traits(dist.get_backend(process_group(world))).devices else "cuda"
