"""Peak memory of training steps on one GPU: predicted beforehand, then measured; and where it runs out of memory, found by trying.

First a list of models, each at one batch. Then, with the allocator held to smaller memories than the card has, batch sizes around the predicted
limit: each is tried, and the largest that ran is compared with the largest that was predicted to. Those runs are also written as rows in the
form of published training runs (`published.py --data FILE`), with and without the ones that ran out of memory.

Example: python bench/gpu_memory.py
"""

from __future__ import annotations

import csv
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.launch.fork_server import RANK_DEFAULTS

os.environ.update({**RANK_DEFAULTS, **os.environ})  # before torch reads it: as ranks are started

import torch

from meshwright import data, zoo
from meshwright.core.calibration import Rates
from meshwright.core.model import ModelProfile
from meshwright.core.plan import CompileMode, MemoryPolicy, Offload, Plan, RecomputeMode
from meshwright.cost.memory_cost import peak_bytes
from meshwright.describe.profile_tracer import trace_task
from meshwright.execute.session import Session
from meshwright.plan.partition import choose_units

HERE = Path(__file__).parent
STEPS = 4
GROWTH = 1.09  # from one batch that is tried to the next: eight a doubling
GIB = 2**30


@dataclass(frozen=True)
class Case:
    model: str
    batch: int
    seq: int = 0
    recompute: RecomputeMode = "none"
    micro_batches: int = 1
    compile: CompileMode = "none"
    offload: Offload = "none"

    def task(self) -> Any:
        return zoo.load(self.model, seq=self.seq or None)

    def plan(self, profile: ModelProfile, batch: int) -> Plan:
        memory = MemoryPolicy(0, choose_units(profile), self.recompute, "bf16", offload=self.offload)
        return Plan(self.model, batch, micro_batches=self.micro_batches, memory=memory, compile=self.compile, device="cuda", backend="nccl")


MODELS = (
    Case("gpt2-124m", 8, 1024), Case("gpt2-124m", 32, 1024), Case("gpt2-124m", 32, 1024, "full"), Case("gpt2-124m", 64, 1024, "none", 4),
    Case("gpt2-774m", 8, 1024), Case("gpt-1.3b", 4, 2048), Case("gpt-1.3b", 8, 2048, "full"), Case("gpt-1.3b", 8, 2048, "selective"),
    Case("llama3-1b", 2, 2048), Case("llama3-1b", 4, 4096, "full"), Case("smollm2", 8, 2048), Case("vae", 4096), Case("cnn", 512),
    Case("cosmoflow", 4), Case("dlrm-tiny", 4096), Case("gpt-1.3b", 4, 2048, offload="optimizer"),
    Case("gpt2-124m", 32, 1024, compile="model"), Case("gpt-1.3b", 4, 2048, compile="model"), Case("llama3-1b", 2, 2048, compile="model"),
    Case("smollm2", 8, 2048, compile="model"), Case("gpt2-774m", 8, 1024, compile="model"), Case("cnn", 512, compile="model"),
    Case("gpt-1.3b", 4, 2048, compile="blocks"), Case("llama3-1b", 2, 2048, compile="blocks"), Case("smollm2", 8, 2048, "full", compile="blocks"),
)  # fmt: skip
LIMITS = (
    (Case("gpt2-124m", 0, 1024), 16), (Case("gpt2-124m", 0, 1024), 40), (Case("gpt2-774m", 0, 1024), 40), (Case("gpt2-774m", 0, 1024, "full"), 24),
    (Case("gpt-1.3b", 0, 2048), 40), (Case("gpt-1.3b", 0, 2048), 80), (Case("gpt-1.3b", 0, 2048, "full"), 40), (Case("llama3-1b", 0, 2048), 40),
    (Case("llama3-1b", 0, 4096), 80), (Case("smollm2", 0, 2048), 24), (Case("cnn", 0), 16), (Case("vae", 0), 8), (Case("cosmoflow", 0), 40),
)  # fmt: skip


