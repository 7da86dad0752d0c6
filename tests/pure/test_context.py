"""Context parallelism before anything runs: what is found in a model's dataflow, what is refused and why, and what a plan then says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from tests import architectures
from tests.pure import fake_inputs
from torch import nn
from torch.nn import functional as F

from meshwright import zoo
from meshwright.core.context_policy import LOSS_MODULE, ContextPolicy, PositionGenerator, PositionSplit
from meshwright.core.dataflow import Dataflow
from meshwright.core.errors import RequestError
from meshwright.core.mesh import Mesh
from meshwright.core.plan import MemoryPolicy, Plan
from meshwright.core.serialization import from_data, to_data
from meshwright.core.tensor_policy import ParameterShard
from meshwright.core.workload import Workload
from meshwright.cost import estimate
from meshwright.describe.dataflow_tracer import trace_dataflow, trace_module_dataflow
from meshwright.describe.profile_tracer import trace_task
from meshwright.observe.wording import describe_plan
from meshwright.plan import Constraints, rank_plans
from meshwright.plan.context_planner import choose_context
from meshwright.schedule import local_profile, plan_ledger

S = 8
Loss = Callable[[nn.Module, Any], Any]


class Attention(nn.Module):
    """Causal self-attention with one head, after whatever `before` makes of x."""

    def __init__(self, before: Callable[[torch.Tensor], torch.Tensor] = lambda x: x, **how: Any) -> None:
        super().__init__()
        self.before, self.how, self.qkv, self.head = before, how, nn.Linear(4, 12), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.before(x)).unsqueeze(1).chunk(3, -1)
        return self.head(F.scaled_dot_product_attention(q, k, v, **{"is_causal": True, **self.how}).squeeze(1))  # type: ignore[no-any-return]


def mean_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten())


def flow_of(model: nn.Module, loss: Loss = mean_loss, length: int = S) -> Dataflow:
    batch = {"x": torch.zeros(2, length, 4), "labels": torch.zeros(2, length, dtype=torch.int64), "weight": torch.zeros(2)}
    return trace_module_dataflow(model, loss, batch)


@cache
def zoo_flow(name: str) -> Dataflow:
    return trace_dataflow(zoo.load(name))


# -- what is found --


def test_the_first_half_of_a_rank_is_from_the_front_and_the_second_from_the_back() -> None:
    policy = ContextPolicy(sequence_length=24, chunks=6)
    assert [policy.position_ranges(r, 3) for r in range(3)] == [((0, 4), (20, 4)), ((4, 4), (16, 4)), ((8, 4), (12, 4))]
    for chunks, ways in ((8, 4), (4, 4), (2, 2), (4, 2)):
        policy = ContextPolicy(sequence_length=16, chunks=chunks)
        held = [p for r in range(ways) for first, n in policy.position_ranges(r, ways) for p in range(first, first + n)]
        assert sorted(held) == list(range(16))
        if chunks > ways:  # so causal work is equal
            assert len({sum(range(first, first + n)) for r in range(ways) for first, n in [policy.position_ranges(r, ways)[0]]}) == ways
            assert len({sum(sum(range(f, f + n)) for f, n in policy.position_ranges(r, ways)) for r in range(ways)}) == 1


def test_fields_of_the_batch_are_cut_along_the_dim_that_counts_positions() -> None:
    policy = choose_context(flow_of(Attention()), 2)
    assert {(f.name, f.dim) for f in policy.fields} == {("x", 1), ("labels", 1)}
    assert [(a.module, a.bytes) for a in policy.attention_sites] == [("", 2 * S * 4 * 4)]
    assert policy.chunks == 4 and policy.mean_loss_modules == (LOSS_MODULE,) and not policy.position_generators


def test_a_language_model_counts_its_positions_and_the_loss_shifts_them() -> None:
    policy = choose_context(zoo_flow("gpt-tiny"), 2)
    assert PositionGenerator("embedding", "arange") in policy.position_generators
    assert {m.start for m in policy.position_generators if m.module == LOSS_MODULE} == {0, 1} and not policy.fields
    assert {a.module for a in policy.attention_sites} == {"blocks.0.attention", "blocks.1.attention"}


def test_keyed_dropout_counts_elements_whose_outer_index_is_the_position() -> None:
    policy = choose_context(trace_dataflow(zoo.load("gpt-tiny", dropout=0.1)), 2)
    assert {m.inner for m in policy.position_generators if m.module.endswith("dropout")} == {64}


def test_few_key_heads_stay_few() -> None:
    attended = choose_context(zoo_flow("llama-tiny"), 4).attention_sites[0]
    assert attended.bytes == 2 * 64 * 2 * 16 * 4  # keys and values, positions, two heads of 16, fp32


def test_positions_that_are_also_looked_at_whole_are_cut_where_a_module_takes_them() -> None:
    """transformers looks through all positions for packed sequences; its rotary embedding takes only this rank's."""
    batch = architectures.labelled_batch(2, 0, 16)
    policy = choose_context(trace_module_dataflow(architectures.build("Llama"), architectures.labelled_loss, batch), 2)
    assert policy.position_generators == (PositionGenerator("model", "arange", is_sharded=False),)
    assert policy.position_splits == (PositionSplit("model.rotary_emb", 1, 1),)


