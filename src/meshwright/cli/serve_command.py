"""`serve`: a model over HTTP, in the shape of OpenAI's API, with a page to try it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli import options
from meshwright.cli.console import log_progress, print_json, require_torch


def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL|CONFIG.json", help="A run, a folder, *.gguf, a name, or a configuration.")] = "smollm2",
    host: Annotated[str, typer.Option("--host", help="Address to listen on; others than loopback need an API key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free.")] = 8000,
    replicas: Annotated[int | None, typer.Option("--replicas", help="Copies of the model, each with ranks of its own.")] = None,
    nproc: Annotated[int | None, typer.Option("--nproc", help="Ranks that one replica is split over; 1 by default.")] = None,
    mesh: options.Mesh = None,
    plan: Annotated[str | None, typer.Option("--plan", help="A plan.json for inference.")] = None,
    api_key: Annotated[str, typer.Option("--api-key", help="Clients must send it; MESHWRIGHT_API_KEY unless given.")] = "",
    log: Annotated[str, typer.Option("--log", help="File for one JSON line a request; stderr unless given.")] = "",
    ray: Annotated[
        str, typer.Option("--ray", metavar="ADDRESS", help="On a Ray cluster: auto (this machine's), HOST:PORT, or local (one of its own).")
    ] = "",
    run_dir: options.RunDir = "runs",
    settings: Annotated[list[str] | None, typer.Option("--set", help="Set a field of the configuration, like context=2048; repeatable.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the address and the model as one JSON object when requests are taken.")] = False,
) -> None:
    """Serve a model over HTTP: /v1/chat/completions, /v1/completions, /predict, /metrics, and a page at /.

    Examples:
      meshwright serve smollm2
      meshwright serve last --port 8080 --replicas 2
      meshwright serve last --ray auto --replicas 4 --mesh tp=2
    """
    require_torch()
    from meshwright.serve.config import load_serve_config, parse_setting
    from meshwright.serve.server import Server, check_address, open_log

    flags = {"replicas": replicas, "nproc": nproc, "mesh": mesh, "plan": plan}
    given = {**dict(map(parse_setting, settings or [])), **{key: value for key, value in flags.items() if value is not None}}
    is_file = model.endswith(".json")
    config = load_serve_config(given if is_file else {"model": model, **given}, Path(model) if is_file else None)
    key = api_key or os.environ.get("MESHWRIGHT_API_KEY", "")
    announce = print_json if as_json else lambda _: None
    if ray:
        from meshwright.serve.ray_server import RayServer

        RayServer(config, Path(run_dir), os.environ, log_progress, log, key, ray).run(host, port, announce)
        return
    listener = check_address(host, port, key)
    try:
        Server(config, Path(run_dir), os.environ, log_progress, open_log(log), key).run(listener, announce)
    finally:
        listener.close()