def main(
    only: Annotated[str, typer.Option(help="models, limits, or all.")] = "all",
    output: Annotated[Path, typer.Option(help="JSON file for the results; the rows go beside it, as .csv.")] = HERE / "results" / "gpu_memory.json",
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON on stdout instead of lines.")] = False,
) -> None:
    """Measure on one GPU; exit code 1 where a model's peak is off by more than 5%.

    Example: python bench/gpu_memory.py --only models
    """
    if not torch.cuda.is_available():
        print("error: no GPU here: run this where torch.cuda.is_available()", file=sys.stderr)
        sys.exit(2)
    total = torch.cuda.get_device_properties(0).total_memory
    base = _base()
    models = [_compared(case, base) for case in MODELS] if only in ("models", "all") else []
    limits = [_limit(case, gib, base, total) for case, gib in LIMITS] if only in ("limits", "all") else []
    result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "base_bytes": base, "models": models, "limits": limits}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=2) + "\n")
    _write_rows(output.with_suffix(".csv"), limits)
    if as_json:
        print(json.dumps(result))
    sys.exit(0 if all(abs(m["ratio"] - 1) <= 0.05 for m in models) else 1)


def _base() -> int:
    """What libraries take from the allocator on first use, and keep."""
    a = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (a @ a).sum().backward()
    del a
    gc.collect()
    return torch.cuda.memory_allocated()


def _profiles(case: Case, kept: dict[tuple[str, int], ModelProfile] = {}) -> ModelProfile:  # noqa: B006 - a cache
    key = (case.model, case.seq)
    if key not in kept:
        kept[key] = trace_task(case.task(), precision="bf16", device="cuda")
    return kept[key]


def _predicted(case: Case, batch: int, base: int) -> dict[str, int]:
    profile = _profiles(case)
    plan = case.plan(profile, batch)
    return peak_bytes(plan, profile.at_batch(plan.max_micro_batch_size), "adamw", Rates(1, 1, {}, (), 0.0, base_bytes=base))


def _run(case: Case, batch: int, steps: int = STEPS) -> dict[str, Any] | None:
    """Peak bytes and the median step's seconds; None if it ran out of memory."""
    try:
        return _stepped(case, batch, steps)
    except torch.cuda.OutOfMemoryError:
        return None
    finally:
        gc.collect()
        torch.cuda.empty_cache()
        torch.compiler.reset()


def _stepped(case: Case, batch: int, steps: int) -> dict[str, Any]:
    task = case.task()
    torch.manual_seed(0)
    torch.cuda.reset_peak_memory_stats()
    with torch.device("cuda"):
        model = task.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    session = Session(case.plan(_profiles(case), batch), model, optimizer)
    corpus = data.load(task.data, task.fields)
    taken = data.GlobalSampler(len(corpus), batch, 0).indices(0)
    samples = {k: v.to("cuda") for k, v in corpus.batch(taken).items()}
    seconds = []
    for _ in range(steps):
        begun = time.perf_counter()
        session.step(samples, task.loss)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return {"bytes": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved(), "step_s": statistics.median(seconds[1:])}


def _compared(case: Case, base: int) -> dict[str, Any]:
    kinds, found = _predicted(case, case.batch, base), _run(case, case.batch)
    assert found is not None, f"{case} ran out of memory"
    ratio = sum(kinds.values()) / found["bytes"]
    print(
        f"{_name(case)} × {case.batch}: predicted {sum(kinds.values()) / 1e9:.2f} GB, measured {found['bytes'] / 1e9:.2f}, {ratio:.3f}",
        file=sys.stderr,
    )
    return {**asdict(case), "predicted": kinds, **found, "ratio": ratio}


def _name(case: Case) -> str:
    how = [f"seq {case.seq}"] * bool(case.seq) + [f"recompute {case.recompute}"] * (case.recompute != "none")
    how += ["optimizer on the host"] * (case.offload != "none")
    how += [f"{case.micro_batches} micro-batches"] * (case.micro_batches > 1) + [f"compile {case.compile}"] * (case.compile != "none")
    return f"{case.model} ({', '.join(how)})" if how else case.model


