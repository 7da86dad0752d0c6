"""Rows of published training runs as inputs of the closed form: what a row says, what it leaves out and what is then taken, what it measured."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from meshwright.core.cluster import Device, Link
from meshwright.core.errors import RequestError
from meshwright.cost.constants import device_architecture
from meshwright.cost.parallel_config import ParallelConfig, UniformCluster
from meshwright.cost.transformer_kernels import TransformerConfig, TransformerRecompute
from meshwright.describe.catalog import DeviceDatasheet, datasheet, find_datasheet

Row = Mapping[str, str]
# What was run, as the row says it: rows that agree in these are one configuration measured again.
CONFIGURATION = (
    "source_id", "task", "framework", "gpu", "gpu_mem_gb", "num_gpus", "model", "layers", "hidden", "seq_len", "precision", "tp", "pp", "vpp", "dp",
    "cp", "ep", "sharding", "shard_group", "seq_parallel", "micro_batch", "global_batch", "recompute", "opts",
)  # fmt: skip
USUAL_HEAD = 64  # elements of a head, where the model's width is no multiple of its heads
GPT_VOCAB = 51200  # what Megatron pads GPT-2's to: the usual one where a row of that family does not say

NEAREST = "a100-sxm-80gb"  # for a device that nobody has described
# A node's network, in bits/s one way, where a row does not say: what nodes of such devices are sold with.
NETWORKS = {"volta": 1e11, "ampere": 1.6e12, "hopper": 3.2e12, "blackwell": 3.2e12}
# Words in a framework's name and its generation; the first that matches holds.
GENERATIONS = (
    ("eager", "eager"), ("automodel", "fsdp2"), ("fsdp2", "fsdp2"), ("torchtitan", "fsdp2"), ("simplefsdp", "fsdp2"), ("composer", "fsdp1"),
    ("fsdp", "fsdp1"), ("mosaic", "fsdp1"), ("llm-foundry", "fsdp1"), ("internevo", "internevo"), ("colossal", "internevo"),
    ("oneflow", "oneflow"), ("nemo", "nemo"),
    ("core", "megatron-core"), ("nanotron", "megatron-core"), ("megatron", "megatron"), ("neox", "megatron"), ("deepspeed", "fsdp1"),
)  # fmt: skip
# Generations that wrote attention out and had dropout, on devices before Hopper. Gated models came later, and with flash kernels.
FLASHLESS = ("megatron", "oneflow")
CORE = ("nemo", "megatron-core")  # generations whose kernels are written fused and whose tensor parallelism cuts positions too
FLASH_KINDS = ("hopper", "blackwell", "cdna")


@dataclass(frozen=True)
class Job:
    """One row, understood. `seconds`, `memory_bytes` and `out_of_memory` are None where the row does not say."""

    row: str
    source: str
    configuration: str
    model: TransformerConfig
    spread: ParallelConfig
    machine: UniformCluster
    kind: str  # of device
    generation: str
    micro_batch_given: bool
    recompute_given: bool
    seconds: float | None
    memory_bytes: float | None
    out_of_memory: bool | None

    @property
    def multi_node(self) -> bool:
        return self.spread.world > self.machine.per_node


@dataclass(frozen=True)
class Skipped:
    """A row that is not predicted, or not compared, and why."""

    row: str
    source: str
    why: str


class Lacking(Exception):
    """A row without a field that nothing can stand for."""


def read(path: Path) -> tuple[list[Job], list[Skipped]]:
    """(jobs, skipped): what lacks a field that nothing can stand for is skipped."""
    jobs, skipped = [], []
    for row in _rows(path):
        try:
            jobs.append(understand(row))
        except Lacking as reason:
            skipped.append(Skipped(row.get("row_id", "?"), row.get("source_id", "?"), str(reason)))
    return jobs, skipped


def _rows(path: Path) -> Iterator[Row]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            yield from ({k: (v or "").strip() for k, v in row.items() if k is not None} for row in csv.DictReader(file))
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}") from None


def understand(row: Row) -> Job:
    kind, sheet = device_of(row)
    generation = generation_of(row, kind)
    model = _model(row)
    spread = _spread(row, model, kind, generation)
    out = row.get("oom", "")
    return Job(
        row=row.get("row_id", "?"),
        source=row.get("source_id", "") or row.get("source", "") or "?",
        configuration="|".join(row.get(name, "") for name in CONFIGURATION),
        model=model,
        spread=spread,
        machine=_machine(row, kind, sheet),
        kind=kind,
        generation=generation,
        micro_batch_given=bool(row.get("micro_batch")),
        recompute_given=bool(row.get("recompute")),
        seconds=_seconds(row, model, spread),
        memory_bytes=_memory(row),
        out_of_memory=None if out == "" else out.lower() in ("1", "1.0", "true", "yes"),
    )


def _number(row: Row, name: str, default: float | None = None) -> float:
    """A field as a number; one that is absent or no number takes the default, and without one the row is lacking."""
    try:
        value = float(row.get(name, ""))
        if value == value and value >= 0:
            return value
    except ValueError:
        pass
    if default is None:
        raise Lacking(f"no {name}")
    return default


def _whole(row: Row, name: str, default: float | None = None) -> int:
    return max(int(_number(row, name, default)), 0)


def device_of(row: Row) -> tuple[str, DeviceDatasheet]:
    """(kind, sheet): by its name and memory, by its name alone, and the nearest where that is not known either."""
    name, size = row.get("gpu", ""), _number(row, "gpu_mem_gb", 0) or None
    found = _named(name, size) or _named(name, None) or datasheet(NEAREST)
    return device_architecture(found.name), found


@cache
def _named(name: str, memory_gb: float | None) -> DeviceDatasheet | None:
    try:
        return find_datasheet(name, memory_gb)
    except RequestError:
        return None


def generation_of(row: Row, kind: str) -> str:
    name = row.get("framework", "").lower()
    for word, generation in GENERATIONS:
        if word in name:
            modern = kind in FLASH_KINDS and generation == "megatron"
            return "megatron-core" if modern else generation
    # Nobody's name: whoever cuts layers or matrices does it as Megatron does, and who cuts data alone as torch does.
    return "megatron-core" if max(_whole(row, "tp", 1), _whole(row, "pp", 1)) > 1 else "fsdp2"


def _machine(row: Row, kind: str, found: DeviceDatasheet) -> UniformCluster:
    device = Device("cuda", found.name, 0, _capacity(row, found), dict(found.peak_flops), found.memory_bandwidth, found.source)
    network = bits_per_s(row.get("inter_node_net", "")) or NETWORKS.get(kind, NETWORKS["ampere"])
    return UniformCluster(
        device, _whole(row, "gpus_per_node", 8) or 8, Link(found.link, 0.0, found.link_bandwidth), Link("network", 0.0, network / 8)
    )


def _capacity(row: Row, found: DeviceDatasheet) -> int:
    """The sheet's, unless the row names quite another: a variant that has no sheet, or a device held to a part of its memory."""
    said = 1e9 * (_number(row, "gpu_mem_gb", 0) or 0)
    return int(said) if said and abs(said / found.memory_bytes - 1) > 0.1 else found.memory_bytes


