"""What travels takes memory, as the engine holds it: gloo's copies, ZeRO-2's window, ZeRO-3's units, gradients that are not there yet."""

from __future__ import annotations

from dataclasses import replace

from fake_inputs import blocks, plan

from meshwright.core.calibration import Rates
from meshwright.core.mesh import Mesh
from meshwright.core.plan import MemoryPolicy, Plan, SyncPolicy
from meshwright.cost.memory_cost import peak_bytes
from meshwright.cost.sync_memory import sync_memory

LAYERS, BYTES = 4, 4096 * 4  # of each layer's gradient


def sharded(zero: int, backend: str, micro: int = 1) -> Plan:
    sync = SyncPolicy(first_bucket_bytes=BYTES, bucket_bytes=BYTES)  # a bucket a layer
    return Plan("made up", 8, Mesh(shard=2), micro_batches=micro, memory=MemoryPolicy(zero=zero), sync=sync, backend=backend)  # type: ignore[arg-type]


def test_gloo_has_a_copy_of_what_it_scatters_until_it_is_waited_for() -> None:
    profile = blocks(LAYERS, shapes=((4096,),), saved=100.0)
    assert sync_memory(sharded(1, "nccl"), profile).end == 0.0
    assert sync_memory(sharded(1, "gloo"), profile).end == LAYERS * BYTES


def test_of_zero_2_two_buckets_are_there_at_once() -> None:
    profile = blocks(LAYERS, shapes=((4096,),), saved=100.0)
    for backend, copies in (("nccl", 1), ("gloo", 2)):
        assert max(sync_memory(sharded(2, backend), profile).after_layer) == 2 * copies * BYTES


def test_a_slice_of_zero_2_is_kept_when_its_bucket_is_done() -> None:
    """The first backward finds none: at its end all are there, beside the last bucket."""
    profile, own = blocks(LAYERS, shapes=((4096,),), saved=100.0), BYTES / 2
    first, later = (sync_memory(sharded(2, "gloo"), profile, first) for first in (True, False))
    assert first.allocated_gradients == LAYERS * own and first.final_gradients == own and later.allocated_gradients == 0.0
    assert first.end == BYTES and later.end == 2 * BYTES
    held = peak_bytes(sharded(2, "gloo"), profile, "adamw", Rates(1, 1, {}, (), 0.0))
    assert held["gradients"] + held["communication"] < LAYERS * own + 4 * BYTES


def test_the_first_micro_batch_to_go_back_finds_no_gradients() -> None:
    """If all are under way before, as in GPipe."""
    profile = blocks(LAYERS, shapes=((4096,),), saved=1e6)
    piped = replace(plan(profile, micro=4), mesh=Mesh(pp=2))
    rates, names = Rates(1, 1, {}, (), 0.0), profile.layer_names
    all_at_once, some = (peak_bytes(piped, profile, "adamw", rates, [dict.fromkeys(names, n)]) for n in (4, 3))
    assert all_at_once["gradients"] == 0
    assert some["gradients"] == LAYERS * BYTES
