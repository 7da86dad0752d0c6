"""Tracing: totals against closed formulas and real runs, folding, and a model that stays as it was."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import json
import math
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_inputs import plan
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from meshwright import zoo
from meshwright.core.errors import RequestError
from meshwright.core.model import LayerProfile, ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.task import Batch, Field, Loss, Task
from meshwright.cost.memory_cost import model_state_bytes, peak_live_memory
from meshwright.describe import layer_profiles, profile_tracer
from meshwright.describe.dataflow_tracer import trace_module_dataflow
from meshwright.describe.preserved_attributes import _find_caches
from meshwright.describe.profile_tracer import profile_parameters_only, trace_module, trace_task
from meshwright.describe.storage_lifetimes import upper_envelope
from meshwright.describe.untraceable import UntraceableError
from meshwright.schedule.step_actions import gradient_buckets
from meshwright.zoo.gpt import GPT, GPTConfig
from meshwright.zoo.llama import Llama, LlamaConfig
from meshwright.zoo.losses import next_token_loss

BATCH = 2  # what a profile is traced at


def square(model: nn.Module, batch: Batch) -> Tensor:
    value: Tensor = model(batch["x"]).float().square().mean()
    return value


def profile_of(model: nn.Module, *shape: int, **how: Any) -> ModelProfile:
    return trace_module(model, how.pop("loss", square), {"x": torch.zeros(BATCH, *shape)}, name="made-up", **how)


def gpt(layers: int, **sizes: int) -> Task:
    config = GPTConfig(**{"vocab": 50, "context": 16, "heads": 2, "width": 8, **sizes}, layers=layers)
    return Task("gpt", lambda: GPT(config), next_token_loss, {"tokens": Field((config.context + 1,), "int64", config.vocab)})


def llama(layers: int) -> Task:
    config = LlamaConfig(vocab=50, context=16, layers=layers, heads=4, kv_heads=2, width=16, ffn=24)
    return Task("llama", lambda: Llama(config), next_token_loss, {"tokens": Field((17,), "int64", 50)})


def by_name(profile: ModelProfile) -> dict[str, LayerProfile]:
    return {x.name: x for x in profile.layers}


# Closed formulas


def test_gpt2_costs_what_its_formulas_say() -> None:
    """Weights of linear layers twice a token, the tied head among them; attention 4·S²·d a layer; backward 2 and 2.5 times."""
    layers, width, vocab, length = 12, 768, 50257, 1024
    found = trace_task(zoo.load("gpt2-124m"))
    tokens = BATCH * length
    products = 2 * tokens * (12 * layers * width**2 + vocab * width)
    attention = 4 * layers * BATCH * length**2 * width
    assert found.parameters == 124_439_808 == vocab * width + length * width + layers * (12 * width**2 + 13 * width) + 2 * width
    assert found.flops_forward == products + attention
    assert found.flops_backward == 2 * products + 2.5 * attention
    assert found.tokens_per_sample == length
    block = by_name(found)["blocks.5"]
    assert block.parameters == 12 * width**2 + 13 * width
    assert block.flops_forward == 2 * tokens * 12 * width**2 + 4 * BATCH * length**2 * width
    assert block.output_bytes == tokens * width * 4
    assert by_name(found)["head"].flops_forward == 2 * tokens * vocab * width


def test_llama_counts_grouped_heads_and_the_gate() -> None:
    width, kv, ffn, vocab, length, layers = 16, 8, 24, 50, 16, 3
    found = trace_task(llama(layers))
    weights = layers * (2 * width**2 + 2 * width * kv + 3 * width * ffn) + vocab * width
    attention = 4 * layers * BATCH * length**2 * width
    assert found.parameters == weights + vocab * width + (2 * layers + 1) * width
    # The angles of the rotation are an outer product of positions and frequencies, which is no matrix product.
    assert found.flops_forward == 2 * BATCH * length * weights + attention
    assert found.flops_backward == 4 * BATCH * length * weights + 2.5 * attention


def test_the_cnn_by_hand() -> None:
    found = trace_task(zoo.load("cnn"))
    convolutions = [2 * BATCH * out * size**2 * into * 9 for into, out, size in ((3, 16, 32), (16, 32, 16), (32, 64, 8))]
    dense = [2 * BATCH * 1024 * 512, 2 * BATCH * 512 * 10]
    assert found.parameters == 553_514
    assert found.flops_forward == sum(convolutions) + sum(dense)
    assert found.flops_backward == 2 * (sum(convolutions) + sum(dense)) - convolutions[0], "an image needs no gradient"
    assert [x.flops_forward for x in found.layers][:5] == [*convolutions, *dense]
    assert {k.kind for k in by_name(found)["conv2"].kernels if k.flops} == {"conv2"}


def test_the_vae_by_hand() -> None:
    found = trace_task(zoo.load("vae"))
    sizes = ((64, 128), (128, 32), (16, 128), (128, 64))
    assert found.parameters == sum(a * b + b for a, b in sizes)
    assert found.flops_forward == sum(2 * BATCH * a * b for a, b in sizes)
    assert found.flops_backward == 2 * found.flops_forward - 2 * BATCH * 64 * 128


def test_the_convolutional_vae_by_hand() -> None:
    found = trace_task(zoo.load("vae-conv"))
    down = [2 * BATCH * out * size**2 * into * 16 for into, out, size in ((1, 16, 14), (16, 32, 7))]
    up = [2 * BATCH * into * size**2 * out * 16 for into, out, size in ((32, 16, 7), (16, 1, 14))]  # a transposed product: by its input's pixels
    dense = [2 * BATCH * 1568 * 32, 2 * BATCH * 16 * 1568]
    assert found.flops_forward == sum(down) + sum(up) + sum(dense)
    assert found.flops_backward == 2 * found.flops_forward - down[0]


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "vae", "vae-conv", "cnn", "cosmoflow-tiny", "dlrm-tiny"])
def test_parameters_are_exact_by_name_and_shape(name: str) -> None:
    task = zoo.load(name)
    found = trace_task(task)
    real = dict(task.build().named_parameters())
    assert {t.name: t.shape for t in found.tensors} == {n: tuple(p.shape) for n, p in real.items()}
    assert [t.name for t in sorted(found.tensors, key=lambda t: t.registration_index)] == list(real), (
        "buckets rely on the order of model.parameters()"
    )
    assert found.parameters == sum(p.numel() for p in real.values())
    assert found.parameter_bytes == 4 * found.parameters
    live = profile_parameters_only(task.build(), name)
    assert sorted(live.tensors, key=lambda t: t.registration_index) == sorted(found.tensors, key=lambda t: t.registration_index)
    assert live.flops_forward == live.activation_bytes == 0


def test_405_billion_parameters_are_traced_in_little_time_and_memory() -> None:
    code = """
