"""What all commands share: common flags, the output consoles, error exit, the torch check, and RunConfig from flags."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console

from meshwright.core.errors import RequestError
from meshwright.core.gc_control import gc_disabled

if TYPE_CHECKING:
    from meshwright.orchestrate import RunConfig
    from meshwright.orchestrate.tutorial_config import RankCounter

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout; everything else goes to stderr.")]
GlobalBatchFlag = Annotated[int | None, typer.Option("--global-batch", help="Samples in one optimizer step, over all ranks.")]
SeqFlag = Annotated[int | None, typer.Option("--seq", help="Tokens in a sample, for language models.")]
NprocFlag = Annotated[int | None, typer.Option("--nproc", help="Number of ranks; all devices by default.")]
MeshFlag = Annotated[str | None, typer.Option("--mesh", help="Axes and degrees, like dp=2 or shard=2; an axis left out is 1.")]
SetFlag = Annotated[list[str] | None, typer.Option("--set", help="Any field of the run's configuration, like zero=3 or recompute=full.")]
ClusterFlag = Annotated[
    str | None, typer.Option("--cluster", help="here, a machine such as dgx-h100:16, ideal[:N], or a cluster's file (.toml, .json)[:N].")
]
DevicesFlag = Annotated[str | None, typer.Option("--devices", help="Which devices, like 0,2; 'cpu' beside GPUs, like 0,cpu,cpu.")]

stderr = Console(stderr=True, highlight=False)
stdout = Console(highlight=False)


def fail(message: str, code: int) -> NoReturn:
    print(f"meshwright: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


def log_progress(text: str) -> None:
    """Print a progress line on stderr."""
    stderr.print(f"· {text}", style="dim", markup=False, soft_wrap=True)


def print_json(value: Any) -> None:
    print(json.dumps(value))


@gc_disabled
def require_torch() -> None:
    """Import torch; RequestError if it is missing or its version unsupported, instead of a traceback later."""
    try:
        found = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise RequestError("torch is not installed: pip install 'torch>=2.11,<2.15'") from None
    numbers = tuple(int(p) for p in found.split("+")[0].split(".")[:2] if p.isdigit())
    if not (2, 11) <= numbers < (2, 15):
        raise RequestError(f"torch {found} is outside 2.11 to 2.14: pip install 'torch>=2.11,<2.15'")
    importlib.import_module("torch")


def parse_devices(text: str | None) -> list[int | Literal["cpu"]] | None:
    if text is None:
        return None
    try:
        return ["cpu" if part == "cpu" else int(part) for part in text.split(",")]
    except ValueError:
        raise RequestError(f"--devices {text}: give numbers, like --devices 0,2, or cpu beside GPUs, like --devices 0,cpu") from None


def make_config(
    file: Path | None = None, settings: list[str] | None = None, count_ranks: RankCounter | None = None, **flags: Any
) -> RunConfig:  # fmt: skip
    """A RunConfig from a file, `--set` pairs and flags; a flag wins over `--set`, which wins over the file.
    `count_ranks` gives the number of ranks, for tutorial files, which do not state it."""
    from meshwright.orchestrate.config import load_config, parse_setting

    chosen = dict(parse_setting(text) for text in settings or [])
    chosen.update({key: value for key, value in flags.items() if value is not None})
    return load_config(file, chosen, count_ranks)
