"""Strands: what tensor parallelism finds in a model's dataflow, and what it says about what it leaves whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest
import torch
from tests import architectures
from torch import nn

from meshwright import zoo
from meshwright.core.dataflow import Dataflow
from meshwright.core.errors import RequestError
from meshwright.core.sized_calls import sized_call
from meshwright.core.tensor_policy import ShardedDim, TensorPolicy
from meshwright.describe.dataflow_tracer import trace_dataflow, trace_module_dataflow
from meshwright.describe.dim_unification import DimMismatchError, LogicalDim, factors_of, reshape_dims, unify
from meshwright.plan.tensor_planner import choose_tensor_grid, reject_if_unsharded


def flow_of(model: nn.Module, *shape: int) -> Dataflow:
    return trace_module_dataflow(model, lambda m, b: m(b["x"]).square().mean(), {"x": torch.zeros(2, *shape)})


def choose_cuts(flow: Dataflow, ways: int, placements: Mapping[str, str] | None = None) -> TensorPolicy:
    """Over one axis."""
    return choose_tensor_grid(flow, (ways,), placements)[0]


def covered(policy: TensorPolicy, flow: Dataflow) -> float:
    """The share of trainable parameters that is cut."""
    sizes = {v.parameter: math.prod(v.shape) for v in flow.values if v.parameter and v.needs_grad}
    return sum(n for name, n in sizes.items() if name in cut_names(policy)) / sum(sizes.values())


def cut_names(policy: TensorPolicy) -> dict[str, int]:
    return {c.parameter: c.dim for s in policy.sharded_dims for c in s.parameter_shards}


# -- the algebra --


def test_a_view_splits_a_strand_into_factors() -> None:
    features = LogicalDim(24)
    (three, heads, width) = reshape_dims([[features]], (3, 2, 4))
    assert [s.size for s in (*three, *heads, *width)] == [3, 2, 4]
    assert factors_of([features]) == [*three, *heads, *width]


def test_tying_splits_the_coarser_of_two() -> None:
    fine, coarse = [LogicalDim(2), LogicalDim(6)], [LogicalDim(12)]
    unify(fine, coarse)
    assert factors_of(fine) == factors_of(coarse)


def test_sizes_without_common_factors_are_not_tied() -> None:
    with pytest.raises(DimMismatchError):
        unify([LogicalDim(4)], [LogicalDim(6)])
    with pytest.raises(DimMismatchError):
        reshape_dims([[LogicalDim(4), LogicalDim(9)]], (6, 6))


def test_pieces_cover_a_strand_whatever_its_size() -> None:
    for size, ways in ((9, 2), (8, 4), (7, 3), (3, 3)):
        dim = ShardedDim("s", size, ())
        pieces = [dim.shard_range(r, ways) for r in range(ways)]
        assert [first for first, _ in pieces] == [sum(n for _, n in pieces[:r]) for r in range(ways)]
        assert sum(n for _, n in pieces) == size and min(n for _, n in pieces) >= 1


# -- what is found --


def test_a_perceptron_alternates_columns_and_rows() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 2))
    assert cut_names(choose_cuts(flow_of(model, 6), 2)) == {"0.weight": 0, "0.bias": 0, "2.weight": 1, "4.weight": 0, "4.bias": 0, "6.weight": 1}


def test_samples_are_known_behind_what_has_no_rule() -> None:
    """An operation that is not known needs everything whole, and still makes as many samples as it was given."""
    flow = flow_of(nn.Sequential(nn.Linear(6, 8), Doing(lambda x: torch.histc(x, 4).sum() * torch.fft.fft(x).real), nn.Linear(8, 4)), 6)
    assert flow.sample_dims.intersection(flow.values[flow.outputs[0]].logical_dims[0])


def test_a_norm_between_two_layers_keeps_them_from_being_partners() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6))
    policy = choose_cuts(flow_of(model, 6), 2)
    assert {m.module for m in policy.gather_sites} == {"0", "2"} and not policy.reduce_sites
    assert "native_layer_norm in 1" in policy.unsharded_reasons["1.weight"]


def test_channels_run_through_convolutions_batch_norms_and_pools_into_a_dense_layer() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 16, 4)
    )  # fmt: skip
    policy = choose_cuts(flow_of(model, 3, 8, 8), 2)
    cuts = cut_names(policy)
    assert (cuts["0.weight"], cuts["1.weight"], cuts["1.running_mean"], cuts["5.weight"]) == (0, 0, 0, 1)
    assert next(c.inner for s in policy.sharded_dims for c in s.parameter_shards if c.parameter == "5.weight") == 16


@pytest.mark.parametrize("name", architectures.NAMES)
def test_nine_tenths_of_each_familys_blocks_are_cut(name: str) -> None:
    flow = trace_module_dataflow(architectures.build(name), architectures.loss(name), architectures.batch(name, 2, 0))
    cuts = cut_names(choose_cuts(flow, 2))
    blocks = {v.parameter: torch.Size(v.shape).numel() for v in flow.values if (v.needs_grad and ".0." in v.parameter) or ".1." in v.parameter}
    assert sum(n for p, n in blocks.items() if p in cuts) >= 0.9 * sum(blocks.values())


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "vae", "vae-conv", "cnn", "cosmoflow-tiny", "dlrm-tiny"])
def test_the_zoo_is_cut(name: str) -> None:
    flow = trace_dataflow(zoo.load(name))
    assert covered(choose_cuts(flow, 2), flow) >= 0.9


@pytest.mark.parametrize("name", ["gpt2-124m", "llama3-8b"])
def test_blocks_that_are_copied_are_as_if_traced(name: str) -> None:
    task = zoo.load(name, seq=64, dropout=0.1 if name == "gpt2-124m" else 0.0)
    assert trace_dataflow(task) == trace_dataflow(task, copy_repeated=False)


@pytest.mark.parametrize("name", [name for name in architectures.NAMES if name not in architectures.OWN])
def test_copied_blocks_of_other_families_are_as_if_traced(name: str) -> None:
    """Of four layers two are copied, where a family's code allows it."""
    depth = {{"GPT2": "n_layer", "T5": "num_layers"}.get(name, "num_hidden_layers"): 4}
    model, loss, batch = architectures.build(name, **depth), architectures.loss(name), architectures.batch(name, 2, 0)
    assert trace_module_dataflow(model, loss, batch) == trace_module_dataflow(model, loss, batch, copy_repeated=False)


