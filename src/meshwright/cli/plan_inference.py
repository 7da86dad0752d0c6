"""`plan MODEL --set kind=serve`: prints ranked plans for inference with estimates, and why the first won."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from meshwright.cli import options
from meshwright.cli.console import log_progress, make_table, print_json, stdout
from meshwright.core.errors import RequestError
from meshwright.core.quantities import show_bytes, show_seconds
from meshwright.core.serialization import to_data

if TYPE_CHECKING:
    from meshwright.plan import InferenceRanking


def plan_inference(
    model: str, settings: list[str], flags: dict[str, Any], cluster: str, output: Path | None, max_rows: int, as_json: bool
) -> None:  # fmt: skip
    from meshwright.orchestrate import Orchestrator
    from meshwright.plan import describe_plan, explain_inference
    from meshwright.serve.config import load_serve_config, parse_setting
    from meshwright.serve.model_source import find_model
    from meshwright.serve.serve_plan import rank_serve_plans, requested_mesh

    start = time.perf_counter()
    given = {**dict(map(parse_setting, settings)), **{key: value for key, value in flags.items() if value is not None}, "model": model}
    config = load_serve_config(given)
    if config.plan != "auto":
        raise RequestError(f"plan={config.plan}: `plan` makes plans; `meshwright serve {model} --plan {config.plan}` runs one")
    source = find_model(config.model, Path("runs"), os.environ)
    mesh, replicas = requested_mesh(config)
    ranks = mesh.size * (replicas or 1) if mesh is not None else None
    with Orchestrator(options.make_config(nproc=ranks, cluster=cluster, backend=config.backend), os.environ, log_progress) as orchestrator:
        calibration = orchestrator.calibration()
        log_progress(f"planning {source.name} for inference")
        ranking = rank_serve_plans(config, source, orchestrator.cluster, calibration)
    best, why = ranking.best, explain_inference(ranking)
    if output is not None and best.estimate.fits:
        best.plan.save(output)
    if as_json:
        plans = [
            {"plan": to_data(s.plan), "estimate": to_data(s.estimate), "fits": s.estimate.fits, "reason": s.estimate.reason} for s in ranking.scored
        ]
        print_json({"plans": plans, "why": why, "refused": list(ranking.refused), "seconds": time.perf_counter() - start})
    if not best.estimate.fits:
        raise RequestError(why)
    if as_json:
        return
    stdout.print(_ranking_table(ranking, max_rows, describe_plan))
    stdout.print(why, markup=False)
    if output is not None:
        stdout.print(f"written to {output}; serve it with: meshwright serve {model} --plan {output}", markup=False, soft_wrap=True)


def _ranking_table(ranking: InferenceRanking, max_rows: int, describe: Any) -> Table:
    load = ranking.load
    caption = f"prompts of {load.prompt_tokens:,} tokens, {load.batch} answers at once, ranked by {load.objective}"
    table = make_table("plan", ">prompt", ">token", ">tokens/s", ">memory a rank", ">largest batch", "fits", caption=caption)
    for scored in ranking.scored[:max_rows]:
        estimate = scored.estimate
        times = show_seconds(estimate.prefill_s), show_seconds(estimate.decode_s), f"{estimate.tokens_per_s:,.0f}"
        memory = show_bytes(max(estimate.memory_bytes)), f"{estimate.max_batch:,}"
        table.add_row(describe(scored.plan), *times, *memory, "yes" if estimate.fits else "no")
    if len(ranking.scored) > max_rows:
        table.add_row(f"[dim]… {len(ranking.scored) - max_rows} more (--most)[/dim]")
    return table
