"""Verification without ranks: what a trial is made of, what counts as a difference, which plan is taken, and what is remembered."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.core.errors import RequestError
from meshwright.core.mesh import Mesh
from meshwright.core.plan import BalancePolicy, MemoryPolicy, Plan, Stage
from meshwright.core.plan_restriction import describe_treatment, without_modules
from meshwright.core.tensor_policy import CollectiveSite, ParameterShard, ShardedDim, TensorPolicy
from meshwright.core.verification import Verification
from meshwright.cost.verification_memory import verification_bytes
from meshwright.describe.profile_tracer import trace_module
from meshwright.execute.verify_cache import describe_inputs, fingerprint, load_verification, save_verification
from meshwright.execute.verify_comparison import PlanResult, Tolerance, compare, first_difference, measure_noise
from meshwright.execute.verify_reference import (
    NoDropout,
    NotVerifiableError,
    Reference,
    copy_model,
    preserve_random_state,
    refuse_random_model,
    run_reference,
)
from meshwright.execute.verify_trial import make_trial
from meshwright.execute.verify_truncation import copy_truncated, possible_truncations
from meshwright.orchestrate.plan_verification import choose_verified

DP2 = Plan("model", 32, Mesh(dp=2))


# -- trials --


@pytest.mark.parametrize(
    ("plan", "shares", "samples"),
    [
        (DP2, (2, 2), 4),
        (replace(DP2, micro_batches=4), (8, 8), 16),
        (replace(DP2, balance=BalancePolicy((24, 8))), (3, 1), 4),
        (replace(DP2, balance=BalancePolicy((20, 12)), micro_batches=2), (5, 3), 8),
        (replace(DP2, mesh=Mesh(dp=2, pp=2), balance=BalancePolicy((24, 8)), micro_batches=2), (6, 2), 8),
        (Plan("model", 32, Mesh(tp=(2,))), (2,), 2),
    ],
    ids=["equal", "micro-batches", "unequal", "unequal micro-batches", "unequal pipelines", "no split"],
)
def test_a_trial_has_as_few_samples_as_the_plan_can_split(plan: Plan, shares: tuple[int, ...], samples: int) -> None:
    trial = make_trial(plan, {"x": torch.arange(32), "scale": torch.tensor(2.0), "name": "n"})
    assert tuple(trial.plan.sample_range(i)[1] for i in range(len(shares))) == shares
    assert trial.batch["x"].tolist() == list(range(samples)) and trial.batch["scale"] == 2.0
    repeated = trial.repeat_samples()
    assert repeated.plain_batch["x"].tolist() == [0, 1]
    assert repeated.batch["x"].tolist() == [0, 1] * (repeated.plan.global_batch // 2)


def test_a_trial_uses_all_samples_where_there_are_few() -> None:
    assert make_trial(DP2, torch.zeros(3)).plan.global_batch == 2
    with pytest.raises(NotVerifiableError, match="a batch of 1 samples cannot be split over 2 data ranks"):
        make_trial(DP2, torch.zeros(1))


# -- one device --


class Random(nn.Module):
    def __init__(self, draws: bool = False) -> None:
        super().__init__()
        self.first, self.drop, self.draws = nn.Linear(4, 4), nn.Dropout(0.5), draws
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(F.dropout(self.first(x), 0.5))
        x = F.scaled_dot_product_attention(x, x, x, None, 0.5) + F.scaled_dot_product_attention(x, x, x, dropout_p=0.5) + self.attention(x, x, x)[0]
        return x + torch.rand_like(x) if self.draws else x


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def reference(model: nn.Module, loss_fn: Any = loss_of) -> Reference:
    copied, _ = copy_model(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return run_reference(copied, loss_fn, torch.ones(2, 3, 4), 2, nullcontext, 0)


def test_dropout_is_off_on_copies_only() -> None:
    model = Random()
    assert refuse_random_model(lambda: reference(model)).loss == reference(model).loss
    assert reference(model).calls_dropout and not reference(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))).calls_dropout
    assert model.drop.p == 0.5 and model.attention.dropout == 0.5
    assert all(p.grad is None for p in model.parameters())
    with NoDropout():
        assert torch.equal(F.dropout2d(torch.ones(1, 2, 3, 3)), torch.ones(1, 2, 3, 3))
    assert (F.dropout(torch.ones(1000)) == 0).any()


def test_a_model_that_draws_random_numbers_is_not_verified() -> None:
    with pytest.raises(NotVerifiableError, match="draws random numbers in forward"):
        refuse_random_model(lambda: reference(Random(draws=True)))


def test_other_models_and_tensors_of_the_loss_get_no_gradients() -> None:
    other, frozen, scale = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False), torch.ones((), requires_grad=True)
    with pytest.raises(NotVerifiableError, match="the loss also runs Sequential"):
        reference(nn.Linear(4, 4), lambda model, x: nn.Sequential(other)(model(x)).mean())
    with pytest.raises(NotVerifiableError, match=r"the loss trains a tensor of shape \(\)"):
        reference(nn.Linear(4, 4), lambda model, x: (model(x) * scale).mean())
    assert reference(nn.Linear(4, 4), lambda model, x: frozen(model(x)).mean()).gradients["weight"] is not None
    assert other.weight.grad is None and scale.grad is None


def test_a_model_that_cannot_be_copied_is_not_verified() -> None:
    model = nn.Linear(4, 4)
    model.derived = model.weight * 2  # torch copies no tensors with a history
    with pytest.raises(NotVerifiableError, match=r"Linear cannot be copied \("):
        copy_model(model, torch.optim.SGD(model.parameters()))


def test_copies_step_by_themselves_and_keep_an_optimizers_own_attributes() -> None:
    class Own(torch.optim.SGD):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.factor = 0.5

        def step(self, closure: Any = None) -> Any:
            assert self.factor == 0.5
            return super().step(closure)

    model = nn.Linear(2, 2)
    optimizer = Own(model.parameters(), lr=0.0)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.0)  # replaces the optimizer's step
    before = model.weight.detach().clone()
    copied, stepper = copy_model(model, optimizer)
    copied(torch.ones(1, 2)).sum().backward()
    stepper.step()
    assert torch.equal(model.weight, before) and model.weight.grad is None
    assert not torch.equal(copied.weight, before)  # type: ignore[arg-type]
    assert optimizer.param_groups[0]["lr"] == 0.0


def test_random_states_are_restored() -> None:
    def draw() -> list[float]:
        return [torch.rand(()).item(), random.random(), float(np.random.rand())]

    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    expected = draw()
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
    with preserve_random_state():
        draw()
    assert draw() == expected


# -- differences --


FP32 = Tolerance("fp32")


def compared(expected: dict[str, Tensor], found: dict[str, Tensor], tolerance: Tolerance = FP32) -> dict[str, bool]:
    plain = Reference(1.0, expected)
    rows = compare(plain, PlanResult(1.0, found, plain.gradient_norm(found), {}, []), tolerance, {})
    return {row.name: row.is_equal for row in rows if row.quantity == "gradient"}


def test_noise_in_a_gradient_that_is_zero_is_no_difference_and_a_wrong_small_one_is() -> None:
    expected = {"large.weight": torch.ones(100), "zero.bias": torch.full((10,), 1e-9), "small.bias": torch.full((10,), 1e-3)}
    assert compared(expected, {**expected, "zero.bias": torch.full((10,), -1e-8)}) == {"large.weight": True, "zero.bias": True, "small.bias": True}
    assert compared(expected, {**expected, "small.bias": torch.full((10,), 2e-3)})["small.bias"] is False
    assert compared(expected, {**expected, "zero.bias": torch.full((10,), math.nan)})["zero.bias"] is False
    assert compared(expected, {**expected, "large.weight": torch.ones(100) * 1.1})["large.weight"] is False
    assert compared(expected, {**expected, "large.weight": torch.ones(100) * 1.1}, Tolerance("bf16"))["large.weight"] is True
    assert compared(expected, {**expected, "large.weight": torch.ones(50)})["large.weight"] is False


def test_what_rounding_changes_on_one_device_is_no_difference() -> None:
    expected = {"weight": torch.ones(100)}
    noise = measure_noise(Reference(1.0, expected), Reference(1.0, {"weight": torch.ones(100) * 1.05}))
    assert compared(expected, {"weight": torch.ones(100) * 1.1}, Tolerance("fp32", noise))["weight"] is True
    assert compared(expected, {"weight": torch.ones(100) * 1.3}, Tolerance("fp32", noise))["weight"] is False


def test_the_gradient_that_backward_reaches_first_is_named() -> None:
    expected = {name: torch.ones(2) for name in ("a.weight", "b.weight", "c.weight")}
    found = {"a.weight": torch.zeros(2), "b.weight": torch.zeros(2), "c.weight": torch.ones(2)}
    rows = compare(Reference(1.0, expected), PlanResult(1.0, found, 1.0, {}, []), Tolerance("fp32"), {"b": "Linear"})
    first = first_difference(rows, ["", "a", "b", "c"])
    assert first is not None
    assert first.describe() == "the gradient of b.weight (Linear) has norm 0, on one device 1.4142, 100% off"


# -- choices --

TP2, ZERO = Plan("model", 32, Mesh(tp=(2,))), Plan("model", 32, Mesh(shard=2), memory=MemoryPolicy(zero=1))


def chosen(**verdicts: Any) -> tuple[str, list[str]]:
    logged: list[str] = []
    reasons = {"wrong": "under it the loss is 2, on one device 1", "failed": "under it rank 0 failed", "inexact": "samples meet"}
    check = lambda plan: Verification(v := verdicts[plan.strategy.split()[0].replace("-", "")], reasons.get(v, ""), samples=4)  # noqa: E731
    plan, lines = choose_verified([TP2, DP2, ZERO], check, logged.append)
    assert lines == logged
    return plan.strategy, lines


def test_the_first_plan_that_is_not_wrong_is_taken() -> None:
    strategy, lines = chosen(tensor="wrong", data="failed", ZeRO1="inexact")
    assert strategy == "ZeRO-1"
    assert lines == [
        "tensor parallel 2 was not used: under it the loss is 2, on one device 1; using ZeRO-1 instead",
        "data parallel was not used: under it rank 0 failed; using ZeRO-1 instead",
        "ZeRO-1 is not exact for this model: samples meet",
    ]
    assert chosen(tensor="not verified") == ("tensor parallel 2", ["not verified: "])
    with pytest.raises(RequestError, match="tensor parallel 2 is wrong for this model: under it the loss is 2"):
        chosen(tensor="wrong", data="failed", ZeRO1="wrong")
    assert chosen(tensor="failed", data="failed", ZeRO1="failed")[0] == "tensor parallel 2"  # training will say why


# -- what is remembered --


def scaled(factor: float) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda model, x: loss_of(model, x) * factor


def test_a_fingerprint_changes_with_everything_that_decides_what_is_computed() -> None:
    def made(plan: Plan = DP2, model: nn.Module | None = None, optimizer: Any = torch.optim.SGD, batch: Any = None, loss: Any = loss_of) -> str:
        inputs = describe_inputs(torch.zeros(8, 4) if batch is None else batch)
        return fingerprint(plan, model or nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)), optimizer, inputs, loss)

    same = [made(), made(), made(batch=torch.zeros(16, 4)), made(replace(DP2, global_batch=64, model="renamed", threads=3))]
    frozen = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)).requires_grad_(False)
    others = [
        made(replace(DP2, micro_batches=2)), made(TP2), made(model=nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2))), made(model=frozen),
        made(model=nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.1))), made(optimizer=torch.optim.Adam), made(batch=torch.zeros(8, 5)),
        made(batch={"x": torch.zeros(8, 4)}), made(loss=scaled(1.0)), made(loss=scaled(2.0)),
    ]  # fmt: skip
    assert len(set(same)) == 1
    assert len({same[0], *others}) == 1 + len(others)


def test_code_without_a_file_has_a_fingerprint() -> None:
    texts = [f"from torch import nn\nclass Made(nn.Linear):\n def forward(self, x): return super().forward(x) * {n}\n" for n in (1.0, 2.0, 2.0)]
    keys = []
    for text in texts:
        names: dict[str, Any] = {"__name__": "made"}
        exec(text, names)
        keys.append(fingerprint(DP2, names["Made"](4, 4), torch.optim.SGD, "", loss_of))
    assert keys[0] != keys[1] and keys[1] == keys[2]


def test_a_broken_cache_only_costs_a_verification(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    save_verification(environ, "key", Verification("inexact", "why", samples=4, seconds=1.5))
    assert load_verification(environ, "key") == Verification("inexact", "why", samples=4, seconds=1.5, is_cached=True)
    (file,) = (tmp_path / "meshwright" / "verified").iterdir()
    for text in ("{", '{"verdict": "equal", "unknown": 1}', "[]", "\0"):
        file.write_text(text)
        assert load_verification(environ, "key") is None
    save_verification(environ, "other", Verification("not verified", "why"))
    assert load_verification(environ, "other") is None
    (tmp_path / "file").write_text("")
    save_verification({"XDG_CACHE_HOME": str(tmp_path / "file")}, "key", Verification("equal"))
    assert load_verification({"XDG_CACHE_HOME": str(tmp_path / "file")}, "key") is None


def test_parameters_whose_elements_are_alike_differ_in_copies_and_alike_in_all() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    nn.init.zeros_(model[0].bias)  # type: ignore[arg-type]
    first, second = (copy_model(model, torch.optim.SGD(model.parameters(), lr=0.1))[0] for _ in range(2))
    for name, original in model.named_parameters():
        assert torch.equal(first.get_parameter(name), second.get_parameter(name))
        assert torch.equal(first.get_parameter(name), original) is (name == "0.weight")


# -- memory, and models with fewer blocks --


class Residual(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, str]:
        return x + self.linear(x) * mask[0], mask, "kept"


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(2)
        for block in self.blocks:
            x, mask, _ = block(x, mask=mask)
        return x


def test_blocks_that_are_left_out_pass_their_inputs_on_and_hold_no_memory() -> None:
    model = Stack()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    whole, *fewer = possible_truncations(DP2, model)
    assert not whole.left_out
    assert [t.stands_for for t in fewer] == [
        {"blocks.0": ("blocks.2", "blocks.3", "blocks.4")},
        {"blocks.0": ("blocks.1", "blocks.2", "blocks.3", "blocks.4")},
    ]
    copied, stepper = copy_truncated(model, optimizer, fewer[1])
    assert [name for name, _ in copied.named_parameters()] == ["blocks.0.linear.weight", "blocks.0.linear.bias"]
    assert [len(group["params"]) for group in stepper.param_groups] == [2] and len(stepper.state) == 2
    x = torch.randn(2, 4)
    assert torch.equal(copied(x), model.blocks[0](x, mask=torch.ones(2))[0])
    assert len(list(model.parameters())) == 10 and len(optimizer.state) == 10


def test_blocks_that_differ_or_share_parameters_stay() -> None:
    model = Stack()
    model.blocks[1].linear.bias.requires_grad_(False)  # type: ignore[union-attr]
    model.blocks[4].linear.weight = model.blocks[3].linear.weight  # type: ignore[union-attr]
    *_, least = possible_truncations(replace(DP2, memory=MemoryPolicy(units=("blocks.2",), recompute="full")), model)
    assert least.stands_for == {}  # 2 recomputes, 1 is frozen in part, 3 and 4 share a weight
    assert [t.left_out for t in possible_truncations(DP2, Stack())][-1] == {f"blocks.{i}" for i in range(1, 5)}


def test_a_plan_without_modules_keeps_stages_and_drops_entries_inside() -> None:
    site = lambda module: CollectiveSite(module, 8.0)  # noqa: E731
    shards = tuple(ParameterShard(f"blocks.{i}.linear.weight", 0) for i in range(3))
    tensor = TensorPolicy((ShardedDim("heads", 4, shards),), reduce_sites=tuple(site(f"blocks.{i}.linear") for i in range(3)))
    memory = MemoryPolicy(units=("blocks.0", "blocks.1", "blocks.2"), layers={"blocks.1": "full"})
    plan = replace(TP2, tensor=tensor, memory=memory, stages=(Stage(("blocks.0", "blocks.1", "blocks.2"), skipped_modules=("blocks.1",)),))
    assert describe_treatment(plan, "blocks.0") == describe_treatment(plan, "blocks.2") != describe_treatment(plan, "blocks.1")
    left = without_modules(plan, {"blocks.1"})
    assert left.stages == plan.stages
    assert left.memory.units == ("blocks.0", "blocks.2") and not left.memory.layers
    assert [s.module for s in left.tensor.reduce_sites] == ["blocks.0.linear", "blocks.2.linear"]
    assert [s.parameter for s in left.tensor.sharded_dims[0].parameter_shards] == ["blocks.0.linear.weight", "blocks.2.linear.weight"]


def test_the_memory_of_verification_is_for_the_samples_that_the_plan_can_split() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    profile = trace_module(model, loss_of, torch.zeros(32, 64), name="model")
    held = sum(p.nbytes for p in model.parameters())
    activations = profile.at_batch(4).activation_bytes
    assert verification_bytes(DP2, profile, "adamw") == int(2 * held + 3 * held + activations)
    assert verification_bytes(DP2, profile, "sgd") == int(3 * held + activations)
    assert verification_bytes(Plan("model", 32), profile, "sgd") == 0