def test_a_parameter_with_an_entry_for_each_position_is_cut_in_its_module() -> None:
    model = Attention()
    model.place = nn.Parameter(torch.zeros(S, 4))
    model.before = lambda x: x + model.place
    assert choose_context(flow_of(model), 2).position_tables == (ParameterShard("place", 0),)


@pytest.mark.parametrize("length", [2 * S, S + 3])
def test_a_slice_of_a_longer_table_gives_positions(length: int) -> None:
    model = Attention()
    model.table = nn.Parameter(torch.zeros(length, 4))
    model.before = lambda x: x + model.table[: x.shape[1]]
    policy = choose_context(flow_of(model), 2)
    assert policy.position_generators == (PositionGenerator("", "slice", 0, 1, length),) and not policy.position_tables


# -- what is refused --


class ByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention((x @ x.transpose(1, 2)).softmax(-1) @ x)  # type: ignore[no-any-return]


def shifted(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"])[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def scores(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch["x"]).square()  # type: ignore[no-any-return]


def counted(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    each = F.cross_entropy(model(batch["x"]).transpose(1, 2), batch["labels"], reduction="none")
    return (each * (batch["labels"] > 0)).sum(), (batch["labels"] > 0).sum()


REFUSED: dict[str, tuple[Callable[[], nn.Module], Loss, str]] = {
    "no attention": (lambda: nn.Linear(4, 5), mean_loss, "does not attend through F.scaled_dot_product_attention: use --mesh dp=2"),
    "shift in the loss": (Attention, shifted, "the loss slices or shifts positions .*put shifted labels into the batch"),
    "attention by hand": (ByHand, mean_loss, "the model compares positions with each other .*F.scaled_dot_product_attention"),
    "mask": (lambda: Attention(attn_mask=torch.zeros(S, S), is_causal=False), mean_loss, "the model gives attention a mask"),
    "running sum": (lambda: Attention(lambda x: x.cumsum(1)), mean_loss, r"the model needs all positions at once \(cumsum\)"),
    "reversed": (lambda: Attention(lambda x: x.flip(1)), mean_loss, r"needs all positions at once \(flip\)"),
    "pooled": (lambda: Attention(lambda x: x - x.mean(1, keepdim=True)), mean_loss, "the model computes on a sum or mean over positions"),
    "convolution": (
        lambda: Attention(lambda x: F.conv1d(x.transpose(1, 2), torch.ones(4, 4, 3), padding=1).transpose(1, 2)),
        mean_loss,
        "convolution",
    ),
    "windows": (
        lambda: Attention(lambda x: (x.view(-1, 2, S // 2, 4) * torch.ones(2, 1, 1)).view(-1, S, 4)),
        mean_loss,
        "splits the dim of positions",
    ),
    "linspace": (lambda: Attention(lambda x: x + torch.linspace(0, 1, S).unsqueeze(-1)), mean_loss, "an operation that is not supported .linspace"),
    "sum": (Attention, lambda m, b: scores(m, b).sum(), r"the loss is a sum over positions: return a mean .* or the pair \(sum, count\)"),
    "sum by a number": (Attention, lambda m, b: scores(m, b).sum() / 16, "return a mean over positions"),
    "ratio": (Attention, lambda m, b: counted(m, b)[0] / counted(m, b)[1], r"computes on a sum or mean over positions \(div\)"),
    "a count of something else": (Attention, lambda m, b: (scores(m, b).sum(), (b["labels"] > 0).sum()), "does not depend on positions"),
    "root": (Attention, lambda m, b: scores(m, b).mean().sqrt(), r"computes on a sum or mean over positions \(sqrt\)"),
    "count of samples": (Attention, lambda m, b: (scores(m, b).sum(), b["weight"].sum()), "the loss does not depend on positions"),
    "count as a number": (Attention, lambda m, b: (scores(m, b).sum(), 16), "the loss returns its count as a number"),
    "mean and count": (Attention, lambda m, b: (mean_loss(m, b), (b["labels"] > 0).sum()), "the loss returns a mean with a count"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_shared_is_refused_with_its_place(name: str) -> None:
    build, loss, reason = REFUSED[name]
    with pytest.raises(RequestError, match=reason):
        choose_context(flow_of(build(), loss), 2)


@pytest.mark.parametrize(
    "loss",
    [
        lambda m, b: scores(m, b).mean(),
        lambda m, b: F.mse_loss(m(b["x"]), torch.zeros(()).expand(2, S, 5)),
        lambda m, b: scores(m, b).mean((1, 2)).sum() * 0.5 + 1,
        lambda m, b: mean_loss(m, b) + 0.1 * scores(m, b).mean(),
        lambda m, b: F.cross_entropy(m(b["x"]).transpose(1, 2), b["labels"], label_smoothing=0.1),
        lambda m, b: counted(m, b),
        lambda m, b: mean_loss(m, b) + 0.01 * sum(p.square().sum() for p in m.parameters()),
    ],
)  # fmt: skip
def test_means_and_pairs_of_sums_are_fine(loss: Loss) -> None:
    assert choose_context(flow_of(Attention(), loss), 2).attention_sites


def test_a_length_that_does_not_divide_says_which_would() -> None:
    with pytest.raises(RequestError, match=r"cp=3 does not divide the 8 positions of a sample: use a sequence \(--seq\) of 6 or 9"):
        choose_context(flow_of(Attention()), 3)


def test_two_ranges_that_look_alike_are_not_told_apart() -> None:
    """On a rank a range over positions has four entries, and so has one over features."""
    model = Attention(lambda x: x * torch.arange(x.shape[1]).unsqueeze(-1) + torch.arange(4))
    with pytest.raises(RequestError, match="other ranges of the same length 4: use another sequence length"):
        choose_context(flow_of(model), 2)
    assert choose_context(flow_of(model, length=12), 2).position_generators


# -- plans --


def plan_of(mesh: Mesh, **changes: Any) -> Plan:
    return Plan("gpt-tiny", 8, mesh, context=choose_context(zoo_flow("gpt-tiny"), mesh.cp), **changes)


def test_a_plan_keeps_it_names_it_and_says_it() -> None:
    plan = plan_of(Mesh(dp=2, cp=2))
    assert from_data(Plan, to_data(plan), "plan") == plan
    assert plan.strategy == "context parallel 2 × data parallel"
    said = " ".join(describe_plan(plan))
    assert "Each sequence of 64 positions is split over 2 ranks, 32 each, one chunk from the front" in said


def test_compilers_do_not_go_with_it() -> None:
    with pytest.raises(RequestError, match="use compile=none"):
        plan_of(Mesh(cp=2), compile="blocks")


def test_the_planner_does_it_when_asked_and_not_of_itself() -> None:
    profile, flow = trace_task(zoo.load("gpt-tiny")), zoo_flow("gpt-tiny")
    cluster, measured, workload = fake_inputs.cluster(4), fake_inputs.calibration(4), Workload(8)
    asked = rank_plans(profile, cluster, workload, measured, Constraints(mesh=Mesh(dp=2, cp=2), flow=flow))
    assert all(s.plan.context.attention_sites and s.plan.compile == "none" for s in asked.scored)
    free = rank_plans(profile, cluster, workload, measured, Constraints(flow=flow))
    assert all(s.plan.mesh.cp == 1 for s in free.scored)
    with pytest.raises(RequestError, match="pass loss_fn"):
        rank_plans(profile, cluster, workload, measured, Constraints(mesh=Mesh(cp=2)))


def test_a_rank_computes_and_keeps_its_share() -> None:
    profile = trace_task(zoo.load("gpt-tiny")).at_batch(8)
    plan = plan_of(Mesh(cp=2))
    mine = local_profile(plan, profile, 0)
    assert mine.flops_forward == pytest.approx(profile.flops_forward / 2)
    assert profile.activation_bytes / 2 < mine.activation_bytes < 0.7 * profile.activation_bytes  # keys and values are whole
    assert mine.parameters == profile.parameters
    costs = [
        estimate(p, profile, Workload(8), fake_inputs.cluster(2), fake_inputs.calibration(2, network=1e12, alpha=0.0))
        for p in (plan, Plan("gpt-tiny", 8))
    ]
    assert costs[0].memory_kinds["activations"] < 0.7 * costs[1].memory_kinds["activations"]
    assert costs[0].step_s < 0.7 * costs[1].step_s


def test_recomputation_gathers_again() -> None:
    profile = trace_task(zoo.load("gpt-tiny"))
    plan = plan_of(Mesh(cp=2), micro_batches=2, memory=MemoryPolicy(units=("blocks.0", "blocks.1")))
    again = replace(plan, memory=replace(plan.memory, recompute="full"))
    calls = [{(x.name, x.op): x.calls for x in plan_ledger(p, profile) if x.axis == "cp"} for p in (plan, again)]
    assert calls[0]["context/blocks.0.attention", "all_gather"] == 2 == calls[0]["context/blocks.0.attention", "reduce_scatter"]
    assert calls[1]["context/blocks.0.attention", "all_gather"] == 4
    assert calls[0]["num_targets/loss", "all_reduce"] == 2
