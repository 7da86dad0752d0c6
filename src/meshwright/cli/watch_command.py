"""`watch RUN`: shows the live view of a run, read from its folder alone."""

from __future__ import annotations

from pathlib import Path

from meshwright.cli import options
from meshwright.cli.console import stdout


def watch(run: options.Run = "last", run_dir: options.RunDir = "runs") -> None:
    """Show the progress of a run until it ends. Ctrl-C ends the view, not the run.

    Example: meshwright watch last
    """
    from meshwright.observe import find_run_folder, follow

    follow(find_run_folder(run, Path(run_dir)), lambda: False, stdout)
