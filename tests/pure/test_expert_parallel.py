"""Owners along `ep`: what is found in a model's dataflow, who gets it, what it costs, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_inputs import calibration, cluster
from tests.procs import expert_models
from tests.procs.plan_cases import model_of, spread, traced
from torch import nn

from meshwright.comm import NullComm
from meshwright.core.errors import RequestError, RunError
from meshwright.core.expert_policy import EmbeddingTable, ExpertPolicy, MoELayer, TableLookup
from meshwright.core.mesh import Mesh
from meshwright.core.plan import MemoryPolicy, Plan
from meshwright.core.serialization import from_data, to_data
from meshwright.core.workload import Workload
from meshwright.cost import estimate
from meshwright.describe.dataflow_tracer import trace_module_dataflow
from meshwright.execute.expert_parallel import shard_experts
from meshwright.execute.recompute_runtime import RecomputeCache
from meshwright.execute.table_parallel import TableParallelForward
from meshwright.observe.wording import describe_plan, plan_setting_rows
from meshwright.plan.expert_planner import choose_expert_parallel
from meshwright.schedule import LedgerLine, ledger_differences, local_profile, plan_ledger, plan_ledgers

MIXTURE, TABLES = {"own": "mixture"}, {"own": "tables"}


def mean(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch).square().mean()


# -- what is found --


def test_a_mixture_is_found_by_what_its_choices_pick_from() -> None:
    found = choose_expert_parallel(traced(MIXTURE)[1], 2)
    assert [m.module for m in found.moe_layers] == ["experts.0", "experts.1"] and not found.tables
    first = found.moe_layers[0]
    assert first.parameters == ("experts.0.up", "experts.0.bias", "experts.0.down")
    assert (first.expert_ids_input, first.tokens_input, first.routing_weights_input) == (0, 1, 2)
    assert first.experts_per_rank == (3, 2) and first.first_expert(1) == 3 and first.num_experts == 5
    assert (first.token_expert_pairs, first.hidden_size, first.row_bytes) == (6.0, expert_models.WIDTH, 8 * expert_models.WIDTH)


def test_a_family_s_mixtures_are_found_and_its_embedding_is_left_alone() -> None:
    found = choose_expert_parallel(traced(model_of("Mixtral"))[1], 4)
    assert [m.experts_per_rank for m in found.moe_layers] == [(1, 1, 1, 1)] * 2 and not found.tables


def test_tables_go_to_owners_by_size_and_their_lookups_keep_their_order() -> None:
    found = choose_expert_parallel(traced(TABLES)[1], 2)
    assert {t.module: t.ep_rank for t in found.tables} == {"words.0": 0, "words.1": 1, "words.2": 1, "bag": 0}
    assert [(x.module, x.indices) for x in found.lookups] == [("words.0", 1), ("words.0", 2), ("words.1", 3), ("words.2", 1), ("bag", 3)]
    assert found.lookups[-1].result_bytes == 2 * expert_models.WIDTH * 8 and found.lookup_module == ""
    assert found.rows_per_rank(2)["words.0.weight"] == (40, 0) and found.lookups_on(0) == (found.lookups[0], found.lookups[1], found.lookups[4])


def test_the_smallest_module_around_the_tables_is_where_they_meet() -> None:
    found = choose_expert_parallel(trace_module_dataflow(_Inside(), mean, {"x": torch.zeros(2, 3, dtype=torch.long)}), 2)
    assert found.lookup_module == "part" and [t.module for t in found.tables] == ["part.a", "part.b"]


class _Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.head = _Pair(), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.part(x))


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Embedding(50, 4), nn.Embedding(50, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) + self.b(x + 1)


class _Asks(_Pair):
    """What the second table is asked depends on what the first said."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).argmax(-1))


class _Tied(_Pair):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.a(x) + self.b(x)) @ self.a.weight.T @ self.b.weight


class _Offsets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bag(x.flatten(), torch.arange(x.shape[0]) * x.shape[1])


