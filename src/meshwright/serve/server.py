"""`serve`: plans, starts the replicas, and answers over HTTP until it is told to stop."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from meshwright.core.errors import RequestError
from meshwright.serve.config import ServeConfig
from meshwright.serve.generation import PreparedModel, prepare_model
from meshwright.serve.model_source import find_model
from meshwright.serve.replica_set import ReplicaSet
from meshwright.serve.service_metrics import ServiceMetrics
from meshwright.serve.text_service import TextService

INSTALL_HINT = "pip install 'meshwright[serve]'"


def check_address(host: str, port: int, api_key: str) -> socket.socket:
    """A listening socket. A server that others can reach needs a key."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise RequestError(f"--host {host}: {(error.strerror or 'not an address').lower()}: use 127.0.0.1, or an address of this machine") from None
    family, _, _, _, address = addresses[0]
    if not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback and not api_key:
        raise RequestError(f"--host {host} can be reached by others: give --api-key KEY (or MESHWRIGHT_API_KEY), or use 127.0.0.1")
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise RequestError(f"--host {host} --port {port}: {(error.strerror or 'cannot be used').lower()}: use another --port") from None
    listener.listen(2048)
    return listener


class Server:
    """One model over HTTP."""

    def __init__(self, config: ServeConfig, run_dir: Path, environ: Mapping[str, str], say: Callable[[str], None], log: TextIO) -> None:
        _require_packages()
        self._config, self._run_dir, self._environ, self._say, self._log_file = config, run_dir, environ, say, log
        self._prepared: PreparedModel = prepare_model(config, run_dir, environ, say)
        self.metrics = ServiceMetrics()
        self.replicas = ReplicaSet(
            self._prepared.source, self._prepared.plan, self._prepared.codec.end_tokens, environ, count=self._prepared.plan.serve.replicas,
            max_waiting=config.max_waiting, log=lambda kind, **facts: self._log({"time": round(time.time(), 3), "event": kind, **facts}),
        )  # fmt: skip

    def run(self, listener: socket.socket, api_key: str, announce: Callable[[dict[str, Any]], None] = lambda _: None) -> None:
        """Serve until SIGINT or SIGTERM; requests under way are then answered. `announce` is told the address when requests are taken."""
        asyncio.run(self._serve(listener, api_key, announce))

    async def _serve(self, listener: socket.socket, api_key: str, announce: Callable[[dict[str, Any]], None]) -> None:
        import uvicorn

        from meshwright.serve.access import Access
        from meshwright.serve.http_app import Services, make_app

        started = time.monotonic()
        count = self._prepared.plan.serve.replicas
        self._say(f"starting {count} replica{'s' * (count > 1)}")
        await self.replicas.start()
        for note in filter(None, [self.replicas.facts.get("note"), *self.replicas.facts.get("reasons", [])]):
            self._say(str(note))
        text = TextService(self.replicas, self._prepared.codec, self.metrics)
        services = Services(
            name=self._config.served_name or self._prepared.source.name, created=int(time.time()), metrics=self.metrics, text=text,
            reload=self.reload, facts=self.facts, is_ready=lambda: bool(self.replicas.ready), close=lambda: self.replicas.close(self._config.grace_s),
        )  # fmt: skip
        app = Access(
            make_app(services), self.metrics, self._log, api_key=api_key, max_body_bytes=int(self._config.max_body_mb * 2**20),
            body_timeout_s=self._config.body_timeout_s,
        )  # fmt: skip
        settings = uvicorn.Config(
            app, lifespan="on", log_level="warning", access_log=False, timeout_keep_alive=30, timeout_graceful_shutdown=int(self._config.grace_s),
            h11_max_incomplete_event_size=2**16, server_header=False,
        )  # fmt: skip
        host, port = listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._say(f"ready in {time.monotonic() - started:.1f} s: {url} (Ctrl-C stops)")
        announce({"url": url, "model": services.name, "plan": self._prepared.plan.summary(), "replica": self.replicas.facts})
        await uvicorn.Server(settings).serve([listener])

    def facts(self) -> dict[str, Any]:
        """For the page, /v1/plan and /metrics."""
        replicas = [{"name": r.name, "state": r.state, "stats": r.stats} for r in self.replicas.replicas]
        return {**self.replicas.facts, "replicas": replicas, "restarts": self.replicas.restarts, "has_chat": self._prepared.codec.has_chat}

    async def reload(self) -> str:
        """Put the newest weights of the served run in place."""
        source = find_model(self._config.model, self._run_dir, self._environ)
        if source == self.replicas.source:
            return f"{source.name}: nothing newer"
        await self.replicas.reload(source)
        self._log({"time": round(time.time(), 3), "event": "reload", "checkpoint": source.checkpoint, "weights": source.weights})
        return source.checkpoint or source.weights

    def _log(self, line: dict[str, Any]) -> None:
        print(json.dumps(line, ensure_ascii=False, default=str), file=self._log_file, flush=True)


def _require_packages() -> None:
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise RequestError(f"the server needs a package that is not installed ({error.name}): {INSTALL_HINT}") from None


def open_log(path: str) -> TextIO:
    """The file for log lines; stderr if none is named."""
    if not path:
        return sys.stderr
    try:
        return open(path, "a", encoding="utf-8")
    except OSError as error:
        raise RequestError(f"--log {path}: {(error.strerror or 'cannot be written').lower()}: give another file") from None
