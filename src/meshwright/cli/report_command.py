"""`report RUN`: writes the summary of a run as one self-contained HTML page."""

from __future__ import annotations

from pathlib import Path

from meshwright.cli import options
from meshwright.cli.console import print_json


def report(run: options.Run = "last", run_dir: options.RunDir = "runs", as_json: options.Json = False) -> None:
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