def bits_per_s(text: str) -> float:
    """A node's network from words: 'IB 4x200 Gbps/node' → 8e11, '100 GB/s' → 8e11; 0 where they hold no figure."""
    found = re.search(r"(?:(\d+)\s*x\s*)?(\d+(?:\.\d+)?)\s*([GT])(B?)", text)
    if found is None:
        return 0.0
    return int(found[1] or 1) * float(found[2]) * (1e12 if found[3] == "T" else 1e9) * (8 if found[4] else 1)


def _model(row: Row) -> TransformerConfig:
    heads = max(_whole(row, "heads"), 1)
    experts = _whole(row, "experts", 0)
    glu = bool(_whole(row, "glu", 0))
    hidden = _whole(row, "hidden")
    expert_ffn = _whole(row, "moe_ffn", _number(row, "ffn", 4 * hidden)) if experts else 0
    opts = row.get("opts", "").lower()
    return TransformerConfig(
        layers=_whole(row, "layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_whole(row, "kv_heads", heads) or heads,
        ffn=_whole(row, "ffn", 0 if experts else 4 * hidden),
        seq=_whole(row, "seq_len"),
        vocab=_whole(row, "vocab", GPT_VOCAB),
        glu=glu,
        tied_embeddings="tied" in opts or not glu,
        experts=experts,
        topk=_whole(row, "topk", 1) if experts else 0,
        expert_ffn=expert_ffn,
        head_dim=0 if hidden % heads == 0 else USUAL_HEAD,
    )


def _spread(row: Row, model: TransformerConfig, kind: str, generation: str) -> ParallelConfig:
    tp, pp, cp = (max(_whole(row, name, 1), 1) for name in ("tp", "pp", "cp"))
    dp = _whole(row, "dp", 0) or max(_whole(row, "num_gpus") // (tp * pp * cp), 1)
    zero = _zero(row.get("sharding", ""))
    given = _whole(row, "shard_group", 0)
    recompute, share = _recompute(row)
    opts = row.get("opts", "").lower()
    written_out = re.search(r"no[- ]flash|(attn|attention)[^;]*\b(torch|eager|unfused|megatron)\b", opts) is not None
    flash = not written_out and ("flash" in opts or generation not in FLASHLESS or kind in FLASH_KINDS or model.glu)
    precision = next((p for p in ("fp8", "fp16", "bf16", "fp32") if p in row.get("precision", "").lower().replace("float", "fp")), "bf16")
    return ParallelConfig(
        micro_batch=max(_whole(row, "micro_batch", 1), 1),
        global_batch=_whole(row, "global_batch"),
        tp=tp,
        pp=pp,
        virtual_stages=max(_whole(row, "vpp", 1), 1),
        dp=dp,
        cp=cp,
        ep=_owners(row, model, dp * cp),
        zero=zero,
        shard=(given if given else dp * cp) if zero else 1,
        sequence_parallel=_sequence_parallel(row, tp, generation),
        recompute=recompute,
        recomputed_share=share,
        precision="bf16" if precision == "fp32" else precision,
        flash_attention=flash,
        dropout=generation in FLASHLESS and not model.glu,
        fused="compile" in opts or generation in CORE,
        frozen="lora" in row.get("task", "").lower(),
        fp32_grads="mixed_precision=default" in opts,
    )


def _owners(row: Row, model: TransformerConfig, replicas: int) -> int:
    """Ranks over which experts are spread. DeepEP is there to exchange tokens between them: a row that names it and says 1 does not say."""
    given = max(_whole(row, "ep", 1), 1)
    return math.gcd(model.experts, replicas) if given == 1 and model.experts and "deepep" in row.get("opts", "").lower() else given


def _zero(text: str) -> int:
    """ZeRO's stage by words; sharing everything in a node (hsdp) is 3 with a smaller group."""
    text = text.lower()
    found = re.search(r"zero-?([0-3])", text)
    if found:
        return int(found[1])
    return 3 if "sdp" in text else 1 if "distributed opt" in text else 0


def _recompute(row: Row) -> tuple[TransformerRecompute, float]:
    text = row.get("recompute", "").lower()
    if text.startswith("full"):
        return "full", 1.0
    if "attn" in text or "attention" in text:
        return "attention", 1.0
    if text.startswith("selective"):
        mfu, hfu = _number(row, "mfu_pct", 0), _number(row, "hfu_pct", 0)
        # The two utilisations differ by what is recomputed: all of it makes 4/3.
        return "full", min(max(3 * (hfu / mfu - 1), 0.0), 1.0) if mfu and hfu else 0.5
    return "none", 1.0


def _sequence_parallel(row: Row, tp: int, generation: str) -> bool:
    text = row.get("seq_parallel", "")
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return bool(float(text)) if re.fullmatch(r"[0-9]+(\.[0-9]*)?", text) else tp > 1 and generation in (*CORE, "fsdp2")


def _seconds(row: Row, model: TransformerConfig, spread: ParallelConfig) -> float | None:
    """Measured, or derived from what was; TFLOP/s are turned back by the formula that made them."""
    for name in ("sec_per_iter", "sec_per_iter_derived"):
        if value := _number(row, name, 0):
            return value
    gpus = _number(row, "num_gpus", spread.world)
    if rate := _number(row, "tokens_per_s_per_gpu", 0):
        return spread.global_batch * model.seq / (rate * gpus)
    if rate := _number(row, "tflops_per_gpu", 0):
        causal = "without causal" not in row.get("notes", "") and "Megatron" not in row.get("framework", "")
        flops = model.model_flops(spread.global_batch, causal)
        again = 4 / 3 if row.get("tflops_kind") == "hardware" and spread.recompute == "full" else 1.0
        return flops * again / (rate * 1e12 * gpus)
    return None


def _memory(row: Row) -> float | None:
    value = _number(row, "mem_gb_per_gpu", 0)
    return value * (2**30 if "gib" in row.get("mem_unit", "").lower() else 1e9) if value else None
