"""What is promised of births and checkpoints on a GPU, tried in one call and printed as one table: about seven minutes on an H200.

- Two ranks on one card, over gloo, each allowed 45% of its memory, train a Llama whose state is 80% of it, under ZeRO-3 and under tp=2.
- llama3-8b trains, and its run ends within 10 s of its last step.
- A save of 10 GB keeps a step waiting for at most half a second, after the first; beside DCP's asynchronous saves.

Weights are made on the card: drawing eight billion values on the host would take minutes. Example: python bench/gpu_checkpoint.py
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
_MOST_S = 200.0  # for one part: the others are to have their turn


@dataclass(frozen=True)
class Sizes:
    layers: int
    width: int
    model: str
    train: tuple[str, ...]
    gigabytes: float


LARGE = Sizes(33, 4096, "llama3-8b", ("--seq", "512", "--global-batch", "1", "--set", "compile=none"), 10.0)
SMALL = Sizes(2, 512, "llama-tiny", (), 0.1)


@dataclass(frozen=True)
class Row:
    what: str
    goal: str
    found: str
    holds: bool | None = None


class Trial:
    """The parts, one after the other, in what is left of the time."""

    def __init__(self, sizes: Sizes, folder: Path, budget_s: float) -> None:
        self.sizes, self.folder, self.ends_at = sizes, folder, time.monotonic() + budget_s
        self.rows: list[Row] = []

    def part(self, name: str, function: Callable[[], list[Row]]) -> None:
        started = time.monotonic()
        try:
            found = function()
        except Exception as error:  # the others are still to be tried
            found = [Row(name, "", f"{type(error).__name__}: {str(error)[-1000:]}", False)]
        self.rows += found
        for row in found:
            print(f"{row.what}: {row.found} ({row.goal}; {name} took {time.monotonic() - started:.0f} s)", flush=True)

    def call(self, *words: str) -> tuple[str, float]:
        """What a command prints, and when it ended."""
        left = min(self.ends_at - time.monotonic(), _MOST_S)
        if left < 10:
            raise RuntimeError("no time was left for it")
        path = os.pathsep.join([str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "4"}
        log = self.folder / "log"
        with log.open("w") as said:
            process = subprocess.Popen(
                [sys.executable, *words], cwd=self.folder, env=env, stdout=subprocess.PIPE, stderr=said, text=True, start_new_session=True
            )
            try:
                out, _ = process.communicate(timeout=left)
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"it was stopped after {left:.0f} s: {log.read_text()[-300:]}") from None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        ended = time.time()
        if process.returncode:
            raise RuntimeError(f"exit code {process.returncode}: {reason(log.read_text())}")
        return out, ended

    def births(self, mesh: str, weights: Path) -> list[Row]:
        words = ("--mesh", mesh, "--layers", str(self.sizes.layers), "--width", str(self.sizes.width), "--weights", str(weights))
        out, _ = self.call(str(HERE / "births.py"), *words, "--steps", "2", "--no-verify")
        found = last_json(out)
        share = found["state_bytes"] / found["device_bytes"] if found["device_bytes"] else 0.0
        allowed, ranks = found["allowed_bytes"], found["ranks"]
        peak, born = (max(rank[key] for rank in ranks) for key in ("peak_bytes", "born_bytes"))
        what = f"{found['parameters'] / 1e9:.2f} billion parameters, state {share:.0%} of the card, two ranks, {mesh}"
        losses = ", ".join(f"{loss:.2f}" for loss in found["losses"])
        times = f"born in {max(rank['born_s'] for rank in ranks):.0f} s with {born / 1e9:.1f} GB, step {found['step_s']:.1f} s, losses {losses}"
        holds = len(found["losses"]) == 2 and all(loss == loss for loss in found["losses"]) and (not allowed or peak <= allowed)
        return [Row(what, f"trains, each rank in {allowed / 1e9:.1f} GB", f"peak {peak / 1e9:.1f} GB; {times}", holds)]

    def end_of_training(self, weights: Path) -> list[Row]:
        settings = ("name=gpu", "checkpoint_every=none", "export=false", "validate_batches=0", "profile=false", "optimizer=adamw")
        words = (*self.sizes.train, *(word for setting in settings for word in ("--set", setting)))
        command = ("-m", "meshwright.cli.main", "train", self.sizes.model, "--init-from", str(weights), "--nproc", "1", "--steps", "6", *words)
        out, ended = self.call(*command, "--json")
        result = last_json(out)
        steps = [json.loads(line) for line in (self.folder / "runs" / "gpu" / "metrics.jsonl").read_text().splitlines()]
        last = max(record["time"] for record in steps if "step_s" in record)
        phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in result["phases"].items() if seconds >= 0.5)
        peak = max(result["measured"]["memory_bytes"]) / 1e9
        found = f"{ended - last:.1f} s, with the digest; {len(result['losses'])} steps, peak {peak:.1f} GB; {phases}"
        return [Row(f"{self.sizes.model}: from its last step to the end of its run", "at most 10 s", found, ended - last <= 10.0)]

    def checkpoints(self) -> list[Row]:
        words = ("--gigabytes", str(self.sizes.gigabytes), "--rounds", "1", "--folder", str(self.folder))
        out, _ = self.call(str(HERE / "checkpoint.py"), *words, "--only", "Meshwright,DCP async", "--json")
        found = last_json(out)
        size, rows = f"{found['bytes'] / 1e9:.1f} GB", []
        for name, way in found["ways"].items():
            times = f"then {way['stall_s']:.3f} s (first {way['first_stall_s']:.2f}); saved in {way['save_s']:.1f} s, loaded in {way['load_s']:.1f} s"
            ours = name == "Meshwright"
            others = min((w["stall_s"] for n, w in found["ways"].items() if n != name), default=float("inf"))
            goal = "a step waits at most 0.5 s, and not longer than for DCP" if ours else ""
            rows.append(Row(f"{name}: a save of {size}", goal, times, way["stall_s"] <= min(0.5, others) if ours else None))
        rows += [Row(f"{name}: a save of {size}", "", reason[:300]) for name, reason in found["failed"].items()]
        return [*rows, Row("the disk, with dd and a flush", "", f"{found['disk_bytes_per_s'] / 1e9:.2f} GB/s")]


def reason(log: str) -> str:
    """The lines of a log that name an error, the launcher's own left out."""
    lines = [line for line in log.splitlines() if "Error" in line and "elastic" not in line and "error_file" not in line]
    return " | ".join(lines[-3:])[-900:] or log[-500:]