def test_whole_parameters_of_a_head_have_partial_gradients() -> None:
    """Qwen3 normalises each head by one weight for all heads: it stays whole, and its gradient is summed over the ranks."""
    flow = trace_module_dataflow(architectures.build("Qwen3"), architectures.loss("Qwen3"), architectures.batch("Qwen3", 2, 0))
    assert "model.layers.0.self_attn.q_norm.weight" in choose_cuts(flow, 2).partial_grad_parameters


def test_every_parameter_is_cut_or_has_a_reason() -> None:
    for name in ("GPT2", "ViT"):
        flow = trace_module_dataflow(architectures.build(name), architectures.loss(name), architectures.batch(name, 2, 0))
        policy = choose_cuts(flow, 2)
        named = {v.parameter for v in flow.values if v.parameter and v.needs_grad}
        assert named == {p for p in cut_names(policy) if p in named} | policy.unsharded_reasons.keys()
        assert all(policy.unsharded_reasons.values())


class _Mixture(nn.Module):
    """Two products outside any layer, whose partial sums go through what `after` does before the module ends."""

    def __init__(self, after: str) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.randn(8, 4))
        self.after = after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x @ self.up) @ self.down
        ways = {"scaled": lambda: y * x, "squared": lambda: y * y, "divisor": lambda: x / y, "added": lambda: y + x, "halved": lambda: y / 2}
        return ways[self.after]()


@pytest.mark.parametrize(("after", "cut"), [("scaled", True), ("halved", True), ("squared", False), ("divisor", False), ("added", False)])
def test_partial_sums_outside_layers_are_completed_where_that_is_exact(after: str, cut: bool) -> None:
    policy = choose_cuts(flow_of(nn.Sequential(nn.Linear(4, 4), _Mixture(after)), 4), 2)
    assert ("1.up" in cut_names(policy)) is cut
    assert [m.module for m in policy.reduce_sites] == (["1"] if cut else [])


# -- what stands in the way --


class _Sliced(nn.Module):
    """Takes the features of a layer apart by number."""

    def __init__(self, width: int, apart: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.apart = nn.Linear(4, width), nn.Linear(4, 4), apart

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.apart(self.up(x)))
        return out


