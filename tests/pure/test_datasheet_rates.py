"""What estimates for machines that nobody has measured rest on: which work is counted, and how it shrinks when it is cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch.nn.functional as F
from fake_inputs import blocks, calibration, cluster, plan, rates
from torch import Tensor, nn

from meshwright.core.calibration import Rates
from meshwright.core.mesh import Mesh
from meshwright.core.model import Kernel, LayerProfile, ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.schedule import Action
from meshwright.core.task import Batch, Field, Task
from meshwright.core.workload import Workload
from meshwright.cost import estimate
from meshwright.cost.collective_cost import collective_seconds
from meshwright.cost.compute_cost import ComputeCost
from meshwright.cost.datasheet_rates import datasheet_calibration
from meshwright.describe.cluster_resolver import resolve_cluster
from meshwright.describe.dataflow_tracer import trace_dataflow
from meshwright.describe.profile_tracer import trace_task
from meshwright.plan import Constraints, explain, rank_plans
from meshwright.plan.best_first_search import BestFirstSearch
from meshwright.plan.oom_advice import with_memory
from meshwright.plan.planning_problem import PlanningProblem
from meshwright.plan.search import rescore_best
from meshwright.plan.search_space import candidates
from meshwright.plan.tensor_planner import choose_tensor_grid
from meshwright.schedule import local_profile
from meshwright.zoo import losses
from meshwright.zoo.gpt import GPT, GPTConfig


def gpt(layers: int = 2, vocab: int = 256, width: int = 64) -> Task:
    config = GPTConfig(vocab=vocab, context=16, layers=layers, heads=4, width=width)
    return Task("gpt", partial(GPT, config), losses.next_token_loss, {"tokens": Field((17,), "int64", vocab)}, tokens_per_sample=16)


def seconds(kernel: Kernel, found: Rates) -> float:
    only = LayerProfile("layer", "layer", 0, 0.0, 0.0, 0.0, 0.0, kernels=(kernel,))
    return ComputeCost(found, "fp32").layer_seconds(only, kernel.phase, {})


class Looks(nn.Module):
    """One attention, to all positions or to those before."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal, self.project = causal, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(x).unsqueeze(1)
        return F.scaled_dot_product_attention(y, y, y, is_causal=self.causal)


def looking(causal: bool) -> ModelProfile:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        out: Tensor = model(batch["x"]).square().mean()
        return out

    return trace_task(Task("looks", partial(Looks, causal), loss, {"x": Field((16, 8))}))


@pytest.mark.parametrize(("causal", "kind"), [(True, "causal"), (False, "attention")])
def test_attention_to_what_came_before_is_a_kind_of_its_own(causal: bool, kind: str) -> None:
    kinds = {k.kind for layer in looking(causal).layers for k in layer.kernels}
    assert kind in kinds and len(kinds & {"causal", "attention"}) == 1
    assert looking(True).flops_forward == looking(False).flops_forward  # as counters count


def test_half_of_the_pairs_take_half_of_the_time() -> None:
    found = replace(rates(1), compute={"attention/fp32": ((1e6, 1e9), (1e9, 5e10)), "matmul/fp32": ((1.0, 1e12),)}, op_overhead_s=0.0)
    assert seconds(Kernel("causal", "forward", 2e8, 0.0), found) == pytest.approx(seconds(Kernel("attention", "forward", 1e8, 0.0), found))


def local(task: Task, ways: int, precision: str = "fp32") -> tuple[ModelProfile, ModelProfile, Plan]:
    profile, flow = trace_task(task, precision=precision), trace_dataflow(task, precision)
    grid = choose_tensor_grid(flow, (ways,), {}, ())
    cut = Plan(task.name, ways, Mesh(tp=(ways,)), tensor=grid[0])
    return profile, local_profile(cut, profile, 0), cut


def test_a_tied_head_computes_as_little_as_its_matrix_is_cut() -> None:
    profile, mine, _ = local(gpt(), 4)
    whole, part = (next(layer for layer in p.layers if layer.name == "head") for p in (profile, mine))
    assert not whole.tensors  # the embedding holds it
    assert part.flops_forward == pytest.approx(whole.flops_forward / 4)


def test_passes_over_parameters_shrink_as_these_do() -> None:
    """Casts of a cut matrix are as long for any batch; what goes over activations does not shrink as much."""
    profile, mine, _ = local(gpt(width=128), 4, "bf16")
    at = next(i for i, layer in enumerate(profile.layers) if layer.name == "blocks.0")
    sizes = {t.numel * (t.itemsize + 2) for t in profile.layers[at].tensors if len(t.shape) == 2}
    pairs = list(zip(profile.layers[at].kernels, mine.layers[at].kernels, strict=True))
    share = mine.layers[at].parameters / profile.layers[at].parameters
    casts = [(a, b) for a, b in pairs if a.kind == "memory" and a.bytes in sizes]
    assert casts and all(b.bytes == pytest.approx(a.bytes * share) for a, b in casts)
    assert any(b.bytes > a.bytes * (share + 0.1) for a, b in pairs if a.kind == "memory")


