"""The zoo: sizes, equality with reference implementations, keyed randomness, losses, and the registry's errors."""

from __future__ import annotations

import copy
import json
import math
import pickle
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from meshwright import zoo
from meshwright.core.errors import RequestError
from meshwright.core.keyed_hash import splitmix64
from meshwright.core.task import Field, KeyedRandomModule, Task
from meshwright.zoo import losses
from meshwright.zoo.autocast import padded_linear
from meshwright.zoo.gpt import GPT, GPT_CONFIGS, GPTConfig
from meshwright.zoo.keyed_random import KeyedDropout, KeyedNormal
from meshwright.zoo.llama import LLAMA_CONFIGS, Llama, LlamaConfig, apply_rotary, rope_frequencies
from meshwright.zoo.vae import VAE, VAE_CONFIGS

SMALL = ("gpt-tiny", "llama-tiny", "vae", "vae-conv", "cnn", "cosmoflow-tiny", "dlrm-tiny")


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def example(task: Task, count: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(f.high, (count, *f.shape), generator=generator) if f.high else torch.rand(count, *f.shape, generator=generator)
        for name, f in task.fields.items()
    }


# Keyed randomness


def keyed_values(module: KeyedRandomModule, x: Tensor, cuts: list[int], first: int = 1000) -> Tensor:
    """Outputs of `module` when the batch comes in pieces of the given sizes."""
    parts, start = [], 0
    for size in cuts:
        module.set_key(7, 3, first + start)
        parts.append(module(x[start : start + size]))
        start += size
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("make", [lambda: KeyedDropout(0.3, site=5), lambda: KeyedNormal(site=5)], ids=["dropout", "normal"])
def test_cutting_a_batch_does_not_change_the_values(make, dtype) -> None:
    module, x = make(), torch.ones(12, 5, 33, dtype=dtype)
    whole = keyed_values(module, x, [12])
    assert whole.dtype == dtype
    for cuts in ([6, 6], [1, 4, 7], [1] * 12):
        assert torch.equal(keyed_values(module, x, cuts), whole)


def test_every_part_of_the_key_matters() -> None:
    def draw(site: int = 1, seed: int = 0, step: int = 0, first: int = 0) -> Tensor:
        module = KeyedNormal(site)
        module.set_key(seed, step, first)
        return module(torch.empty(2, 50))

    base = draw()
    assert torch.equal(base, draw())
    for other in (draw(site=2), draw(seed=1), draw(step=1), draw(first=2), draw(seed=-1), draw(seed=2**63 + 5)):
        assert not torch.isclose(base, other).any(dim=1).all()
    assert torch.equal(draw(first=1)[0], base[1])


def test_normal_noise_has_the_moments_of_a_normal() -> None:
    module = KeyedNormal(site=0)
    x = module(torch.empty(400, 1000, dtype=torch.float64))
    assert abs(x.mean()) < 0.01
    assert abs(x.var() - 1) < 0.02
    assert abs((x**4).mean() - 3) < 0.1
    assert abs(x.mean(dim=1).std() * math.sqrt(1000) - 1) < 0.15  # samples are independent of one another
    assert abs(x.mean(dim=0).std() * math.sqrt(400) - 1) < 0.15