import json, resource, time
begun = time.process_time()
from meshwright import zoo
from meshwright.describe.profile_tracer import trace_task
found = trace_task(zoo.load("llama3-405b"))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps([found.parameters, found.flops_forward, time.process_time() - begun, peak, len(found.layers)]))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=200)
    parameters, flops, seconds, peak, count = json.loads(ran.stdout)
    width, ffn, vocab, layers, length = 16384, 53248, 128256, 126, 8192
    weights = layers * (2 * width**2 + 2 * width * 1024 + 3 * width * ffn) + vocab * width
    assert parameters == 405_853_388_800
    assert flops == 2 * BATCH * length * weights + 4 * layers * BATCH * length**2 * width
    assert count >= layers
    assert seconds < 60
    assert peak < 2e9


# Activations


def saved_in_a_real_run(model: nn.Module, loss: Loss, batch: Batch) -> int:
    """Bytes of the storages that autograd keeps, parameters and the batch not counted; each storage once."""
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *batch.values())}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss(model, batch)
    return sum(t.untyped_storage().nbytes() for pointer, t in kept.items() if pointer not in known)


@pytest.mark.parametrize(
    "activation", [nn.ReLU, nn.GELU, nn.Tanh, nn.Identity, lambda: nn.Dropout(0.5)], ids=["relu", "gelu", "tanh", "none", "dropout"]
)
@pytest.mark.parametrize("samples", [1, 2, 7])
def test_an_mlp_saves_what_a_real_run_saves(activation: Callable[[], nn.Module], samples: int) -> None:
    model = nn.Sequential(nn.Linear(12, 20), activation(), nn.LayerNorm(20), nn.Linear(20, 8), activation(), nn.Linear(8, 3))
    found = profile_of(model, 12).at_batch(samples).activation_bytes
    assert found == saved_in_a_real_run(model, square, {"x": torch.rand(samples, 12)})