def _limit(case: Case, gib: int, base: int, total: int) -> dict[str, Any]:
    """Batches from small to large until two have failed; the largest that should and that did run."""
    room = gib * GIB
    torch.cuda.set_per_process_memory_fraction(room / total)
    needs = lambda batch: sum(_predicted(case, batch, base).values())  # noqa: E731
    most = 1
    while needs(most + 1) <= room:
        most += 1 if most < 64 else most // 32
    sizes = sorted({max(round(most * GROWTH**n), 1) for n in range(-3, 4)})
    tried: list[dict[str, Any]] = []
    for batch in sizes:
        tried.append({"batch": batch, "predicted": needs(batch), **(_run(case, batch, 2) or {"bytes": 0})})
        if len(tried) > 1 and not tried[-1]["bytes"] and not tried[-2]["bytes"]:
            break
    torch.cuda.set_per_process_memory_fraction(1.0)
    ran = max((t["batch"] for t in tried if t["bytes"]), default=0)
    wrong = sum((t["predicted"] <= room) != bool(t["bytes"]) for t in tried)
    print(f"{_name(case)} in {gib} GiB: predicted to {most}, ran to {ran} of {[t['batch'] for t in tried]}, {wrong} wrong", file=sys.stderr)
    return {**asdict(case), "gib": gib, "predicted_most": most, "ran_most": ran, "wrong": wrong, "tried": tried}


def _write_rows(path: Path, limits: Sequence[dict[str, Any]]) -> None:
    """Transformers' runs as rows that `published.py` reads."""
    rows = [_row(limit, one) for limit in limits if limit["seq"] for one in limit["tried"]]
    if rows:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows({**row, "row_id": i + 1} for i, row in enumerate(rows))


def _row(limit: dict[str, Any], one: dict[str, Any]) -> dict[str, Any]:
    case = Case(**{k: limit[k] for k in ("model", "batch", "seq", "recompute", "micro_batches", "compile", "offload")})
    with torch.device("meta"):
        config = case.task().build().config
    gated, sizes = hasattr(config, "kv_heads"), asdict(config)
    return {
        "row_id": 0, "source_id": "h200-limits", "source": "bench/gpu_memory.py", "confidence": "measured", "task": "pretrain",
        "framework": "PyTorch eager (Meshwright, one device)", "gpu": "H200", "gpu_mem_gb": limit["gib"] * GIB / 1e9,
        "num_gpus": 1, "gpus_per_node": 1,
        "intra_node_net": "", "inter_node_net": "", "model": case.model, "layers": sizes["layers"], "hidden": sizes["width"],
        "heads": sizes["heads"], "kv_heads": sizes.get("kv_heads", sizes["heads"]), "ffn": sizes.get("ffn", 4 * sizes["width"]), "glu": int(gated),
        "seq_len": case.seq, "vocab": sizes["vocab"], "experts": "", "topk": "", "moe_ffn": "", "precision": "amp_bf16",
        "tp": 1, "pp": 1, "vpp": 1, "dp": 1, "cp": 1, "ep": 1, "sharding": "ddp", "shard_group": "", "seq_parallel": "",
        "micro_batch": one["batch"], "global_batch": one["batch"],
        "recompute": case.recompute, "opts": "FlashAttention; not compiled; fused AdamW", "tflops_per_gpu": "", "tflops_kind": "",
        "mfu_pct": "", "hfu_pct": "",
        "sec_per_iter": "", "sec_per_iter_derived": "", "tokens_per_s_per_gpu": "",
        "mem_gb_per_gpu": one["bytes"] / 1e9 if one["bytes"] else "", "mem_unit": "GB (10^9)", "oom": int(not one["bytes"]), "notes": "",
    }  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