@pytest.mark.parametrize(
    ("width", "apart"),
    [
        (12, lambda y: y[..., :4] * y[..., 4:8] + y[..., 8:]),
        (12, lambda y: y[:, :4] * y[:, -8:-4] + y[:, 8:12]),
        (8, lambda y: y.narrow(1, 0, 4) * torch.narrow(y, -1, 4, 4)),
    ],
)
def test_even_slices_by_number_are_cut_and_their_numbers_rewritten(width: int, apart: Callable[[torch.Tensor], torch.Tensor]) -> None:
    policy = choose_cuts(flow_of(_Sliced(width, apart), 4), 2)
    assert [m.module for m in policy.reduce_sites] == ["down"]
    runs = {c.parameter: c.outer for s in policy.sharded_dims for c in s.parameter_shards}
    assert runs == {"up.weight": width // 4, "up.bias": width // 4, "down.weight": 1}
    assert {r.length for r in policy.size_rewrites} == {width} and all(r.original_size % 4 == 0 for r in policy.size_rewrites)


@pytest.mark.parametrize(
    ("width", "apart"),
    [
        (10, lambda y: y[..., :4] * y[..., 4:8]),
        (12, lambda y: y[..., 1:5] * y[..., 5:9]),
        (8, lambda y: y[..., :4] * y[..., 4:99]),
        (8, lambda y: y[:, None, :4].squeeze(1) * y[..., 4:]),
        (8, lambda y: y[..., ::2]),
    ],
)
def test_other_slices_are_left_whole_and_said_so(width: int, apart: Callable[[torch.Tensor], torch.Tensor]) -> None:
    large = nn.Linear(4, 8000)  # beside which the others are not worth a gather
    assert "slice in 0 needs all of it" in choose_cuts(flow_of(nn.Sequential(_Sliced(width, apart), large), 4), 2).unsharded_reasons["0.up.weight"]


def test_a_call_with_other_sizes() -> None:
    x = torch.arange(24).view(2, 12)
    for name, args in {"__getitem__": (x, (slice(None), slice(6, None))), "narrow": (x, 1, 6, 6)}.items():
        call = sized_call(name, args, {})
        assert call is not None and call.dims == (0, 0, 1, 1)[-len(call.sizes) :]
        new, kwargs = call.with_sizes([3 if n == 6 else n for n in call.sizes])
        assert getattr(torch.Tensor, name)(*new, **kwargs).tolist() == (x[:, 3:] if name == "__getitem__" else x[:, 3:6]).tolist()
    assert sized_call("__getitem__", (x, (0, slice(2))), {}) is None
    assert sized_call("__getitem__", (x, slice(None)), {}) is None


def test_more_ranks_than_pieces_is_said_with_numbers() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    policy = choose_cuts(flow_of(model, 4), 8)
    assert policy.unsharded_reasons["0.weight"] == "a dim of 3 cannot be split over 8 ranks"
    with pytest.raises(RequestError, match=r"tp=8: nothing in this model can be sharded \(a dim of 3"):
        reject_if_unsharded((policy, TensorPolicy()), (8,))


def test_a_layer_can_be_kept_whole_by_name() -> None:
    flow = trace_dataflow(zoo.load("gpt-tiny"))
    policy = choose_cuts(flow, 2, {"blocks.0.mlp": "replicate", "embedding.positions": "column"})
    assert "blocks.0.mlp.up.weight" not in cut_names(policy) and "blocks.1.mlp.up.weight" in cut_names(policy)
    assert "placements ask for replicate" in policy.unsharded_reasons["blocks.0.mlp.up.weight"]


def test_a_name_that_matches_nothing_is_an_error() -> None:
    flow = trace_dataflow(zoo.load("gpt-tiny"))
    with pytest.raises(RequestError, match=r"blocks\.0\.mlp"):
        choose_cuts(flow, 2, {"blocks.0.mpl": "replicate"})
    with pytest.raises(RequestError, match="column"):
        choose_cuts(flow, 2, {"blocks.0.mlp": "columns"})


# -- two dimensions --


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "cnn", "cosmoflow-tiny"])
def test_a_grid_cuts_matrices_along_both_dims(name: str) -> None:
    flow = trace_dataflow(zoo.load(name))
    first, second = (cut_names(policy) for policy in choose_tensor_grid(flow, (2, 2)))
    sizes = {v.parameter: math.prod(v.shape) for v in flow.values if v.parameter and len(v.shape) > 1}
    both = [n for n in sizes if n in first and n in second]
    assert sum(sizes[n] for n in both) >= 0.95 * sum(sizes.values())
    assert all(first[n] != second[n] for n in both)


