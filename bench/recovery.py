"""What a killed rank costs a run: `meshwright train` under several meshes, a random rank killed at a random step, beside the same run undisturbed.

Of each run: seconds from SIGKILL until the supervisor knew, until the next step was finished, and how many steps were done twice; and whether losses
and the final state are, to the last bit, those of the undisturbed run. The undisturbed run takes no snapshots.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from meshwright.observe.jsonl_tail import read_records

HERE = Path(__file__).parent
MESHES = {
    "dp=4": ("--mesh", "dp=4"),
    "ZeRO-3 over 4": ("--mesh", "shard=4", "--set", "zero=3"),
    "tp=2": ("--mesh", "tp=2"),
    "pp=2": ("--mesh", "pp=2", "--set", "micro_batches=2"),
    "dp=2,tp=2,pp=2": ("--mesh", "dp=2,tp=2,pp=2", "--set", "micro_batches=2"),
}
ALWAYS = ("--set", "digest=true", "--set", "profile=false", "--set", "verify=false", "--set", "export=false")


def main(
    runs: Annotated[int, typer.Option(min=1, help="Killed runs of each mesh.")] = 3,
    model: Annotated[str, typer.Option(help="What is trained.")] = "gpt-mini",
    steps: Annotated[int, typer.Option(min=10, help="Steps of each run.")] = 60,
    mesh: Annotated[list[str] | None, typer.Option(help=f"Only these of: {'; '.join(MESHES)}.")] = None,
    words: Annotated[list[str] | None, typer.Option("--set", help="More settings of every run, like global_batch=8.")] = None,
    seed: Annotated[int, typer.Option(help="Of the ranks and the steps at which they are killed.")] = 0,
    output: Annotated[Path, typer.Option(help="JSON file for the results.")] = HERE / "results" / "recovery.json",
) -> None:
    """Kill random ranks at random steps, and say what it cost.

    Examples:
      python bench/recovery.py
      python bench/recovery.py --mesh dp=4 --runs 5 --set global_batch=8
    """
    draws, rows, settings = random.Random(seed), [], [part for word in words or () for part in ("--set", word)]
    for name in mesh or MESHES:
        command = [sys.executable, "-m", "meshwright.cli.main", "train", model, "--steps", str(steps), *MESHES[name], *ALWAYS, *settings]
        straight = train([*command, "--set", "max_restarts=0"])
        ranks = len(straight["measured"]["memory_bytes"])
        for _ in range(runs):
            rank, step = draws.randrange(ranks), draws.randrange(4, steps - 2)
            result = train(command, rank, step)
            is_same = all(result[key] == straight[key] for key in ("state_digest", "losses", "validation"))
            rows.append({"mesh": name, "ranks": ranks, "rank": rank, **result["killed"], "same": is_same, "step_s": straight["measured"]["step_s"]})
            say(rows[-1])
    output.parent.mkdir(exist_ok=True)
    output.write_text(json.dumps({"model": model, "steps": steps, "settings": settings, "runs": rows}, indent=1) + "\n")
    show(rows)


def train(command: list[str], rank: int | None = None, at_step: int = 0) -> dict[str, Any]:
    """The result of a run; with `rank`, of one whose rank was killed after so many steps, with what that cost as `killed`."""
    place = Path(tempfile.mkdtemp(prefix="recovery-"))
    try:
        with (place / "stderr").open("w") as stderr:
            process = subprocess.Popen([*command, "--run-dir", str(place / "runs")], stdout=subprocess.DEVNULL, stderr=stderr)
            killed_at = kill_at(place, process, rank, at_step) if rank is not None else 0.0
            code = process.wait()
        if code:
            sys.exit(f"{' '.join(command)} ended with {code}:\n{(place / 'stderr').read_text()[-2000:]}")
        (folder,) = (place / "runs").iterdir()
        result: dict[str, Any] = json.loads((folder / "result.json").read_text())
        if rank is not None:
            (fault,), (restart,) = result["faults"], result["restarts"]
            next_step = fault["time"] + restart["seconds"]
            redone = {"failed_at": restart["failed_at"], "redone": restart["failed_at"] - (restart["step"] or 0), "source": restart["source"]}
            result["killed"] = {"noticed_s": fault["time"] - killed_at, "next_step_s": next_step - killed_at, **redone}
        return result
    finally:
        shutil.rmtree(place)


def kill_at(place: Path, process: subprocess.Popen[bytes], rank: int, at_step: int) -> float:
    """Kill a rank once a run has finished so many steps; returns when."""
    while sum(path.read_text().count('"step_s"') for path in place.glob("runs/*/metrics.jsonl")) < at_step:
        if process.poll() is not None:
            sys.exit(f"the run ended before step {at_step}:\n{(place / 'stderr').read_text()[-2000:]}")
        time.sleep(0.005)
    (events,) = place.glob(f"runs/*/events-{rank}.jsonl")
    pid = next(int(record["data"]["pid"]) for record in read_records(events) if record["kind"] == "start")
    os.kill(pid, signal.SIGKILL)
    return time.time()


def say(row: dict[str, Any]) -> None:
    numbers = f"noticed after {row['noticed_s']:.3f} s, next step after {row['next_step_s']:.2f} s, {row['redone']} steps again"
    print(f"{row['mesh']}: rank {row['rank']} at step {row['failed_at']}: {numbers}, from a {row['source']}, same: {row['same']}", file=sys.stderr)


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("mesh", "runs", "step", "noticed (median, longest)", "next step (median, longest)", "steps again", "same")
    for name in dict.fromkeys(row["mesh"] for row in rows):
        of_mesh = [row for row in rows if row["mesh"] == name]
        noticed, after = ([row[key] for row in of_mesh] for key in ("noticed_s", "next_step_s"))
        seconds = (f"{statistics.median(values):.2f} s, {max(values):.2f} s" for values in (noticed, after))
        again, same = statistics.mean(row["redone"] for row in of_mesh), sum(row["same"] for row in of_mesh)
        table.add_row(name, str(len(of_mesh)), f"{1e3 * (of_mesh[0]['step_s'] or 0):.0f} ms", *seconds, f"{again:.1f}", f"{same} of {len(of_mesh)}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
