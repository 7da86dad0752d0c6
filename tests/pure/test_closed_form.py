"""The closed form of a transformer's step and memory: what must hold of it whatever the constants are, and the bench that compares it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.core.cluster import Device, Link
from meshwright.cost.closed_form_memory import closed_form_peak
from meshwright.cost.closed_form_step import closed_form_step
from meshwright.cost.constants import load_fitted_constants
from meshwright.cost.parallel_config import ParallelConfig, UniformCluster
from meshwright.cost.ring_cost import Ring, ring_alpha_beta
from meshwright.cost.transformer_kernels import TransformerConfig, TransformerShard, block_profile

REPOSITORY = Path(__file__).parents[2]
GPT = TransformerConfig(layers=24, hidden=4096, heads=32, kv_heads=32, ffn=16384, seq=2048, vocab=51200)
LLAMA = replace(GPT, kv_heads=8, ffn=14336, vocab=128256, glu=True, tied_embeddings=False)
EXPERTS = replace(LLAMA, experts=64, topk=4, expert_ffn=2048)
SHEET = Device("cuda", "a device", 0, 80 * 2**30, {"fp16": 312e12, "bf16": 312e12}, 2e12)
MACHINE = UniformCluster(SHEET, 8, Link("link", 0.0, 300e9), Link("network", 0.0, 200e9))
CONSTANTS = load_fitted_constants().constants("ampere", "megatron-core")


def spreads() -> st.SearchStrategy[ParallelConfig]:
    def build(tp: int, pp: int, dp: int, micro: int, count: int, zero: int, chunks: int, flash: bool) -> ParallelConfig:
        return ParallelConfig(
            micro_batch=micro, global_batch=micro * count * dp, tp=tp, pp=pp, dp=dp, zero=zero, shard=dp if zero else 1, flash_attention=flash,
            virtual_stages=chunks if pp > 1 else 1, sequence_parallel=tp > 1,
        )  # fmt: skip

    few = st.sampled_from([1, 2, 4, 8])
    return st.builds(
        build, few, few, st.sampled_from([1, 4, 16, 64]), few, st.sampled_from([1, 8, 32]), st.integers(0, 3), st.sampled_from([1, 3]), st.booleans()
    )


def seconds(spread: ParallelConfig, machine: UniformCluster = MACHINE, model: TransformerConfig = GPT) -> float:
    return closed_form_step(model, spread, machine, CONSTANTS).seconds


def size(spread: ParallelConfig, model: TransformerConfig = GPT) -> float:
    return sum(closed_form_peak(model, spread, CONSTANTS).values())


@given(spreads(), st.floats(1.0, 8.0))
@settings(max_examples=60, deadline=None)
def test_a_better_machine_is_never_slower(spread: ParallelConfig, better: float) -> None:
    faster = [
        replace(MACHINE, link=Link("link", 0.0, 300e9 * better)),
        replace(MACHINE, network=Link("network", 0.0, 200e9 * better)),
        replace(MACHINE, device=replace(SHEET, memory_bandwidth=2e12 * better)),
    ]
    for machine in faster:
        assert seconds(spread, machine) <= seconds(spread) * (1 + 1e-9)


@given(spreads())
@settings(max_examples=60, deadline=None)
def test_recomputing_costs_time_and_saves_memory(spread: ParallelConfig) -> None:
    full = replace(spread, recompute="full")
    assert seconds(full) >= seconds(spread) * (1 - 1e-9)
    if GPT.layers // spread.pp > 1:  # one block alone must come back whole
        assert size(full) <= size(spread) * (1 + 1e-9)
    half = replace(full, recomputed_share=0.5)
    assert seconds(spread) <= seconds(half) <= seconds(full)


@given(spreads())
@settings(max_examples=60, deadline=None)
def test_sharding_more_never_takes_more_memory(spread: ParallelConfig) -> None:
    states = ("parameters", "gradients", "optimizer")
    sizes = [sum(closed_form_peak(GPT, replace(spread, zero=z, shard=spread.dp), CONSTANTS)[k] for k in states) for z in range(4)]
    assert sizes == sorted(sizes, reverse=True)
    wider = closed_form_peak(GPT, replace(spread, zero=3, shard=max(spread.dp // 2, 1)), CONSTANTS)
    assert sum(wider[k] for k in states) >= sizes[3] * (1 - 1e-9)


@given(spreads(), st.integers(2, 8))
@settings(max_examples=60, deadline=None)
def test_more_micro_batches_never_raise_the_share_of_the_bubble(spread: ParallelConfig, times: int) -> None:
    more = replace(spread, global_batch=spread.global_batch * times)
    few, many = closed_form_step(GPT, spread, MACHINE, CONSTANTS), closed_form_step(GPT, more, MACHINE, CONSTANTS)
    assert many.bubble / many.seconds <= few.bubble / few.seconds + 1e-9
    if spread.pp == 1:
        assert few.bubble == 0


def test_interleaving_shortens_the_bubble_and_holds_more() -> None:
    plain = ParallelConfig(micro_batch=1, global_batch=32, tp=8, pp=8)
    chunks = replace(plain, virtual_stages=3)
    assert closed_form_step(GPT, chunks, MACHINE, CONSTANTS).bubble < closed_form_step(GPT, plain, MACHINE, CONSTANTS).bubble
    assert closed_form_peak(GPT, chunks, CONSTANTS)["activations"] > closed_form_peak(GPT, plain, CONSTANTS)["activations"]


def test_activations_are_those_of_the_published_formula() -> None:
    """34 bytes a token and hidden element, and 5 a pair of positions and head (Korthikanti et al., 2022)."""
    tokens = 4 * GPT.seq
    kept = block_profile(GPT, TransformerShard(samples=4, flash_attention=False, dropout=True)).activation_bytes
    assert kept == pytest.approx(34 * tokens * GPT.hidden + 5 * tokens * GPT.seq * GPT.heads)
    cut = block_profile(GPT, TransformerShard(samples=4, flash_attention=False, dropout=True, tp=8)).activation_bytes
    assert cut == pytest.approx((10 + 24 / 8) * tokens * GPT.hidden + 5 * tokens * GPT.seq * GPT.heads / 8)


def test_flops_of_a_block_are_those_of_the_model() -> None:
    one = block_profile(LLAMA, TransformerShard(samples=1))
    whole = LLAMA.layers * (one.flops_forward + one.flops_backward)
    without_head = LLAMA.model_flops(1) - 6 * LLAMA.seq * LLAMA.vocab * LLAMA.hidden
    flash = 2 * LLAMA.seq**2 * LLAMA.hidden * LLAMA.layers  # a flash kernel computes the scores once more in backward
    assert whole == pytest.approx(without_head + 0.5 * flash)


def test_parameters_of_known_models() -> None:
    assert TransformerConfig(96, 12288, 96, 96, 49152, 2048, 51200).parameters == pytest.approx(174.6e9, rel=0.01)
    assert TransformerConfig(80, 8192, 64, 8, 28672, 8192, 128256, glu=True, tied_embeddings=False).parameters == pytest.approx(70.6e9, rel=0.01)


def test_groups_side_by_side_share_a_nodes_network() -> None:
    alone = ring_alpha_beta("all_reduce", Ring(16, 1), MACHINE, CONSTANTS)
    beside = ring_alpha_beta("all_reduce", Ring(4, 8), MACHINE, CONSTANTS)
    within = ring_alpha_beta("all_reduce", Ring(8, 1), MACHINE, CONSTANTS)
    assert within.bytes_per_s > alone.bytes_per_s > beside.bytes_per_s
    assert beside.bytes_per_s == pytest.approx(alone.bytes_per_s / 8)


def test_experts_are_held_and_sent_by_their_owners_alone() -> None:
    spread = ParallelConfig(micro_batch=1, global_batch=64, dp=64, zero=3, shard=64)
    owned = replace(spread, ep=64)
    assert closed_form_step(EXPERTS, owned, MACHINE, CONSTANTS).communication < closed_form_step(EXPERTS, spread, MACHINE, CONSTANTS).communication
    assert sum(owned.experts_by_stage(EXPERTS)) * 64 == pytest.approx(EXPERTS.layers * EXPERTS.experts * EXPERTS.ffn_parameters)


def test_frozen_weights_have_no_gradients_to_compute_send_or_keep() -> None:
    spread = ParallelConfig(micro_batch=1, global_batch=64, dp=8)
    frozen = replace(spread, frozen=True)
    assert seconds(frozen) < seconds(spread)
    assert closed_form_peak(GPT, frozen, CONSTANTS)["optimizer"] == 0


def test_what_was_never_fitted_has_the_common_constants() -> None:
    common = load_fitted_constants().constants("ampere", "a framework of tomorrow")
    assert common == load_fitted_constants().constants("a device of tomorrow", "")
    assert common.matmul == pytest.approx(load_fitted_constants().base["matmul"])


def run(table: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}"}
    command = [sys.executable, str(REPOSITORY / "bench" / "published.py"), "--data", str(table), *flags]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


HEADER = (
    "row_id,source_id,framework,gpu,num_gpus,layers,hidden,heads,ffn,seq_len,tp,pp,dp,"
    "micro_batch,global_batch,recompute,sec_per_iter,tokens_per_s_per_gpu,tflops_per_gpu,mem_gb_per_gpu,mem_unit,oom"
)
ROWS = (
    "1,a,Megatron-LM,A100,8,24,2048,16,8192,1024,1,1,8,4,64,full,1.0,,,30,GB,0",
    "2,a,a new framework,GPU-9000,16,24,2048,16,8192,1024,2,2,4,,64,,,5000,,,,",
    "3,b,Megatron-LM,A100,8,,2048,16,8192,1024,1,1,8,4,64,full,1.0,,,,,",
    "4,b,PyTorch FSDP2,H100,8,24,2048,16,8192,1024,1,1,8,4,64,none,,,,,,",
    "5,b,Megatron-LM,A100,8,96,12288,96,49152,2048,8,1,1,8,64,none,,,140,,,1",
    "6,b,Megatron-LM,A100,eight,24,2048,16,,1024,x,,,,64,full,1.0,,,,,",
)


def test_a_table_with_gaps_is_predicted_where_it_can_be_and_says_why_not(tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    table.write_text("\n".join([HEADER, *ROWS]) + "\n", encoding="utf-8")
    done = run(table, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["time"]["rows"] == 3 and found["time"]["skipped"] == 3
    assert found["time"]["skipped_why"] == {"no layers": {"b": 1}, "no num_gpus": {"b": 1}, "no measured time": {"b": 1}}
    assert found["memory"]["rows"] == 1 and found["memory"]["mape"] > 0
    assert set(found["time"]["by_source"]) == {"a", "b"}
    assert found["fits"]["rows"] == 2 and found["fits"]["recall_oom"] == 100.0
    shown = run(table)
    assert shown.returncode == 0 and "no measured time" in shown.stdout


def test_a_table_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    done = run(tmp_path / "none.csv")
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1
