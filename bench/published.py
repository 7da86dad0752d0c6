"""Step time and memory of published training runs, predicted from each row's own description, beside what was measured.

The model is `meshwright.cost.closed_form_step` with the constants that it ships; they were fitted on the training part (`fit_published.py`) and the
test part is every row whose configuration falls into one of four parts by a hash, so that a configuration measured twice is never in both.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from meshwright.core.errors import MeshwrightError
from meshwright.cost.closed_form_memory import closed_form_peak
from meshwright.cost.closed_form_step import closed_form_step
from meshwright.cost.constants import CostConstants, FittedConstants, load_fitted_constants
from meshwright.cost.parallel_config import ParallelConfig
from published_rows import Job, Skipped, read

HERE = Path(__file__).parent
DATA = HERE.parent.parent / "shared" / "data" / "published_training.csv"
PARTS = 4  # of these, one is the test part
LARGEST_MICRO_BATCH = 16  # tried where a row does not say its own
PARTIAL = ("nemo", "megatron-core")  # generations that recompute as many blocks as one asks for
ROOM = 0.96  # of a device's memory: what a run can fill


@dataclass(frozen=True)
class Prediction:
    job: Job
    seconds: float
    memory_bytes: float

    @property
    def time_error(self) -> float:
        return 100 * (self.seconds / self.job.seconds - 1) if self.job.seconds else 0.0

    @property
    def memory_error(self) -> float:
        return 100 * (self.memory_bytes / self.job.memory_bytes - 1) if self.job.memory_bytes else 0.0

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= ROOM * self.job.machine.device.memory_bytes


def part(job: Job) -> int:
    """By what was run and not by row: the same run measured again is in the same part."""
    return zlib.crc32(job.configuration.encode()) % PARTS


def is_test(job: Job) -> bool:
    return part(job) == 0


def predict(job: Job, constants: CostConstants) -> Prediction:
    spread = settled(job, constants)
    seconds = closed_form_step(job.model, spread, job.machine, constants).seconds
    return Prediction(job, seconds, sum(closed_form_peak(job.model, spread, constants).values()))


def settled(job: Job, constants: CostConstants) -> ParallelConfig:
    """What a row leaves open, decided as whoever ran it had to: recompute where it does not fit otherwise, the quickest micro-batch that fits."""
    sizes = [job.spread.micro_batch]
    if not job.micro_batch_given:
        share = max(job.spread.global_batch // job.spread.dp, 1)
        sizes = [n for n in (2**i for i in range(10)) if n <= min(LARGEST_MICRO_BATCH, share) and share % n == 0]
    spreads = [replace(job.spread, micro_batch=n) for n in sizes]
    if not job.recompute_given:
        spreads = [_recomputing(job, s, constants) for s in spreads]
    if len(spreads) == 1:
        return spreads[0]
    fitting = [s for s in spreads if _room(job, s, constants)]
    return min(fitting or spreads[:1], key=lambda s: closed_form_step(job.model, s, job.machine, constants).seconds)


def _recomputing(job: Job, spread: ParallelConfig, constants: CostConstants) -> ParallelConfig:
    """In as few blocks as it takes, in eighths of them, where a framework can choose that; in all of them else."""
    eighths = range(1, 9) if job.generation in PARTIAL else (8,)
    tried = [spread, *(replace(spread, recompute="full", recomputed_share=n / 8) for n in eighths)]
    return next((s for s in tried if _room(job, s, constants)), tried[-1])


def _room(job: Job, spread: ParallelConfig, constants: CostConstants) -> bool:
    return sum(closed_form_peak(job.model, spread, constants).values()) <= ROOM * job.machine.device.memory_bytes


def predict_all(jobs: Iterable[Job], file: FittedConstants) -> list[Prediction]:
    return [predict(job, file.constants(job.kind, job.generation)) for job in jobs]


def errors(values: Sequence[float]) -> dict[str, float]:
    """Mean and largest absolute error, in percent, and how many."""
    sizes = [abs(v) for v in values]
    return {"mape": round(sum(sizes) / max(len(sizes), 1), 2), "max": round(max(sizes, default=0.0), 2), "rows": len(sizes)}


def report(predictions: Sequence[Prediction], skipped: Sequence[Skipped]) -> dict[str, Any]:
    timed = [p for p in predictions if p.job.seconds]
    sized = [p for p in predictions if p.job.memory_bytes]
    said = [p for p in predictions if p.job.out_of_memory is not None]
    lacking = {"time": "no measured time", "memory": "no measured memory"}
    return {
        "time": _measure(timed, lambda p: p.time_error, [*skipped, *_without(predictions, timed, lacking["time"])]),
        "memory": _measure(sized, lambda p: p.memory_error, [*skipped, *_without(predictions, sized, lacking["memory"])]),
        "fits": {
            "rows": len(said),
            "recall_fits": _recall([p.fits for p in said if not p.job.out_of_memory]),
            "recall_oom": _recall([not p.fits for p in said if p.job.out_of_memory]),
            "ran": _recall([p.fits for p in timed]),
        },
    }


def _without(predictions: Sequence[Prediction], having: Sequence[Prediction], why: str) -> list[Skipped]:
    ids = {id(p) for p in having}
    return [Skipped(p.job.row, p.job.source, why) for p in predictions if id(p) not in ids]


def _measure(rows: Sequence[Prediction], error: Callable[[Prediction], float], skipped: Sequence[Skipped]) -> dict[str, Any]:
    parts: dict[str, Callable[[Prediction], bool]] = {
        "train": lambda p: not is_test(p.job),
        "test": lambda p: is_test(p.job),
        "single_node": lambda p: not p.job.multi_node,
        "multi_node": lambda p: p.job.multi_node,
        "test_single_node": lambda p: is_test(p.job) and not p.job.multi_node,
        "test_multi_node": lambda p: is_test(p.job) and p.job.multi_node,
    }
    worst = sorted(rows, key=lambda p: -abs(error(p)))[:10]
    return {
        **errors([error(p) for p in rows]),
        "skipped": len(skipped),
        "skipped_why": _reasons(skipped),
        "by_source": {s: errors([error(p) for p in rows if p.job.source == s]) for s in dict.fromkeys(p.job.source for p in rows)},
        "parts": {name: errors([error(p) for p in rows if belongs(p)]) for name, belongs in parts.items()},
        "worst": [{"row": p.job.row, "source": p.job.source, "error": round(error(p), 1)} for p in worst],
    }


def _reasons(skipped: Sequence[Skipped]) -> dict[str, dict[str, int]]:
    """Why, by source: how many rows."""
    found: dict[str, dict[str, int]] = {}
    for each in skipped:
        of = found.setdefault(each.why, {})
        of[each.source] = of.get(each.source, 0) + 1
    return found


def _recall(right: Sequence[bool]) -> float | None:
    return round(100 * sum(right) / len(right), 2) if right else None


def main(
    data: Annotated[Path, typer.Option(help="A table with the columns of the published one.")] = DATA,
    output: Annotated[Path | None, typer.Option(help="Also write the JSON to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout instead of the tables.")] = False,
) -> None:
    """Predict every row that says enough, and compare with what was measured.

    Example:
      python bench/published.py --json
    """
    try:
        jobs, skipped = read(data)
    except MeshwrightError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(error.exit_code) from None
    found = report(predict_all(jobs, load_fitted_constants()), skipped)
    if output is not None:
        output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if as_json:
        print(json.dumps(found))
        return
    show(found)


def show(found: Mapping[str, Any]) -> None:
    console = Console()
    for name in ("time", "memory"):
        table = Table("", "rows", "mean |error| %", "max %", title=name)
        for where, values in [("all", found[name]), *found[name]["parts"].items(), *found[name]["by_source"].items()]:
            table.add_row(where, str(values["rows"]), f"{values['mape']:.1f}", f"{values['max']:.1f}")
        console.print(table)
        for why, sources in found[name]["skipped_why"].items():
            console.print(f"skipped, {why}: " + ", ".join(f"{source} {count}" for source, count in sources.items()))
    console.print(f"fits: {found['fits']}")


if __name__ == "__main__":
    typer.run(main)