def test_mixing_is_splitmix64_in_unsigned_arithmetic() -> None:
    def reference(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    values = [0, 1, 2**63 - 1, -1, -(2**63), 0x123456789ABCDEF, -987654321]
    assert [m % 2**64 for m in splitmix64(torch.tensor(values)).tolist()] == [reference(v % 2**64) for v in values]


def test_bits_are_uniform() -> None:
    bits = KeyedNormal(site=3)._random_bits(torch.empty(100, 2000))
    for place in range(64):
        assert abs(((bits >> place) & 1).double().mean() - 0.5) < 0.006
    counts = torch.bincount(((bits >> 56) & 0xFF).flatten(), minlength=256).double()
    expected = bits.numel() / 256
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert 150 < chi_square < 380  # 255 degrees of freedom: mean 255, deviation 22.6


def test_dropout_rate_scale_gradient_and_evaluation() -> None:
    module = KeyedDropout(0.25, site=0)
    x = torch.ones(64, 1000, requires_grad=True)
    y = module(x)
    assert abs((y == 0).double().mean() - 0.25) < 0.01
    assert y.unique().tolist() == pytest.approx([0.0, 4 / 3])
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    assert module.eval()(x) is x


def test_dropout_of_nothing_costs_nothing() -> None:
    module, x = KeyedDropout(0.0, site=0), torch.ones(2, 3)
    module.set_key(1, 2, 3)
    assert module(x) is x
    assert list(module.buffers()) == []
    with pytest.raises(ValueError, match="less than 1"):
        KeyedDropout(1.0, site=0)


def test_a_new_key_does_not_recompile() -> None:
    module, frames = KeyedDropout(0.5, site=1), []

    def backend(graph, _inputs):
        frames.append(graph)
        return graph.forward

    compiled, seen = torch.compile(module, backend=backend), []
    for step in range(4):
        module.set_key(0, step, 10 * step)
        seen.append(compiled(torch.ones(4, 16)))
        assert torch.equal(seen[-1], module(torch.ones(4, 16)))
    assert len(frames) == 1
    assert not torch.equal(seen[0], seen[1])


def test_keys_are_not_saved_and_modules_are_keyed() -> None:
    model = zoo.load("gpt-tiny", dropout=0.1).build()
    keyed = [m for m in model.modules() if isinstance(m, KeyedRandomModule)]
    assert len({m.site for m in keyed}) == len(keyed) == 1 + 2 * 2
    assert not any("key" in name.split(".")[-1] for name in model.state_dict())


@pytest.mark.parametrize("name", ["gpt-tiny", "vae", "cosmoflow-tiny"])
def test_the_loss_of_a_model_with_randomness_does_not_depend_on_the_cut(name: str) -> None:
    task = zoo.load(name) if name == "vae" else zoo.load(name, dropout=0.2)
    torch.manual_seed(0)
    model, batch = task.build().double(), example(task, 8)

    def loss_of(first: int, count: int) -> Tensor:
        for module in model.modules():
            if isinstance(module, KeyedRandomModule):
                module.set_key(1, 2, first)
        return task.loss(model, {k: v[first : first + count] for k, v in batch.items()})

    whole = loss_of(0, 8)
    assert torch.allclose((2 * loss_of(0, 2) + 6 * loss_of(2, 6)) / 8, whole, rtol=1e-12)
    assert not torch.allclose(loss_of(0, 8), task.loss(model.eval(), batch), rtol=1e-6)


# Sizes


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt2-124m", 124_439_808),
        ("gpt2-355m", 354_823_168),
        ("gpt2-774m", 774_030_080),
        ("gpt2-1.5b", 1_557_611_200),
        ("smollm2", 134_515_008),
        ("llama3-1b", 1_235_814_400),
        ("llama3-3b", 3_212_749_824),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("cnn", 553_514),
        ("cosmoflow", 3_488 + 55_360 + 221_312 + 884_992 + 3_539_456 + 4 * 1_050_737),
        ("dlrm", 49_536 + 728_065 + 4 * 80_000 * 128),
    ],
)
def test_parameter_counts_are_the_published_ones(name: str, expected: int) -> None:
    with torch.device("meta"):
        assert parameters(zoo.load(name).build()) == expected


@pytest.mark.parametrize("name", ["gpt-1.3b", "gpt3-175b"])
def test_gpt3_sizes_follow_from_their_shape(name: str) -> None:
    c = GPT_CONFIGS[name]
    with torch.device("meta"):
        model = zoo.load(name).build()
    block = 12 * c.width**2 + 13 * c.width
    assert parameters(model) == c.layers * block + (c.vocab + c.context + 2) * c.width


