"""One GPU: `meshwright train` beside a plain compiled PyTorch loop on the same model, batch, precision and optimizer.

Both run as processes of their own, in the order plain, ours, ours, plain, so that a drift of the machine (a GPU at its power limit
slows down as it warms) falls on both, and the plain loop's two runs say how noisy the machine is.

Example: python bench/single_gpu.py --model gpt2-124m --batch 32 --seq 1024
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def plain(model: str, batch: int, seq: int, steps: int, warm: int) -> dict[str, Any]:
    """What somebody writes by hand: autocast, whole-model compile, fused AdamW, clipping; timed over the last steps together."""
    import torch

    from meshwright import data, zoo

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    task = zoo.load(model, seq=seq)
    with torch.device("cuda"):
        network = task.build()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    loss_fn = torch.compile(task.loss)
    corpus = data.load(task.data, task.fields)
    sampler = data.GlobalSampler(len(corpus), batch, 0)
    begun = time.perf_counter()
    for step in range(warm + steps):
        if step == warm:
            torch.cuda.synchronize()
            start = time.perf_counter()
        tokens = {k: v.pin_memory().to("cuda", non_blocking=True) for k, v in corpus.batch(sampler.indices(step)).items()}
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_fn(network, tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / steps
    return {
        "tokens_per_s": batch * seq / seconds,
        "step_s": seconds,
        "memory_bytes": torch.cuda.max_memory_allocated(),
        "loss": float(loss),
        "seconds": time.perf_counter() - begun,
    }


def ours(model: str, batch: int, seq: int, steps: int, warm: int) -> dict[str, Any]:
    """The product, as a user runs it."""
    command = [sys.executable, "-m", "meshwright.cli.main", "train", model, "--json", "--global-batch", str(batch), "--seq", str(seq)]
    command += ["--steps", str(steps + warm), "--set", "validate_batches=0", "--set", "profile=false", "--run-dir", "/tmp/meshwright-bench"]
    begun = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"meshwright train failed:\n{done.stderr[-3000:]}")
    result = json.loads(done.stdout)
    measured = result["measured"]
    return {
        "tokens_per_s": measured["tokens_per_s"],
        "step_s": measured["step_s"],
        "memory_bytes": max(measured["memory_bytes"]),
        "mfu": measured["mfu"],
        "predicted_step_s": result["predicted"]["step_s"],
        "predicted_memory_bytes": max(result["predicted"]["memory_bytes"]),
        "loss": result["losses"][-1],
        "seconds": time.perf_counter() - begun,
    }


def plain_apart() -> dict[str, Any]:
    """The plain loop in a process of its own."""
    done = subprocess.run([sys.executable, __file__, "--only-plain", *sys.argv[1:]], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the plain loop failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2-124m")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warm", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=1, help="how often the four runs are done")
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument("--only-plain", action="store_true", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.only_plain:
        print(json.dumps(plain(a.model, a.batch, a.seq, a.steps, a.warm)))
        return
    rounds: dict[str, list[dict[str, Any]]] = {"plain": [], "meshwright": []}
    order = ["plain", "meshwright", "meshwright", "plain"] * a.repeats
    for done, engine in enumerate(order):
        print(f"· {a.model}: {engine}, run {done + 1} of {len(order)}", file=sys.stderr)
        rounds[engine].append(plain_apart() if engine == "plain" else ours(a.model, a.batch, a.seq, a.steps, a.warm))
        print(f"  {rounds[engine][-1]['tokens_per_s']:,.0f} tokens/s", file=sys.stderr)
    median = {k: statistics.median(r["tokens_per_s"] for r in v) for k, v in rounds.items()}
    result = {
        "model": a.model,
        "batch": a.batch,
        "seq": a.seq,
        "tokens_per_s": median,
        "ratio": median["meshwright"] / median["plain"],
        "noise": max(abs(b["tokens_per_s"] / a["tokens_per_s"] - 1) for a, b in zip(rounds["plain"][::2], rounds["plain"][1::2], strict=True)),
        "rounds": rounds,
    }
    output = a.output or RESULTS / f"single_gpu_{a.model}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=2) + "\n")
    if a.json:
        print(json.dumps(result))
    else:
        speeds = f"plain {median['plain']:,.0f} tokens/s, meshwright {median['meshwright']:,.0f}"
        print(f"{a.model} {a.batch}×{a.seq}: {speeds}, ratio {result['ratio']:.3f}, plain against itself within {result['noise']:.1%}")


if __name__ == "__main__":
    main()
