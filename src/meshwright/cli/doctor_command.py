"""`doctor`: prints what is wrong with this environment, and the command that fixes it."""

from __future__ import annotations

import os

import typer
from rich.table import Table

from meshwright.cli import options
from meshwright.cli.console import print_json, stdout
from meshwright.core.serialization import to_data


def doctor(as_json: options.Json = False) -> None:
    """Check Python, torch, devices, memory, disk and ports, and print how to fix what is wrong. Exits with 1 if something must be fixed.

    Example: meshwright doctor
    """
    from meshwright.describe.environment_checks import run_checks

    checks = run_checks(os.environ)
    if as_json:
        print_json({"checks": to_data(checks), "ok": all(c.ok for c in checks)})
    else:
        table = Table(box=None, show_header=False)
        for check in checks:
            mark = "[red]✗[/red]" if not check.ok else "[dim]·[/dim]" if check.mend else "[green]✓[/green]"
            table.add_row(mark, check.name, check.found, f"→ {check.mend}" if check.mend else "")
        stdout.print(table)
    if not all(c.ok for c in checks):
        raise typer.Exit(1)