@pytest.mark.parametrize("name", ["cnn", "vae", "vae-conv", "cosmoflow-tiny", "dlrm-tiny"])
def test_zoo_models_save_what_a_real_run_saves(name: str) -> None:
    task = zoo.load(name)
    batch = {n: torch.zeros(5, *f.shape, dtype=getattr(torch, f.dtype)) for n, f in task.fields.items()}
    assert trace_task(task).at_batch(5).activation_bytes == saved_in_a_real_run(task.build(), task.loss, batch)


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
def test_language_models_save_what_a_real_run_saves(name: str) -> None:
    task = zoo.load(name)
    batch = {"tokens": torch.zeros(5, task.fields["tokens"].shape[0], dtype=torch.int64)}
    assert trace_task(task).at_batch(5).activation_bytes == saved_in_a_real_run(task.build(), task.loss, batch)


class _Alive(TorchDispatchMode):
    """The most bytes alive at once of what a real run makes."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known = {t.untyped_storage()._cdata for t in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in (t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.known:
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._died, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.now)
        return out

    def _died(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


@pytest.mark.parametrize(
    ("name", "samples"),
    [("gpt-tiny", 4), ("gpt-tiny", 32), ("llama-tiny", 8), ("cosmoflow-tiny", 4), ("cosmoflow-tiny", 32), ("vae-conv", 64), ("cnn", 512)],
)
def test_the_fullest_moment_is_that_of_a_real_run(name: str, samples: int) -> None:
    """Gradients included, on one device, without what libraries on CPUs take for themselves, which is not seen here."""
    task = zoo.load(name)
    model = task.build()
    batch = {n: torch.zeros(samples, *f.shape, dtype=getattr(torch, f.dtype)) for n, f in task.fields.items()}
    with sdpa_kernel(SDPBackend.MATH), _Alive([*model.parameters(), *batch.values()]) as alive:
        value = task.loss(model, batch)
        (value[0] / value[1] if isinstance(value, tuple) else value).backward()
    found = peak_live_memory(Plan(name, samples), trace_task(task, attention="math", device="cuda").at_batch(samples)).bytes
    assert found == pytest.approx(alive.most, rel=0.03)


def test_norms_are_wide_on_cuda_and_pooling_is_not() -> None:
    norm, pool = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), nn.Sequential(nn.Conv3d(1, 4, 1), nn.ReLU(), nn.MaxPool3d(2))
    for model, shape, more in ((norm, (8,), True), (pool, (1, 4, 4, 4), False)):
        cpu, cuda = (profile_of(model, *shape, precision="bf16", device=kind).activation_bytes for kind in ("cpu", "cuda"))
        assert (cuda > cpu) is more and cuda != cpu


@example([(-2, 2), (-5, 3)], 2)
@given(st.lists(st.tuples(st.integers(-50, 50), st.integers(0, 20)), min_size=1), st.integers(1, 40))
def test_an_envelope_is_the_highest_line_everywhere(lines: list[tuple[int, int]], samples: int) -> None:
    few = upper_envelope([(float(a), float(b)) for a, b in lines])
    assert max([0.0, *(a + b * samples for a, b in few)]) == max([0.0, *(a + b * samples for a, b in lines)])


def activations(length: int, attention: str) -> float:
    return trace_task(gpt(2, context=length), attention=attention).activation_bytes


def test_flash_attention_never_saves_the_scores() -> None:
    short, middle, long = (activations(length, "flash") for length in (64, 128, 192))
    assert long - middle == middle - short > 0


def test_math_attention_saves_the_scores_and_computes_as_much() -> None:
    short, middle, long = (activations(length, "math") for length in (64, 128, 192))
    scores = 4 * BATCH * 2 * 2 * (192**2 - 2 * 128**2 + 64**2)  # fp32, two heads, two layers: second difference of S²
    assert (long - middle) - (middle - short) >= scores
    flash, math_ = (trace_task(gpt(2), attention=a).flops_forward for a in ("flash", "math"))
    assert flash == math_


def test_attention_over_three_dimensions() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.up(x)
            return F.scaled_dot_product_attention(y, y, y)

    found = profile_of(Bare(), 5, 8)
    assert found.flops_forward == 2 * BATCH * 5 * 8 * 8 + 4 * BATCH * 5 * 5 * 8


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_torchs_own_encoder_runs_flash_attention_too(dropout: float) -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True), 4)
    found = profile_of(model, 10, 16)
    block = 2 * BATCH * 10 * (4 * 16 * 16 + 2 * 16 * 32) + 4 * BATCH * 10 * 10 * 16
    assert [x.flops_forward for x in found.layers if x.block] == [block] * 4
    short, middle, long = (profile_of(model, length, 16).activation_bytes for length in (10, 20, 30))
    assert long - middle == middle - short


# Other batch sizes and precisions


SUMS: tuple[Callable[[LayerProfile], float], ...] = (
    lambda x: x.flops_forward,
    lambda x: x.flops_backward,
    lambda x: x.activation_bytes,
    lambda x: x.output_bytes,
    lambda x: x.fusible_bytes,
    lambda x: x.compiler_recomputed_bytes,
    lambda x: sum(k.bytes * k.count for k in x.kernels),
    lambda x: sum(k.count for k in x.kernels),
)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "vae", "cnn", "cosmoflow-tiny", "dlrm-tiny"])
def test_a_profile_at_another_batch_is_what_a_trace_there_gives(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = zoo.load(name)
    usual = trace_task(task, precision=precision)
    for module in (profile_tracer, layer_profiles):
        monkeypatch.setattr(module, "PROBED_BATCHES", (16, 17))
    there, moved = trace_task(task, precision=precision), usual.at_batch(16)
    assert there.batch == moved.batch == 16
    for a, b in [*zip(there.layers, moved.layers, strict=True), *zip(there.per_sample_layers, moved.per_sample_layers, strict=True)]:
        assert (a.name, a.tensors, a.block) == (b.name, b.tensors, b.block)
        assert [get(a) for get in SUMS] == pytest.approx([get(b) for get in SUMS]), a.name


def test_a_trace_does_not_depend_on_what_the_process_did_before() -> None:
    """In a new process autograd's numbers begin at 0. Everyone's first trace is such a one."""
    code = """
