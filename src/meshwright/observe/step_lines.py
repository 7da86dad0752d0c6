"""Prints a run as one line per step, as training scripts do: for logs, and for comparison with such scripts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from meshwright.observe.jsonl_tail import JsonlTail, JsonRecord
from meshwright.observe.run_folder import RunFolder

if TYPE_CHECKING:
    from rich.console import Console


def follow_step_lines(folder: RunFolder, stop: Callable[[], bool], console: Console, log_interval: int, interval: float = 0.25) -> None:
    """Print every `log_interval`-th step, and the last one, until `stop()` is true."""
    metrics, steps = JsonlTail(folder.path / "metrics.jsonl"), folder.job().get("steps")
    while True:
        stopping = stop()  # before reading: records written before the stop must still be shown
        for record in metrics.read():
            step = record.get("step")
            if isinstance(step, int) and "loss" in record and ((step + 1) % log_interval == 0 or step + 1 == steps):
                console.print(format_step_line(record, steps), soft_wrap=True, highlight=False, markup=False)
        if stopping:
            return
        time.sleep(interval)


def format_step_line(record: JsonRecord, steps: int | None) -> str:
    """'12/404, 812.3 ms, lr 1.19e-06, loss 2.3456, 5.12 GB, grad norm 3.210': memory is the peak so far, of rank 0."""
    step = f"{record['step'] + 1}/{steps if steps is not None else '?'}, {1e3 * record['step_s']:.1f} ms"
    norm = f"{record['grad_norm']:.3f}" if record.get("grad_norm") is not None else "–"
    memory = f"{record['memory_bytes'] / 1e9:.2f} GB"
    loss = f"{record['loss']:.4f}" if record["loss"] is not None else "nan"
    return f"{step}, lr {record['learning_rate']:.2e}, loss {loss}, {memory}, grad norm {norm}"