def test_a_statistic_that_is_used_for_something_else_keeps_its_features_whole() -> None:
    class Telling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            told = x.square().mean(-1, keepdim=True) * self.scale
            return x * told.rsqrt() + told.square().sum()

    model = nn.Sequential(nn.Linear(4, 8), Telling(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
    first, second = choose_tensor_grid(flow_of(model, 4), (2, 2))
    assert "0.weight" not in cut_names(second) or cut_names(first).get("0.weight") == 0
    assert any(
        "statistic" in reason or "needs all of it" in reason for reason in (*first.unsharded_reasons.values(), *second.unsharded_reasons.values())
    )


# -- rules are sound: what they let pass may really be cut --


class Doing(nn.Module):
    """One function of the data, behind a layer so that its result has a gradient."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x) * self.scale


@pytest.mark.parametrize(
    ("function", "free"),
    [
        (lambda x: x.flip(1), {0, 2, 3}),
        (lambda x: x.roll(1, 2), {0, 1, 3}),
        (lambda x: x.roll(1), set()),
        (lambda x: x.topk(4, 1).values, {0, 2, 3}),
        (lambda x: x.topk(4, 1, largest=False).indices.to(x.dtype), {0, 2, 3}),
        (lambda x: x.sort(2).values, {0, 1, 3}),
        (lambda x: x.cumsum(1), {0, 2, 3}),
        (lambda x: x.softmax(1), {0, 2, 3}),
        (lambda x: torch.triu(x), {0, 1}),
        (lambda x: torch.tril(x), {0, 1}),
        (lambda x: nn.functional.pad(x, (0, 0, 1, -1)), {0, 1, 3}),
        (lambda x: nn.functional.pad(x, (1, 1)), {0, 1, 2}),
        (lambda x: x.mean((1,), keepdim=True).expand_as(x), {0, 2, 3}),
        (lambda x: x.amax(dim=2, keepdim=True) + x, {0, 1, 3}),
        (lambda x: x.permute(0, 3, 2, 1).flip(1).permute(0, 3, 2, 1), {0, 1, 2}),
        (lambda x: x[:, :, 1:], {0, 1, 3}),
        (lambda x: torch.cat([x, x], 1), {0, 2, 3}),
        (lambda x: x.index_select(1, torch.tensor([2, 0])), {0, 2, 3}),
        (lambda x: torch.arange(5.0).expand((*x.shape[:3], 5)).gather(3, (x > 0).long()), {0, 1, 2, 3}),
        (lambda x: x.gather(1, torch.zeros_like(x, dtype=torch.int64)), {0, 2, 3}),
        (lambda x: nn.functional.mse_loss(x, x * 2, reduction="none"), {0, 1, 2, 3}),
        (lambda x: nn.functional.cross_entropy(x, torch.zeros_like(x[:, 0], dtype=torch.int64), reduction="none"), {0, 2, 3}),
    ],
)
def test_a_strand_that_passes_can_be_cut(function: Callable[[torch.Tensor], torch.Tensor], free: set[int]) -> None:
    """Which dims of the data pass is what the rule says; for each of them, working on a piece gives that piece of the result."""
    given, model = torch.randn(2, 4, 6, 8), Doing(function)
    flow = flow_of(model, 4, 6, 8)
    x = next(v for v in flow.values if v.shape == (2, 4, 6, 8) and not v.parameter)
    call = next(m for m in flow.modules if not m.module)
    bound = {s for op in flow.operations[call.first_op : call.end_op] for s in (*op.indivisible_dims, *op.contracted_dims)}
    out = flow.values[flow.outputs[0]]
    passes = {d: o for d, dim in enumerate(x.logical_dims) for o, made in enumerate(out.logical_dims) if dim == made and not bound.intersection(dim)}
    assert set(passes) == free
    for dim, at in passes.items():
        half = given.shape[dim] // 2
        torch.testing.assert_close(model(given.narrow(dim, half, half)), model(given).narrow(at, half, half))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())  # type: ignore[no-any-return]


def test_a_block_with_frozen_parameters_or_hooks_is_no_copy_of_one_without() -> None:
    model = nn.Sequential(*(Residual() for _ in range(5)))
    model[3].up.requires_grad_(False)  # type: ignore[operator]
    model[4].up.register_forward_hook(lambda _m, _a, out: out.softmax(-1))  # type: ignore[operator, union-attr]
    flow = flow_of(model, 6, 8)
    assert [v.parameter for v in flow.values if v.parameter and not v.needs_grad] == ["3.up.weight", "3.up.bias"]
    assert [op.module for op in flow.operations if op.name == "_softmax"] != []
    assert "4.up.weight" not in cut_names(choose_cuts(flow, 2)) and cut_names(choose_cuts(flow, 2))["2.up.weight"] == 0


def test_a_list_may_hold_none_in_a_modules_place() -> None:
    class Stages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Residual(), Residual()])
            self.between = nn.ModuleList([nn.Linear(8, 8)])
            self.between.register_module("1", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block, layer in zip(self.blocks, self.between, strict=True):
                x = block(x) if layer is None else layer(block(x))
            return x

    assert {"blocks.0.up.weight", "blocks.1.up.weight"} <= cut_names(choose_cuts(flow_of(Stages(), 6, 8), 2)).keys()