from meshwright import zoo
from meshwright.describe.profile_tracer import trace_task
first, second = (trace_task(zoo.load("dlrm-tiny")) for _ in range(2))
wrong = [a.name for a, b in zip(first.layers + first.per_sample_layers, second.layers + second.per_sample_layers) if a.kernels != b.kernels]
print(wrong)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert ran.stdout.strip() == "[]"


def test_tracing_twice_gives_the_same_profile() -> None:
    found = [trace_task(llama(2)) for _ in range(5)]
    assert all(other.layers == found[1].layers for other in found[2:])


def test_a_profile_there_and_back_is_the_same() -> None:
    found = trace_task(gpt(2))
    assert found.at_batch(2) is found
    assert found.at_batch(9).at_batch(2) == found


def test_low_precision_halves_products_and_changes_no_flops() -> None:
    full, low = (trace_task(gpt(2), precision=p) for p in ("fp32", "bf16"))
    assert (full.flops_forward, full.flops_backward) == (low.flops_forward, low.flops_backward)
    assert by_name(low)["head"].output_bytes == by_name(full)["head"].output_bytes / 2
    assert low.at_batch(64).activation_bytes < 0.8 * full.at_batch(64).activation_bytes
    assert low.parameter_bytes == full.parameter_bytes, "parameters are stored in fp32"


def test_double_precision_doubles_bytes() -> None:
    single, double = (trace_task(gpt(2), precision=p) for p in ("fp32", "fp64"))
    assert double.parameter_bytes == 2 * single.parameter_bytes
    assert double.activation_bytes > 1.9 * single.activation_bytes


# Blocks and folding


def test_repeated_blocks_are_recognised() -> None:
    found = trace_task(gpt(5))
    assert {x.name: x.block for x in found.layers if x.block} == {f"blocks.{i}": "blocks.0" for i in range(5)}
    assert not any(x.block for x in trace_task(zoo.load("cnn")).layers)


