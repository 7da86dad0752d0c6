"""Resolves `--cluster` to a `Cluster`: `here`, a machine of the catalog with a number of nodes, `ideal[:N]`, or a file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path

from meshwright.core.cluster import Cluster, Link, Node
from meshwright.core.errors import RequestError, unknown_name_error
from meshwright.core.mesh import MAX_RANKS
from meshwright.core.serialization import from_data, read_json
from meshwright.describe.cluster_file import load_cluster, parse_cluster
from meshwright.describe.cluster_spec import check_device_count
from meshwright.describe.discover import discover

IDEAL_LINK = Link("ideal", 0.0, 1e18)  # communication takes no noticeable time


def resolve_cluster(text: str, environ: Mapping[str, str], *, ranks: int | None = None) -> Cluster:
    """The cluster that `text` names; for a file with `:N`, N nodes like its first. `ranks` limits the number of devices, and sets it for `ideal`
    without a number."""
    name, _, number = text.partition(":")
    if text == "here":
        return discover(environ, ranks=ranks)
    if name.endswith((".json", ".toml")):
        cluster = _cluster_from_file(Path(name), _parse_count(text, number, f"{name}:4"))
    elif name == "ideal":
        return ideal_cluster(_parse_count(text, number, "ideal:64") or ranks, environ)
    else:
        if name not in machine_names():
            raise unknown_name_error("cluster", name, ["here", "ideal", *machine_names(), "a file's name in .toml or .json"])
        cluster = catalog_cluster(name, _parse_count(text, number, f"{name}:4"))
    return cluster.first_devices(ranks) if ranks is not None else cluster


def _cluster_from_file(path: Path, nodes: int | None) -> Cluster:
    cluster = load_cluster(path) if path.suffix == ".toml" else from_data(Cluster, read_json(path), str(path))
    if not cluster.devices:
        raise RequestError(f"{path}: the cluster has no devices: add devices to its nodes")
    node = cluster.nodes[0]
    check_device_count(len(node.devices) * nodes if nodes is not None else 0, f"{path}:{nodes}")
    return replace(cluster, nodes=tuple(replace(node, name=f"{node.name}-{i}") for i in range(nodes))) if nodes is not None else cluster


@cache
def machine_names() -> tuple[str, ...]:
    folder = files("meshwright.describe.catalog").joinpath("machines")
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")))


def catalog_cluster(name: str, nodes: int | None = None) -> Cluster:
    """A machine of the catalog with `nodes` nodes; by default all it has, or one where it is sold by the node."""
    if name not in machine_names():
        raise unknown_name_error("cluster", name, machine_names())
    text = files("meshwright.describe.catalog").joinpath("machines", f"{name}.toml").read_text(encoding="utf-8")
    return parse_cluster(text, f"{name}.toml", name, nodes)


def ideal_cluster(count: int | None, environ: Mapping[str, str]) -> Cluster:
    """`count` devices like this machine's first (by default as many as it has), on a network that takes no time."""
    here = discover(environ)
    node = here.nodes[0]
    devices = tuple(replace(here.devices[0], index=i) for i in range(count or len(here.devices)))
    return Cluster("ideal", (Node("ideal", devices, node.cores, node.memory_bytes, node.cpu, link=IDEAL_LINK),), IDEAL_LINK, source="no network")


def _parse_count(text: str, number: str, example: str) -> int | None:
    if ":" not in text:
        return None
    text = text if len(text) <= 80 else f"{text[:80]}…"
    if not re.fullmatch("[0-9]+", number) or not number.strip("0"):
        raise RequestError(f"--cluster {text}: write it like {example}")
    if len(number) > len(str(MAX_RANKS)) or int(number) > MAX_RANKS:
        raise RequestError(f"--cluster {text}: that is more than {MAX_RANKS:,}: write it like {example}")
    return int(number)
