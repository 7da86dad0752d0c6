"""`report RUN`: writes the summary of a run as one self-contained HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.common import JsonFlag, print_json


def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, its name below --run-dir, or 'last'.")] = "last",
    run_dir: Annotated[str, typer.Option("--run-dir", help="Folder that holds runs.")] = "runs",
    as_json: JsonFlag = False,
) -> None:
    """Write report.html for a run, finished or not, and print its path.

    Example: meshwright report last
    """
    from meshwright.observe import find_run_folder, write_report

    folder = find_run_folder(run, Path(run_dir))
    path = write_report(folder)
    if as_json:
        print_json({"run": str(folder.path), "report": str(path), "result": folder.result()})
    else:
        print(path)