@pytest.mark.parametrize("make", [gpt, llama], ids=["gpt", "llama"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_folding_changes_no_number(make: Callable[[int], Task], precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folded = trace_task(make(6), precision=precision)
    monkeypatch.setattr(profile_tracer, "skip_repeated_blocks", lambda *_: contextlib.nullcontext())
    plain = trace_task(make(6), precision=precision)
    apart = {"fusible_bytes": 0.0, "transient_bytes": 0.0, "transient_lines": ()}  # see the next tests
    for a, b in zip(folded.layers, plain.layers, strict=True):
        assert replace(a, **apart) == replace(b, **apart)
        # Autocast keeps its copies of biases until forward ends: folded blocks have none, and this model's are as large as its activations.
        assert a.transient_bytes == pytest.approx(b.transient_bytes, rel=1e-9 if precision == "fp32" else 0.2)


def test_folding_does_not_change_what_a_compiler_could_fuse(monkeypatch: pytest.MonkeyPatch) -> None:
    folded = trace_task(gpt(6))
    monkeypatch.setattr(profile_tracer, "skip_repeated_blocks", lambda *_: contextlib.nullcontext())
    assert [x.fusible_bytes for x in folded.layers] == [x.fusible_bytes for x in trace_task(gpt(6)).layers]


@pytest.mark.parametrize("make", [gpt, llama], ids=["gpt", "llama"])
def test_a_block_costs_the_same_among_two_and_among_six(make: Callable[[int], Task]) -> None:
    """Two blocks are never folded."""
    few, many = trace_task(make(2)), trace_task(make(6))

    def costs(x: LayerProfile) -> tuple[Any, ...]:
        return x.parameters, x.flops_forward, x.flops_backward, x.activation_bytes, x.output_bytes, x.kernels

    second = by_name(few)["blocks.1"]
    assert costs(by_name(few)["blocks.0"]) == costs(by_name(many)["blocks.0"])
    for number in range(1, 6):
        assert costs(by_name(many)[f"blocks.{number}"]) == costs(second)
    for name in {x.name for x in few.layers if not x.block}:
        assert costs(by_name(many)[name]) == costs(by_name(few)[name]), name


class Repeats(nn.Module):
    """The product with its weight, `times` times over: equal in shape whatever `times` is."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.inner(torch.sin(x))
        return x


@pytest.mark.parametrize(
    "parts",
    [
        [Repeats(1), Repeats(1), Repeats(5), Repeats(5)],
        [nn.Sequential(nn.Linear(8, 8), a()) for a in (nn.Identity, nn.Identity, nn.GELU, nn.GELU)],
        [nn.Sequential(nn.Conv2d(4, 4, 3, stride=s, padding=1), nn.ReLU()) for s in (1, 1, 2, 1)],
    ],
    ids=["attribute", "activation", "stride"],
)
def test_blocks_of_equal_shapes_that_do_different_things(parts: list[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (4, 16, 16) if isinstance(parts[0], nn.Sequential) and isinstance(parts[0][0], nn.Conv2d) else (8,)
    folded = profile_of(nn.Sequential(*parts), *shape)
    monkeypatch.setattr(profile_tracer, "skip_repeated_blocks", lambda *_: contextlib.nullcontext())
    plain = profile_of(nn.Sequential(*parts), *shape)
    assert [x.activation_bytes for x in folded.layers] == [x.activation_bytes for x in plain.layers]
    assert folded.flops_forward == plain.flops_forward


def test_blocks_on_inputs_of_other_shapes_are_not_folded() -> None:
    class Pyramid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(5))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)[:, ::2]
            return x

    found = profile_of(Pyramid(), 32, 8)
    assert [x.flops_forward for x in found.layers if x.block] == [2 * BATCH * length * 64 for length in (32, 16, 8, 4, 2)]


def test_a_model_that_checkpoints_its_blocks() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    assert profile_of(Checkpointed(), 8).parameters == 4 * 2 * 72


# Which layer owns what


def test_tied_parameters_count_once() -> None:
    found = trace_task(gpt(2))
    assert [names[1:] for names in found.tied_parameters] == [("head.weight",)]
    assert by_name(found)["head"].parameters == 0
    assert by_name(found)["head"].flops_forward > 0
    assert len({t.name for t in found.tensors}) == len(found.tensors)


class Holder(nn.Module):
    """Parameters of its own beside blocks, one level down as well."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.body = nn.Module()
        self.body.shift = nn.Parameter(torch.zeros(8))  # type: ignore[assignment]
        self.body.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale + self.body.shift
        for block in self.body.blocks:
            x = block(x)
        return x


def test_parameters_that_containers_own_are_counted_once() -> None:
    found = profile_of(Holder(), 8)
    assert sorted(t.name for t in found.tensors) == sorted(n for n, _ in Holder().named_parameters())
    assert by_name(found)["body"].parameters == 8
    assert by_name(found)["(model)"].parameters == 8
    assert found.parameters == 8 + 8 + 3 * 72


def test_layers_come_in_the_order_they_run() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(8, 8)
            self.first = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.last(self.first(x))
            return y

    assert [x.name for x in profile_of(Backwards(), 8).layers][:2] == ["first", "last"]


def test_frozen_parameters_need_no_gradient_memory() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].requires_grad_(False)
    found = profile_of(model, 64)
    trained = 4 * (64 * 64 + 64)
    assert sum(b.bytes for b in gradient_buckets(plan(found, dp=2), found)) == trained
    assert model_state_bytes(plan(found), found, "adamw")["optimizer"] == 2 * trained


def test_units_do_not_lie_inside_each_other() -> None:
    from meshwright.plan.partition import choose_units

    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, 8))
            self.parts = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 16))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.parts(x @ self.weight)
            return y

    model = nn.Module()
    model.body, model.forward = Body(), lambda x: model.body(x)  # type: ignore[assignment]
    units = choose_units(profile_of(model, 8))
    assert not any(b.startswith(f"{a}.") for a in units for b in units)