@pytest.mark.parametrize(("layers", "vocab"), [(1, 256), (40, 256)])
def test_the_vocabulary_is_cut_however_deep_the_model(layers: int, vocab: int) -> None:
    task = gpt(layers, vocab)
    policy = choose_tensor_grid(trace_dataflow(task), (4,), {}, ())[0]
    share = vocab * 64 / trace_task(task).parameters
    assert "embedding.tokens.weight" not in policy.unsharded_reasons and policy.embedding_sites, f"{share:.1%} of the parameters"
    assert "embedding.positions.weight" in policy.unsharded_reasons or layers == 1


def test_a_host_that_is_slower_than_its_device_decides() -> None:
    found = replace(rates(1), async_dispatch=True, op_overhead_s=1e-6, fixed={"host": 1e-3})
    assert seconds(Kernel("memory", "forward", 0.0, 10.0, count=7), found) == pytest.approx(7e-3)


def test_coming_to_a_meeting_inside_a_layer_takes_time_and_to_others_none() -> None:
    where, profile = cluster(4, kind="cpu"), blocks(2)
    both = replace(plan(profile, dp=2), mesh=Mesh(dp=2, tp=(2,)))
    slow = replace(rates(4), fixed={"tp_sync": 1e-3})
    for axis, more in (("tp", 1e-3), ("dp", 0.0)):
        action = Action("", "all_reduce", bytes=1000, axis=axis)
        assert collective_seconds(action, both, where, slow) - collective_seconds(action, both, where, rates(4)) == pytest.approx(more)


def test_on_data_sheets_no_product_takes_longer_than_a_larger_one() -> None:
    found = datasheet_calibration(resolve_cluster("dgx-h100:1", {})).layouts[0]
    times = [size / rate for size, rate in found.compute["matmul/bf16"]]
    assert all(small <= large * (1 + 1e-9) for small, large in pairwise(times))


def published(batch: int, devices: int) -> Callable[..., BestFirstSearch]:
    """A search on data sheets."""
    task = gpt(4)
    profile, flow, where = trace_task(task, precision="bf16"), trace_dataflow(task, "bf16"), resolve_cluster(f"dgx-a100:{devices // 8}", {})
    known, workload, constraints = datasheet_calibration(where), Workload(batch, precision="bf16"), Constraints(flow=flow)
    return partial(BestFirstSearch, PlanningProblem(profile, where, workload, known, constraints))


def test_a_search_for_less_than_anything_costs_finds_nothing_and_prices_nothing() -> None:
    make = published(64, 16)
    best = min(found.step_s for _, found in make().search())
    assert make(cost_limit=best / 10).search() == []
    assert min(found.step_s for _, found in make(cost_limit=best * 10).search()) == best


def test_sending_takes_nothing_from_a_gpu_and_something_from_a_cpu() -> None:
    task = gpt(4)
    profile, flow, where = trace_task(task), trace_dataflow(task), cluster(2)
    constraints = Constraints(mesh=Mesh(pp=2), micro_batches=4, recompute="none", schedule="1f1b", flow=flow)
    chosen = next(candidates(profile, where, Workload(8), constraints))
    known = calibration(2, network=1e8)
    times = {}
    for queued in (True, False):
        said = replace(known, layouts=tuple(replace(row, async_dispatch=queued, op_overhead_s=0.0) for row in known.layouts))
        times[queued] = estimate(chosen, profile, Workload(8), where, said).step_s
    assert times[True] < times[False]


def test_half_the_memory_is_said_to_be_too_little_only_where_it_is() -> None:
    """Plans near the best one of a large cluster need not fit; slower ones may."""
    task = gpt(8, 1024, 2048)
    profile, flow, whole = trace_task(task, precision="bf16"), trace_dataflow(task, "bf16"), resolve_cluster("dgx-a100:2", {})
    workload, constraints = Workload(256, precision="bf16"), Constraints(flow=flow, offload="none")
    roomy = rank_plans(profile, whole, workload, datasheet_calibration(whole), constraints).best
    where = with_memory(whole, lambda _: int(1.45 * max(roomy.estimate.memory_bytes)))
    ranking = rank_plans(profile, where, workload, datasheet_calibration(where), constraints)
    half = with_memory(where, lambda size: size // 2)
    assert not rescore_best(ranking, half, ranking.calibration).estimate.fits
    assert rank_plans(profile, half, workload, datasheet_calibration(half), constraints).best.estimate.fits
    said = explain(replace(ranking, search_s=0.0))
    assert "half the memory" in said and "half the memory → nothing fits" not in said
    assert "Not tried, for lack of time: half the memory" in explain(replace(ranking, search_s=60.0))