@pytest.mark.parametrize(
    ("model", "owners", "line"),
    [
        (_Tied(), 2, "ep=2: this model has neither experts nor embedding tables that outweigh the rest of it: use --mesh dp=2"),
        (_Offsets(), 2, r"ep=2: .* \(bag takes offsets or weights: give it indices of shape .* alone\): use --mesh dp=2"),
        (_Asks(), 2, "ep=2: this model has neither experts nor embedding tables that outweigh"),
        (_Pair(), 3, "ep=3: this model has 2 embedding tables, and an ep rank holds at least one: use --mesh ep=2 or less"),
    ],
)
def test_what_cannot_be_owned_is_refused(model: nn.Module, owners: int, line: str) -> None:
    with pytest.raises(RequestError, match=line):
        choose_expert_parallel(trace_module_dataflow(model, mean, {"x": torch.zeros(2, 3, dtype=torch.long)}), owners)


def test_more_owners_than_experts_are_refused() -> None:
    with pytest.raises(RequestError, match=r"ep=6: this model has 5 experts in experts\.0, .*: use --mesh ep=5 or less"):
        choose_expert_parallel(traced(MIXTURE)[1], 6)
    with pytest.raises(RequestError, match="ep=2: this model has neither"):
        choose_expert_parallel(traced(model_of("gpt-tiny"))[1], 2)


# -- the plan --


def test_a_plan_with_owners_keeps_its_word_in_json() -> None:
    plan, _ = spread(TABLES, Mesh(ep=2), 8)
    assert from_data(Plan, to_data(plan), "plan") == plan and plan.strategy == "operator parallel 2"
    assert spread(MIXTURE, Mesh(dp=2, ep=2), 8)[0].strategy == "expert parallel 2 × data parallel"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"mesh": Mesh(pp=2, ep=2)}, "a pipeline stage cannot look up rows on other ep ranks"),
        ({"mesh": Mesh(shard=2, ep=2), "memory": MemoryPolicy(3)}, "use zero=1 or zero=2"),
        ({"mesh": Mesh(ep=2, tp=(2,))}, "table parallelism does not go with tensor parallelism"),
        ({"mesh": Mesh(ep=4)}, "leave expert out"),
        ({"compile": "model"}, "use compile=blocks"),
        ({"memory": MemoryPolicy(units=("words",), recompute="full")}, "set recompute=none"),
    ],
)
def test_what_owners_do_not_go_with(changes: dict[str, Any], line: str) -> None:
    plan, _ = spread(TABLES, Mesh(ep=2), 8)
    if changes.get("mesh") == Mesh(ep=4):
        plan = replace(plan, expert=choose_expert_parallel(traced(MIXTURE)[1], 2))
    with pytest.raises(RequestError, match=line):
        replace(plan, **changes)


def test_owners_in_words() -> None:
    plan, _ = spread(MIXTURE, Mesh(ep=2), 8)
    assert any("a rank holds 2 to 3 experts; all-to-alls send tokens" in line for line in describe_plan(plan))
    assert ("experts and tables", "3 + 2 experts × 2", "on each of 2 ep ranks") in plan_setting_rows(plan)
    plan, _ = spread(TABLES, Mesh(ep=2), 8)
    assert any("4 embedding tables are distributed over 2 ep ranks" in line for line in describe_plan(plan))


# -- what it costs --


def test_an_owner_holds_its_part_and_the_rest_of_the_model() -> None:
    plan, profile = spread(TABLES, Mesh(ep=2), 8)
    held = [sum(t.numel for t in local_profile(plan, profile, 0, 0, owner).tensors) for owner in range(2)]
    tables = sum(rows * expert_models.WIDTH for rows in expert_models.ROWS) + expert_models.ROWS[3] * expert_models.WIDTH
    assert sum(held) == profile.parameters + (profile.parameters - tables)
    found = estimate(plan, profile, Workload(8, precision="fp64"), cluster(2), calibration(2))
    alone = estimate(replace(plan, mesh=Mesh(dp=2), expert=ExpertPolicy()), profile, Workload(8, precision="fp64"), cluster(2), calibration(2))
    assert found.step_s > 0 and found.memory_kinds["optimizer"] < alone.memory_kinds["optimizer"] and found.traffic_bytes > 0


def test_routing_decides_within_a_bound_and_lookups_are_exact() -> None:
    plan, profile = spread(MIXTURE, Mesh(ep=2), 8)
    lines = {line.name: line for line in plan_ledger(plan, profile) if line.op == "all_to_all"}
    pairs = 4 * 6 * 8 * expert_models.WIDTH  # samples a rank, pairs a sample, bytes a row
    assert (lines["tokens/experts.0"].calls, lines["tokens/experts.0"].bytes, lines["tokens/experts.0"].bound) == (2, 3 * pairs, True)
    assert (lines["counts/experts.0"].bytes, lines["counts/experts.0"].bound) == (5 * 8, False)
    plan, profile = spread(TABLES, Mesh(ep=2), 8)
    assert not any(line.bound for line in plan_ledger(plan, profile)) and set(plan_ledgers(plan, profile)) == {"0", "1"}


