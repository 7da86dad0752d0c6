"""How a batch is split into shares, what `prepare` accepts, and the lines that it answers with, on one rank."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import clip_grad
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import meshwright as mw
from meshwright.core.plan import BalancePolicy, Plan
from meshwright.execute.batch_share import split_batch
from meshwright.execute.rank_loader import RankLoader

PLAN = Plan("t", 4)


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0]).square().mean()


def parts(count: int = 10) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(TensorDataset(torch.randn(count, 3)), 4)


# -- shares --


@given(st.integers(1, 9), st.lists(st.integers(1, 6), min_size=1, max_size=8), st.booleans())
def test_shares_cover_a_batch_and_their_weights_sum_to_one(total: int, shares: list[int], equal: bool) -> None:
    degree = len(shares)
    balance = BalancePolicy() if equal else BalancePolicy(tuple(shares))
    plan = Plan("t", 2 * degree if equal else sum(shares), mw.Mesh(dp=degree), balance=balance)
    every = [split_batch(plan, rank, total) for rank in range(degree)]
    counted = [i for s in every if s.is_first_copy for i in range(s.first_sample, s.first_sample + s.num_samples)]
    assert counted == list(range(total))
    assert all(s.num_samples for s in every)
    assert sum(Fraction(s.num_samples, s.global_batch * s.copies) for s in every) == 1
    assert len({s.is_even for s in every}) == len({s.min_samples for s in every}) == 1  # ranks agree
    if every[0].is_even:
        assert len({s.weight for s in every}) == 1
    assert every[0].min_samples == min(s.num_samples for s in every)


# -- prepare and unpacking --


def test_a_run_unpacks_in_the_order_in_which_it_was_given_things() -> None:
    model, optimizer, loader = parts()
    other = DataLoader(TensorDataset(torch.randn(5, 3)), 4)
    schedules = torch.optim.lr_scheduler.StepLR(optimizer, 1), torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    given = loader, schedules[0], model, scaler, other, schedules[1], optimizer
    unpacked = list(mw.prepare(*given, plan=PLAN))
    for thing, got in zip(given, unpacked, strict=True):
        assert isinstance(got, RankLoader) if thing in (loader, other) else got is thing
    assert len(unpacked[0]) == 3 and unpacked[0].batch_size == 4 and len(unpacked[4].dataset) == 5
    assert [len(x) for (x,) in unpacked[4]] == [4, 1]


@pytest.mark.parametrize("generator", [None, torch.Generator()])
def test_one_rank_has_the_order_of_the_plain_loader(generator: torch.Generator | None) -> None:
    def orders(prepared: bool) -> list[list[int]]:
        torch.manual_seed(3)
        if generator is not None:
            generator.manual_seed(5)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader: Any = DataLoader(TensorDataset(torch.arange(10)), 4, shuffle=True, generator=generator)
        if prepared:
            model, optimizer, loader = mw.prepare(model, optimizer, loader, plan=PLAN)
        return [[int(i) for (batch,) in loader for i in batch] for _ in range(3)]

    assert orders(True) == orders(False)


def test_run_step_steps_the_schedule_that_it_was_given() -> None:
    model, optimizer, loader = parts()
    stepped, plateau = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    run = mw.prepare(model, optimizer, loader, stepped, plateau, plan=PLAN)
    rates = []
    for batch in run.loader:
        rates.append(optimizer.param_groups[0]["lr"])
        run.step(batch, loss_fn)
    assert rates == pytest.approx([0.1, 0.05, 0.025])


def test_nothing_is_stepped_in_a_loop_of_ones_own() -> None:
    model, optimizer, loader = parts()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, loader, schedule = mw.prepare(model, optimizer, loader, schedule, plan=PLAN)
    for batch in loader:
        loss_fn(model, batch).backward()
        optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.1


def refused(*objects: Any, **options: Any) -> str:
    with pytest.raises(mw.RequestError) as error:
        mw.prepare(*objects, **{"plan": PLAN, **options})
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_prepare_refuses() -> None:
    model, optimizer, loader = parts()
    other = nn.Linear(3, 2)
    assert "the optimizer is of another model" in refused(other, optimizer, loader)
    both = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    assert "also holds 2 parameters that are not in the model" in refused(model, both, loader)
    assert "takes one model, and was given 2" in refused(model, other, optimizer, loader)
    assert "takes one optimizer, and was given 0" in refused(model, loader)
    assert "not a str" in refused(model, optimizer, "plan.json")
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(other.parameters(), lr=0.1), 1)
    assert "StepLR schedules another optimizer" in refused(model, optimizer, loader, schedule)
    split = DataLoader(loader.dataset, 4, sampler=DistributedSampler(loader.dataset, 2, 0))  # type: ignore[arg-type]
    assert "has a DistributedSampler" in refused(model, optimizer, split)
    empty = DataLoader(TensorDataset(torch.empty(0, 3)), 4)
    assert "the loader yields nothing: its data set is empty" in refused(model, optimizer, empty, plan=None, loss_fn=loss_fn)
    assert "the loader yields nothing" in refused(model, optimizer, iter([]), plan=None, loss_fn=loss_fn)


class Stream(IterableDataset[Any]):
    """Samples that can be read only once."""

    def __init__(self, count: int) -> None:
        self._samples = iter([(torch.full((3,), float(i)), torch.tensor(i % 2)) for i in range(count)])

    def __iter__(self) -> Iterator[Any]:
        return self._samples


@pytest.mark.parametrize("make", [lambda: iter(list(DataLoader(Stream(12), 4))), lambda: DataLoader(Stream(12), 4)], ids=["generator", "stream"])
def test_a_batch_that_planning_looks_at_is_not_lost(make: Any) -> None:
    model, optimizer, _ = parts()
    run = mw.prepare(model, optimizer, make(), loss_fn=loss_fn)
    assert [float(x[0, 0]) for x, *_ in run.loader] == [0.0, 4.0, 8.0]
    with pytest.raises(mw.RequestError, match="a generator at its end"):
        list(run.loader)


class Nothing(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


@pytest.mark.parametrize("loader", [DataLoader(TensorDataset(torch.randn(3, 3)), 4, drop_last=True), DataLoader(Nothing(), 4), iter([])])
def test_a_loader_that_yields_nothing(loader: Any) -> None:
    model, optimizer, _ = parts()
    run = mw.prepare(model, optimizer, loader, plan=PLAN)
    with pytest.raises(mw.RequestError, match="the loader yields nothing: its data set is empty, drop_last leaves out its only batch"):
        list(run.loader)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda loss: [loss, loss], "a list of 2"),
        (lambda loss: {"loss": loss}, "a dict with loss"),
        (lambda loss: loss.expand(2), "a tensor of shape (2,)"),
        (lambda loss: None, "a NoneType"),
        (lambda loss: (loss, loss, loss), "a tuple of 3"),
    ],
)
def test_a_loss_that_is_no_scalar(returned: Any, said: str) -> None:
    run = mw.prepare(*parts(), plan=PLAN)
    batch = next(iter(run.loader))
    for call in (run.step, lambda batch, loss: run.validate([batch], loss)):
        with pytest.raises(mw.RequestError) as error:
            call(batch, lambda model, batch: returned(loss_fn(model, batch)))
        assert f"loss_fn returned {said}" in str(error.value)


@pytest.mark.parametrize("own", [False, True])
def test_eval_left_on_is_said_once(own: bool, capsys: pytest.CaptureFixture[str]) -> None:
    run = mw.prepare(*parts(), plan=PLAN)
    model, optimizer, loader = run
    for batch in loader:
        if own:
            loss_fn(model, batch).backward()
            optimizer.step()
        else:
            run.step(batch, loss_fn)
    assert "eval mode" not in capsys.readouterr().err
    model.eval()
    for batch in loader:
        if own:
            loss_fn(model, batch).backward()
            optimizer.step()
        else:
            run.step(batch, loss_fn)
    assert capsys.readouterr().err.count("the model trains in eval mode") == 1


def test_run_step_refuses_a_scaler() -> None:
    run = mw.prepare(*parts(), torch.amp.GradScaler("cpu"), plan=PLAN)
    with pytest.raises(mw.RequestError, match=r"run.step does not use a GradScaler"):
        run.step(next(iter(run.loader)), loss_fn)


def test_own_loop_of_a_plan_that_scales_the_loss_is_refused() -> None:
    run = mw.prepare(*parts(), plan=Plan("t", 4, memory=mw.MemoryPolicy(precision="fp16")))
    with pytest.raises(mw.RequestError, match=r"precision=fp16 scales the loss in run.step"):
        list(run)


def test_a_plan_in_low_precision_runs_the_model_in_it() -> None:
    run = mw.prepare(*parts(), plan=Plan("t", 4, memory=mw.MemoryPolicy(precision="bf16")))
    model, _, loader = run
    assert model(next(iter(loader))[0]).dtype == torch.bfloat16
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 7))
    assert not torch.is_autocast_enabled("cpu")


# -- metrics --


def test_gather_and_mean_on_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    got = mw.gather({"a": torch.arange(3), "b": (torch.tensor(2.0, requires_grad=True), 4)})
    assert got["a"].tolist() == [0, 1, 2] and [t.tolist() for t in got["b"]] == [[2.0], [4]]
    assert not got["b"][0].requires_grad
    assert float(mw.mean(torch.tensor(3.0, requires_grad=True))) == 3.0
    with pytest.raises(mw.RequestError, match="not str"):
        mw.gather(["a"])
    mw.print("one", "two", sep="-", end="!")
    assert capsys.readouterr().out == "one-two!" and mw.is_first()


def test_gather_while_a_stream_is_read() -> None:
    """Its loader has no length, and is there all the same."""
    model, optimizer, _ = parts()
    run = mw.prepare(model, optimizer, DataLoader(Stream(8), 4), plan=Plan("t", 4))
    for _ in run.loader:
        assert mw.gather(torch.arange(4)).tolist() == [0, 1, 2, 3]


# -- what is replaced in torch --


@pytest.mark.parametrize("name", ["clip_grad_norm_", "_clip_grads_with_norm_", "clip_grad_value_", "_get_total_norm"])
def test_torch_makes_its_functions_as_expected(name: str) -> None:
    """See [Note: what is replaced in torch] in sharded_gradients.py."""
    assert "func" in getattr(clip_grad, name).__code__.co_freevars
    assert hasattr(torch.amp.GradScaler, "_unscale_grads_")


def test_a_prepared_model_is_freed_with_its_script() -> None:
    """What torch's functions look models up in holds none of them."""

    def script() -> list[weakref.ref[Any]]:
        model, optimizer, loader = mw.prepare(*parts(), plan=Plan("t", 4, memory=mw.MemoryPolicy(offload="optimizer")))
        for batch in loader:
            loss_fn(model, batch).backward()
            assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 0
            optimizer.step()
        return [weakref.ref(thing) for thing in (model, optimizer, loader)]

    references = script()
    gc.collect()
    assert [reference() for reference in references] == [None] * 3
