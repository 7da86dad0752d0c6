"""Schedules: which parameters travel together, what a step sends, and in which order."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from fake_inputs import blocks, layer, model, plan
from hypothesis import given
from hypothesis import strategies as st

from meshwright.core.mesh import Mesh
from meshwright.core.model import ModelProfile, TensorSpec
from meshwright.core.plan import Plan
from meshwright.core.schedule import Action, wire_factor
from meshwright.core.tensor_policy import ParameterShard, ShardedDim, TensorPolicy
from meshwright.schedule import build_schedule, local_profile, plan_ledger, plan_ledgers
from meshwright.schedule.buckets import ALIGN_BYTES, OWN_BUCKET_DIVISOR, Bucket, assign_buckets, init_broadcast_groups
from meshwright.schedule.step_actions import gradient_buckets

# Buckets

PARAMETERS = st.lists(st.tuples(st.integers(0, 500), st.sampled_from([1, 2, 4, 8])), max_size=40)


@st.composite
def bucketed(draw: st.DrawFn) -> tuple[list[tuple[int, int]], tuple[Bucket, ...], dict[str, int]]:
    given_parameters = draw(PARAMETERS)
    limits = {"first_bytes": draw(st.integers(1, 2000)), "bytes_cap": draw(st.integers(1, 4000)), "shards": draw(st.integers(1, 9))}
    numels, items = [n for n, _ in given_parameters], [i for _, i in given_parameters]
    return given_parameters, assign_buckets(numels, items, items, **limits), limits


@given(bucketed())
def test_every_parameter_is_in_one_bucket_with_its_size(case: Any) -> None:
    parameters, found, _ = case
    slots = [slot for bucket in found for slot in bucket.slots]
    assert sorted(slot.index for slot in slots) == list(range(len(parameters)))
    assert all(slot.numel == parameters[slot.index][0] for slot in slots)


@given(bucketed())
def test_slots_lie_apart_aligned_and_inside(case: Any) -> None:
    _, found, _ = case
    for bucket in found:
        end = 0
        for slot in bucket.slots:
            assert slot.offset >= end
            assert slot.offset * bucket.itemsize % ALIGN_BYTES == 0
            end = slot.offset + slot.numel
        assert end <= bucket.numel


@given(bucketed())
def test_a_bucket_divides_into_aligned_shards(case: Any) -> None:
    _, found, limits = case
    for bucket in found:
        assert bucket.numel % limits["shards"] == 0
        if limits["shards"] > 1:
            assert bucket.bytes // limits["shards"] % ALIGN_BYTES == 0


@given(bucketed())
def test_padding_is_what_no_parameter_uses_and_is_small(case: Any) -> None:
    parameters, found, limits = case
    for bucket in found:
        used = sum(parameters[slot.index][0] for slot in bucket.slots) * bucket.itemsize
        assert bucket.padding == bucket.bytes - used
        assert 0 <= bucket.padding < ALIGN_BYTES * (len(bucket.slots) + limits["shards"])


@given(bucketed())
def test_a_bucket_has_one_key(case: Any) -> None:
    parameters, found, _ = case
    for bucket in found:
        assert {parameters[slot.index][1] for slot in bucket.slots} == {bucket.key} == {bucket.itemsize}


@given(bucketed())
def test_only_the_parameter_that_fills_a_bucket_goes_beyond_its_cap(case: Any) -> None:
    """A bucket is closed by the parameter that reaches the cap: without its last one, it was below. Large ones stand alone."""
    _, every, limits = case
    alone = [len(b.slots) == 1 and b.slots[0].numel * b.itemsize * OWN_BUCKET_DIVISOR >= limits["bytes_cap"] for b in every]
    found = [bucket for bucket, by_itself in zip(every, alone, strict=True) if not by_itself]
    assert not any(s.numel * b.itemsize * OWN_BUCKET_DIVISOR >= limits["bytes_cap"] for b in found for s in b.slots)
    most = max(limits["bytes_cap"], limits["first_bytes"])
    for bucket in found:
        before = bucket.slots[:-1]
        assert not before or (before[-1].offset + before[-1].numel) * bucket.itemsize < most
    last_of = {bucket.key: bucket for bucket in found}
    least = min(limits["bytes_cap"], limits["first_bytes"])
    for bucket in found:
        if bucket is not last_of[bucket.key]:
            assert bucket.bytes >= least, "closed before it was full"


@given(bucketed())
def test_buckets_and_their_slots_come_in_the_order_of_gradients(case: Any) -> None:
    _, found, _ = case
    complete = [bucket.slots[-1].index for bucket in found]
    assert complete == sorted(complete)
    for bucket in found:
        order = [slot.index for slot in bucket.slots]
        assert order == sorted(order)


def test_the_first_bucket_is_small() -> None:
    found = assign_buckets([40] * 20, [4] * 20, [0] * 20, first_bytes=320, bytes_cap=1280, shards=1)
    assert [bucket.bytes for bucket in found] == [320, 1280, 1280, 320]


def test_a_large_tensor_travels_alone() -> None:
    """Nothing is copied into its bucket, and those around it share theirs."""
    found = assign_buckets([2, 10_000, 2], [4] * 3, ["a"] * 3, first_bytes=32, bytes_cap=64, shards=2)
    assert [[slot.index for slot in bucket.slots] for bucket in found] == [[1], [0, 2]]


def test_buckets_by_hand() -> None:
    """5 elements of 4 bytes are padded to 8 before the next; 3 shards of 16 bytes want a multiple of 12."""
    (bucket,) = assign_buckets([5, 6], [4, 4], ["k", "k"], first_bytes=1000, bytes_cap=1000, shards=3)
    assert [(s.index, s.offset, s.numel) for s in bucket.slots] == [(0, 0, 5), (1, 8, 6)]
    assert (bucket.numel, bucket.bytes, bucket.padding) == (24, 96, 96 - 44)


@given(PARAMETERS, st.integers(1, 3000))
def test_start_up_sends_everything_once_in_runs_of_one_kind(parameters: list[tuple[int, int]], most: int) -> None:
    sizes, kinds = [n * i for n, i in parameters], [i for _, i in parameters]
    runs = list(init_broadcast_groups(sizes, kinds, most))
    assert sorted(i for run in runs for i in run) == [i for i, size in enumerate(sizes) if size]
    assert all(len({kinds[i] for i in run}) == 1 and sum(sizes[i] for i in run[:-1]) < most for run in runs)


def test_start_up_knows_buffers_and_kinds_of_numbers() -> None:
    """2**27 floats are a run of their own; the rest of the floats and the whole numbers are one each."""
    profile = model([layer("a", ((2**27,), (8,)))])
    profile = replace(profile, buffers=(TensorSpec("mean", (4,)), TensorSpec("count", (), 8, dtype="int64")))
    lines = [line for line in plan_ledger(plan(profile, dp=2), profile) if line.phase == "start-up"]
    assert [(x.name, x.op, x.axis, x.group, x.calls, x.bytes) for x in lines] == [
        ("init/params", "broadcast", "world", 2, 3, 4 * 2**27 + 4 * 8 + 4 * 4 + 8)
    ]


@given(st.sampled_from([{"dp": 4}, {"shard": 4, "zero": 1}, {"dp": 2, "shard": 2, "zero": 3}]))
def test_ranks_that_do_the_same_share_a_ledger(how: dict[str, int]) -> None:
    profile = blocks(2)
    chosen = plan(profile, **how)
    assert plan_ledgers(chosen, profile) == {"0,1,2,3": list(plan_ledger(chosen, profile, rank=3))}


# Schedules


def program(chosen: Plan, profile: ModelProfile) -> tuple[Action, ...]:
    return build_schedule(chosen, profile).program_for(0)


def wire(chosen: Plan, profile: ModelProfile, *, padding: bool = True) -> float:
    """Bytes a rank sends for parameters and gradients in one step; the loss is not among them."""
    sizes = {"batch": chosen.mesh.data_parallel_size, "replica": chosen.mesh.dp, "shard": chosen.mesh.shard}
    return sum(
        (a.bytes - (0 if padding else a.padding)) * wire_factor(a.op, sizes[a.axis])
        for a in program(chosen, profile)
        if a.is_collective and a.name != "loss"
    )


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("zero", "times"), [(1, 1.0), (2, 1.0), (3, 1.5)])
def test_zero_sends_so_much_as_data_parallelism(ranks: int, zero: int, times: float) -> None:
    profile = blocks(4, ((64, 64), (64,)))
    data_parallel = wire(plan(profile, dp=ranks), profile)
    assert data_parallel == 4 * (64 * 64 + 64) * 4 * 2 * (ranks - 1) / ranks
    assert wire(plan(profile, shard=ranks, zero=zero), profile) == times * data_parallel


SHAPES = st.lists(st.lists(st.lists(st.integers(1, 20), max_size=3).map(tuple), max_size=3), min_size=1, max_size=4)


@given(SHAPES, st.integers(2, 8))
def test_without_padding_the_ratios_hold_for_any_shapes(shapes: list[list[tuple[int, ...]]], ranks: int) -> None:
    profile = model([layer(f"layers.{i}", s, block="layers.0") for i, s in enumerate(shapes)])
    bare = sum(t.bytes for t in profile.tensors) * 2 * (ranks - 1) / ranks
    assert wire(plan(profile, batch=ranks, dp=ranks), profile, padding=False) == pytest.approx(bare)
    for zero, times in ((1, 1.0), (2, 1.0), (3, 1.5)):
        chosen = plan(profile, batch=ranks, shard=ranks, zero=zero)
        assert wire(chosen, profile, padding=False) == pytest.approx(times * bare)
        listed = sum(a.padding for a in program(chosen, profile))
        assert times * bare - 1e-6 <= wire(chosen, profile) <= times * bare + listed + 1e-6


@st.composite
def cases(draw: st.DrawFn) -> tuple[Plan, ModelProfile]:
    count = draw(st.integers(1, 5))
    shapes = draw(st.sampled_from([((64, 64),), ((7, 3), (5,)), ((),), ()]))
    layers = [layer("embedding", ((100, 8),))] + [layer(f"blocks.{i}", shapes, block="blocks.0") for i in range(count)] + [layer("head", ())]
    profile = model(layers)
    zero, micro = draw(st.integers(0, 3)), draw(st.integers(1, 4))
    dp, shard = draw(st.integers(1, 3)), draw(st.integers(2, 3)) if zero else 1
    recompute = draw(st.sampled_from(["none", "selective", "full"]))
    return plan(profile, batch=dp * shard * micro, dp=dp, shard=shard, zero=zero, micro=micro, recompute=recompute), profile


@given(cases())
def test_names_are_unique_and_every_wait_names_an_earlier_action(case: Any) -> None:
    seen: set[str] = set()
    for action in program(*case):
        assert set(action.depends_on) <= seen
        assert action.name not in seen
        seen.add(action.name)


@given(cases())
def test_every_layer_runs_once_a_micro_batch_and_phase(case: Any) -> None:
    chosen, profile = case
    actions = program(chosen, profile)
    forward = Counter(a.layer for a in actions if a.op == "forward" and not a.name.startswith("recompute/"))
    backward = Counter(a.layer for a in actions if a.op == "backward")
    again = Counter(a.layer for a in actions if a.name.startswith("recompute/"))
    everyone = dict.fromkeys(range(len(profile.layers)), chosen.micro_batches)
    assert forward == backward == everyone
    units = {i: chosen.micro_batches for i, x in enumerate(profile.layers) if x.name in chosen.memory.units}
    assert again == (units if chosen.memory.recompute != "none" else {})
    assert [a.op for a in actions].count("optimizer") == 1


@given(cases())
def test_backward_goes_through_the_layers_in_reverse(case: Any) -> None:
    chosen, profile = case
    order = [a.layer for a in program(chosen, profile) if a.op == "backward"]
    assert order == list(reversed(range(len(profile.layers)))) * chosen.micro_batches


@given(cases())
def test_the_optimizer_waits_for_every_gradient(case: Any) -> None:
    chosen, profile = case
    actions = program(chosen, profile)
    (step,) = (a for a in actions if a.op == "optimizer")
    assert set(step.depends_on) == {a.name for a in actions if a.name.startswith(("grads/", "replicas/"))}


@given(cases())
def test_a_gradient_leaves_when_it_is_there(case: Any) -> None:
    """No bucket is sent before the backward of every layer that fills it, and it is sent right after the last of them."""
    chosen, profile = case
    if chosen.memory.zero == 3:
        return
    layer_of = {t.name: i for i, x in enumerate(profile.layers) for t in x.tensors}
    tensors = list(reversed(profile.tensors))
    needs = [{layer_of[tensors[s.index].name] for s in b.slots} for b in gradient_buckets(chosen, profile)]
    done: dict[str, set[int]] = {}
    for action in program(chosen, profile):
        if action.op == "backward":
            done.setdefault(action.name.rsplit("/", 1)[1], set()).add(action.layer)
        elif action.name.startswith("grads/"):
            _, bucket, micro = action.name.split("/")
            assert needs[int(bucket.removeprefix("bucket"))] <= done[micro]


@given(cases())
def test_zero_3_gathers_before_it_computes(case: Any) -> None:
    chosen, profile = case
    if chosen.memory.zero != 3:
        return
    for action in program(chosen, profile):
        if action.op in ("forward", "backward") and profile.layers[action.layer].tensors:
            name = profile.layers[action.layer].name
            unit = name if name in chosen.memory.units else "root"
            phase = "forward" if action.name.startswith("forward/") else "backward"
            assert action.depends_on == (f"params/{unit}/{phase}/{action.name.rsplit('/', 1)[1]}",)


def collectives(chosen: Plan, profile: ModelProfile) -> Counter[tuple[str, str, str]]:
    return Counter((a.name.split("/")[0], a.op, a.axis) for a in program(chosen, profile) if a.is_collective)


def test_micro_batches_multiply_what_they_must() -> None:
    profile = blocks(3)

    def count(**how: int) -> Counter[tuple[str, str, str]]:
        return collectives(plan(profile, micro=4, **how), profile)

    buckets = len(gradient_buckets(plan(profile, dp=2), profile))
    loss = {("loss", "all_reduce", "batch"): 1}
    gather = {("params", "all_gather", "shard"): buckets}
    assert count(dp=2) == {**loss, ("grads", "all_reduce", "replica"): buckets}
    assert count(shard=2, zero=1) == {**loss, **gather, ("grads", "reduce_scatter", "shard"): buckets}
    assert count(shard=2, zero=2) == {**loss, **gather, ("grads", "reduce_scatter", "shard"): 4 * buckets}, "stage 2 has no place to add up in"
    assert count(shard=2, zero=3) == {**loss, ("params", "all_gather", "shard"): 4 * 2 * 3, ("grads", "reduce_scatter", "shard"): 4 * 3}


@pytest.mark.parametrize("zero", [1, 3])
def test_replicas_of_shards_meet_too(zero: int) -> None:
    profile = blocks(3, ((64, 64),))
    chosen = plan(profile, dp=2, shard=4, zero=zero)
    replicas = [a for a in program(chosen, profile) if a.name.startswith("replicas/")]
    assert {(a.op, a.axis) for a in replicas} == {("all_reduce", "replica")}
    assert sum(a.bytes for a in replicas) == 3 * 64 * 64 * 4 // 4, "each rank brings its own quarter"
    assert all(a.depends_on for a in replicas)


def test_replicas_of_stage_2_meet_after_each_micro_batch() -> None:
    profile = blocks(3)
    found = collectives(plan(profile, dp=2, shard=2, zero=2, micro=4), profile)
    assert found["replicas", "all_reduce", "replica"] == found["grads", "reduce_scatter", "shard"]


def test_one_device_sends_nothing() -> None:
    profile = blocks(3)
    for zero in range(4):
        assert not collectives(plan(profile, zero=zero, micro=2), profile)


@pytest.mark.parametrize(("precision", "kind", "size"), [("fp64", "mean", 8), ("fp32", "mean", 4), ("bf16", "mean", 4), ("fp32", "masked mean", 8)])
def test_the_loss_is_one_number_or_a_sum_and_a_count(precision: str, kind: str, size: int) -> None:
    profile = blocks(2)
    made = plan(profile, dp=2)
    chosen = replace(made, memory=type(made.memory)(precision=precision), samples=replace(made.samples, loss=kind))  # type: ignore[arg-type]
    (loss,) = (a for a in program(chosen, profile) if a.name == "loss")
    assert (loss.op, loss.axis, loss.bytes) == ("all_reduce", "batch", size)


def test_zero_3_gathers_in_the_precision_of_the_arithmetic_and_reduces_in_storage() -> None:
    profile = blocks(2, ((64, 64),))
    made = plan(profile, shard=2, zero=3)
    chosen = Plan(**{**vars(made), "memory": type(made.memory)(3, made.memory.units, "none", "bf16")})
    sizes = {a.op: a.bytes for a in program(chosen, profile) if "blocks.0" in a.name and a.is_collective}
    assert sizes == {"all_gather": 64 * 64 * 2, "reduce_scatter": 64 * 64 * 4}


def test_zero_3_units_that_do_not_divide_are_padded_and_say_so() -> None:
    """7 rows of 3 over 4 ranks, whose slices begin at multiples of 16 bytes: 32 elements travel, 11 of them empty."""
    profile = blocks(1, ((7, 3),))
    gathers = [a for a in program(plan(profile, shard=4, zero=3), profile) if a.op == "all_gather"]
    assert [(a.bytes, a.padding) for a in gathers] == [(32 * 4, 11 * 4)] * 2


def test_equal_work_is_shrunk_by_what_is_cut_of_each_layer() -> None:
    """Two layers may share their kernels and not their cuts."""
    first = layer("a", ((8, 8),))
    profile = model([first, replace(layer("b", ((8, 8),)), kernels=first.kernels)])
    chosen = Plan("m", 4, Mesh(tp=(2,)), tensor=TensorPolicy(sharded_dims=(ShardedDim("a.0:0", 8, (ParameterShard("a.0", 0),)),)))
    cut, whole = local_profile(chosen, profile, 0).layers
    assert [k.flops for k in cut.kernels] == [k.flops / 2 for k in first.kernels]
    assert whole.kernels == first.kernels
