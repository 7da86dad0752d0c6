"""Scaling curves: simulates one job on increasing rank counts, planned anew for each or with the mesh's inner axes fixed; writes CSV, JSON, SVG."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.core.errors import RequestError
from meshwright.core.mesh import Mesh
from meshwright.core.quantities import show_count
from meshwright.core.serialization import write_json
from meshwright.observe.curves_figure import Panel, curves_figure
from meshwright.orchestrate.orchestrator import ProgressCallback
from meshwright.orchestrate.simulation import SimulationJob, choose_plan, simulate_step, step_to_json
from meshwright.orchestrate.simulation_target import SimulationTarget
from meshwright.simulate import Disturbances

_COLUMNS = ("ranks", "mesh", "global_batch", "step_s", "samples_per_s", "tokens_per_s", "mfu", "efficiency", "predicted_s", "reason")
_MAX_RANKS = 1 << 20


def parse_rank_counts(text: str) -> list[int]:
    """The rank counts of '8..4096' (doubling from the first) or '8,24,64'."""
    counts: list[int] = []
    if span := re.fullmatch(r"(\d{1,9})\.\.(\d{1,9})", text):
        first, last = map(int, span.groups())
        counts = [first << k for k in range(64) if first << k <= last] if first else []
    elif re.fullmatch(r"\d{1,9}(,\d{1,9})*", text):
        counts = [int(count) for count in text.split(",")]
    if not counts or min(counts) < 1 or max(counts) > _MAX_RANKS:
        raise RequestError(f"--scale {text}: write it like 8..4096 or 8,24,64, from 1 to {_MAX_RANKS:,} ranks")
    return sorted(set(counts))


@dataclass(frozen=True)
class ScalingSpec:
    """How the job grows: `weak` scaling fixes the batch per rank, strong scaling the global batch."""

    rank_counts: Sequence[int]
    weak: bool = False

    def global_batch(self, batch: int, ranks: int) -> int:
        return max(batch * ranks // self.rank_counts[0], 1) if self.weak else batch


def scale_mesh(mesh: Mesh, ranks: int) -> Mesh:
    """The mesh on more ranks: the dp degree grows, or the shard degree if the mesh has shard but no dp; tp, cp, ep and pp stay."""
    outer = "dp" if mesh.dp > 1 or mesh.shard == 1 else "shard"
    inner = mesh.size // mesh.degree(outer)
    if ranks % inner:
        nearest = max(ranks // inner, 1) * inner
        raise RequestError(f"{ranks} ranks are not a multiple of {inner}, the size of mesh {mesh} without {outer}: use {nearest} ranks")
    return replace(mesh, dp=ranks // inner) if outer == "dp" else replace(mesh, shard=ranks // inner)


def simulate_scaling(
    job: SimulationJob, target: SimulationTarget, spec: ScalingSpec, disturbances: Disturbances, log_progress: ProgressCallback
) -> list[dict[str, Any]]:
    """One row for each number of ranks. If no plan is legal for one, its row holds the reason and the curve continues."""
    if job.given_plan is not None:
        raise RequestError(f"--scale plans for every number of ranks, and {job.config.plan} is for {job.given_plan.world}: give a model instead")
    config, rows = job.config, []
    for number, ranks in enumerate(spec.rank_counts):
        log_progress(f"{ranks:,} ranks ({number + 1} of {len(spec.rank_counts)})")
        batch = spec.global_batch(job.global_batch, ranks)
        row: dict[str, Any] = dict.fromkeys(_COLUMNS)
        row |= {"ranks": ranks, "global_batch": batch}
        try:
            mesh = str(scale_mesh(Mesh.parse(config.mesh), ranks)) if config.mesh else None
            job.config = config.model_copy(update={"mesh": mesh, "nproc": None})
            chosen = choose_plan(job, target.with_ranks(ranks), log_progress, batch=batch, ranks=ranks)
            step = step_to_json(job, simulate_step(job, chosen, disturbances, log_progress), disturbances)
            row |= {key: step[key] for key in (*_COLUMNS, "fits", "plan") if key in step and key != "global_batch"}
            row |= {"predicted_s": chosen.estimate.step_s, "memory_bytes": step["memory_bytes"]["total"]}
        except RequestError as error:
            row["reason"] = str(error)
        finally:
            job.config = config
        rows.append(row)
    return _add_efficiency(rows)


def _add_efficiency(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the efficiency: samples per second and rank, relative to the smallest number of ranks that has a plan."""
    first = next((row for row in rows if row["samples_per_s"]), None)
    for row in rows:
        if first is not None and row["samples_per_s"]:
            row["efficiency"] = row["samples_per_s"] / row["ranks"] / (first["samples_per_s"] / first["ranks"])
    return rows


def write_scaling(folder: Path, rows: list[dict[str, Any]], title: str) -> dict[str, str]:
    """Write scaling.csv, scaling.json and scaling.svg; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "scaling.csv").open("w", newline="", encoding="utf-8") as file:
        out = csv.DictWriter(file, _COLUMNS, extrasaction="ignore")
        out.writeheader()
        out.writerows(rows)
    write_json(folder / "scaling.json", {"points": rows})
    paths = {"csv": str(folder / "scaling.csv"), "json": str(folder / "scaling.json")}
    if simulated := [row for row in rows if row["samples_per_s"]]:
        (folder / "scaling.svg").write_text(scaling_figure(simulated, title), encoding="utf-8")
        paths["figure"] = str(folder / "scaling.svg")
    return paths


def scaling_figure(rows: list[dict[str, Any]], title: str) -> str:
    rates = [(float(row["ranks"]), float(row["samples_per_s"])) for row in rows]
    ideal = [(ranks, rates[0][1] * ranks / rates[0][0]) for ranks, _ in rates]
    efficiency = [(float(row["ranks"]), 100 * float(row["efficiency"])) for row in rows]
    several, curves, dashed = len(rows) > 1, {"simulated": rates, "ideal": ideal}, frozenset({"ideal"})
    throughput = Panel("samples per second", "ranks", curves, show_count, show_count, several, True, dashed=dashed)
    relative = Panel("efficiency", "ranks", {"relative to the smallest": efficiency}, show_count, lambda v: f"{v:.0f} %", several)
    return curves_figure([throughput, relative], title)