def last_json(text: str) -> dict[str, Any]:
    """The last JSON object that a command has printed, on one line or over several."""
    line = next((line for line in reversed(text.splitlines()) if line.startswith("{") and line.endswith("}")), None)
    return json.loads(line if line is not None else text[text.index("{") :])  # type: ignore[no-any-return]


def make_weights(folder: Path, config: Any) -> Path:
    """A folder of weights of the zoo's Llama, made on the device in bf16: matrices of noise, norms of ones."""
    from meshwright.checkpoint.tensor_file import TensorSpec
    from meshwright.checkpoint.weights_folder import write_weights
    from meshwright.execute.state_dtypes import as_bytes
    from meshwright.zoo.llama import Llama

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in Llama(config).state_dict().items()}

    def values() -> Iterator[list[memoryview]]:
        for shape in shapes.values():
            made = torch.randn(shape, device=device, dtype=torch.bfloat16).mul_(0.02) if len(shape) > 1 else torch.ones(shape, dtype=torch.bfloat16)
            yield [as_bytes(made.cpu())]

    write_weights(folder, [TensorSpec(name, "BF16", shape) for name, shape in shapes.items()], values())
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return folder


def roomy_folder(folder: Path, needed: int) -> Path:
    """In memory, if there is room: the disk is for the checkpoints."""
    memory = Path("/dev/shm")
    is_roomy = memory.is_dir() and shutil.disk_usage(memory).free > 1.5 * needed
    return Path(tempfile.mkdtemp(prefix="gpu-checkpoint-", dir=memory if is_roomy else folder))


def main(
    folder: Annotated[Path | None, typer.Option(help="Where to write; a temporary folder unless given.")] = None,
    only: Annotated[str, typer.Option(help="Some of births, end, saves, with commas between them.")] = "births,end,saves",
    budget_s: Annotated[float, typer.Option(help="Seconds for all parts; what does not fit is left out.")] = 450.0,
    small: Annotated[bool, typer.Option(help="Small sizes, to try this out on a CPU.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Example: python bench/gpu_checkpoint.py --small"""
    sys.path[:0] = [str(HERE.parent / "src"), str(HERE)]
    from births import llama_config
    from meshwright.zoo.llama import LLAMA_CONFIGS

    home = Path(tempfile.mkdtemp(prefix="gpu-checkpoint-", dir=folder))
    sizes = SMALL if small else LARGE
    store = roomy_folder(home, int(2 * 8.1e9) if not small else 0)
    trial = Trial(sizes, home, budget_s)
    parts = only.split(",")
    try:
        if "saves" in parts:
            trial.part("saves", trial.checkpoints)
        if "end" in parts:
            trial.part("end", lambda: trial.end_of_training(make_weights(store / "model", LLAMA_CONFIGS[sizes.model])))
            shutil.rmtree(store / "model", ignore_errors=True)
        if "births" in parts:
            weights = make_weights(store / "births", llama_config(sizes.layers, sizes.width))
            trial.part("births tp=2", lambda: trial.births("tp=2", weights))
            trial.part("births shard=2", lambda: trial.births("shard=2", weights))  # over gloo each step moves the model thrice: it comes last
    finally:
        shutil.rmtree(home, ignore_errors=True)
        shutil.rmtree(store, ignore_errors=True)
    if as_json:
        print(json.dumps([vars(row) for row in trial.rows]))
        return
    table = Table("what", "goal", "found", "holds", title=torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU", show_lines=True)
    for row in trial.rows:
        table.add_row(row.what, row.goal, row.found, {True: "yes", False: "NO", None: ""}[row.holds])
    Console(width=170).print(table)


if __name__ == "__main__":
    typer.run(main)
