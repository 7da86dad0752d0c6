"""Pipeline stages: where a model can be cut, what crosses, how the cut balances, and what a plan refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_inputs import cluster
from tests import architectures
from torch import nn

from meshwright import zoo
from meshwright.core.errors import RequestError
from meshwright.core.mesh import Mesh
from meshwright.core.plan import MemoryPolicy, Plan, Stage, TiedParameter
from meshwright.core.tied_parameters import stages_holding
from meshwright.core.workload import Workload
from meshwright.describe.dataflow_tracer import trace_dataflow, trace_module_dataflow
from meshwright.describe.profile_tracer import trace_module, trace_task
from meshwright.plan.pipeline_planner import _balanced_cuts, cut_stages, reuses_parameters
from meshwright.plan.search_space import Constraints, candidates, is_schedule_eligible
from meshwright.plan.tensor_planner import choose_tensor_grid
from meshwright.schedule import build_schedule

TIED = (Stage(("a",)), Stage(("b",), tied_parameters=(TiedParameter("a.w", "b"),)))
FOUR = tuple(Stage((str(i),)) for i in range(4))


def stages_of(name: str, count: int) -> tuple[Stage, ...]:
    if name in architectures.NAMES:
        made = architectures.build(name), architectures.loss(name), architectures.batch(name, 2, 0)
        return cut_stages(trace_module_dataflow(*made), trace_module(*made, name=name), count)
    task = zoo.load(name)
    return cut_stages(trace_dataflow(task), trace_task(task), count)


def test_one_activation_crosses_between_blocks() -> None:
    first, second = stages_of("gpt-tiny", 2)
    assert first.entry == "" and second.entry == "blocks.1"
    (carry,) = second.boundary_activations
    assert carry.source == "blocks.0" and [(s.module, s.position) for s in carry.consumers] == [("blocks.1", 0)]
    assert carry.bytes == 64 * 64 * 4
    assert set(second.skipped_modules) == {"embedding", "blocks.0"}


def test_a_tied_embedding_is_on_both_ends() -> None:
    _, last = stages_of("gpt-tiny", 2)
    assert last.tied_parameters == (TiedParameter("embedding.tokens.weight", "head"),)
    assert stages_holding(stages_of("gpt-tiny", 2))("embedding.tokens.weight") == (0, 1)


def test_every_action_knows_how_many_ranks_take_part() -> None:
    """A send is between two ranks, and a tied embedding meets on the two that hold it, however long the pipeline is."""
    made: Any = architectures.build("GPT2", n_layer=4), architectures.loss("GPT2"), architectures.batch("GPT2", 2, 0)
    mesh, profile = Mesh(pp=4, dp=3), trace_module(*made, name="GPT2")
    plan = Plan("GPT2", 12, mesh, 4, cut_stages(trace_module_dataflow(*made), profile, 4))
    found = {
        (a.op, a.name.split("/")[0]): a.num_ranks(mesh)
        for rank in range(4)
        for a in build_schedule(plan, profile).program_for(3 * rank)
        if a.is_communication
    }
    assert {name: ranks for (op, name), ranks in found.items() if op == "send"} == {"activations": 2, "gradients": 2}
    assert {name: ranks for (op, name), ranks in found.items() if op == "all_reduce"} == {"tied": 2, "grads": 3, "loss": 12}


def test_an_encoders_output_travels_with_the_decoder() -> None:
    stages = stages_of("T5", 4)
    assert max(len(stage.boundary_activations) for stage in stages) >= 2
    sizes = {carry.name: (carry.bytes_for(1), carry.bytes_for(3)) for stage in stages for carry in stage.boundary_activations}
    assert sizes["encoder>0"] == (10 * 32 * 4, 3 * 10 * 32 * 4)
    assert sizes["decoder.block.0.layer.0>1"] == (4 * 10 * 10 * 4,) * 2, "a bias for heads and positions is the same for all samples"


def test_every_layer_is_on_one_stage_in_order() -> None:
    for name in ("cnn", "Llama", "ViT"):
        stages = stages_of(name, 2)
        layers = [layer for stage in stages for layer in stage.layers]
        assert len(layers) == len(set(layers)) and all(stage.layers for stage in stages)


def test_stages_are_uneven_where_that_balances() -> None:
    costs = [1.0, 1.0, 1.0, 1.0, 4.0]
    assert _balanced_cuts(costs, [1, 2, 3, 4], 2, []) == [4]
    assert _balanced_cuts([4.0, 1.0, 1.0, 1.0, 1.0], [1, 2, 3, 4], 2, []) == [1]
    assert _balanced_cuts([1.0] * 6, [1, 2, 3, 4, 5], 3, []) == [2, 4]
    assert _balanced_cuts([1.0] * 6, [2, 5], 2, []) == [2]


def test_more_stages_than_places_is_said_with_numbers() -> None:
    with pytest.raises(RequestError, match=r"cannot be split into 16 pipeline stages, only into \d+ at most: use a smaller pp"):
        stages_of("gpt-tiny", 16)


def test_who_asks_for_a_schedule_gets_a_pipeline_and_who_places_layers_gets_them_placed() -> None:
    task = zoo.load("gpt-tiny")
    profile, flow = trace_task(task), trace_dataflow(task)
    for constraints in (Constraints(schedule="gpipe", flow=flow), Constraints(placements={"head": "replicate"}, flow=flow)):
        plans = list(candidates(profile, cluster(4, kind="cpu"), Workload(8), constraints))
        assert plans and all(plan.mesh.pp > 1 and plan.schedule == "gpipe" for plan in plans if constraints.schedule)
        assert all(plan.mesh.degree("tp") > 1 and "head" not in str(plan.tensor.sharded_dims) for plan in plans if constraints.placements)


def test_in_a_pipeline_tensor_parallel_ranks_meet_inside_layers() -> None:
    """An encoder's output enters the decoder once, at its input; in a pipeline a stage may begin after that input."""
    made: Any = architectures.build("Decoder"), architectures.loss("Decoder"), architectures.batch("Decoder", 2, 0)
    flow, profile = trace_module_dataflow(*made), trace_module(*made, name="Decoder")
    layers = ("embedding", "layers.layers.0", "layers.layers.1", "head")
    assert set(profile.layer_names) >= set(layers)
    alone, piped = (choose_tensor_grid(flow, (2,), layers=given)[0] for given in ((), profile.layer_names))
    assert "layers" in {m.module for m in alone.copy_sites}
    assert all(m.module.startswith(layers) and m.module != "layers" for m in piped.copy_sites)
    assert len(piped.copy_sites) == len(alone.copy_sites) + 1


