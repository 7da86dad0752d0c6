"""Do the default learning rate, warm-up, clipping and initial values train? Families of the zoo and of transformers, at full width with few layers.

    python bench/defaults.py [--only llama] [--device cuda]

A model passes if the mean of its last three losses is below its first one, and no loss after the third step is above 1.1 times the first."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright import data, zoo
from meshwright.core.task import Field, Task
from meshwright.orchestrate.config import RunConfig
from meshwright.orchestrate.lr_defaults import fill_learning_rate
from meshwright.orchestrate.lr_schedule import learning_rate
from meshwright.orchestrate.rank_entrypoints import make_optimizer
from meshwright.zoo.cosmoflow import COSMOFLOW_CONFIGS, CosmoFlow
from meshwright.zoo.gpt import GPT, GPT_CONFIGS
from meshwright.zoo.llama import LLAMA_CONFIGS, Llama

SEQ = 32


@dataclass(frozen=True)
class Case:
    """A model, its batch, and for language models the number of layers and the vocabulary; None: its own."""

    name: str
    batch: int = 2
    layers: int | None = None
    vocab: int | None = None
    edge: int | None = None  # of cosmoflow's volume
    config: dict[str, Any] | None = None  # of transformers


def transformer(kind: str, width: int, layers: int, **more: Any) -> Case:
    heads = width // 128 if width % 128 == 0 else width // 64
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": 4096, "max_position_embeddings": 1024}
    return Case(f"hf {kind}", config={"model_type": kind, **sizes, **more}, layers=layers)


CASES = (
    *(Case(name, batch=16) for name in ("gpt-tiny", "gpt-mini", "llama-tiny", "vae", "vae-conv", "cnn", "dlrm")),
    Case("dlrm-tiny", batch=512),  # losses of small batches differ more than 20 steps change them
    Case("cosmoflow-tiny", batch=128),
    Case("cosmoflow", batch=32, edge=16),
    transformer("gpt2", 768, 4),
    Case("smollm2", layers=4, vocab=4096),
    Case("gpt2-124m", layers=4, vocab=4096),
    Case("gpt-1.3b", layers=1, vocab=4096),
    Case("llama3-8b", layers=1, vocab=4096),
    transformer("llama", 2560, 1, intermediate_size=6912),
    transformer("mistral", 2048, 1, intermediate_size=7168, num_key_value_heads=4),
    transformer("qwen2", 1536, 1, intermediate_size=8960, num_key_value_heads=2),
    transformer("opt", 2048, 1, ffn_dim=8192, word_embed_proj_dim=2048),
    transformer("gpt_neox", 2048, 1, intermediate_size=8192),
    Case("llama3-1b", layers=1, vocab=4096),
)
# Whole models, and the widest ones with one layer, for a GPU with 139 GiB.
GPU_CASES = (
    Case("gpt2-124m", batch=8),
    Case("gpt-1.3b", batch=8),
    Case("llama3-3b", batch=8),
    Case("gpt3-175b", batch=4, layers=1),
    Case("llama3-8b", batch=4, layers=16),
    Case("llama3-70b", batch=4, layers=2),
    Case("llama3-405b", batch=2, layers=1, vocab=4096),
    transformer("llama", 2560, 32, intermediate_size=6912),
    transformer("opt", 2560, 32, ffn_dim=10240, word_embed_proj_dim=2560),
)


@contextmanager
def load_task(case: Case) -> Iterator[Task]:
    if case.config is not None:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(case.config))
            yield zoo.load(f"hf:{folder}", seq=SEQ)
        return
    if case.edge is not None:
        volume = replace(COSMOFLOW_CONFIGS[case.name], edge=case.edge)
        task = zoo.load(case.name)
        yield replace(task, build=partial(CosmoFlow, volume), fields={**task.fields, "volume": Field(volume.volume)})
        return
    if case.name not in {**GPT_CONFIGS, **LLAMA_CONFIGS}:
        yield zoo.load(case.name)
        return
    known: Any = GPT_CONFIGS.get(case.name) or LLAMA_CONFIGS[case.name]
    config = replace(known, layers=case.layers or known.layers, vocab=case.vocab or known.vocab)
    build: Callable[[], nn.Module] = partial(GPT if case.name in GPT_CONFIGS else Llama, config)
    yield replace(zoo.load(case.name, seq=SEQ), build=build, fields={"tokens": Field((SEQ + 1,), "int64", config.vocab)})


def train(case: Case, task: Task, steps: int, device: torch.device) -> dict[str, Any]:
    """Train from the defaults of a run of `steps` steps; returns the losses and the line that explains the learning rate."""
    torch.manual_seed(0)
    with device:
        model = task.build()
    config, reason = fill_learning_rate(RunConfig(steps=steps), task, (tuple(p.shape) for p in model.parameters()))
    assert config.learning_rate is not None
    assert config.warmup_steps is not None
    optimizer = make_optimizer(config, model)
    dataset = data.load(task.data, task.fields)
    sampler = data.GlobalSampler(len(dataset), case.batch, 0)
    losses = []
    start = time.perf_counter()
    for step in range(steps):
        rate = learning_rate(step, peak=config.learning_rate, warmup=config.warmup_steps, steps=steps, schedule=config.lr_schedule)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = task.loss(model, {k: v.to(device) for k, v in dataset.batch(sampler.indices(step)).items()})
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    parameters = sum(p.numel() for p in model.parameters())
    return {"parameters": parameters, "losses": losses, "reason": reason, "fell": fell(losses), "seconds": time.perf_counter() - start}


def fell(losses: list[float]) -> bool:
    return statistics.mean(losses[-3:]) < losses[0] and max(losses[3:]) <= 1.1 * losses[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "defaults.json")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    rows = []
    for case in GPU_CASES if options.device == "cuda" else CASES:
        if options.only not in case.name:
            continue
        with load_task(case) as task:
            row = {"name": case.name, "layers": case.layers, **train(case, task, options.steps, torch.device(options.device))}
        rows.append(row)
        losses = row["losses"]
        size, seconds = f"{row['parameters'] / 1e6:8.1f} M", f"{row['seconds']:4.0f} s"
        curve = f"{losses[0]:8.3f} → {statistics.mean(losses[-3:]):8.3f}, highest after step 3 {max(losses[3:]):8.3f}"
        print(f"{case.name:16} {size} {curve} {'fell' if row['fell'] else 'DID NOT FALL'} {seconds}  {row['reason']}", flush=True)
        options.output.write_text(json.dumps(rows, indent=1))
    print(f"{sum(row['fell'] for row in rows)} of {len(rows)} fell")


if __name__ == "__main__":
    main()
