"""`serve`: plans, starts the replicas, and answers over HTTP until it is told to stop."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from meshwright.core.errors import MeshwrightError, RequestError
from meshwright.serve.async_replica import AsyncReplica
from meshwright.serve.config import ServeConfig
from meshwright.serve.model_source import ModelSource
from meshwright.serve.predict_batcher import Batcher, PredictReplica
from meshwright.serve.replica_ranks import LocalRanks, ReplicaRanks
from meshwright.serve.replica_set import ReplicaSet
from meshwright.serve.served_model import ServedModel, find_served, prepare_served
from meshwright.serve.service_metrics import ServiceMetrics
from meshwright.serve.text_replica import TextReplica, TextReplicas
from meshwright.serve.text_service import TextService

INSTALL_HINT = "pip install 'meshwright[serve]'"
_KEEP_ALIVE_S = 30
_WATCHED = ("*.safetensors", "*.json")  # files of a folder whose change means newer weights
Say = Callable[[str], None]


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


class ModelService:
    """One model with its replicas and its ASGI application. `make_ranks` says where a replica runs, by its number."""

    def __init__(
        self, config: ServeConfig, model: ServedModel, run_dir: Path, environ: Mapping[str, str], log: Callable[[dict[str, Any]], None], *,
        api_key: str = "", make_ranks: Callable[[int], ReplicaRanks] | None = None,
    ) -> None:  # fmt: skip
        self._config, self.model, self._run_dir, self._environ, self._log = config, model, run_dir, environ, log
        self.name = config.served_name or self.model.source.name
        self.metrics = ServiceMetrics()
        kind: type[AsyncReplica] = TextReplica if self.model.source.kind == "text" else PredictReplica
        plan = self.model.plan
        own_ranks: Callable[[int], ReplicaRanks] = lambda number: LocalRanks(plan.threads or 1, environ, number * plan.world)  # noqa: E731
        self.replicas: ReplicaSet[Any] = ReplicaSet(
            kind, self.model.job, make_ranks or own_ranks, count=self.model.replicas, hang_timeout_s=config.hang_timeout_s, log=self._note
        )  # fmt: skip
        self._version = _version(self.model.source)
        self.app = self._make_app(api_key)

    def _make_app(self, api_key: str) -> Any:
        from meshwright.serve.access import Access, AccessLimits
        from meshwright.serve.http_app import Services, make_app
        from meshwright.serve.predict_routes import PredictService

        config, codec = self._config, self.model.codec
        services = Services(
            name=self.name, created=int(time.time()), metrics=self.metrics, reload=self.reload, facts=self.facts,
            is_ready=lambda: bool(self.replicas.ready), close=lambda: self.replicas.close(config.grace_s),
        )  # fmt: skip
        if self.model.source.kind == "text":
            assert codec is not None
            services.text = TextService(TextReplicas(self.replicas, config.max_waiting), codec, self.metrics, config.request_timeout_s)
        else:
            batcher = Batcher(
                self.replicas, self.metrics, max_batch=config.max_batch, max_wait_s=config.max_wait_ms / 1000, max_waiting=config.max_waiting
            )  # fmt: skip
            services.predict = PredictService(batcher, codec, config.request_timeout_s)
        limits = AccessLimits(int(config.max_body_mb * 2**20), max(2**28, int(4 * config.max_body_mb * 2**20)), config.body_timeout_s)
        return Access(make_app(services), self.metrics, self._log, api_key=api_key, limits=limits)

    def facts(self) -> dict[str, Any]:
        """For the page, /v1/plan and /metrics."""
        replicas = [{"name": r.name, "state": r.state, "stats": r.stats} for r in self.replicas.replicas]
        has_chat = self.model.codec is not None and self.model.codec.has_chat
        return {**self.replicas.facts, "replicas": replicas, "restarts": self.replicas.restarts, "has_chat": has_chat}

    def describe(self) -> dict[str, Any]:
        """What is served, once it is ready."""
        model = self.model
        return {"model": self.name, "kind": model.source.kind, "plan": model.plan.summary(), "replica": self.replicas.facts}

    def _find_newest(self) -> ModelSource:
        return replace(find_served(self._config, self._run_dir, self._environ), draft=self.model.source.draft)

    async def reload(self) -> str:
        """Put the newest weights in place; returns which."""
        source = await asyncio.to_thread(self._find_newest)
        version = _version(source)
        if (source, version) == (self.replicas.job.source, self._version):
            return f"{source.name}: nothing newer"
        await self.replicas.reload(source)
        self._version = version
        self._note("reload", checkpoint=source.checkpoint, weights=source.weights)
        return source.checkpoint or source.weights

    async def reload_regularly(self) -> None:
        """Look for newer weights from time to time. What cannot be loaded is noted once, and tried again when it has changed."""
        failed: Any = None
        while self._config.reload_every_s:
            await asyncio.sleep(self._config.reload_every_s)
            try:
                source = await asyncio.to_thread(self._find_newest)
                if (source, _version(source)) != failed:
                    failed = (source, _version(source))
                    await self.reload()
                    failed = None
            except (MeshwrightError, OSError) as error:
                self._note("reload failed", reason=str(error))

    def _note(self, event: str, **facts: Any) -> None:
        self._log({"time": round(time.time(), 3), "event": event, **facts})


class Server:
    """One model over HTTP."""

    def __init__(self, config: ServeConfig, run_dir: Path, environ: Mapping[str, str], say: Say, log: TextIO, api_key: str = "") -> None:
        require_packages()
        self._config, self._say = config, say
        self.service = ModelService(config, prepare_served(config, run_dir, environ, say), run_dir, environ, line_logger(log), api_key=api_key)

    def run(self, listener: socket.socket, announce: Callable[[dict[str, Any]], None] = lambda _: None) -> None:
        """Serve until SIGINT or SIGTERM; requests under way are then answered. `announce` is told the address when requests are taken."""
        import uvicorn

        from meshwright.serve.connection_limits import MAX_HEADER_BYTES, ConnectionLimits, limited_protocol, raise_descriptor_limit

        config = self._config
        raise_descriptor_limit(config.max_connections)
        settings = uvicorn.Config(
            self.service.app, lifespan="on", ws="none", log_level="error", access_log=False, timeout_keep_alive=_KEEP_ALIVE_S,
            server_header=False, proxy_headers=False,
            http=limited_protocol(ConnectionLimits(config.header_timeout_s, _KEEP_ALIVE_S, config.body_timeout_s, config.max_connections)),
            timeout_graceful_shutdown=int(config.grace_s), h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )  # fmt: skip
        with asyncio.Runner(loop_factory=settings.get_loop_factory()) as runner:
            runner.run(self._serve(uvicorn.Server(settings), listener, announce))

    async def _serve(self, server: Any, listener: socket.socket, announce: Callable[[dict[str, Any]], None]) -> None:
        """Answer /health from the start, and everything when the replicas are ready. If they cannot start, the reason is raised."""
        opening = asyncio.create_task(self._open(_url(listener), announce))
        opening.add_done_callback(
            lambda task: setattr(server, "should_exit", server.should_exit or (not task.cancelled() and bool(task.exception())))
        )
        watching = asyncio.create_task(self.service.reload_regularly())
        try:
            await server.serve([listener])
        finally:
            for task in (opening, watching):
                task.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            with suppress(asyncio.CancelledError):
                await opening

    async def _open(self, url: str, announce: Callable[[dict[str, Any]], None]) -> None:
        started, count, service = time.monotonic(), self.service.model.replicas, self.service
        self._say(f"starting {count} replica{'s' * (count > 1)}")
        await service.replicas.start()
        announce_ready(service.describe(), url, time.monotonic() - started, self._say, announce)


def announce_ready(found: Mapping[str, Any], url: str, seconds: float, say: Say, announce: Callable[[dict[str, Any]], None]) -> None:
    """Say that a model is served, and where."""
    facts = found["replica"]
    for note in filter(None, [facts.get("note"), *facts.get("reasons", []), *_about_embeddings(facts)]):
        say(str(note))
    say(f"ready in {seconds:.1f} s: {url} (Ctrl-C stops)")
    announce({"url": url, **found})


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _about_embeddings(facts: Mapping[str, Any]) -> list[str]:
    about = facts.get("embedding")
    return [f"/v1/embeddings: {about['pooling']}; {about['width']} numbers"] if about else []


def _version(source: ModelSource) -> tuple[Any, ...]:
    """What changes when the files of a model's weights do."""
    folder = Path(source.checkpoint or source.weights)
    files = sorted(path for pattern in _WATCHED for path in folder.glob(pattern)) if source.checkpoint or source.weights else []
    return tuple((path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in files)


def require_packages() -> None:
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise RequestError(f"the server needs a package that is not installed ({error.name}): {INSTALL_HINT}") from None


def line_logger(file: TextIO) -> Callable[[dict[str, Any]], None]:
    """Writes one JSON line for each call."""
    return lambda line: print(json.dumps(line, ensure_ascii=False, default=str), file=file, flush=True)


def open_log(path: str) -> TextIO:
    """The file for log lines; stderr if none is named."""
    if not path:
        return sys.stderr
    try:
        return open(path, "a", encoding="utf-8")
    except OSError as error:
        raise RequestError(f"--log {path}: {(error.strerror or 'cannot be written').lower()}: give another file") from None
