"""The blocks that `parallel.py` measures: each kind of parallelism as a careful person writes it in plain torch for one model, beside
Meshwright, which is given the module and finds the rest. Both make the same collectives of the same sizes and train the same weights."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from rounds import Trial


@dataclass(frozen=True)
class Block:
    """One kind of parallelism: what it is called, how many ranks it takes, what is trained, and the 'module:function' that makes it."""

    title: str
    world: int
    about: str
    maker: str


_GPT = "3-layer GPT, 256 wide"
BLOCKS = {
    "data": Block("data parallel", 2, f"{_GPT}, 2×256 tokens a rank", "data:replicas"),
    "zero": Block("ZeRO-3", 2, f"{_GPT}, 2×256 tokens a rank", "data:shards"),
    "tensor": Block("tensor parallel, 1-D", 2, f"{_GPT}, 4×256 tokens", "tensor:line"),
    "grid": Block("tensor parallel, 2-D (2x2)", 4, f"{_GPT}, 4×256 tokens", "grid:grid"),
    "depth": Block("tensor parallel, 3-D (2x1x2)", 4, f"{_GPT}, 2×256 tokens a sheet", "tensor:depth"),
    "hybrid": Block("data × tensor parallel", 4, f"{_GPT}, 2×256 tokens a replica", "tensor:hybrid"),
    "pipeline": Block("pipeline, 1f1b, 4 micro-batches", 2, f"{_GPT}, 4×256 tokens", "pipeline:pipeline"),
    "context": Block("context parallel", 2, f"{_GPT}, 4×256 tokens", "context:context"),
    "experts": Block("expert parallel", 2, "2-layer Mixtral of transformers, 8 experts, 256 wide, 2×256 tokens a rank", "experts:experts"),
    "tables": Block("embedding tables at owners", 2, "DLRM, 8 tables of 10,000 × 64, 2048 samples a rank", "tables:tables"),
    "spatial": Block("spatial parallel", 2, "CosmoFlow, 5 convolutions, 4 volumes of 32×32×32", "spatial:spatial"),
}


def trial(rank: int, world: int, name: str) -> Trial:
    """For one rank of one block."""
    module, _, function = BLOCKS[name].maker.partition(":")
    made: Trial = getattr(importlib.import_module(f"by_hand.{module}"), function)(BLOCKS[name].title, rank, world)
    return made