def test_dlrm_parts() -> None:
    with torch.device("meta"):
        model = zoo.load("dlrm").build()
    assert (parameters(model.bottom), parameters(model.top)) == (49_536, 728_065)
    assert model.config.top_widths == (138, 512, 512, 512, 256, 1)


# Language models


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
def test_a_later_token_does_not_change_earlier_logits(name: str) -> None:
    task = zoo.load(name)
    model, tokens = task.build().double(), example(task, 2)["tokens"][:, :-1]
    changed = tokens.clone()
    changed[:, 40] = (changed[:, 40] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.allclose(before[:, :40], after[:, :40], atol=1e-12)
    assert (before[:, 40:] - after[:, 40:]).abs().amax(dim=(0, 2)).min() > 1e-6


@pytest.mark.parametrize(
    "model", [GPT(GPT_CONFIGS["gpt-tiny"]), Llama(LlamaConfig(64, 32, 2, 4, 2, 32, 64, tied_embeddings=True))], ids=["gpt", "llama"]
)
def test_tied_weights_survive_a_copy_and_a_birth_on_meta(model: nn.Module) -> None:
    embedding = "embedding.tokens.weight" if isinstance(model, GPT) else "embedding.weight"
    with torch.device("meta"):
        empty = type(model)(model.config)
    empty.to_empty(device="cpu")
    empty.reset_parameters()
    for one in (model, copy.deepcopy(model), empty):
        assert one.head.weight is one.get_parameter(embedding)
    for name, parameter in empty.named_parameters():
        assert parameter.isfinite().all(), name
    torch.manual_seed(3)
    model.reset_parameters()
    torch.manual_seed(3)
    empty.reset_parameters()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), empty.parameters(), strict=True))


def test_gpt_initialisation_scales_the_residual_branches() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab=512, context=64, layers=8, heads=4, width=128))
    block = model.blocks[0]
    assert block.attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.mlp.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert block.attention.output.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert model.embedding.tokens.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert not block.attention.qkv.bias.any()
    tokens = torch.randint(512, (2, 65))
    assert losses.next_token_loss(model, {"tokens": tokens}).item() == pytest.approx(math.log(512), abs=0.15)


def test_gpt_equals_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    c = GPT_CONFIGS["gpt-tiny"]
    config = transformers.GPT2Config(vocab_size=c.vocab, n_positions=c.context, n_embd=c.width, n_layer=c.layers, n_head=c.heads)
    theirs = transformers.GPT2LMHeadModel(config).double().eval()
    ours = GPT(c).double()
    with torch.no_grad():
        _copy_gpt2(ours, theirs)
    tokens = torch.randint(c.vocab, (2, c.context))
    assert torch.allclose(ours(tokens), theirs(tokens).logits, atol=1e-9)


def _copy_gpt2(ours: GPT, theirs: nn.Module) -> None:
    source = theirs.transformer
    ours.embedding.tokens.weight.copy_(source.wte.weight)
    ours.embedding.positions.weight.copy_(source.wpe.weight)
    ours.norm.load_state_dict(source.ln_f.state_dict())
    for block, layer in zip(ours.blocks, source.h, strict=True):
        for parameter in layer.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # biases and norms must count too
        block.attention_norm.load_state_dict(layer.ln_1.state_dict())
        block.mlp_norm.load_state_dict(layer.ln_2.state_dict())
        for linear, conv in ((block.attention.output, layer.attn.c_proj), (block.mlp.up, layer.mlp.c_fc), (block.mlp.down, layer.mlp.c_proj)):
            linear.weight.copy_(conv.weight.T)
            linear.bias.copy_(conv.bias)
        # Theirs: all queries, all keys, all values; ours: head by head.
        heads, size = ours.config.heads, block.attention.head_width
        block.attention.qkv.weight.copy_(layer.attn.c_attn.weight.T.view(3, heads, size, -1).transpose(0, 1).reshape(3 * heads * size, -1))
        block.attention.qkv.bias.copy_(layer.attn.c_attn.bias.view(3, heads, size).transpose(0, 1).reshape(-1))