# A live model is not touched


class Noted(nn.Module):
    """Blocks, a buffer that training changes, and a forward that somebody replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(4))
        inner = self.blocks[2].forward
        self.blocks[2].forward = lambda x: inner(x) + 1  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def look(model: nn.Module) -> dict[str, Any]:
    return {
        "values": {n: copy.deepcopy(t.detach()) for n, t in [*model.named_parameters(), *model.named_buffers()]},
        "same": {n: id(t) for n, t in [*model.named_parameters(), *model.named_buffers()]},
        "grads": [p.grad for p in model.parameters()],
        "forwards": {n: vars(m).get("forward") for n, m in model.named_modules()},
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()],
        "training": [m.training for m in model.modules()],
    }


@pytest.mark.parametrize("fails", [False, True], ids=["traced", "failed"])
def test_a_live_model_stays_as_it_was(fails: bool) -> None:
    model = Noted()
    model.blocks[0].eval()
    batch = {"x": torch.rand(4, 8)}
    given, before = batch["x"].clone(), look(model)

    def loss(network: nn.Module, data: Batch) -> Tensor:
        value = square(network, data)
        if fails:
            raise ValueError("no such thing")
        return value

    if fails:
        with pytest.raises(RequestError, match="noted can be neither traced nor run: no such thing"):
            trace_module(model, loss, batch, name="noted")
    else:
        assert trace_module(model, loss, batch, name="noted").parameters == 4 * (72 + 16)
    after = look(model)
    values = before.pop("values"), after.pop("values")
    assert before == after
    assert all(torch.equal(values[0][n], values[1][n]) for n in values[0])
    assert torch.equal(batch["x"], given)
    square(model, batch).backward()
    assert all(p.grad is not None and not p.grad.is_meta for p in model.parameters())


def test_batches_may_be_tuples_and_hold_other_things() -> None:
    found = trace_module(nn.Linear(8, 2), lambda m, b: m(b[0]["x"]).mean() * len(b[1]), ({"x": torch.rand(6, 8)}, "two"), name="odd")
    assert found.flops_forward == 2 * BATCH * 8 * 2


def test_a_batch_may_hold_a_number() -> None:
    found = trace_module(nn.Linear(8, 2), lambda m, b: (m(b[0]) * b[1]).mean(), (torch.rand(6, 8), torch.tensor(3.0)), name="scaled")
    assert found.flops_forward == 2 * BATCH * 8 * 2


def test_a_loss_may_be_a_sum_and_a_count() -> None:
    found = profile_of(nn.Linear(8, 2), 8, loss=lambda m, b: (m(b["x"]).sum(), torch.tensor(2)))
    assert found.flops_backward == 2 * BATCH * 8 * 2


# What cannot be traced says so


def reading(value: Callable[[Tensor], Any]) -> Task:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            value(torch.rand(3))
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x)
            return y

    return Task("reads", Reads, square, {"x": Field((8,))})


@pytest.mark.parametrize("value", [lambda t: t.sum().item(), lambda t: t.tolist(), lambda t: int(t[0])], ids=["item", "list", "int"])
def test_a_constructor_that_reads_values_is_refused(value: Callable[[Tensor], Any]) -> None:
    with pytest.raises(RequestError, match="model reads: its constructor needs real tensors") as error:
        trace_task(reading(value))
    assert "\n" not in str(error.value)


def test_a_constructor_that_fails_by_itself_says_why() -> None:
    def build() -> nn.Module:
        raise FileNotFoundError("weights.bin")

    with pytest.raises(RequestError, match=r"weights\.bin"):
        trace_task(Task("broken", build, square, {"x": Field((8,))}))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x if x.sum() > 0 else -x)
        return y


@pytest.mark.parametrize(
    "loss",
    [lambda m, b: m(b["x"]), lambda m, b: 3.0, lambda m, b: b["x"].sum(), lambda m, b: m(b["y"]).mean()],
    ids=["vector", "number", "no gradient", "no such field"],
)
def test_a_loss_that_does_not_run_names_the_model_in_one_line(loss: Loss) -> None:
    with pytest.raises(RequestError, match="model made-up can be neither traced nor run: ") as error:
        profile_of(nn.Linear(8, 8), 8, loss=loss)
    assert "\n" not in str(error.value)


def test_a_model_that_reads_values_is_run_instead() -> None:
    found, traced = profile_of(Branches(), 8), profile_of(nn.Sequential(nn.Linear(8, 8)), 8)
    assert "Python reads the value of a tensor in `y: Tensor = self.inner(" in found.untraceable and "test_trace.py:" in found.untraceable
    assert (found.parameters, found.flops_forward) == (traced.parameters, traced.flops_forward)
    assert not traced.untraceable


def test_a_field_of_no_known_type() -> None:
    with pytest.raises(RequestError, match="flaot32"):
        trace_task(Task("typo", lambda: nn.Linear(8, 8), square, {"x": Field((8,), "flaot32")}))


def test_recurrent_layers_compute_something() -> None:
    found = profile_of(nn.LSTM(8, 16, batch_first=True), 5, 8, loss=lambda m, b: m(b["x"])[0].mean())
    assert found.flops_forward >= 2 * BATCH * 5 * 4 * 16 * (8 + 16)


def test_sparse_embeddings() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4))
    found = trace_module(model, square, {"x": torch.zeros(2, 3, dtype=torch.int64)}, name="sparse")
    assert found.parameters == 60


# Hugging Face

needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
HF = {
    "gpt2": {"n_layer": 4, "n_head": 2, "n_embd": 32, "vocab_size": 300, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0},
    "llama": {
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "intermediate_size": 64,
        "vocab_size": 300, "max_position_embeddings": 64,
    },
}  # fmt: skip
HF_WEIGHTS = {"gpt2": 4 * 12 * 32**2, "llama": 4 * (2 * 32**2 + 2 * 32 * 16 + 3 * 32 * 64)}  # of the blocks' linear layers


@needs_transformers
@pytest.mark.parametrize("kind", HF)
def test_hugging_face_models_are_traced(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **HF[kind]}))
    task = zoo.load(f"hf:{tmp_path}", seq=16)
    found = trace_task(task)
    assert found.parameters == sum(p.numel() for p in task.build().parameters())
    products = 2 * BATCH * 16 * (HF_WEIGHTS[kind] + 300 * 32)
    attention = 4 * 4 * BATCH * 16**2 * 32
    outer = 2 * BATCH * 16 * 4 if kind == "llama" else 0  # rotary angles by a small product
    assert products + attention <= found.flops_forward <= products + attention + outer
    assert found.flops_backward == 2 * products + 2.5 * attention
    assert sum(bool(x.block) for x in found.layers) == 4
    assert [names[1:] for names in found.tied_parameters] == ([("lm_head.weight",)] if kind == "gpt2" else [])
    assert math.isclose(found.at_batch(8).flops_forward, 4 * found.flops_forward, rel_tol=0.01)


def test_a_single_small_sample_is_convolved_by_torch_itself() -> None:
    """Which lays out columns and nothing else; several samples go to a library, which has room for four gradients of a weight."""
    build, kernel, edge, given, made = lambda: nn.Sequential(nn.Conv2d(8, 16, 3, padding=1)), 9, 8, 8, 16
    fields = {"image": Field((given, edge, edge))}
    profile = trace_task(Task("conv", build, lambda model, batch: model(batch["image"]).square().mean(), fields))
    columns, weight = 4 * kernel * given * edge * edge, 4 * kernel * given * made
    one, two, three = (profile.at_batch(n).layers[0].transient_bytes for n in (1, 2, 3))
    each = three - two
    assert 0 < 4 * weight < two - each - one + columns, "one sample is not on the line of several"
    on_gpu = trace_task(Task("conv", build, lambda model, batch: model(batch["image"]).square().mean(), fields), device="cuda")
    assert on_gpu.layers[0].single_sample_bytes is None


def test_who_saves_what_is_known_by_module() -> None:
    """Of a block: its norms and the products that are cut where they give save whole activations, those that sum over cut inputs do not."""
    profile = trace_task(zoo.load("gpt-mini"))
    block = next(layer for layer in profile.layers if layer.name.startswith("blocks."))
    by, width = dict(block.saved_by), block.output_bytes
    assert sum(by.values()) < 1.0, "attention and the activation belong to no module with parameters"
    whole = [part * block.activation_bytes / width for name, part in by.items() if "norm" in name]
    assert whole and all(abs(part - 1) < 0.1 for part in whole)


def test_what_rank_0_says_of_such_a_model_reaches_other_ranks() -> None:
    with pytest.raises(UntraceableError) as error:
        trace_module_dataflow(Branches(), square, {"x": torch.zeros(BATCH, 8)})
    received = pickle.loads(pickle.dumps(error.value))
    assert isinstance(received, RequestError) and str(received) == str(error.value)


class LazyTables(nn.Module):
    """Makes tables when they are first needed, and keeps them in three ways."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.tables, self.calls = nn.Linear(8, 8), {}, 0
        self.table: Tensor | None = None

    @functools.lru_cache(maxsize=4)  # noqa: B019
    def positions(self, length: int) -> Tensor:
        return torch.arange(length).float().cos()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.table = torch.arange(8.0).sin() if self.table is None else self.table
        self.tables.setdefault(8, torch.arange(8.0).tanh())
        return self.linear(x) + self.table + self.tables[8] + self.positions(8)  # type: ignore[no-any-return]


