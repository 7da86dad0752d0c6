"""The server under load: continuous batching beside one answer at a time, `/predict` beside LitServe, minutes of mixed load, connections that say
nothing; and with `--gpu` a Poisson load beside a plain loop of transformers.

Servers are processes of their own and are asked in turns, one round each; medians over rounds count. LitServe is compared where it is installed.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from http_load import Client, Stream, closed_load, percentile, serving, serving_with_litserve, stream_answer

Numbers = dict[str, Any]


def text_numbers(streams: Sequence[Stream], seconds: float) -> Numbers:
    gaps = [gap for stream in streams for gap in stream.gaps_s]
    return {
        "tokens_per_s": sum(stream.tokens for stream in streams) / seconds, "gap_p50_s": percentile(gaps, 0.5), "gap_p99_s": percentile(gaps, 0.99),
        "first_p50_s": percentile([s.first_s for s in streams], 0.5), "first_p99_s": percentile([s.first_s for s in streams], 0.99),
        "errors": sum(bool(stream.error) for stream in streams),
    }  # fmt: skip


def prompts(count: int, length: int, vocabulary: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(vocabulary) for _ in range(length)] for _ in range(count)]


def bench_batching(model: str, rounds: int, clients: int) -> Numbers:
    """One server that has one answer at a time, and one that has as many as there are clients; the same requests."""
    tokens = 48
    options = ("--set", "context=256", "--set", "max_waiting=512")
    found: dict[str, list[Numbers]] = {"one at a time": [], "continuous": []}
    with serving(model, *options, "--set", "batch=1") as alone, serving(model, *options, "--set", f"batch={clients}") as together:
        for turn in range(rounds + 1):
            for name, url in (("one at a time", alone), ("continuous", together))[:: 1 if turn % 2 else -1]:
                count = clients * 2 if name == "continuous" else max(clients // 4, 2)
                bodies = [{"prompt": ids, "max_tokens": tokens, "temperature": 0} for ids in prompts(count, 32, 250, turn)]
                streams, seconds = asyncio.run(closed_load(url, bodies, clients))
                if turn:  # the first is for warming up
                    found[name].append(text_numbers(streams, seconds))
    medians = {name: _medians(rows) for name, rows in found.items()}
    return {"model": model, "clients": clients, **medians, **_ratios(medians, "continuous", "one at a time", ("tokens_per_s", "gap_p99_s"))}


# -- predictions --


async def ask_predictions(url: str, bodies: Sequence[bytes], clients: int, seconds: float) -> Numbers:
    """Closed loop: each client sends one sample and waits."""
    latencies: list[float] = []
    statuses: Counter[int] = Counter()
    stop = time.perf_counter() + seconds

    async def work(first: int) -> None:
        client, turn = Client(url), first
        while time.perf_counter() < stop:
            started = time.perf_counter()
            status = await client.send("/predict", bodies[turn % len(bodies)])
            await client.read()
            latencies.append(time.perf_counter() - started)
            statuses[status] += 1
            turn += clients
        client.close()

    started = time.perf_counter()
    await asyncio.gather(*(work(i) for i in range(clients)))
    took = time.perf_counter() - started
    errors = sum(count for status, count in statuses.items() if status != 200)
    return {"requests_per_s": len(latencies) / took, "p50_s": percentile(latencies, 0.5), "p99_s": percentile(latencies, 0.99), "errors": errors}


def bench_predict(name: str, rounds: int, clients: int, seconds: float, wait_ms: Sequence[float], threads: int) -> Numbers:
    """Ours beside LitServe with the same model and the same bodies. LitServe is given several waits; its best counts."""
    import torch

    from meshwright import zoo

    fields = [f for key, f in zoo.load(name).fields.items() if key not in ("label", "target")]
    draw = torch.Generator().manual_seed(0)
    bodies = [json.dumps({"instances": [torch.rand(fields[0].shape, generator=draw).tolist()]}).encode() for _ in range(64)]
    has_litserve = importlib.util.find_spec("litserve") is not None
    found: dict[str, list[Numbers]] = {}
    with ExitStack() as stack:
        contestants = [("meshwright", stack.enter_context(serving(name, "--set", f"threads={threads}")))]
        for wait in wait_ms if has_litserve else ():
            contestants.append((f"litserve, {wait:g} ms", stack.enter_context(serving_with_litserve(name, wait / 1000, threads))))
        _check_equal(bodies[0], [url for _, url in contestants])
        for turn in range(rounds + 1):
            for label, url in contestants[:: 1 if turn % 2 else -1]:
                row = asyncio.run(ask_predictions(url, bodies, clients, seconds if turn else 2.0))
                if turn:
                    found.setdefault(label, []).append(row)
    medians = {label: _medians(rows) for label, rows in found.items()}
    result: Numbers = {"model": name, "clients": clients, "http": _http_parser(), **medians}
    if has_litserve:
        best = max((label for label in medians if label != "meshwright"), key=lambda label: medians[label]["requests_per_s"])
        result["best_litserve"] = best
        result.update(_ratios(medians, "meshwright", best, ("requests_per_s", "p99_s")))
    return result


def _http_parser() -> str:
    return "httptools" if importlib.util.find_spec("httptools") is not None else "h11"


def _check_equal(body: bytes, urls: Sequence[str]) -> None:
    """All must give the same answer."""

    async def ask(url: str) -> Any:
        client = Client(url)
        assert await client.send("/predict", body) == 200
        found = json.loads(await client.read())["predictions"][0]
        client.close()
        return found

    answers = [asyncio.run(ask(url)) for url in urls]
    flat = [_flat(answer) for answer in answers]
    assert all(max(abs(a - b) for a, b in zip(flat[0], other, strict=True)) < 1e-4 for other in flat[1:]), "the servers' answers differ"


def _flat(value: Any) -> list[float]:
    return [number for entry in value for number in _flat(entry)] if isinstance(value, list) else [value]


# -- load and slow connections --


def bench_load(model: str, seconds: float, clients: int) -> Numbers:
    """Mixed load: streamed and whole, short and long, sampled and greedy, and clients that go away."""

    async def run(url: str) -> Numbers:
        stop, errors, counts = time.perf_counter() + seconds, Counter[str](), Counter[str]()

        async def work(seed: int) -> None:
            draw, client = random.Random(seed), Client(url)
            while time.perf_counter() < stop:
                ids = [draw.randrange(250) for _ in range(draw.randrange(1, 120))]
                body = {
                    "prompt": ids,
                    "max_tokens": draw.randrange(1, 60),
                    "temperature": draw.choice([0, 1]),
                    "seed": draw.randrange(9),
                    "n": draw.randrange(1, 3),
                }
                kind = draw.choice(["stream", "stream", "whole", "whole", "leave"])
                try:
                    if kind == "stream":
                        found = await stream_answer(client, body)
                        errors.update([found.error] if found.error else [])
                    else:
                        sending = asyncio.ensure_future(client.send("/v1/completions", json.dumps(body).encode()))
                        if kind == "leave":
                            await asyncio.sleep(draw.random() * 0.2)
                            sending.cancel()
                            await asyncio.gather(sending, return_exceptions=True)
                            client.close()
                        else:
                            status = await sending
                            answer = await client.read()
                            errors.update([answer.decode()[:200]] if status != 200 else [])
                except (OSError, asyncio.IncompleteReadError) as error:
                    errors[f"{kind}: {type(error).__name__}"] += 1
                    client.close()
                counts[kind] += 1
            client.close()

        await asyncio.gather(*(work(i) for i in range(clients)))
        return {"seconds": seconds, "requests": dict(counts), "errors": dict(errors)}

    with serving(model, "--set", "context=256", "--set", f"batch={clients}") as url:
        return {"model": model, "clients": clients, **asyncio.run(run(url))}


def bench_slow(model: str, rounds: int, connections: int) -> Numbers:
    """Latency of ordinary requests with and without many connections that send half a request and wait."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    starts = (b"", head[:30], head + b"content-length: 100\r\n\r\n{", head + b"transfer-encoding: chunked\r\n\r\n5\r\n{")

    async def measure(url: str, slow: int) -> Numbers:
        peers = []
        host, port = url.removeprefix("http://").split(":")
        for i in range(slow):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(starts[i % len(starts)])
            peers.append(writer)
        bodies = [{"prompt": ids, "max_tokens": 8, "temperature": 0} for ids in prompts(200, 16, 250)]
        streams, _ = await closed_load(url, bodies, 4)
        for writer in peers:
            writer.close()
        totals = [stream.total_s for stream in streams]
        return {"p50_s": percentile(totals, 0.5), "p99_s": percentile(totals, 0.99), "errors": sum(bool(s.error) for s in streams)}

    found: dict[str, list[Numbers]] = {"alone": [], "beside slow ones": []}
    with serving(model, "--set", "context=256") as url:
        for turn in range(rounds + 1):
            for name, slow in (("alone", 0), ("beside slow ones", connections))[:: 1 if turn % 2 else -1]:
                row = asyncio.run(measure(url, slow))
                if turn:
                    found[name].append(row)
    medians = {name: _medians(rows) for name, rows in found.items()}
    return {"model": model, "connections": connections, **medians, **_ratios(medians, "beside slow ones", "alone", ("p50_s", "p99_s"))}


# -- a GPU --


def bench_gpu(folder: Path, rate: float, seconds: float) -> Numbers:
    """Requests of 128 tokens for 128 tokens arrive at random (Poisson); beside it a plain loop of transformers, which takes what has arrived as a
    batch and generates it to the end."""
    draw = random.Random(0)
    arrivals, now = [], 0.0
    while now < seconds:
        now += draw.expovariate(rate)
        arrivals.append(now)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    asked = prompts(len(arrivals), 128, vocabulary)

    async def ours(url: str) -> Numbers:
        started, found = time.perf_counter(), []

        async def one(at: float, ids: list[int]) -> None:
            await asyncio.sleep(max(started + at - time.perf_counter(), 0))
            client = Client(url)
            found.append(await stream_answer(client, {"prompt": ids, "max_tokens": 128, "temperature": 0}))
            client.close()

        await asyncio.gather(*(one(at, ids) for at, ids in zip(arrivals, asked, strict=True)))
        numbers = text_numbers(found, time.perf_counter() - started)
        return {**numbers, "answer_p50_s": percentile([s.total_s for s in found], 0.5), "answer_p99_s": percentile([s.total_s for s in found], 0.99)}

    with serving(str(folder), "--set", "context=256", "--set", "batch=256", "--set", "max_waiting=100000") as url:
        warm = [{"prompt": ids, "max_tokens": 16, "temperature": 0} for ids in prompts(64, 128, vocabulary, 1)]
        asyncio.run(closed_load(url, warm, 64))
        served = asyncio.run(ours(url))
    plain = _plain_loop(folder, arrivals, asked)
    return {
        "rate": rate, "requests": len(arrivals), "meshwright": served, "transformers": plain,
        "tokens_per_s_ratio": served["tokens_per_s"] / plain["tokens_per_s"], "answer_p50_ratio": served["answer_p50_s"] / plain["answer_p50_s"],
    }  # fmt: skip


def _plain_loop(folder: Path, arrivals: Sequence[float], asked: Sequence[list[int]], most: int = 64) -> Numbers:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.bfloat16).cuda().eval()
    generate: Callable[[torch.Tensor, int], Any] = lambda tokens, new: model.generate(  # noqa: E731
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
    )
    with torch.inference_mode():
        generate(torch.tensor(list(asked[:4])).cuda(), 4)
        done, latencies, started = 0, [], time.perf_counter()
        while done < len(arrivals):
            now = time.perf_counter() - started
            ready = [i for i in range(done, min(done + most, len(arrivals))) if arrivals[i] <= now]
            if not ready:
                time.sleep(max(arrivals[done] - now, 0.0))
                continue
            generate(torch.tensor([asked[i] for i in ready]).cuda(), 128)
            torch.cuda.synchronize()
            done += len(ready)
            latencies += [time.perf_counter() - started - arrivals[i] for i in ready]
        seconds = time.perf_counter() - started
    return {"tokens_per_s": 128 * len(arrivals) / seconds, "answer_p50_s": percentile(latencies, 0.5), "answer_p99_s": percentile(latencies, 0.99)}


def _make_gpu_model(folder: Path) -> Path:
    """A Llama of 1.5 billion parameters with random weights, in bfloat16."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
        max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.device("cuda"):
        transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


# -- the table --


def _medians(rows: Sequence[Numbers]) -> Numbers:
    return {key: sum(row[key] for row in rows) if key == "errors" else statistics.median(row[key] for row in rows) for key in rows[0]}


def _ratios(medians: Numbers, ours: str, other: str, keys: Sequence[str]) -> Numbers:
    return {f"{key}_ratio": medians[ours][key] / medians[other][key] for key in keys}


def _show(results: dict[str, Numbers]) -> None:
    table = Table("part", "what", "numbers")
    for part, numbers in results.items():
        for key, value in numbers.items():
            shown = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
            table.add_row(part, key, f"{shown:.4g}" if isinstance(shown, float) else str(shown))
            part = ""
    Console(stderr=True, width=160).print(table)


def main(
    only: Annotated[list[str] | None, typer.Option("--only", help="batching, predict, load, slow; repeatable. All unless given.")] = None,
    text_model: Annotated[str, typer.Option("--text-model", help="For batching, load and slow connections.")] = "smollm2",
    predict_model: Annotated[str, typer.Option("--predict-model", help="A model of the zoo with one input.")] = "cnn",
    rounds: Annotated[int, typer.Option("--rounds", help="Turns of each server.")] = 5,
    clients: Annotated[int, typer.Option("--clients", help="Clients at once.")] = 16,
    seconds: Annotated[float, typer.Option("--seconds", help="Of mixed load.")] = 120.0,
    threads: Annotated[int, typer.Option("--threads", help="CPU threads of a model that answers samples.")] = 1,
    gpu: Annotated[bool, typer.Option("--gpu", help="Only the Poisson load, on one GPU.")] = False,
    rate: Annotated[float, typer.Option("--rate", help="Requests a second on the GPU.")] = 40.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as one JSON object on stdout.")] = False,
    output: Annotated[Path | None, typer.Option("--output", help="Also write them to a file.")] = None,
) -> None:
    """Measure the server. Example: python bench/serve.py --only predict --rounds 7"""
    parts: dict[str, Callable[[], Numbers]] = {
        "batching": lambda: bench_batching(text_model, rounds, clients),
        "predict": lambda: bench_predict(predict_model, rounds, clients, 6.0, (0.0, 2.0), threads),
        "load": lambda: bench_load(text_model, seconds, clients),
        "slow": lambda: bench_slow(text_model, rounds, 500),
    }
    if unknown := set(only or ()) - set(parts):
        raise typer.BadParameter(f"--only {', '.join(sorted(unknown))}: one of {', '.join(parts)}")
    if gpu:
        with tempfile.TemporaryDirectory() as folder:
            results = {"gpu": bench_gpu(_make_gpu_model(Path(folder)), rate, 60.0)}
    else:
        results = {}
        for name in only or parts:
            print(f"{name} …", file=sys.stderr, flush=True)
            results[name] = parts[name]()
    _show(results)
    if output is not None:
        output.write_text(json.dumps(results, indent=1) + "\n")
    if as_json:
        print(json.dumps(results))


if __name__ == "__main__":
    typer.run(main)