class _Braided(nn.Module):
    """Root code that keeps a value for itself across both layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        out: torch.Tensor = self.c(self.b(y) + y)
        return out


def test_no_cut_where_a_value_crosses_outside_all_modules() -> None:
    made: Any = (_Braided(), lambda m, b: m(b["x"]).sum(), {"x": torch.zeros(2, 4)})
    profile = trace_module(*made, name="braided")
    with pytest.raises(RequestError, match="at most"):
        cut_stages(trace_module_dataflow(*made), profile, 3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"micro_batches": 1}, "needs at least pp=2 micro-batches, 1 given: set micro_batches=2"),
        ({"schedule": "zero_bubble", "micro_batches": 2}, "2 stages a rank"),
        ({"stages": tuple(Stage((str(i),)) for i in range(3))}, "3 stages do not divide over pp=2"),
        ({"stages": FOUR}, "use interleaved"),
        ({"compile": "model"}, "compile=blocks"),
        ({"memory": MemoryPolicy(zero=2), "mesh": Mesh(pp=2, shard=2), "stages": TIED}, "zero=1 or zero=3"),
        ({"memory": MemoryPolicy(zero=2), "mesh": Mesh(pp=2, shard=2), "schedule": "interleaved", "stages": FOUR}, "use 1f1b"),
    ],
)  # fmt: skip
def test_a_plan_refuses_what_cannot_run_and_says_what_to_change(changes: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"model": "m", "global_batch": 8, "mesh": Mesh(pp=2), "micro_batches": 2, "stages": (Stage(("a",)), Stage(("b",)))}
    with pytest.raises(RequestError, match=words):
        Plan(**{**given, **changes})


def test_zero_bubble_goes_there_and_back_again() -> None:
    stages = tuple(Stage((str(i),)) for i in range(4))
    plan = Plan("m", 8, Mesh(pp=2), 4, stages, "zero_bubble")
    assert [plan.stage_rank(s) for s in range(4)] == [0, 1, 1, 0]
    assert [Plan("m", 8, Mesh(pp=2), 4, stages, "interleaved").stage_rank(s) for s in range(4)] == [0, 1, 0, 1]


class Queries(nn.Module):
    """Adds the same learned queries in every block, as a DETR decoder does."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(QueryBlock(twice) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class QueryBlock(nn.Module):
    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.twice, self.linear, self.query = twice, nn.Linear(8, 8), nn.Parameter(torch.randn(6, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.query.tanh()  # read once
        x = self.linear(x + query).relu()
        return x * query if self.twice else x


@pytest.mark.parametrize("twice", [False, True])
def test_a_value_made_of_parameters_that_a_stage_uses_twice_reuses_them(twice: bool) -> None:
    """torch cannot split backward there: the planner does not choose zero_bubble."""
    made = Queries(twice), lambda model, x: model(x).square().mean(), torch.randn(2, 6, 8)
    flow = trace_module_dataflow(*made)
    stages = cut_stages(flow, trace_module(*made, name="queries"), 4)
    assert reuses_parameters(flow, stages) == twice
    assert is_schedule_eligible("zero_bubble", stages, Constraints(flow=flow)) != twice
    assert is_schedule_eligible("interleaved", stages, Constraints(flow=flow))
