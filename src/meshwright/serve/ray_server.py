"""`serve --ray`: the same server as a Ray Serve deployment, whose replicas have their ranks in placement groups of the cluster.

[Note: the deployment]
One deployment of one Ray Serve replica runs the server's application, as it runs without Ray: it queues, routes to the replica with the least to do,
retries, counts and reloads. Only its ranks are elsewhere (`RayRanks`). If its process or its node ends, Ray Serve starts it again; its ranks belong
to it, and end with it. The command watches the deployment and deletes it when it is told to stop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from meshwright.core.errors import MeshwrightError, RequestError, RunError
from meshwright.serve.config import ServeConfig
from meshwright.serve.served_model import ServedModel, prepare_served
from meshwright.serve.server import ModelService, Say, announce_ready, check_address, line_logger, open_log, require_packages

try:
    import ray
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException
except ImportError as missing:
    raise RequestError(f"--ray needs a package that is not installed ({missing.name}): pip install 'meshwright[ray]'") from None

from meshwright.serve.ray_ranks import RayRanks, check_cluster, rank_bundle

_APPLICATION = "meshwright"
_POLL_S = 1.0
_CONNECT_S = 10.0
_ANSWER_S = 30.0  # for Ray Serve to take requests at its address
_LOCAL_STORE_BYTES = 100 * 2**20  # nothing large goes through Ray's object store


class Ingress:
    """The deployment: the server's application, and how it stands with its replicas."""

    def __init__(self, config: ServeConfig, model: ServedModel, run_dir: str, folder: str, log: str, api_key: str) -> None:
        with suppress(OSError):
            os.chdir(folder)
        bundle = rank_bundle(model.plan)
        self._service = ModelService(
            config, model, Path(run_dir), os.environ, line_logger(open_log(log)), api_key=api_key, make_ranks=lambda _: RayRanks(bundle, folder)
        )
        self._opening = asyncio.create_task(self._service.replicas.start())
        self._watching = asyncio.create_task(self._service.reload_regularly())

    def __serve_build_asgi_app__(self) -> Any:
        return self._service.app

    async def opened(self) -> dict[str, Any]:
        """What is served, once the replicas are ready; or why they cannot start."""
        try:
            await asyncio.shield(self._opening)
        except MeshwrightError as error:
            return {"failure": str(error), "is_request": isinstance(error, RequestError) or error.exit_code == RequestError.exit_code}
        return self._service.describe()

    async def check_health(self) -> None:
        """Ray Serve makes a new deployment where this raises."""
        if self._opening.done() and (error := self._opening.exception()) is not None:
            raise error


