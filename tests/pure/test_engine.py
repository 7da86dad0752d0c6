"""The engine gives what transformers generates, for requests alone or together, that come and go, in pages or not, with little memory."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import serve_models

from meshwright.core.errors import RequestError
from meshwright.core.mesh import Mesh
from meshwright.core.plan import MemoryPolicy, Plan
from meshwright.execute.apply import AppliedPlan, apply
from meshwright.serve.decoder_check import choose_decoder
from meshwright.serve.decoders import RecomputeDecoder
from meshwright.serve.draft_model import DraftModel
from meshwright.serve.engine import Engine, PromptPace
from meshwright.serve.page_pool import PagePool
from meshwright.serve.requests import SamplingParams, TokenEvent
from meshwright.serve.scheduler import Limits, Scheduler, Sequence
from meshwright.serve.speculation import PromptLookup
from meshwright.serve.steps import Chunk, Step
from meshwright.zoo.gpt import GPT, GPT_CONFIGS
from meshwright.zoo.llama import LLAMA_CONFIGS, Llama

CPU = torch.device("cpu")
_loaded: dict[str, Any] = {}
_decoders: dict[int, Any] = {}  # by model: the last one, which has its attention


def applied(model: Any) -> AppliedPlan:
    return apply(Plan("test", 1, Mesh()), model, None)


def family(name: str) -> tuple[Any, Any]:
    """A model, and a copy of it for the engine, which takes its attention."""
    if name not in _loaded:
        _loaded[name] = serve_models.build(name), applied(serve_models.build(name))
    return _loaded[name]


class Runner:
    def __init__(self, decoder: Any) -> None:
        self.run, self.most_repeats = decoder.forward, decoder.most_repeats


def make_proposer(kind: str) -> Any:
    """Guesses of the text itself, of the model that is guessed for, or of one whose guesses are wrong."""
    if kind in ("none", "prompt"):
        return PromptLookup() if kind == "prompt" else None
    model = applied(serve_models.build("llama" if kind == "itself" else "mistral"))
    with torch.inference_mode():
        decoder = choose_decoder(model, serve_models.VOCABULARY, 4, CPU).decoder
    assert decoder.memory is not None
    decoder.memory.allocate(200)
    return DraftModel(decoder, PagePool(200, 4, shares=False), 7)


def make_engine(
    plan: AppliedPlan, pages: int = 64, page_tokens: int = 4, proposer: Any = None, guesses: int = 4, fixed_shapes: bool = False, **limits: Any
) -> Engine:
    if id(plan) in _decoders:
        _decoders.pop(id(plan)).close()
    with torch.inference_mode():
        decoder = _decoders[id(plan)] = choose_decoder(plan, serve_models.VOCABULARY, page_tokens, CPU).decoder
    if decoder.memory is not None:
        decoder.memory.allocate(pages)
    if fixed_shapes:
        with torch.inference_mode():
            decoder.use_graphs(limits.get("max_sequences", 8), limits.get("context", 100))
    pool = PagePool(pages, page_tokens, shares=decoder.memory is not None)
    scheduler = Scheduler(pool, Limits(**{"context": 100, **limits}), (), splits_prompts=decoder.splits_prompts)
    clock = itertools.count(0.0, 0.001).__next__ if fixed_shapes else time.perf_counter  # how often steps are repeated depends on how long they take
    return Engine(Runner(decoder), scheduler, proposer, guesses, clock)  # type: ignore[arg-type]


def answers(engine: Engine, prompts: list[list[int]], **params: Any) -> list[list[int]]:
    found = {engine.submit(prompt, SamplingParams(**{"ignore_end": True, **params})).id: list[int]() for prompt in prompts}
    for event in engine.drain():
        found[event.request].append(event.token)
    return list(found.values())


@pytest.mark.parametrize("name", serve_models.FAMILIES)
def test_families_generate_what_transformers_does(name: str) -> None:
    model, plan = family(name)
    prompts = serve_models.prompts(5)
    expected = [serve_models.greedy(model, prompt, 12) for prompt in prompts]
    assert answers(make_engine(plan), prompts, max_tokens=12) == expected
    assert len({tuple(answer) for answer in expected}) > 1


@pytest.mark.parametrize("name", ["llama-tiny", "gpt-tiny"])
def test_the_zoo_generates_what_it_computes_without_a_cache(name: str) -> None:
    torch.manual_seed(0)
    model = (Llama(LLAMA_CONFIGS[name]) if name in LLAMA_CONFIGS else GPT(GPT_CONFIGS[name])).eval()
    prompts = serve_models.prompts(4)
    plain = RecomputeDecoder(model, CPU)
    engine = Engine(Runner(plain), Scheduler(PagePool(64, 4, shares=False), Limits(60), ()))  # type: ignore[arg-type]
    assert answers(make_engine(applied(model)), prompts, max_tokens=10) == answers(engine, prompts, max_tokens=10)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**9), page_tokens=st.sampled_from([1, 3, 4, 100]), step_tokens=st.integers(4, 40), max_sequences=st.integers(1, 6),
    name=st.sampled_from(["llama", "gemma2", "gpt2"]), pages=st.integers(12, 40),
    speculation=st.sampled_from(["none", "prompt", "itself", "wrong"]), fixed_shapes=st.booleans(),
)  # fmt: skip
def test_requests_that_come_and_go_get_what_they_get_alone(
    seed: int, page_tokens: int, step_tokens: int, max_sequences: int, name: str, pages: int, speculation: str, fixed_shapes: bool
) -> None:
    """Sampled and greedy, cancelled on the way, with memory that does not hold all of them."""
    draw = random.Random(seed)
    _, plan = family(name)
    pages = max(-(-pages * 4 // page_tokens), 2)
    sizes = {"step_tokens": step_tokens, "prompt_tokens": step_tokens, "max_sequences": max_sequences, "context": 40}
    busy = make_engine(plan, pages, page_tokens, make_proposer(speculation), draw.randrange(1, 6), fixed_shapes, **sizes)
    prompts = serve_models.prompts(4, seed % 1000, longest=20)
    requests: dict[int, tuple[list[int], SamplingParams, Any]] = {}
    found: dict[int, list[int]] = {}
    cancelled = set()
    todo = draw.randrange(3, 9)
    while todo or busy.has_work:
        if todo and draw.random() < 0.4:
            todo -= 1
            shared = draw.choice(prompts)
            prompt = [*shared, *(draw.randrange(3, 90) for _ in range(draw.randrange(4)))]  # prompts that begin alike
            params = SamplingParams(
                max_tokens=draw.randrange(1, 15), ignore_end=True, temperature=draw.choice([0.0, 0.9]), seed=draw.randrange(99), top_k=9
            )
            sequence = busy.submit(prompt, params)
            requests[sequence.id], found[sequence.id] = (prompt, params, sequence), []
        if requests and draw.random() < 0.05:
            chosen = draw.choice(list(requests))
            if busy.cancel(requests[chosen][2]):
                cancelled.add(chosen)
        for event in busy.step():
            found[event.request].append(event.token)
    assert busy.scheduler.pool.used == 0
    quiet = make_engine(plan, context=40)
    for number, (prompt, params, _) in requests.items():
        quiet.scheduler.pool.forget_all()
        quiet.submit(prompt, params)
        alone = [event.token for event in quiet.drain()]
        assert found[number] == (alone[: len(found[number])] if number in cancelled else alone)


def test_prompts_that_begin_alike_are_computed_once() -> None:
    _, plan = family("llama")
    engine = make_engine(plan)
    first, second = serve_models.prompts(1, longest=30)[0] * 3, [5, 6, 7]
    answers(engine, [first], max_tokens=2)
    computed = engine.stats.prompt_tokens
    answers(engine, [[*first, *second]], max_tokens=2)
    assert engine.stats.prompt_tokens - computed < len(second) + 2 * 4


def test_sequences_that_do_not_fit_wait_for_those_that_do() -> None:
    """The youngest gives its pages back, and goes on later."""
    model, plan = family("llama")
    prompts = serve_models.prompts(6, longest=10)
    engine = make_engine(plan, pages=12)
    assert answers(engine, prompts, max_tokens=20) == [serve_models.greedy(model, prompt, 20) for prompt in prompts]
    assert engine.scheduler.preemptions > 0


def test_ends_of_answers() -> None:
    _, plan = family("llama")
    prompt = serve_models.prompts(1)[0]
    (whole,) = answers(make_engine(plan), [prompt], max_tokens=10)

    def run(engine: Engine, **params: Any) -> list[TokenEvent]:
        engine.submit(prompt, SamplingParams(**params))
        return list(engine.drain())

    stopped = run(make_engine(plan), max_tokens=10, stop_tokens=(whole[3],))
    cut = whole.index(whole[3]) + 1
    assert [e.token for e in stopped] == whole[:cut] and stopped[-1].finish == "stop"
    assert [e.finish for e in run(make_engine(plan), max_tokens=3)] == [None, None, "length"]
    at_context = run(make_engine(plan, context=len(prompt) + 4), max_tokens=50)
    assert len(at_context) == 4 and at_context[-1].finish == "length"


def test_prompts_that_can_never_run_are_refused() -> None:
    _, plan = family("llama")
    engine = make_engine(plan, context=20)
    for prompt, reason in (([], "no tokens"), (list(range(20)), "20 tokens, and prompt and answer together may have 20")):
        with pytest.raises(RequestError, match=reason):
            engine.submit(prompt, SamplingParams())


def test_decode_goes_on_while_a_long_prompt_comes_in() -> None:
    _, plan = family("llama")
    engine = make_engine(plan, pages=80, step_tokens=64, prompt_tokens=8)
    first = engine.submit([4, 5, 6], SamplingParams(max_tokens=30, ignore_end=True))
    engine.step()
    engine.submit(list(range(3, 63)), SamplingParams(max_tokens=1))
    steps = []
    while engine.has_work:
        steps.append([event.request for event in engine.step()])
    assert all(first.id in step for step in steps[:7]) and sum(len(step) for step in steps) == 30


@pytest.mark.parametrize("kind", ["prompt", "itself", "wrong"])
def test_guesses_change_no_answer_and_save_steps_if_they_are_right(kind: str) -> None:
    """Text that repeats itself is guessed from itself; the model itself guesses everything right; another one, almost nothing."""
    model, plan = family("llama")
    prompt = serve_models.prompts(1, longest=8)[0] * 4
    expected = serve_models.greedy(model, prompt, 40)
    engine = make_engine(plan, proposer=make_proposer(kind))
    assert answers(engine, [prompt], max_tokens=40) == [expected]
    stats = engine.stats
    if kind == "itself":
        assert stats.kept_guesses == stats.guessed_tokens > 25 and stats.steps < 15
    elif kind == "wrong":
        assert stats.kept_guesses < stats.guessed_tokens // 2 and stats.guessed_tokens < 40, "wrong guesses are given up"
    assert stats.generated_tokens == 40 and engine.scheduler.pool.used == 0
    sampled = {"temperature": 0.9, "seed": 5, "repetition_penalty": 1.2, "max_tokens": 20}
    assert answers(make_engine(plan, proposer=make_proposer(kind)), [prompt], **sampled) == answers(make_engine(plan), [prompt], **sampled)


@pytest.mark.parametrize("name", serve_models.PACKED)
def test_steps_of_fixed_shapes_are_repeated_and_give_the_same(name: str) -> None:
    """What a GPU captures as graphs: several tokens before the host sees one, rows of padding, windows and soft caps."""
    model, plan = family(name)
    prompts = serve_models.prompts(5)
    expected = [serve_models.greedy(model, prompt, 12) for prompt in prompts]
    engine = make_engine(plan, fixed_shapes=True)
    assert answers(engine, prompts, max_tokens=12) == expected
    assert engine.stats.steps < 8 and engine.stats.generated_tokens == 60 and engine.scheduler.pool.used == 0
    stop = expected[0][5]
    cut = expected[0].index(stop) + 1
    assert answers(make_engine(plan, fixed_shapes=True), prompts[:1], max_tokens=12, stop_tokens=(stop,)) == [expected[0][:cut]]


@pytest.mark.parametrize(("fixed_s", "token_s", "low", "high"), [(0.0, 1e-4, 80, 120), (0.02, 1e-6, 2048, 2048), (0.02, 1e-4, 180, 320)])
def test_a_step_takes_prompts_by_what_they_cost(fixed_s: float, token_s: float, low: int, high: int) -> None:
    """Beside steps of 10 ms: as many tokens as double a step, or as double what prompts take whatever their length."""
    pace, draw = PromptPace(2048), random.Random(0)
    for _ in range(60):
        pace.note(0, 0.01)
        tokens = min(pace.prompt_tokens, draw.randrange(pace.prompt_tokens // 2, 2 * pace.prompt_tokens))
        pace.note(tokens, 0.01 + fixed_s + token_s * tokens)
    assert low <= pace.prompt_tokens <= high
    assert pace.steps_in(0.02) == 2


def test_guesses_from_the_text() -> None:
    text = Sequence(1, [1, 2, 3, 4, 9, 1, 2, 3], 8, SamplingParams(), 0, 0.0)
    lookup = PromptLookup()
    assert lookup.propose([text], [3]) == {1: (4, 9, 1)}, "as it went on after 1 2 3"
    assert PromptLookup().propose([text], [0]) == {}
    text.tokens += [4, 7]
    assert lookup.propose([text], [3]) == {}, "4 7 was never there"
    for _ in range(20):
        lookup.note(text, 3, 0)
    text.tokens += [1, 2, 3]
    assert lookup.propose([text], [3]) == {}, "guesses that are always wrong are paused"


def test_steps_are_numbers_and_back() -> None:
    step = Step((Chunk(3, 5, (1, 2), (7, 8)), Chunk(4, 0, (9,), (), 0)), (1, 2), 3)
    assert Step.decode(step.encode()) == step and Step.decode(Step().encode()) == Step()


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_bf16_logits_are_close_to_a_plain_pass(name: str) -> None:
    """Teacher-forced: the same tokens in chunks beside another sequence, and in one plain pass, both in bfloat16."""
    model = serve_models.build(name).to(torch.bfloat16)
    own = apply(Plan("test", 1, Mesh(), memory=MemoryPolicy(precision="bf16")), serve_models.build(name).to(torch.bfloat16), None)
    with torch.inference_mode():
        chosen = choose_decoder(own, serve_models.VOCABULARY, 4, CPU)
        chosen.decoder.memory.allocate(16)  # type: ignore[union-attr]
        tokens = serve_models.prompts(1, longest=24)[0]
        expected = model(torch.tensor([tokens])).logits[0].float()
        found = [chosen.decoder.forward(Step((Chunk(0, i, (token,), tuple(range(8))),)))[0] for i, token in enumerate(tokens)]
        chosen.decoder.close()
    assert chosen.kind == "packed" and chosen.difference < 0.02
    assert (torch.stack(found).float() - expected).norm() < 0.02 * expected.norm()


@pytest.mark.prove
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_compiled_model_generates_the_same(name: str) -> None:
    model = serve_models.build(name)
    plan = apply(Plan("test", 1, Mesh(), compile="model"), serve_models.build(name), None)
    prompts = serve_models.prompts(3)
    assert answers(make_engine(plan), prompts, max_tokens=6) == [serve_models.greedy(model, prompt, 6) for prompt in prompts]
