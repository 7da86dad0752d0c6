"""Plans of traced models on the catalog's machines, priced from data sheets, beside published runs of the same layout: before and after the fitted
constants. A plan has no interleaving deeper than two stages a rank, so rows with more are priced at two."""

from __future__ import annotations

import csv
import json
import statistics
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from meshwright import zoo
from meshwright.core.calibration import Calibration
from meshwright.core.cluster import Cluster
from meshwright.core.errors import MeshwrightError
from meshwright.core.mesh import Mesh
from meshwright.core.model import ModelProfile
from meshwright.core.strand import Flow
from meshwright.core.workload import Workload
from meshwright.cost import sheets
from meshwright.cost.sheets import from_sheets
from meshwright.describe.clusters import resolve
from meshwright.describe.flow import trace_flow
from meshwright.describe.trace import trace_task
from meshwright.plan import Wishes, rank_plans

HERE = Path(__file__).parent
DATA = HERE.parent.parent / "shared" / "data" / "published_training.csv"
MODELS = {"GPT 175B": "gpt3-175b", "GPT3-175B": "gpt3-175b", "LLAMA3-8B": "llama3-8b", "LLAMA3-70B": "llama3-70b", "Llama3 70B": "llama3-70b"}
MACHINES = {"A100": "dgx-a100", "H100": "dgx-h100"}


@cache
def traced(name: str, seq: int, precision: str) -> tuple[ModelProfile, Flow]:
    task = zoo.load(name, seq=seq)
    return trace_task(task, precision=precision), trace_flow(task, precision)


def by_thumb(cluster: Cluster) -> Calibration:
    """As before: one curve for all devices."""
    kept, sheets.rates_of = sheets.rates_of, sheets._by_thumb
    try:
        return from_sheets(cluster)
    finally:
        sheets.rates_of = kept


def predict(row: dict[str, str]) -> dict[str, Any]:
    profile, flow = traced(MODELS[row["model"]], int(row["seq_len"]), "fp8" if row["precision"] == "fp8" else "bf16")
    cluster = resolve(f"{MACHINES[row['gpu']]}:{max(int(row['num_gpus']) // 8, 1)}", {}, ranks=int(row["num_gpus"]))
    zero = 3 if "zero3" in row["sharding"] else 1 if "zero1" in row["sharding"] else 0
    dp, tp, pp, cp = (int(row[k] or 1) for k in ("dp", "tp", "pp", "cp"))
    zero = zero if dp > 1 else 0
    mesh = Mesh(pp=pp, cp=cp, tp=(tp,), **({"shard": dp} if zero else {"dp": dp}))
    shared = tp > 1 and cp == 1 and row["seq_parallel"] != "0"
    wishes = Wishes(
        mesh=mesh,
        zero=zero,
        micro_batches=int(row["global_batch"]) // (dp * int(row["micro_batch"])),
        flow=flow,
        recompute="full" if row["recompute"] == "full" else "none",
        sequence=True if shared else None,
        schedule="interleaved" if pp > 1 and int(row["vpp"] or 1) > 1 else None,
    )
    workload = Workload(int(row["global_batch"]), precision=profile.precision)  # type: ignore[arg-type]
    found = {
        name: rank_plans(profile, cluster, workload, rates(cluster), wishes).best for name, rates in (("before", by_thumb), ("after", from_sheets))
    }
    seconds = float(row["sec_per_iter"] or row["sec_per_iter_derived"])
    return {"row": row["row_id"], "measured_s": seconds, "error": found["after"].estimate.error, "mesh": str(mesh),
            **{name: best.estimate.step_s / seconds - 1 for name, best in found.items()}}  # fmt: skip


def main(data: Path = DATA, as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    with data.open(encoding="utf-8") as file:
        rows = [
            r for r in csv.DictReader(file) if r["model"] in MODELS and r["task"] == "pretrain" and (r["sec_per_iter"] or r["sec_per_iter_derived"])
        ]
    found, skipped = [], []
    for row in rows:
        try:
            found.append(predict(row))
        except MeshwrightError as error:
            skipped.append({"row": row["row_id"], "why": str(error)})
    means = {name: statistics.mean(abs(r[name]) for r in found) for name in ("before", "after")}
    if as_json:
        typer.echo(json.dumps({"rows": found, "skipped": skipped, "mean_absolute_error": means}))
        return
    table = Table(box=None)
    for column in ("row", "mesh", "measured", "before", "after", "stated"):
        table.add_column(column)
    for r in found:
        table.add_row(r["row"], r["mesh"], f"{r['measured_s']:.2f} s", f"{r['before']:+.0%}", f"{r['after']:+.0%}", f"± {r['error']:.0%}")
    Console().print(table, means, skipped)


if __name__ == "__main__":
    typer.run(main)