def test_a_trace_leaves_nothing_in_the_model() -> None:
    model, batch = LazyTables(), {"x": torch.randn(4, 8)}
    expected = copy.deepcopy(model)(batch["x"])
    trace_module_dataflow(model, lambda m, b: m(b["x"]).mean(), batch)
    trace_module(model, lambda m, b: m(b["x"]).mean(), batch, name="lazy")
    assert (model.table, model.tables, model.calls) == (None, {}, 0)
    assert torch.equal(model(batch["x"]), expected)


def test_caches_inside_static_methods_are_found() -> None:
    """Of a static method, a class holds an object that is not a function; a decorator's closure holds the cache."""
    cache = functools.lru_cache(lambda size: torch.zeros(size))

    class Table(nn.Module):
        made = staticmethod(lambda size: cache(size))

    assert cache in _find_caches(Table())


def test_a_library_that_is_imported_by_a_traced_constructor_still_initialises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a model is built from fakes, initialisation is skipped; what a library took from `torch.nn.init` then must work later."""
    (tmp_path / "library_of_inits.py").write_text("from torch.nn import init\nnormal_ = init.normal_\n")
    monkeypatch.syspath_prepend(tmp_path)

    def build() -> nn.Module:
        importlib.import_module("library_of_inits")
        return nn.Linear(4, 4)

    trace_task(Task("imports", build, lambda model, batch: model(batch["x"]).mean(), {"x": Field((4,))}))
    weight = torch.zeros(8)
    importlib.import_module("library_of_inits").normal_(weight)
    assert weight.abs().sum() > 0
