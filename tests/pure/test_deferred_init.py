"""A deferred construction gives the values of an ordinary one with the same seed, bit for bit, with one tensor in memory at a time."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from meshwright import zoo
from meshwright.describe.deferred_init import DeferralError, DeferredModel, defer_init

transformers = pytest.importorskip("transformers")

SEED = 5
SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def held(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, buffers and attributes that are tensors, by all their names."""
    return {
        f"{prefix}.{key}".lstrip("."): value
        for prefix, module in model.named_modules(remove_duplicate=False)
        for registry in (module._parameters, module._buffers, vars(module))
        for key, value in registry.items()
        if isinstance(value, Tensor) and not is_lazy(value)
    }


def identical(expected: Tensor, found: Tensor) -> bool:
    if (expected.dtype, expected.shape, expected.stride()) != (found.dtype, found.shape, found.stride()):
        return False
    first, second = (t.detach().resolve_conj().contiguous().flatten().view(torch.uint8) for t in (expected, found))
    return torch.equal(first, second)


def check(build: Callable[[], nn.Module]) -> DeferredModel:
    """Compare everything that a deferred construction promises with an ordinary one."""
    _seed(SEED)
    model = build()
    state, expected = torch.get_rng_state(), held(model)
    _seed(SEED)
    torch.manual_seed(77)
    callers = torch.get_rng_state()
    deferred = defer_init(build, SEED)
    found = held(deferred.model)
    assert all(t.is_meta for t in found.values())
    assert [(n, t.shape, t.dtype, t.requires_grad, type(t)) for n, t in found.items()] == [
        (n, t.shape, t.dtype, t.requires_grad, type(t)) for n, t in expected.items()
    ]
    assert _ties(found) == _ties(expected)
    seen: list[str] = []
    for names, tensor in deferred.values.replay():
        assert all(identical(expected[name], tensor) for name in names), names
        seen += names
    assert sorted(seen) == sorted(expected)
    assert torch.equal(torch.get_rng_state(), callers)
    assert deferred.values.rng_state is not None and torch.equal(deferred.values.rng_state, state)
    return deferred


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _ties(tensors: dict[str, Tensor]) -> set[frozenset[str]]:
    by_id: dict[int, set[str]] = {}
    for name, tensor in tensors.items():
        by_id.setdefault(id(tensor), set()).add(name)
    return {frozenset(names) for names in by_id.values()}


def largest(model: nn.Module) -> int:
    return max(t.numel() * t.element_size() for t in held(model).values())


@pytest.mark.parametrize("name", ["vae", "cnn", "gpt-tiny", "llama-tiny", "dlrm-tiny", "cosmoflow-tiny"])
def test_models_of_the_zoo(name: str) -> None:
    deferred = check(zoo.load(name).build)
    assert deferred.values.peak == largest(deferred.model)


@pytest.mark.parametrize(
    ("auto", "config"),
    [
        ("CausalLM", lambda: transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=16)),
        ("CausalLM", lambda: transformers.LlamaConfig(**SMALL)),
        ("CausalLM", lambda: transformers.MixtralConfig(**SMALL, num_local_experts=2)),
        ("CausalLM", lambda: transformers.Qwen2Config(**SMALL)),
        ("CausalLM", lambda: transformers.GemmaConfig(**SMALL, head_dim=8)),
        ("Seq2SeqLM", lambda: transformers.T5Config(vocab_size=96, d_model=32, d_ff=48, d_kv=8, num_layers=2, num_heads=4)),
        ("MaskedLM", lambda: transformers.BertConfig(**{k: v for k, v in SMALL.items() if k != "num_key_value_heads"})),
        ("ImageClassification", lambda: transformers.ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=32)),
        ("ImageClassification", lambda: transformers.SwinConfig(embed_dim=8, depths=[2, 2], num_heads=[2, 2], image_size=32)),
    ],
    ids=["gpt2", "llama", "mixtral", "qwen2", "gemma", "t5", "bert", "vit", "swin"],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_models_of_transformers(auto: str, config: Callable[[], Any], dtype: torch.dtype) -> None:
    made = config()
    build = partial(getattr(transformers, f"AutoModelFor{auto}").from_config, made, dtype=dtype)
    deferred = check(build)
    assert deferred.values.peak <= largest(deferred.model) + 100_000  # what indices and tables are computed from


def _initialised(init: Callable[..., Any], *args: Any, layer: Callable[[], nn.Module] = lambda: nn.Linear(12, 10), **kwargs: Any) -> nn.Module:
    module = layer()
    init(module.weight, *args, **kwargs)
    return module


