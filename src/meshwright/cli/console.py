"""The output of all commands: consoles, progress lines, tables, JSON and the error exit; and the check that torch is there."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from meshwright.core.errors import RequestError, RunError
from meshwright.core.gc_control import gc_disabled
from meshwright.core.serialization import dump_json

stderr = Console(stderr=True, highlight=False)
stdout = Console(highlight=False)


def fail(message: str, code: int) -> NoReturn:
    print(f"meshwright: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


def log_progress(text: str) -> None:
    """Print a progress line on stderr."""
    stderr.print(f"· {text}", style="dim", markup=False, soft_wrap=True)


def print_json(value: Any) -> None:
    print(dump_json(value))


def print_line(text: str) -> None:
    """Print a line on stdout as it is: not wrapped, brackets are not markup."""
    stdout.print(text, markup=False, soft_wrap=True)


def make_table(*columns: str, title: str | None = None, caption: str | None = None, fold: bool = False) -> Table:
    """A table without borders. A column named like '>step' is right-aligned; with `fold`, long words are wrapped, not truncated."""
    table = Table(box=None, header_style="bold", title=title, title_justify="left", caption=caption, caption_justify="left")
    for name in columns:
        justify = "right" if name.startswith(">") else "left"
        table.add_column(name.removeprefix(">"), justify=justify, overflow="fold" if fold else "ellipsis")  # type: ignore[arg-type]
    return table


@gc_disabled
def require_torch() -> None:
    """Import torch; RequestError if it is missing or its version unsupported, instead of a traceback later."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise RequestError("torch is not installed: pip install 'torch>=2.11,<2.15'") from None
    numbers = tuple(int(p) for p in version.split("+")[0].split(".")[:2] if p.isdigit())
    if not (2, 11) <= numbers < (2, 15):
        raise RequestError(f"torch {version} is not supported (2.11 to 2.14 are): pip install 'torch>=2.11,<2.15'")
    try:
        importlib.import_module("torch")
    except (ImportError, MemoryError, OSError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        reason = lines[-1].strip() if lines else type(error).__name__
        raise RunError(f"torch cannot be imported: {reason}: raise the memory limit (ulimit -v), or see `meshwright doctor`") from None