class RayServer:
    """One model over HTTP, on the cluster at `address`: HOST:PORT, auto for that of this machine, or local for one that ends with the command."""

    def __init__(self, config: ServeConfig, run_dir: Path, environ: Mapping[str, str], say: Say, log: str, api_key: str, address: str) -> None:
        require_packages()
        open_log(log)  # refused here, if it is
        self._config, self._run_dir, self._say, self._log, self._api_key, self._address = config, run_dir, say, log, api_key, address
        self._model = prepare_served(config, run_dir, environ, say)

    def run(self, host: str, port: int, announce: Callable[[dict[str, Any]], None] = lambda _: None) -> None:
        """Serve until a signal stops the command. `announce` is told the address when requests are taken."""
        started, stdout = time.monotonic(), sys.stdout
        # Ray prints what its processes say: that must not come between what this command prints.
        with redirect_stdout(sys.stderr), self._connected(), self._serving(host, port) as (url, handle):
            found = self._wait_until_open(handle)
            _check_answers(url)
            with redirect_stdout(stdout):
                announce_ready(found, url, time.monotonic() - started, self._say, announce)
            self._watch()

    @contextmanager
    def _connected(self) -> Iterator[None]:
        options: dict[str, Any] = {"include_dashboard": False, "object_store_memory": _LOCAL_STORE_BYTES} if self._address == "local" else {}
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            _check_reachable(self._address)
            ray.init(address=self._address, logging_level=logging.ERROR, **options)
        except (OSError, ValueError, RuntimeError, RayError) as error:
            text = (getattr(error, "strerror", None) or str(error)).splitlines()
            reason = next((line.strip(" .") for line in text if line.strip()), type(error).__name__)
            raise RequestError(f"--ray {self._address}: {reason}: start a cluster with `ray start --head`, or use --ray local") from None
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        try:
            bundle, plan, count = rank_bundle(self._model.plan), self._model.plan, self._model.replicas
            check_cluster(bundle, plan.world, count)
            if "GPU" not in bundle and ray.cluster_resources().get("GPU"):
                self._say("the cluster has GPUs, and this plan is for CPUs: use --plan with one that `meshwright plan --cluster FILE` made")
            yield
        finally:
            ray.shutdown()

    @contextmanager
    def _serving(self, host: str, port: int) -> Iterator[tuple[str, Any]]:
        """The deployment: (its address, a handle)."""
        was_running = _is_serve_running()
        listener = check_address(host, 0 if was_running and port else port, self._api_key)
        port = port if was_running and port else listener.getsockname()[1]
        listener.close()
        if was_running and _APPLICATION in serve.status().applications:
            raise RequestError("this Ray cluster serves a model already: end that command, or `serve shutdown`, which ends all of Ray Serve there")
        config, plan = self._config, self._model.plan
        deployment: Any = serve.deployment(
            serve.ingress()(Ingress), name="server", num_replicas=1, max_ongoing_requests=config.max_connections,
            ray_actor_options={"num_cpus": 0}, graceful_shutdown_timeout_s=config.grace_s + 10,
        )  # fmt: skip
        bound = deployment.bind(config, self._model, str(self._run_dir.resolve()), os.getcwd(), _resolved(self._log), self._api_key)
        count = self._model.replicas
        self._say(f"starting {count} replica{'s' * (count > 1)} of {plan.world} rank{'s' * (plan.world > 1)} on the Ray cluster")
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        try:
            if not was_running:
                serve.start(proxy_location="HeadOnly", http_options={"host": host, "port": port}, logging_config=_QUIET)
            yield _url(host, port), serve.run(bound, name=_APPLICATION, route_prefix="/", logging_config=_QUIET)
        except (RayError, RayServeException, RuntimeError) as error:
            reason = next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
            raise RunError(f"Ray Serve could not run the server: {reason}") from None
        finally:
            with suppress(RayError, RayServeException, RuntimeError):
                serve.delete(_APPLICATION)
                if not was_running:
                    serve.shutdown()

    def _wait_until_open(self, handle: Any) -> dict[str, Any]:
        response = handle.opened.remote()
        while True:
            with suppress(TimeoutError):
                found: dict[str, Any] = response.result(timeout_s=_POLL_S)
                break
        if failure := found.get("failure"):
            raise (RequestError if found["is_request"] else RunError)(failure)
        return found

    def _watch(self) -> None:
        """Until the deployment is gone, which it should not be."""
        state = ""
        while (found := serve.status().applications.get(_APPLICATION)) is not None:
            if str(found.status.value) != state:
                state = str(found.status.value)
                if state != "RUNNING":
                    self._say(f"Ray Serve: {state.lower()} {found.message}".strip())
            time.sleep(_POLL_S)
        raise RunError("the deployment was deleted by someone else")


_QUIET = {"enable_access_log": False, "log_level": "ERROR"}


def _check_reachable(address: str) -> None:
    """Raise OSError where nothing listens: Ray would try for minutes. Where `auto` leads is in a file that `ray start` writes."""
    if address == "auto":
        file = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
        address = os.environ.get("RAY_ADDRESS") or (file.read_text().strip() if file.is_file() else "")
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()


def _is_serve_running() -> bool:
    with suppress(ValueError):
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
        return True
    return False


def _resolved(log: str) -> str:
    return str(Path(log).resolve()) if log else ""


def _url(host: str, port: int) -> str:
    shown = "127.0.0.1" if host in ("", "0.0.0.0") else "[::1]" if host == "::" else f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"


def _check_answers(url: str) -> None:
    """The server answers at its address. It does not where Ray Serve ran before, at another one."""
    deadline = time.monotonic() + _ANSWER_S
    while True:
        try:
            with urllib.request.urlopen(f"{url}/v1/models", timeout=_POLL_S * 5) as answer:
                if answer.headers.get("x-request-id") and "data" in json.load(answer):
                    return
        except urllib.error.HTTPError as error:
            if error.code == 401:
                return
        except (OSError, ValueError):
            pass
        if time.monotonic() > deadline:
            raise RequestError(
                f"nothing answers at {url}: Ray Serve takes requests at another address. It ran on this cluster before (give its --port), or the "
                "head node is another machine (start this command there)"
            )
        time.sleep(0.2)