@pytest.mark.filterwarnings("ignore:mean is more than 2 std")
@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Transformer(16, 4, 2, 2, 32, batch_first=True),
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 3),
        lambda: nn.LSTM(6, 8, 2, bidirectional=True),
        lambda: nn.MultiheadAttention(16, 4, add_bias_kv=True),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)),
        lambda: nn.utils.spectral_norm(nn.Linear(6, 8)),
        lambda: nn.utils.parametrizations.orthogonal(nn.Linear(6, 8)),
        lambda: nn.Embedding(9, 5, padding_idx=3),
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.LazyLinear(4)).double(),
        lambda: nn.Linear(6, 8).to("cpu", torch.float16).requires_grad_(False),
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(5, 6)).to("cpu").float().type(torch.float64),
        partial(_initialised, nn.init.trunc_normal_, std=0.02),
        partial(_initialised, nn.init.trunc_normal_, std=2.0, a=-1.0, b=1.5),
        partial(_initialised, nn.init.trunc_normal_, a=3.0, b=4.0),
        partial(_initialised, nn.init.orthogonal_),
        partial(_initialised, nn.init.sparse_, 0.3),
        partial(_initialised, nn.init.eye_),
        partial(_initialised, nn.init.kaiming_normal_),
        partial(_initialised, nn.init.xavier_uniform_),
        partial(_initialised, nn.init.dirac_, layer=lambda: nn.Conv1d(8, 9, 3)),
    ],
)
def test_layers_of_torch_and_their_initialisations(build: Callable[[], nn.Module]) -> None:
    check(build)


class _Constructor(nn.Module):
    """Does in its constructor what models do in theirs."""

    def __init__(self) -> None:
        super().__init__()
        rates = [x.item() for x in torch.linspace(0, 0.1, 3)]
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(rate)) for rate in rates)
        self.copy = copy.deepcopy(self.layers[0])
        self.head = nn.Linear(8, 20)
        self.table = nn.Embedding(20, 8)
        self.head.weight = self.table.weight
        self.query = nn.Parameter(torch.Tensor(4, 8))
        self.position = nn.Parameter(torch.randn(1, 4, 8) * 0.02)
        self.fused = nn.Parameter(torch.cat([torch.randn(2, 8), torch.zeros(1, 8), torch.rand(3, 8)]))
        self.old = nn.Parameter(torch.FloatTensor([1.0, 2.0]))
        with torch.no_grad():
            self.head.bias[:5] = 1
            self.head.bias[[6, 7]] = 2.0
            self.query.normal_().t()[2:4].mul_(3)
            self.layers[1][0].weight.copy_(self.layers[0][0].weight)
            self.layers[2][0].weight.data = torch.stack([self.query.data[0] * i for i in range(8)])
        inverse = 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8))
        angles = torch.outer(torch.arange(4), inverse)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("ids", torch.arange(6).expand(1, -1), persistent=False)
        self.register_buffer("bands", torch.from_numpy(np.linspace(0, 1, 7)).float())
        self.register_buffer("drawn", torch.from_numpy(np.random.rand(3)))
        self.mask = torch.full((4, 4), float("-inf")).triu(1)
        self.scale = self.mask.new_tensor([0.5, 2.0])
        self.register_buffer("rotations", torch.polar(torch.ones(4, 4), angles).conj())
        with torch.device("meta"):
            inner = nn.Linear(4, 4)
        self.inner = inner.to_empty(device="cpu")
        nn.init.normal_(self.inner.weight)
        nn.init.zeros_(self.inner.bias)
        self.noise = torch.randn(3, generator=torch.Generator().manual_seed(4))
        self.stds = [float(random.random()), torch.tensor([3.0, 4.0]).tolist(), torch.ones(2).numpy().sum()]
        self.states = [torch.arange(3.0), torch.randn(2)]


def test_what_constructors_do() -> None:
    deferred = check(_Constructor)
    _seed(SEED)
    expected, model = _Constructor(), deferred.model
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [m.p for m in expected.modules() if isinstance(m, nn.Dropout)]
    assert model.stds[1:] == expected.stds[1:]
    assert all(identical(a, b) for a, b in zip(expected.states, model.states, strict=True))  # tensors in lists have their values at once


def test_a_constructor_that_reads_its_draws() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30))
        first, second = model[0].weight, model[1].weight
        model.order = torch.randperm(5).tolist()
        if (first > 0).float().mean().item() > (second > 0).float().mean().item():
            nn.init.orthogonal_(first)
        model.kept = first.data[second.data > 0][:10].clone()
        model.choice = torch.multinomial(first.data.flatten().abs(), 4)
        with torch.no_grad():
            first[second > 0.1] = 0.0
        return model

    deferred = check(build)
    torch.manual_seed(SEED)
    assert deferred.model.order == build().order


def test_seeds_that_a_constructor_sets() -> None:
    def build() -> nn.Module:
        model = nn.Linear(8, 8)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            model.inside = torch.randn(4)
        model.after = torch.randn(4)
        state = torch.get_rng_state()
        model.once, ignored = torch.rand(5), torch.rand(7)
        torch.set_rng_state(state)
        model.again = torch.rand(5) + ignored.shape[0]
        return model

    check(build)


