"""Ranks of a replica on a Ray cluster: a placement group with one bundle a rank, and an actor in each bundle."""

from __future__ import annotations

import asyncio
import fcntl
import importlib
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from meshwright.core.errors import RequestError
from meshwright.core.event import Fault
from meshwright.core.plan import Plan
from meshwright.launch import RankFailure, describe_fault
from meshwright.serve.replica_ranks import in_thread

Bundle = Mapping[str, float]
_PLACE_S = 30.0  # for resources that others give back
_ROOT_CAUSE_GRACE_S = 2.0  # after a rank reports a lost peer: how long to wait for the peer's own report
_SIOCGIFADDR = 0x8915  # Linux: an interface's IPv4 address


def rank_bundle(plan: Plan) -> dict[str, float]:
    """What Ray has to set aside for one rank of a plan."""
    threads = float(plan.threads or 1)
    return {"CPU": threads} if plan.device == "cpu" else {"CPU": 1.0, "GPU": 1.0}


def check_cluster(bundle: Bundle, world: int, replicas: int) -> None:
    """Refuse what the cluster could not place though nothing else ran on it."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = sum(min(int(node.get(name, 0) // amount) for name, amount in bundle.items()) for node in nodes)
    if room < world * replicas:
        raise RequestError(
            f"the Ray cluster has room for {_count(room, 'rank')} of {_show(bundle)}, and {_count(replicas, 'replica')} of {_count(world, 'rank')} "
            f"{'needs' if replicas == 1 else 'need'} {world * replicas}: it has {_count(len(nodes), 'node')} with {_show(_sum(nodes, bundle))} in "
            "all. Add nodes, or give fewer --replicas, a smaller --mesh, or --set threads=1"
        )


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number != 1)}"


def _show(resources: Bundle) -> str:
    return " and ".join(f"{amount:g} {name}{'s' * (amount != 1)}" for name, amount in resources.items())


def _sum(nodes: Iterable[Bundle], names: Iterable[str]) -> dict[str, float]:
    held = list(nodes)
    return {name: sum(node.get(name, 0) for node in held) for name in names}


class RankActor:
    """One rank. It lives as long as its replica."""

    def __init__(self, folder: str) -> None:
        with suppress(OSError):  # relative paths mean what they mean to the command, where that folder exists
            os.chdir(folder)

    def address(self) -> str:
        """Where the ranks of a replica can meet whose first one this is."""
        host = ray.util.get_node_ip_address()
        with socket.create_server((host, 0)) as free:
            return f"tcp://{host}:{free.getsockname()[1]}"

    def run(self, target: str, kwargs: Mapping[str, Any]) -> Fault | None:
        """Call `target`; returns what went wrong."""
        if (interface := _interface_of(ray.util.get_node_ip_address())) is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        module, _, name = target.partition(":")
        try:
            getattr(importlib.import_module(module), name)(**kwargs)
        except Exception as error:
            return describe_fault(error, int(kwargs["rank"]))
        return None


def _interface_of(address: str) -> str | None:
    """The network interface with this address; None if there is none, or the system does not say."""
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
            found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None


class RayRanks:
    """Ranks in the bundles of a placement group that is made when they are opened and removed when they are closed. `folder` is where they work."""

    def __init__(self, bundle: Bundle, folder: str) -> None:
        self._bundle, self._folder = dict(bundle), folder
        self._group: PlacementGroup | None = None
        self._actors: list[Any] = []

    @property
    def pids(self) -> list[int]:
        return []

    @property
    def host(self) -> str:
        return str(ray.util.get_node_ip_address())

    async def open(self, world: int) -> None:
        await self.close()
        self._group = placement_group([self._bundle] * world, strategy="PACK")
        if not await in_thread(self._group.wait, _PLACE_S):
            await self.close()
            free = {name: ray.available_resources().get(name, 0.0) for name in self._bundle}
            needed = {name: amount * world for name, amount in self._bundle.items()}
            raise RequestError(
                f"the Ray cluster has not placed a replica of {_count(world, 'rank')} within {_PLACE_S:g} s: it needs {_show(needed)}, "
                f"{_show(self._bundle)} of them for each rank on one node, and {_show(free)} are free: add nodes, or end what holds the rest"
            )
        make = ray.remote(num_cpus=self._bundle["CPU"], num_gpus=self._bundle.get("GPU", 0), max_restarts=0)(RankActor)
        places = [PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=i) for i in range(world)]
        self._actors = [make.options(scheduling_strategy=place).remote(self._folder) for place in places]

    async def run(self, target: str, kwargs: Mapping[str, Any]) -> None:
        """Ray gives each actor its GPU alone, so each sees it as the first."""
        actors = list(self._actors)
        try:
            init_method = await actors[0].address.remote()
        except RayError as error:
            raise RankFailure(_death(0, error)) from None
        shared = {**kwargs, "world": len(actors), "init_method": init_method, "devices": [0] * len(actors)}  # Ray shows a rank its own device only
        calls = {
            asyncio.ensure_future(_outcome(rank, actor.run.remote(target, {**shared, "rank": rank}))) for rank, actor in enumerate(actors)
        }  # fmt: skip
        faults: list[Fault] = []
        deadline: float | None = None
        while calls and all(fault.secondary for fault in faults):
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                break
            done, calls = await asyncio.wait(calls, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            faults += [fault for call in done if (fault := call.result()) is not None]
            if faults and deadline is None:
                deadline = time.monotonic() + _ROOT_CAUSE_GRACE_S
        for call in calls:
            call.cancel()
        if faults:
            raise RankFailure(next((fault for fault in faults if not fault.secondary), faults[0]))

    async def close(self) -> None:
        actors, group, self._actors, self._group = self._actors, self._group, [], None
        await in_thread(_end, actors, group)

    async def release(self) -> None:
        await self.close()


def _end(actors: list[Any], group: PlacementGroup | None) -> None:
    steps: list[Callable[[], Any]] = [lambda actor=actor: ray.kill(actor) for actor in actors]  # type: ignore[misc]
    if group is not None:
        steps.append(lambda: remove_placement_group(group))
    for step in steps:
        with suppress(RayError, ValueError):  # it has ended, or Ray has
            step()


async def _outcome(rank: int, call: Any) -> Fault | None:
    try:
        return await call  # type: ignore[no-any-return]
    except RayError as error:
        return _death(rank, error)


def _death(rank: int, error: RayError) -> Fault:
    """An actor that ended by itself is the cause of what the others report."""
    kind = "its actor died" if isinstance(error, RayActorError) else type(error).__name__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = next((line for line in lines if "cause" in line.lower() or "exit" in line.lower()), lines[0] if lines else kind)
    return Fault(time.time(), rank, kind, cause[:300])
