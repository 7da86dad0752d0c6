"""A model that no rank can hold: two ranks share a device over gloo, each may use a fraction of it, and train a Llama whose state needs nearly both.

Prints what each rank has held, at birth and at its peak, and the losses. Example, on one GPU: python bench/births.py --mesh shard=2 --layers 33
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.nn import functional as F

WORLD, VOCAB = 2, 32000


def main(
    mesh: Annotated[str, typer.Option(help="shard=2 (ZeRO-3) or tp=2.")] = "shard=2",
    layers: Annotated[int, typer.Option(help="Blocks of width 4096, 218 million parameters each.")] = 33,
    width: Annotated[int, typer.Option(help="The blocks' width.")] = 4096,
    weights: Annotated[str | None, typer.Option(help="A folder of weights to begin with; initial values are drawn unless given.")] = None,
    fraction: Annotated[float, typer.Option(help="Of the GPU's memory, that each rank may use.")] = 0.45,
    steps: Annotated[int, typer.Option(min=1)] = 4,
    precision: Annotated[str, typer.Option(help="fp32 or bf16.")] = "bf16",
    verify: Annotated[bool, typer.Option(help="Verify the plan before step 1.")] = True,
) -> None:
    """Example: python bench/births.py --mesh tp=2 --layers 4 --width 512"""
    if "RANK" not in os.environ:
        devices = ",".join(["cuda:0" if torch.cuda.is_available() else "cpu"] * WORLD)
        env = {**os.environ, "MESHWRIGHT_DEVICES": devices if "cuda" in devices else "", "OMP_NUM_THREADS": "4"}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}", *sys.argv]
        raise typer.Exit(subprocess.run(command, env=env, check=False).returncode)
    _train(mesh, layers, width, weights, fraction, steps, precision, verify)


def llama_config(layers: int, width: int) -> Any:
    from meshwright.zoo.llama import LlamaConfig

    return LlamaConfig(VOCAB, 512, layers, heads=width // 128, kv_heads=max(width // 512, 1), width=width, ffn=width * 7 // 2)


def _train(mesh: str, layers: int, width: int, weights: str | None, fraction: float, steps: int, precision: str, verify: bool) -> None:
    import meshwright as mw
    from meshwright.zoo.llama import Llama

    on_gpu, started = torch.cuda.is_available(), time.perf_counter()
    if on_gpu:
        torch.cuda.set_device(0)
        torch.cuda.set_per_process_memory_fraction(fraction, 0)
        torch.set_float32_matmul_precision("high")
    dist.init_process_group("gloo")

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        (tokens,) = batch
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    tokens = torch.randint(0, VOCAB, (2 * steps, 257), generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens), batch_size=2)
    torch.manual_seed(0)
    model = mw.deferred_init(lambda: Llama(llama_config(layers, width)))
    parameters = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=on_gpu)  # torch's loop over tensors needs the parameters' size once more
    zero = {"zero": 3} if "shard" in mesh else {}
    constraints = {"mesh": mesh, "precision": precision, "recompute": "full", "verify": verify, **zero}
    run = mw.prepare(model, optimizer, loader, loss_fn=loss_fn, weights=weights, **constraints)
    born = {"born_s": time.perf_counter() - started, "born_bytes": _allocated(on_gpu)}
    losses, times = [], []
    for batch in run.loader:
        before = time.perf_counter()
        losses.append(float(run.step(batch, loss_fn)))
        times.append(time.perf_counter() - before)
    found = {**born, "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0, "held": run.session.applied.memory_bytes()}
    ranks: list[Any] = [None] * WORLD
    dist.all_gather_object(ranks, found)
    if run.is_first:
        state = 16 * parameters  # parameters, gradients and AdamW's two states, in fp32
        total = torch.cuda.mem_get_info()[1] if on_gpu else 0
        print(json.dumps({
            "mesh": mesh, "parameters": parameters, "state_bytes": state, "device_bytes": total, "allowed_bytes": int(fraction * total),
            "ranks": ranks, "losses": losses, "step_s": sorted(times)[len(times) // 2],
        }), flush=True)  # fmt: skip


def _allocated(on_gpu: bool) -> int:
    return torch.cuda.max_memory_allocated() if on_gpu else 0


if __name__ == "__main__":
    typer.run(main)
