"""Measures `meshwright report` of a long run: seconds and resident memory for a synthetic run of a million steps.

python bench/report_size.py [--steps 1000000]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def write_run(folder: Path, steps: int) -> None:
    """A run folder with the files that grow with the number of steps: metrics.jsonl, and the losses of result.json."""
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps({"model": "gpt-mini", "steps": steps}))
    losses = [2.0 + 8.0 * math.exp(-step / (steps / 20)) + 0.1 * math.sin(step) for step in range(steps)]
    with (folder / "metrics.jsonl").open("w") as file:
        for step, loss in enumerate(losses):
            took = 0.1 + 0.003 * math.sin(7 * step)
            record = {
                "step": step, "time": 1.7e9 + 0.1 * step, "loss": loss, "step_s": took, "samples_per_s": 32 / took, "tokens_per_s": 8192 / took,
                "mfu": 0.03 / took, "memory_bytes": 619_000_000, "grad_norm": 1.0 + 0.2 * math.cos(step), "learning_rate": 3e-4,
            }  # fmt: skip
            file.write(json.dumps(record, separators=(",", ":")) + "\n")
    start = {"time": 1.7e9, "rank": 0, "kind": "start", "step": -1, "data": {"pid": 1, "host": "elsewhere"}}
    end = {**start, "time": 1.7e9 + 0.1 * steps, "kind": "end", "data": {"memory_bytes": 619_000_000}}
    (folder / "events-0.jsonl").write_text("".join(json.dumps(event) + "\n" for event in (start, end)))
    (folder / "result.json").write_text(json.dumps({"losses": losses, "measured": {"step_s": 0.1}, "faults": [], "seconds": 0.1 * steps}))


def measure(folder: Path) -> tuple[float, float, int]:
    """(seconds, CPU seconds, peak resident bytes) of the command, in a process of its own."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "meshwright", "report", str(folder)], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"meshwright report ended with {os.waitstatus_to_exitcode(status)}")
    return time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        write_run(folder, steps)
        seconds, cpu_s, resident = measure(folder)
        size, page = (folder / "metrics.jsonl").stat().st_size, (folder / "report.html").stat().st_size
    print(f"| steps | metrics.jsonl | report.html | seconds | CPU seconds | resident |\n|{'---|' * 6}")
    print(f"| {steps:,} | {size / 1e6:.0f} MB | {page / 1e3:.0f} kB | {seconds:.1f} | {cpu_s:.1f} | {resident / 1e6:.0f} MB |")


if __name__ == "__main__":
    main()
