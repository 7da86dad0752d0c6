"""Greedy generation of one model: Meshwright's engine beside transformers' own `generate`, the same weights, in turns in one process.

On a GPU the model is a Llama of 1.5 billion parameters with random weights in bfloat16, on a CPU SmolLM2 with its own; --model names another
folder. Times are of answers of a fixed length; a token takes what an answer takes more than an answer of one token. How much of the answers
is the same is said, too: in bfloat16, random weights soon part ways.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table

from meshwright.cli.options import make_config
from meshwright.orchestrate import Orchestrator
from meshwright.serve import generation
from meshwright.serve.config import load_serve_config
from meshwright.serve.replica_client import ReplicaClient
from meshwright.serve.requests import SamplingParams
from meshwright.serve.serve_plan import rank_serve_plans

LLAMA_1B5 = {
    "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 8192,
    "vocab_size": 128256, "max_position_embeddings": 4096, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
Prompts = list[list[int]]
_STARTED = time.perf_counter()


@dataclass(frozen=True)
class Engine:
    """One way to generate: answers of so many tokens to each prompt."""

    name: str
    answer: Callable[[Prompts, int], Prompts]


def make_llama(folder: Path) -> None:
    """A folder with random weights, large enough for tokens to differ."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**LLAMA_1B5)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)


def plain_engines(folder: str, device: str) -> Iterator[Engine]:
    """transformers' settings: its growing cache, and a static one (compiled on a GPU, as it does by itself)."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()

    def engine(name: str, **options: Any) -> Engine:
        @torch.inference_mode()
        def answer(prompts: Prompts, count: int) -> Prompts:
            tokens = torch.tensor(prompts, device=device)
            given = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "attention_mask": torch.ones_like(tokens), **options}
            return model.generate(tokens, **given)[:, tokens.shape[1] :].tolist()  # type: ignore[no-any-return]

        return Engine(name, answer)

    static = {} if device == "cuda" else {"disable_compile": True}
    yield engine("transformers, static cache", cache_implementation="static", **static)
    yield engine("transformers, dynamic cache")


@contextmanager
def our_engine(name: str, folder: str, context: int, batch: int, **settings: Any) -> Iterator[Engine]:
    config = load_serve_config({"model": folder, "context": context, "batch": batch, "chat": False, **settings})
    prepared = generation.prepare_model(config, Path("runs"), os.environ, tell)
    with generation.open_replica(prepared, os.environ, tell) as replica:
        yield Engine(name, lambda prompts, count: run_requests(replica, prompts, count))


def tell(line: str) -> None:
    """Progress, with the time since the start."""
    print(f"[{time.process_time():.0f} CPU s, {time.perf_counter() - _STARTED:.0f} s] {line}", file=sys.stderr, flush=True)


def run_requests(replica: ReplicaClient, prompts: Prompts, count: int) -> Prompts:
    params = SamplingParams(max_tokens=count, ignore_end=True)
    found: dict[int, list[int]] = {replica.submit(prompt, params): [] for prompt in prompts}
    for event in replica.events():
        found[event.request].append(event.token)
    return list(found.values())


def predict(folder: str, batch: int, prompt: int, answer: int, settings: dict[str, Any]) -> dict[str, float]:
    """What the planner says of our plain engine, by this machine's calibration."""
    config = load_serve_config({"model": folder, "context": prompt + answer, "prompt": prompt, "batch": batch, "nproc": 1, **settings})
    with Orchestrator(make_config(nproc=1), os.environ, lambda _: None) as orchestrator:
        calibration = orchestrator.calibration()
        source = generation.find_model(folder, Path("runs"), os.environ)
        found = rank_serve_plans(config, source, orchestrator.cluster, calibration).best.estimate
    return {"step_s": found.decode_s, "prefill_s": batch * found.prefill_s, "memory_bytes": max(found.memory_bytes), "error": found.error}


def timed(engine: Engine, prompts: Prompts, count: int) -> tuple[float, Prompts]:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    answers = engine.answer(prompts, count)
    return time.perf_counter() - started, answers


