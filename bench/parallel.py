"""Tensor parallelism and a pipeline as Meshwright finds them in a module, beside the same written by hand in torch; and what overlap hides.

As `overhead.py`: all engines in one process group, one step each a round, in a balanced order, ratios within a round, medians; a second
copy of the first engine of each block is the noise. All engines must reach the same losses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from overhead import HERE, compare
from parallel_cases import Shared


def main(
    rounds: Annotated[int, typer.Option(min=3, help="Timed steps of each engine.")] = 18,
    batch: Annotated[int, typer.Option(min=4, help="Samples of the group; a multiple of 4.")] = Shared.batch,
    seq: Annotated[int, typer.Option(min=1, help="Tokens in a sample.")] = Shared.seq,
    layers: Annotated[int, typer.Option(min=2, help="Blocks of the GPT.")] = Shared.layers,
    output: Annotated[Path, typer.Option(help="Where the JSON goes.")] = HERE / "results" / "parallel.json",
    as_json: Annotated[bool, typer.Option("--json", help="Print that JSON on stdout instead of the table.")] = False,
) -> None:
    """Time tensor and pipeline parallelism by hand and through Meshwright on 2 ranks, one thread each.

    Example: python bench/parallel.py
    """
    compare(Shared(batch=batch, seq=seq, layers=layers), rounds, "parallel_cases", output, as_json=as_json)


if __name__ == "__main__":
    typer.run(main)