@pytest.mark.parametrize("factor", [1.0, 8.0])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_llama_equals_transformers(factor: float, kv_heads: int) -> None:
    transformers = pytest.importorskip("transformers")
    c = LlamaConfig(vocab=256, context=64, layers=2, heads=4, kv_heads=kv_heads, width=64, ffn=176, rope_theta=10000.0, rope_factor=factor)
    rope = {"rope_type": "default", "rope_theta": c.rope_theta}
    if factor != 1.0:
        rope |= {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = transformers.LlamaConfig(
        vocab_size=c.vocab,
        hidden_size=c.width,
        intermediate_size=c.ffn,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads,
        max_position_embeddings=64,
        rms_norm_eps=c.eps,
        rope_parameters=rope,
        tie_word_embeddings=False,
    )
    theirs = transformers.LlamaForCausalLM(config).double().eval()
    ours = Llama(c).double()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        ours.load_state_dict(_renamed_llama(theirs.state_dict()))
    tokens = torch.randint(c.vocab, (2, 64))
    # Their rotary table is float32 even in a float64 model.
    assert torch.allclose(ours(tokens), theirs(tokens).logits, atol=1e-4)
    assert (ours(tokens) - ours(tokens.flip(1))).abs().max() > 0.1


def _renamed_llama(state: dict[str, Tensor]) -> dict[str, Tensor]:
    words = {
        "model.embed_tokens": "embedding",
        "model.layers": "blocks",
        "model.norm": "norm",
        "lm_head": "head",
        "post_attention_layernorm": "mlp_norm",
        "input_layernorm": "attention_norm",
        "self_attn": "attention",
        "q_proj": "query",
        "k_proj": "key",
        "v_proj": "value",
        "o_proj": "output",
        "gate_proj": "gate",
        "up_proj": "up",
        "down_proj": "down",
    }

    def rename(name: str) -> str:
        for theirs, ours in words.items():
            name = name.replace(theirs, ours)
        return name

    return {rename(name): value for name, value in state.items()}


def test_rotation_depends_on_the_distance_only() -> None:
    config = LLAMA_CONFIGS["llama-tiny"]
    angles = torch.outer(torch.arange(40).double(), rope_frequencies(config, torch.device("cpu"), torch.float64))
    rotary = torch.stack((angles.cos(), angles.sin()))
    query, key = torch.randn(2, config.head_width, dtype=torch.float64)
    turned = [apply_rotary(v.expand(1, 1, 40, -1), rotary)[0, 0] for v in (query, key)]
    products = turned[0] @ turned[1].T
    assert torch.allclose(products.diagonal(5), products[0, 5].expand(35))
    assert not torch.allclose(products[0, 5], products[0, 6])


def test_half_precision_logits_are_summed_in_float32() -> None:
    tokens, table = torch.randint(256, (2, 9)), nn.Embedding(256, 256).bfloat16()  # the smallest language model
    loss = losses.next_token_loss(table, {"tokens": tokens})
    assert loss.dtype == torch.float32
    assert torch.equal(loss, losses.next_token_loss(table.float(), {"tokens": tokens}))


# VAE and the other losses


def test_elbo_has_its_closed_form() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.anchor = nn.Parameter(torch.zeros(1, dtype=torch.float64))

        def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            full = torch.ones(image.shape[0], 16, dtype=torch.float64)
            return torch.zeros_like(image), 0.5 * full, math.log(4.0) * full

    image = torch.rand(6, 1, 8, 8)
    divergence = torch.distributions.kl_divergence(torch.distributions.Normal(0.5, 2.0), torch.distributions.Normal(0.0, 1.0))
    expected = 64 * math.log(2.0) + 16 * divergence.item()
    assert losses.elbo_loss(Fixed(), {"image": image}).item() == pytest.approx(expected, rel=1e-6)


def test_vae_samples_in_training_only_and_learns_through_the_sample() -> None:
    torch.manual_seed(0)
    model, image = VAE(VAE_CONFIGS["vae"]), torch.rand(4, 1, 8, 8)
    logits, mean, log_variance = model(image)
    assert logits.shape == image.shape
    assert mean.shape == log_variance.shape == (4, 16)
    code = mean + (0.5 * log_variance).exp() * model.noise(mean)
    assert torch.equal(logits, model.decoder(code))
    assert torch.equal(model.eval()(image)[0], model.decoder(mean))
    (gradient,) = torch.autograd.grad(logits.sum(), log_variance)
    assert gradient.abs().min() > 0


def test_dlrm_interaction_is_every_pair_once() -> None:
    task = zoo.load("dlrm-tiny")
    model, vectors = task.build(), torch.randn(3, 5, 16)
    expected = [(vectors[:, i] * vectors[:, j]).sum(1) for i in range(5) for j in range(i)]
    assert torch.allclose(model._pairwise_interaction(vectors), torch.stack(expected, dim=1), atol=1e-5)


@pytest.mark.parametrize("name", SMALL)
def test_every_model_trains_in_float64_and_works_without_memory(name: str) -> None:
    task = zoo.load(name)
    batch = example(task, 4)
    with torch.device("meta"):
        model = task.build()
    assert task.loss(model, {k: v.to("meta") for k, v in batch.items()}).is_meta
    with FakeTensorMode() as mode:
        loss = task.loss(task.build(), {k: mode.from_tensor(v) for k, v in batch.items()})
        loss.backward()
    torch.manual_seed(0)
    model = task.build().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    values = []
    for _ in range(6):
        loss = task.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    assert loss.dtype == torch.float64
    assert all(p.grad is not None for p in model.parameters())
    assert values[-1] < values[0]


# Registry


def test_every_name_loads_without_building() -> None:
    for name in zoo.names():
        task = zoo.load(name)
        assert pickle.loads(pickle.dumps(task)).fields == task.fields  # a launcher may send it to a worker
        assert task.name == name
        assert task.global_batch > 0
        assert (task.tokens_per_sample is not None) == (task.data == "source")
    mini = zoo.load("gpt-mini")
    assert (mini.global_batch, mini.learning_rate, mini.tokens_per_sample, mini.fields) == (32, 3e-3, 128, {"tokens": Field((129,), "int64", 256)})
    assert zoo.load("gpt2-124m").tokens_per_sample == 1024
    assert zoo.load("gpt2-124m", seq=256).fields["tokens"].shape == (257,)
    assert zoo.load("llama-tiny", seq=4096).tokens_per_sample == 4096


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gpt2-124", {}, "unknown model 'gpt2-124'; did you mean 'gpt2-124m'"),
        ("gpt-tiny", {"seq": 65}, "use --seq 64 or less"),
        ("gpt-tiny", {"seq": 0}, "at least 1"),
        ("gpt-tiny", {"dropout": 1.0}, "less than 1"),
        ("cnn", {"seq": 8}, "cnn takes no sequence length"),
        ("llama-tiny", {"dropout": 0.1}, "llama-tiny has no dropout"),
        ("vae", {"dropout": 0.1}, "vae has no dropout"),
        ("no.such.module:make", {}, "cannot import no.such.module: ModuleNotFoundError"),
        ("/no/such/file.py:make", {}, "no such file"),
        ("math:no_such", {}, "math has no 'no_such'"),
        ("math:pi", {}, "'pi' is a float"),
        ("collections:OrderedDict", {}, "returned OrderedDict"),
        ("math:sqrt", {}, "the factory raised TypeError"),
        ("torch.nn:Identity", {}, r"Identity has no loss\(batch\)"),
        ("math:sqrt", {"seq": 4}, "takes no sequence length"),
        ("hf:/no/such/folder", {}, "give a local folder"),
    ],
)
def test_wrong_requests_are_one_clear_line(name: str, options: dict[str, float], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        zoo.load(name, **options)
    assert "\n" not in str(caught.value)


FACTORIES = '''
from __future__ import annotations
from dataclasses import dataclass
import torch
from torch import nn
from meshwright.core.task import Field, Task

@dataclass
class Width:
    value: int = 3

class Mine(nn.Module):
    fields = {"x": Field((3,))}
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(Width().value, 1)
    def loss(self, batch):
        return self(batch["x"]).square().mean()
    def forward(self, x):
        return self.layer(x)

class Shy(Mine):
    """Reads a value while it is made, which no meta tensor has."""
    def __init__(self):
        super().__init__()
        self.start = self.layer.weight.sum().item()

def task():
    return Task("mine", Mine, lambda model, batch: model.loss(batch), Mine.fields)

class NoFields(nn.Module):
    def loss(self, batch): ...
'''


def test_a_users_factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mw_factories.py").write_text(FACTORIES)
    for reference in ("mw_factories:Mine", f"{tmp_path}/mw_factories.py:Mine", "mw_factories.py:Shy"):
        task = zoo.load(reference)
        model = task.build()
        assert (task.name, task.data, set(task.fields)) == (reference, "synthetic", {"x"})
        assert not model.layer.weight.is_meta
        task.loss(model, {"x": torch.ones(2, 3)}).backward()
    assert zoo.load("mw_factories:task").name == "mine"
    with pytest.raises(RequestError, match="NoFields has no fields"):
        zoo.load("mw_factories:NoFields")
    (tmp_path / "broken.py").write_text("import no_such_thing\n")
    with pytest.raises(RequestError, match=r"cannot import broken.py: ModuleNotFoundError: No module named 'no_such_thing'"):
        zoo.load("broken.py:make")


def test_a_local_hugging_face_configuration(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = {"model_type": "gpt2", "vocab_size": 300, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    task = zoo.load(f"hf:{tmp_path}", seq=8)
    assert zoo.load(f"hf:{tmp_path}/config.json").tokens_per_sample == 32
    assert (task.data, task.fields) == ("source", {"tokens": Field((8,), "int64", 300)})
    model, batch = task.build(), example(task, 2)
    logits = model(batch["tokens"]).logits
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["tokens"][:, 1:].flatten())
    assert torch.allclose(task.loss(model, batch), expected)  # equal in training mode: no dropout is left
    with torch.device("meta"):
        assert task.build().lm_head.weight.is_meta
    with FakeTensorMode() as mode:
        task.loss(task.build(), {"tokens": mode.from_tensor(batch["tokens"])}).backward()
    with pytest.raises(RequestError, match="use --seq 32 or less"):
        zoo.load(f"hf:{tmp_path}", seq=33)
    (tmp_path / "config.json").write_text('{"model_type": "no-such-type"}')
    with pytest.raises(RequestError, match="not a configuration that transformers reads") as caught:
        zoo.load(f"hf:{tmp_path}")
    assert "\n" not in str(caught.value)


def test_transformers_missing_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(RequestError, match=r"pip install 'meshwright\[hf\]'"):
        zoo.load(f"hf:{tmp_path}")


def test_padding_of_the_head_changes_neither_loss_nor_gradient() -> None:
    torch.manual_seed(0)
    x, weight, targets = torch.randn(6, 16, requires_grad=True), torch.randn(51, 16, requires_grad=True), torch.randint(0, 51, (6,))
    losses_and_grads = []
    for logits in (F.linear(x, weight), padded_linear(x, weight, 13)):
        loss = F.cross_entropy(logits, targets)
        losses_and_grads.append((loss, *torch.autograd.grad(loss, (x, weight))))
    for plain, padded in zip(*losses_and_grads, strict=True):
        torch.testing.assert_close(padded, plain)