def measure(engines: list[Engine], batch: int, prompt: int, answer: int, rounds: int, vocabulary: int) -> list[dict[str, Any]]:
    """Medians over rounds, in which engines take turns; prompts are new each time, so that none is found in memory."""
    times: dict[str, list[tuple[float, float]]] = {engine.name: [] for engine in engines}
    same: dict[str, list[float]] = {engine.name: [] for engine in engines}
    generator = torch.Generator().manual_seed(batch)
    for turn in range(rounds + 1):
        prompts, first = (torch.randint(3, vocabulary, (batch, prompt), generator=generator).tolist() for _ in range(2))
        reference: Prompts = []
        for engine in engines[turn % len(engines) :] + engines[: turn % len(engines)]:
            one, _ = timed(engine, first, 1)
            all_tokens, answers = timed(engine, prompts, answer)
            reference = reference or answers
            tell(f"{engine.name}, batch {batch}: {all_tokens:.2f} s for answers, {one:.2f} s for first tokens")
            if turn:  # the first round warms up
                times[engine.name].append((one, all_tokens))
                pairs = [a == b for x, y in zip(answers, reference, strict=True) for a, b in zip(x, y, strict=True)]
                same[engine.name].append(sum(pairs) / len(pairs))
    rows = []
    for engine in engines:
        step = statistics.median((whole - one) / (answer - 1) for one, whole in times[engine.name])
        whole = statistics.median(whole for _, whole in times[engine.name])
        rows.append(
            {
                "engine": engine.name, "batch": batch, "prompt": prompt, "answer": answer, "step_s": step, "decode_tokens_per_s": batch / step,
                "tokens_per_s": batch * answer / whole, "prefill_s": statistics.median(one for one, _ in times[engine.name]),
                "same": statistics.median(same[engine.name]),
            }
        )  # fmt: skip
    return rows


def main(
    model: Annotated[str, typer.Option(help="A Hugging Face folder; by device unless given.")] = "",
    batches: Annotated[str, typer.Option(help="Answers at once.")] = "1,32",
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 128,
    answer: Annotated[int, typer.Option(help="Tokens of an answer.")] = 128,
    rounds: Annotated[int, typer.Option(help="Rounds in which the engines take turns.")] = 3,
    only: Annotated[str, typer.Option(help="Our variants, by comma: plain, compile, int8, tp2, fp8.")] = "",
    output: Annotated[Path | None, typer.Option(help="A JSON file for the rows.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Tokens a second of Meshwright's engine and of transformers.

    Example:
      python bench/generate.py --batches 1,4 --prompt 64 --answer 32
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    variants = {
        "plain": {} if device == "cuda" else {"compile": False}, "compile": {"compile": True}, "int8": {"quantize": "int8"},
        "fp8": {"quantize": "fp8"}, "tp2": {"mesh": "tp=2"},
    }  # fmt: skip
    chosen = only.split(",") if only else ["plain", "int8"] + (["tp2"] if device == "cpu" and (os.cpu_count() or 1) > 1 else [])
    sizes, rows = [int(n) for n in batches.split(",")], list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as ground, ExitStack() as stack:
        if model:
            folder = model
        elif device == "cuda":
            folder = f"{ground}/llama"
            make_llama(Path(folder))
        else:
            folder = generation.find_model("smollm2", Path("runs"), os.environ).weights
        gc.collect()
        vocabulary = transformers.AutoConfig.from_pretrained(folder).vocab_size
        context, engines = prompt + answer + 8, list(plain_engines(folder, device))
        for name in chosen:
            engines.append(stack.enter_context(our_engine(f"meshwright, {name}", folder, context, max(sizes), **variants[name])))
        for batch in sizes:
            measured = measure(engines, batch, prompt, answer, rounds, vocabulary)
            plain = next((row for row in measured if row["engine"] == "meshwright, plain"), None)
            if plain is not None:
                plain["predicted"] = predict(folder, batch, prompt, answer, variants["plain"])
            rows += measured
    machine = torch.cuda.get_device_name() if device == "cuda" else f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    result = {"machine": machine, "torch": torch.__version__, "when": datetime.now(UTC).isoformat(timespec="seconds"), "rows": rows}
    if output is not None:
        output.write_text(json.dumps(result, indent=1) + "\n")
    if as_json:
        print(json.dumps(result))
        return
    table = Table(
        "engine", "batch", "a token every", "tokens/s while answering", "tokens/s in all", "first token", "same tokens", "predicted", caption=machine
    )
    for row in rows:
        figures = f"{row['step_s'] * 1e3:.2f} ms", f"{row['decode_tokens_per_s']:,.0f}", f"{row['tokens_per_s']:,.0f}", f"{row['prefill_s']:.3f} s"
        told = f"{row['predicted']['step_s'] * 1e3:.2f} ms (± {row['predicted']['error']:.0%})" if "predicted" in row else ""
        table.add_row(row["engine"], str(row["batch"]), *figures, f"{row['same']:.0%}", told)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
