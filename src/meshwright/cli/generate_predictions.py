"""`generate` for a model that generates no text: runs it over a data set, writes what it gives, and prints a short table."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.cli.console import log_progress, make_table, print_json, print_line, stdout

if TYPE_CHECKING:
    from meshwright.serve.batch_inference import BatchResult
    from meshwright.serve.config import ServeConfig
    from meshwright.serve.model_source import ModelSource


def generate_predictions(config: ServeConfig, source: ModelSource, run_dir: Path, as_json: bool) -> None:
    from meshwright.serve import batch_inference
    from meshwright.serve.batch_replica import PICTURE

    prepared = batch_inference.prepare_batch(config, source, run_dir, os.environ, log_progress)
    result = batch_inference.run_batch(prepared, os.environ, log_progress)
    if as_json:
        print_json(batch_inference.summary(prepared, result))
        return
    _print_figures(result, f"{source.name} on {result.samples:,} samples of {prepared.job.data}, its {prepared.job.split} part")
    print_line(f"written to {result.folder}: {batch_inference.describe_memory(result)}")
    if not (source.weights or source.checkpoint):
        print_line(f"the weights of {source.name} are random: the figures are those of a model that has learnt nothing; give a run for a trained one")
    if result.picture_rows:
        drawn = f", and images drawn from the prior with seed {prepared.job.seed}" if result.picture_rows > 2 else ""
        print_line(f"{PICTURE} has {result.picture_rows} rows: originals, their reconstructions{drawn}")


def _print_figures(result: BatchResult, title: str) -> None:
    from meshwright.observe.formatting import format_number, format_percent, format_rate

    print_line(title)
    table = make_table("figure", ">value")
    if result.loss is not None:
        table.add_row("loss, as in validation", format_number(result.loss))
    for figure in result.figures:
        table.add_row(figure.label, format_percent(figure.value, 2) if figure.is_share else format_number(figure.value))
    table.add_row("speed", format_rate(result.samples_per_s, "samples/s"))
    if result.nonfinite:
        table.add_row("[red]samples with NaN or infinite outputs[/red]", f"{result.nonfinite:,}")
    stdout.print(table)
