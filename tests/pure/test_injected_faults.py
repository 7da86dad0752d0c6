"""What `--inject` says is parsed, or refused in one line; each fault fires once."""

from __future__ import annotations

import pytest
import torch

from meshwright.core.errors import RequestError
from meshwright.core.injected_fault import FAULT_KINDS, InjectedFault, parse_injected_fault, parse_injected_faults
from meshwright.execute.fault_injection import FaultInjection, InjectedFaultError
from meshwright.orchestrate.config import load_config


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill:rank=2,step=7", InjectedFault("kill", 2, 7)),
        ("stop:step=5,rank=1", InjectedFault("stop", 1, 5)),
        ("exit:rank=0,step=0,code=3", InjectedFault("exit", 0, 0, code=3)),
        ("slow:rank=1,factor=1.5", InjectedFault("slow", 1, factor=1.5)),
        ("nan:rank=1,step=5,again=2", InjectedFault("nan", 1, 5, again=2)),
    ],
)
def test_what_is_understood(text: str, fault: InjectedFault) -> None:
    assert parse_injected_fault(text) == fault
    assert parse_injected_fault(str(fault)) == fault or fault.again


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("kil:rank=1,step=2", "unknown fault 'kil' in --inject kil:rank=1,step=2; did you mean 'kill'?"),
        ("", "unknown fault"),
        ("kill", "--inject kill: rank=… is missing: write it like kill:rank=1,step=7"),
        ("kill:", "rank=… is missing"),
        ("kill:step=2", "rank=… is missing"),
        ("kill:rank=1", "step=… is missing"),
        ("kill:rank=1,step", "step= is no number"),
        ("kill:rank=one,step=2", "rank=one is no number"),
        ("kill:rank=-1,step=2", "rank=-1 must be at least 0"),
        ("kill:rank=1,step=2,code=3", "unknown key 'code'"),
        ("exit:rank=1,step=2,code=300", "code=300 must be from 0 to 255"),
        ("slow:rank=1,factor=0.5", "factor=0.5 must be from 1 to 1e+06"),
        ("slow:rank=1,factor=nan", "factor=nan must be"),
        ("kill:rank=1,rank=2,step=2", "rank is given twice"),
    ],
)
def test_what_is_refused(text: str, line: str) -> None:
    with pytest.raises(RequestError) as error:
        parse_injected_fault(text)
    assert line in str(error.value)
    assert "\n" not in str(error.value)


def test_ranks_and_steps_that_the_run_does_not_have() -> None:
    with pytest.raises(RequestError, match="there is no rank 2: the run has 2 ranks, counted from 0"):
        parse_injected_faults(["kill:rank=2,step=1"], world=2)
    with pytest.raises(RequestError, match="there is no step 9: the run has 9 steps, counted from 0"):
        parse_injected_faults(["kill:rank=1,step=8", "kill:rank=1,step=9"], world=2, steps=9)


def test_a_setting_may_be_one_fault_or_a_list() -> None:
    assert load_config(None, {"inject": "kill:rank=1,step=2"}).inject == ("kill:rank=1,step=2",)
    assert load_config(None, {"inject": ["kill:rank=1,step=2", "nan:rank=0,step=1"]}).inject == ("kill:rank=1,step=2", "nan:rank=0,step=1")


def test_each_kind_says_what_it_does() -> None:
    assert all(kind.what.startswith(("the rank", "one element")) for kind in FAULT_KINDS.values())


@pytest.mark.parametrize(("again", "generations"), [(0, [0]), (1, [0, 1])])
def test_a_fault_fires_once_in_a_run_unless_it_is_told_to_come_again(again: int, generations: list[int]) -> None:
    model, fired = torch.nn.Linear(2, 2), []
    for generation in range(3):
        injection = FaultInjection([InjectedFault("raise", 1, 4, again=again)], 1, generation, lambda fault, step: None)
        for step in range(6):
            try:
                with injection.around_step(step, model, None):
                    pass
            except InjectedFaultError:
                assert step == 4
                fired.append(generation)
    assert fired == generations


def test_other_ranks_are_left_alone() -> None:
    said: list[object] = []
    injection = FaultInjection([InjectedFault("raise", 1, 0)], 0, 0, lambda fault, step: said.append(fault))
    with injection.around_step(0, torch.nn.Linear(2, 2), None):
        assert not said


def test_nan_reaches_one_element_of_one_gradient_in_one_step() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    injection = FaultInjection([InjectedFault("nan", 0, 1)], 0, 0, lambda fault, step: None)
    counts = []
    for step in range(3):
        model.zero_grad()
        with injection.around_step(step, model, None):
            model(torch.ones(2, 3)).square().sum().backward()
        counts.append(sum(int(torch.isnan(p.grad).sum()) for p in model.parameters() if p.grad is not None))
    assert counts == [0, 1, 0]
