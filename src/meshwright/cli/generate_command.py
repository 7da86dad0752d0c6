"""`generate`: answers to prompts, streamed to the terminal; for models that generate no text, outputs for the samples of a data set."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli import options
from meshwright.cli.console import log_progress, print_json, require_torch, stderr, stdout
from meshwright.cli.generate_predictions import generate_predictions
from meshwright.core.errors import RequestError

if TYPE_CHECKING:
    from meshwright.serve.config import ServeConfig
    from meshwright.serve.generation import Piece


def generate(
    model: Annotated[str, typer.Argument(metavar="MODEL|CONFIG.json", help="A run, a folder, *.gguf, a name, or a configuration.")] = "smollm2",
    prompt: Annotated[list[str] | None, typer.Option("--prompt", help="A question; repeatable.")] = None,
    prompts: Annotated[Path | None, typer.Option("--prompts", help="A text file with one prompt a line; prompts.txt beside a CONFIG.json.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", help="Most tokens of an answer; 256 by default.")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="0, the default: the most likely token each time.")] = None,
    system: Annotated[str | None, typer.Option("--system", help="A system message, for models with a chat template.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of sampling, and of images that are drawn.")] = None,
    data: Annotated[str | None, typer.Option("--data", help="For other models: a data set; the run's own unless given.")] = None,
    samples: Annotated[int | None, typer.Option("--samples", help="For other models: the first so many samples; all unless given.")] = None,
    nproc: Annotated[int | None, typer.Option("--nproc", help="Number of ranks that the model is split over; 1 by default.")] = None,
    mesh: Annotated[str | None, typer.Option("--mesh", help="Ranks of one copy of the model, like tp=2 or pp=2; dp=2: two copies.")] = None,
    plan: Annotated[str | None, typer.Option("--plan", help="A plan.json for inference.")] = None,
    run_dir: options.RunDir = "runs",
    settings: Annotated[list[str] | None, typer.Option("--set", help="Set a field of the configuration, like top_p=0.9; repeatable.")] = None,
    as_json: options.Json = False,
) -> None:
    """Generate text from prompts. A model that generates no text is run over a data set: its outputs are written, and figures such as the accuracy
    are printed.

    Examples:
      meshwright generate smollm2 --prompt "What is the capital of France?"
      meshwright generate last --prompt "def main(" --max-tokens 100 --temperature 0.7
      meshwright generate configs/inference_axonn.json --prompts prompts.txt --set model_id=FOLDER
      meshwright generate vae --data digits --samples 100 --seed 1
    """
    require_torch()
    from meshwright.serve import generation
    from meshwright.serve.served_model import find_served

    flags = {
        "max_tokens": max_tokens, "temperature": temperature, "system": system, "seed": seed, "nproc": nproc, "mesh": mesh, "plan": plan,
        "data": data, "samples": samples,
    }  # fmt: skip
    config, default_prompts = _configuration(model, settings or [], {key: value for key, value in flags.items() if value is not None})
    source = find_served(config, Path(run_dir), os.environ)
    if source.kind == "predict":
        if prompt or prompts is not None:
            raise RequestError(f"{source.name} generates no text: leave out --prompt and --prompts; it is run over a data set (--data)")
        generate_predictions(config, source, Path(run_dir), as_json)
        return
    _refuse_samples(config, source.name)
    texts = list(prompt or [])
    if prompts is None and not texts and default_prompts is not None and default_prompts.is_file():
        prompts = default_prompts
    texts += generation.read_prompts(prompts) if prompts is not None else []
    if not texts:
        raise RequestError('there is no prompt: give --prompt "…", or --prompts FILE with one a line')
    prepared = generation.prepare_model(config, Path(run_dir), os.environ, log_progress)
    with generation.open_replica(prepared, os.environ, log_progress) as replica:
        _say_facts(replica.facts)
        answers: dict[int, Any] = {}
        printer = _Printer(texts, as_json)
        for piece in generation.generate(prepared, replica, texts):
            printer.show(piece)
            if piece.answer is not None:
                answers[piece.index] = piece.answer
        stats = replica.stats
    measured = generation.rates(stats)
    if as_json:
        outputs = [
            {"prompt": a.prompt, "text": a.text, "tokens": list(a.tokens), "prompt_tokens": a.num_prompt, "finish": a.finish}
            for _, a in sorted(answers.items())
        ]
        print_json({"outputs": outputs, **measured, "model": prepared.source.name, "plan": prepared.plan.summary(), "replica": replica.facts})
        return
    produced = sum(len(a.tokens) for a in answers.values())
    read = sum(a.num_prompt for a in answers.values())
    shown = {name: "–" if rate is None else f"{rate:.1f} tokens/s" for name, rate in measured.items()}
    stderr.print(f"prompts: {read} tokens, {shown['prefill_tokens_per_s']}; answers: {produced} tokens, {shown['decode_tokens_per_s']}", markup=False)


def _refuse_samples(config: ServeConfig, name: str) -> None:
    from meshwright.serve.batch_inference import FOR_SAMPLES

    for field in FOR_SAMPLES:
        if field in config.model_fields_set:
            raise RequestError(f"{field} is for models that are run over a data set, and {name} generates text: give --prompt, or --set kind=predict")


def _configuration(source: str, settings: list[str], flags: dict[str, Any]) -> tuple[ServeConfig, Path | None]:
    """The configuration, and where prompts are by default."""
    from meshwright.core.serialization import read_json
    from meshwright.orchestrate.tutorial_config import inference_settings, is_tutorial_config
    from meshwright.serve.config import load_serve_config, parse_setting

    given = {**dict(map(parse_setting, settings)), **flags}
    if not source.endswith(".json"):
        return load_serve_config({"model": source, **given}), None
    file = Path(source)
    data = read_json(file)
    if isinstance(data, dict) and is_tutorial_config(data):
        return load_serve_config(inference_settings(data, file, given)), file.parent / "prompts.txt"
    return load_serve_config(given, file), file.parent / "prompts.txt"


def _say_facts(facts: dict[str, Any]) -> None:
    for note in filter(None, [facts.get("note"), *facts.get("reasons", [])]):
        log_progress(str(note))
    log_progress(f"ready in {facts['load_s']:.1f} s: {facts['decoding']}, up to {facts['context']} tokens and {facts['sequences']} answers at once")


class _Printer:
    """Prints answers: a single one as it comes, several each when it is whole."""

    def __init__(self, prompts: list[str], as_json: bool) -> None:
        self._prompts, self._as_json = prompts, as_json
        if len(prompts) == 1 and not as_json:
            stdout.print(f"[bold]{_escape(prompts[0])}[/bold]")

    def show(self, piece: Piece) -> None:
        if self._as_json:
            return
        if len(self._prompts) == 1:
            print(piece.text, end="" if piece.answer is None else "\n", flush=True)
        elif piece.answer is not None:
            stdout.print(f"[bold]{_escape(piece.answer.prompt)}[/bold]")
            print(piece.answer.text, end="\n\n", flush=True)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