def test_a_bound_holds_or_is_reported() -> None:
    line = LedgerLine("step", "tokens/x", "all_to_all", "ep", 2, 2, 100, 0, 50.0, True)
    assert ledger_differences([line], [("tokens/x", "all_to_all", 2, 2, 60)]) == []
    assert ledger_differences([line], [("tokens/x", "all_to_all", 2, 2, 101)]) == [
        "all_to_all tokens/x over 2 ranks: 2 calls, at most 100 bytes planned; 2 calls, 101 bytes done"
    ]
    assert ledger_differences([line], [("tokens/x", "all_to_all", 2, 1, 60)])


# -- at one owner, who owns everything --


def alone(mixture: bool, module: nn.Module) -> Any:
    rows = (
        ExpertPolicy((MoELayer("", ("up", "bias", "down"), (expert_models.EXPERTS,), 1.0, expert_models.WIDTH, 8, 1, 0, 2),))
        if mixture
        else ExpertPolicy()
    )
    return shard_experts(module, torch.optim.SGD(module.parameters()), rows, NullComm(), RecomputeCache())


def test_a_choice_past_the_last_expert_is_none() -> None:
    torch.manual_seed(0)
    module = expert_models.Experts().double()
    tokens, weights = torch.randn(3, expert_models.WIDTH, dtype=torch.float64), torch.rand(3, 2, dtype=torch.float64)
    choices = torch.tensor([[0, 1], [2, 3], [4, 4]])
    expected = module(choices, tokens, weights).detach()
    alone(True, module)
    assert torch.allclose(module(choices, tokens, weights), expected, atol=1e-12)
    choices[2] = expert_models.EXPERTS
    assert torch.equal(module(choices, tokens, weights)[2], torch.zeros(expert_models.WIDTH, dtype=torch.float64))


def test_a_mixture_may_be_given_no_weights() -> None:
    class Plain(expert_models.Experts):
        def forward(self, choices: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(choices, tokens, torch.ones(choices.shape, dtype=tokens.dtype))

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Plain()

        def forward(self, choices: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            return self.inner(choices, tokens)

    model, given = Around(), {"choices": torch.zeros(2, 2, dtype=torch.long), "tokens": torch.randn(2, expert_models.WIDTH)}
    found = choose_expert_parallel(trace_module_dataflow(nn.ModuleDict({"a": model})["a"], mean, given), 1)
    assert [(m.module, m.routing_weights_input) for m in found.moe_layers] == [("inner", None)]
    expected = model(**given).detach()
    shard_experts(model, torch.optim.SGD(model.parameters()), found, NullComm(), RecomputeCache())
    assert torch.allclose(model(**given), expected, atol=1e-6)


def test_a_mixture_that_does_not_weigh_its_experts_is_refused() -> None:
    class Squares(expert_models.Experts):
        def forward(self, choices: torch.Tensor, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return super().forward(choices, tokens, weights.square())

    with pytest.raises(RequestError, match="does not sum its experts' results by their weights"):
        alone(True, Squares())


class _Noisy(_Pair):
    """Statistics and randomness before the last lookup."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        return self.drop(self.norm(self.a(x))) + self.b(x + 1)


def test_asking_leaves_no_trace() -> None:
    policy = ExpertPolicy(
        (), (EmbeddingTable("a", "a.weight", 50, 0), EmbeddingTable("b", "b.weight", 50, 0)), "", (TableLookup("a", 1, 16), TableLookup("b", 1, 16))
    )
    results = []
    for at_owner in (False, True):
        torch.manual_seed(0)
        model = _Noisy()
        if at_owner:
            model.forward = TableParallelForward(model, dict(model.named_modules()), policy, NullComm(), RecomputeCache())
        given = torch.arange(6)
        made = [model(given), model(given)]
        made[1].sum().backward()
        results.append([given, *made, *model.buffers(), model.a.weight.grad, model.b.weight.grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    with pytest.raises(RunError, match="was looked up outside the forward of model, or in another order"):
        model.a(torch.arange(2))