def test_statistics_of_a_forward_pass_in_a_constructor() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.5))
        with torch.no_grad():
            model.width = model(torch.randn(2, 3, 8, 8)).flatten(1).shape[1]
        return model.append(nn.Linear(model.width, 3))

    check(build)


def test_results_that_the_cpu_lays_out_in_its_own_way() -> None:
    def build() -> nn.Module:
        model = nn.Linear(8, 8)
        model.left, model.values, model.right = torch.svd(model.weight.detach())
        model.spectrum = torch.fft.rfft2(torch.randn(6, 8))
        model.weight.data = torch.linalg.qr(model.right.double())[0].float()
        model.sums = model.left.sum(0) + model.right.sum(1)
        torch._foreach_mul_([p.data for p in model.parameters()], 0.5)
        return model

    check(build)


def _layers(n: int) -> list[nn.Linear]:
    return [nn.Linear(64, 64) for _ in range(n)]


def test_one_tensor_is_alive_at_a_time() -> None:
    """Also where each is changed after all others were drawn, copied from another, or drawn in several pieces with others between."""

    def twice() -> nn.Module:
        return nn.Sequential(*_layers(6)).apply(lambda m: nn.init.normal_(m.weight) if isinstance(m, nn.Linear) else None)

    def scaled() -> nn.Module:
        model = nn.Sequential(*_layers(6))
        for layer in model:
            layer.weight.data.mul_(0.5).add_(1e-3)
        return model

    def cloned() -> nn.Module:
        layer = nn.Linear(64, 64)
        return nn.Sequential(*(copy.deepcopy(layer) for _ in range(6)))

    def interleaved() -> nn.Module:
        model = nn.Sequential(*_layers(6))
        for part in (slice(0, 20), slice(20, 64)):
            for layer in model:
                layer.weight.data[part].normal_()
        return model

    for build in (twice, scaled, cloned, interleaved):
        assert check(build).values.peak == 64 * 64 * 4


def test_recording_draws_nothing_and_replays_repeat() -> None:
    deferred = defer_init(lambda: nn.Sequential(*_layers(3)), SEED)
    first = [(names, tensor.clone()) for names, tensor in deferred.values.replay()]
    torch.manual_seed(1)
    second = list(deferred.values.replay())
    assert all(a == b and torch.equal(s, t) for (a, s), (b, t) in zip(first, second, strict=True))


def test_the_callers_draws_between_tensors_change_nothing() -> None:
    torch.manual_seed(SEED)
    expected = held(nn.Sequential(*_layers(3)))
    for (name, *_), tensor in defer_init(lambda: nn.Sequential(*_layers(3)), SEED).values.replay():
        torch.rand(3)
        assert identical(expected[name], tensor)


def test_tensors_from_outside_keep_their_values() -> None:
    given = nn.Parameter(torch.arange(6.0))

    def build() -> nn.Module:
        model = nn.Linear(6, 6)
        model.bias = given
        model.weight.data[0] = given.data
        return model

    check(build)
    assert torch.equal(given, torch.arange(6.0)) and not given.is_meta


def _changes_a_tensor_from_outside(outside: Tensor = torch.zeros(3)) -> nn.Module:  # noqa: B008
    outside.normal_()
    return nn.Linear(3, 3)


def _makes_a_sparse_tensor() -> nn.Module:
    model = nn.Linear(3, 3)
    model.sparse = model.weight.data.to_sparse()
    return model


def _writes_through_numpy() -> nn.Module:
    model = nn.Linear(3, 3)
    model.weight.detach().numpy()[0] = 1.0
    return model


def _catches_the_refusal() -> nn.Module:
    try:
        return _changes_a_tensor_from_outside()
    except Exception:
        return nn.Linear(3, 3)


def _keeps_a_view_in_a_list() -> nn.Module:
    model = nn.Linear(4, 4)
    model.rows = list(model.weight.detach().chunk(2))
    return model


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (_changes_a_tensor_from_outside, r"aten.normal_.default changes a tensor that the constructor did not make \(.*test_deferred_init.py:\d+\)"),
        (_makes_a_sparse_tensor, "sparse"),
        (_writes_through_numpy, r"read-only \(.*test_deferred_init.py:\d+\)"),
        (_catches_the_refusal, "changes a tensor that the constructor did not make"),
        (_keeps_a_view_in_a_list, "part of a parameter or buffer"),
        (lambda: nn.Linear(3, 3).share_memory(), "share_memory"),
    ],
)
def test_what_cannot_be_recorded_is_refused_in_one_line(build: Callable[[], nn.Module], reason: str) -> None:
    with pytest.raises(DeferralError, match=reason) as caught:
        defer_init(build, SEED)
    assert "\n" not in str(caught.value)
