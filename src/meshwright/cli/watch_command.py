"""`watch RUN`: shows the live view of a run, read from its folder alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.common import stdout


def watch(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, its name below --run-dir, or 'last'.")] = "last",
    run_dir: Annotated[str, typer.Option("--run-dir", help="Folder that holds runs.")] = "runs",
) -> None:
    """Follow a run until it ends. Ctrl-C stops watching, not the run.

    Example: meshwright watch last
    """
    from meshwright.observe import find_run_folder, follow

    follow(find_run_folder(run, Path(run_dir)), lambda: False, stdout)
