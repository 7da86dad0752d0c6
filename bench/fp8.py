"""fp8 beside bf16 on one GPU: a training step of a stack of GPT blocks, compiled by block and eager, and what selective recomputation does to both.

Each pair is run in the order bf16, fp8, fp8, bf16 in one process, so that a drift of the card falls on both. A short training of a small GPT
in both precisions shows how far the curves are apart.

Example: python bench/fp8.py --width 2048 --layers 24 --batch 8 --seq 2048
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright import data, zoo
from meshwright.core.plan import MemoryPolicy, Plan
from meshwright.execute.session import Session
from meshwright.zoo.gpt import Block, GPTConfig

RESULTS = Path(__file__).parent / "results"


class Stack(nn.Module):
    """The blocks of a GPT, without embedding and head: where fp8 is used."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def step_seconds(config: GPTConfig, batch: int, seq: int, precision: str, compile: str, recompute: str, steps: int) -> dict[str, float]:
    """Median of a step (forward, backward, fused AdamW) and the peak memory."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    gc.collect()  # a session and its hooks hold each other: what is left of the run before would count as this one's memory
    torch.cuda.empty_cache()
    with torch.device("cuda"):
        model = Stack(config)
    units = tuple(f"blocks.{i}" for i in range(config.layers))
    memory = MemoryPolicy(0, units, recompute, precision)  # type: ignore[arg-type]
    plan = Plan("stack", batch, memory=memory, compile=compile, device="cuda", backend="nccl")  # type: ignore[arg-type]
    session = Session(plan, model, torch.optim.AdamW(model.parameters(), fused=True))
    x = torch.randn(batch, seq, config.width, device="cuda", dtype=torch.bfloat16)
    target = torch.randn_like(x)
    for _ in range(3):
        session.step({"x": x, "y": target}, distance)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        session.step({"x": x, "y": target}, distance)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return {"step_s": statistics.median(times), "memory_bytes": torch.cuda.max_memory_allocated()}


def distance(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (model(batch["x"]).float() - batch["y"].float()).square().mean()


def curve(precision: str, steps: int) -> list[float]:
    """Losses of a small GPT on text."""
    torch.manual_seed(0)
    task = zoo.load("gpt-mini")
    with torch.device("cuda"):
        model = task.build()
    units = tuple(f"blocks.{i}" for i in range(4))
    plan = Plan("gpt-mini", 32, memory=MemoryPolicy(0, units, "none", precision), device="cuda", backend="nccl")  # type: ignore[arg-type]
    session = Session(plan, model, torch.optim.AdamW(model.parameters(), lr=task.learning_rate, fused=True), clip=1.0)
    corpus = data.load(task.data, task.fields)
    sampler = data.GlobalSampler(len(corpus), 32, 0)
    return [float(session.step({k: v.cuda() for k, v in corpus.batch(sampler.indices(i)).items()}, task.loss).loss) for i in range(steps)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--curve-steps", type=int, default=100, help="0 leaves the curves out")
    parser.add_argument("--cases", nargs="+", default=["blocks/none", "blocks/selective", "none/none", "none/selective"], help="compile/recompute")
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    a = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    config = GPTConfig(vocab=256, context=a.seq, layers=a.layers, heads=a.width // 128, width=a.width)
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "width": a.width, "layers": a.layers}
    result |= {"batch": a.batch, "seq": a.seq, "cases": {}}
    for case in a.cases:
        compile, recompute = case.split("/")
        runs: dict[str, list[dict[str, float]]] = {"bf16": [], "fp8": []}
        for precision in ("bf16", "fp8", "fp8", "bf16"):
            runs[precision].append(step_seconds(config, a.batch, a.seq, precision, compile, recompute, a.steps))
            print(f"· {case} {precision}: {runs[precision][-1]['step_s'] * 1e3:.1f} ms", file=sys.stderr, flush=True)
        mean = {k: statistics.mean(r["step_s"] for r in v) for k, v in runs.items()}
        result["cases"][case] = {"runs": runs, "speedup": mean["bf16"] / mean["fp8"]}
    if a.curve_steps:
        curves = {precision: curve(precision, a.curve_steps) for precision in ("bf16", "fp8")}
        apart = [abs(x / y - 1) for x, y in zip(curves["fp8"], curves["bf16"], strict=True)]
        result["curves"] = {**curves, "largest_difference": max(apart), "last_difference": apart[-1]}
    output = a.output or RESULTS / f"fp8_{a.width}x{a.layers}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=2) + "\n")
    if a.json:
        print(json.dumps(result))
        return
    for case, found in result["cases"].items():
        both = {k: (statistics.mean(r["step_s"] for r in v), v[0]["memory_bytes"]) for k, v in found["runs"].items()}
        text = ", ".join(f"{k} {s * 1e3:.1f} ms {m / 1e9:.1f} GB" for k, (s, m) in both.items())
        print(f"compile/recompute {case}: {text}, speed-up {found['speedup']:.3f}")
    if a.curve_steps:
        print(f"curves: at most {result['curves']['largest_difference']:.2%} apart, {result['curves']['last_difference']:.2%} at the end")


if __name__ == "__main__":
    main()
