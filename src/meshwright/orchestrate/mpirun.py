"""`train --launcher mpi`: starts the ranks of a run with mpirun. Each rank reads the configuration from a file and joins as an external rank."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from meshwright.core.backends import backend_traits
from meshwright.core.errors import RequestError, unknown_name_error
from meshwright.launch.fork_server import RANK_DEFAULTS
from meshwright.launch.mpi_launcher import mpirun_command, run_command
from meshwright.orchestrate.config import RunConfig
from meshwright.orchestrate.knobs import script_environment
from meshwright.orchestrate.orchestrator import Orchestrator

LAUNCHERS = ("local", "mpi")


def needs_mpirun(launcher: str | None, backend: str | None, is_launched: bool) -> bool:
    """Whether mpirun must start the ranks: it was requested, or the backend requires it."""
    if launcher is not None and launcher not in LAUNCHERS:
        raise unknown_name_error("launcher", launcher, LAUNCHERS)
    needed = backend is not None and bool(backend_traits(backend).launchers)
    if launcher == "local" and needed and not is_launched:
        raise RequestError(f"backend {backend} needs ranks that mpirun started: use --launcher mpi, or --backend gloo")
    return not is_launched and (launcher == "mpi" or needed)


def train_with_mpirun(config: RunConfig, script: str | None, arguments: list[str], environ: Mapping[str, str], as_json: bool) -> int:
    """Run the training or script under mpirun; returns its exit code, which is that of the first failing rank."""
    if script is not None and not Path(script).is_file():
        raise RequestError(f"{script}: no such file")
    script_env = script_environment(config) if script is not None else {}
    with Orchestrator(config, environ, lambda _: None) as orchestrator:
        node = orchestrator.cluster.nodes[0]
        ranks, kind = len(orchestrator.cluster.devices), orchestrator.cluster.devices[0].kind
    threads = {"OMP_NUM_THREADS": str(max(node.cores // ranks, 1))} if kind == "cpu" else {}
    Path(config.run_dir).mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", suffix=".json", prefix=".mpi-", dir=config.run_dir) as file:  # in run_dir: ranks of other nodes see it too
        json.dump(config.model_dump(mode="json", exclude_defaults=True), file)
        file.flush()
        train = ["-m", "meshwright.cli.main", "train", file.name, *(["--json"] if as_json else [])]
        command, env = mpirun_command(ranks, {**RANK_DEFAULTS, **environ, **threads, **script_env}, cores=node.cores)
        return run_command([*command, sys.executable, *([script, *arguments] if script is not None else train)], env, sys.stderr)
