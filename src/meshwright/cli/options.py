"""The options that several commands share, and the RunConfig that their values make."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from meshwright.core.errors import RequestError

if TYPE_CHECKING:
    from meshwright.orchestrate import RunConfig
    from meshwright.orchestrate.tutorial_config import RankCounter

Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object on stdout; everything else goes to stderr.")]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="A model of the zoo, hf:PATH, or package.module:factory.")]
GlobalBatch = Annotated[int | None, typer.Option("--global-batch", help="Samples in one optimizer step, over all ranks.")]
Seq = Annotated[int | None, typer.Option("--seq", help="Sequence length in tokens, for language models.")]
Nproc = Annotated[int | None, typer.Option("--nproc", help="Number of ranks; one for each device by default.")]
Mesh = Annotated[str | None, typer.Option("--mesh", help="Mesh axes and their degrees, like dp=2 or shard=2,tp=4; an axis left out has degree 1.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Set a field of the run's configuration, like zero=3 or recompute=full; repeatable.")]
Cluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        help="here (this machine), a known machine and its number of nodes like dgx-h100:16, ideal[:RANKS] (communication costs nothing), "
        "or a .toml or .json file[:NODES].",
    ),
]
Devices = Annotated[str | None, typer.Option("--devices", help="Device numbers to use, like 0,2; 'cpu' adds a CPU rank beside GPUs, like 0,cpu.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, its name below --run-dir, or 'last'.")]
RunDir = Annotated[str, typer.Option("--run-dir", help="Folder that contains the runs' folders.")]


def parse_devices(text: str | None) -> list[int | Literal["cpu"]] | None:
    if text is None:
        return None
    try:
        return ["cpu" if name == "cpu" else int(name) for name in text.split(",")]
    except ValueError:
        raise RequestError(f"--devices {text}: give numbers, like --devices 0,2, or cpu beside GPUs, like --devices 0,cpu") from None


def make_config(
    file: Path | None = None, settings: list[str] | None = None, count_ranks: RankCounter | None = None, **flags: Any
) -> RunConfig:  # fmt: skip
    """A RunConfig from a file, `--set` pairs and flags; a flag wins over `--set`, which wins over the file.
    `count_ranks` gives the number of ranks, for tutorial files, which do not state it."""
    from meshwright.orchestrate.config import load_config, parse_setting

    values = dict(parse_setting(text) for text in settings or [])
    return load_config(file, values | {key: value for key, value in flags.items() if value is not None}, count_ranks)
