"""`train --launcher mpi`: starts the ranks of a run with mpirun. Each rank reads the configuration from a file and joins as an external rank."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from meshwright.core.backends import backend_traits
from meshwright.core.errors import RequestError, unknown_name_error
from meshwright.launch.fork_server import RANK_DEFAULTS
from meshwright.launch.launch_environment import SUPERVISOR_VARIABLE
from meshwright.launch.mpi_launcher import MpirunExit, is_one_node, mpirun_command, supervise
from meshwright.observe import Recorder, RunFolder, write_report
from meshwright.orchestrate.config import RunConfig
from meshwright.orchestrate.knobs import script_environment
from meshwright.orchestrate.orchestrator import Orchestrator

LAUNCHERS = ("local", "mpi")
_STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)  # exit codes of a rank that was told to stop


def needs_mpirun(launcher: str | None, backend: str | None, is_launched: bool) -> bool:
    """Whether mpirun must start the ranks: it was requested, or the backend requires it."""
    if launcher is not None and launcher not in LAUNCHERS:
        raise unknown_name_error("launcher", launcher, LAUNCHERS)
    needed = backend is not None and bool(backend_traits(backend).launchers)
    if launcher == "local" and needed and not is_launched:
        raise RequestError(f"backend {backend} needs ranks that mpirun started: use --launcher mpi, or --backend gloo")
    return not is_launched and (launcher == "mpi" or needed)


def train_with_mpirun(config: RunConfig, script: str | None, arguments: list[str], environ: Mapping[str, str], as_json: bool) -> int:
    """Run the training or script under mpirun; returns its exit code, which is that of the first failing rank. A failure or a stop is recorded in
    the run folder. RankFailure if a rank could not report its failure itself."""
    if script is not None and not Path(script).is_file():
        raise RequestError(f"{script}: no such file")
    script_env = script_environment(config) if script is not None else {}
    with Orchestrator(config, environ, lambda _: None) as orchestrator:
        node = orchestrator.cluster.nodes[0]
        ranks, kind = len(orchestrator.cluster.devices), orchestrator.cluster.devices[0].kind
    threads = {"OMP_NUM_THREADS": str(max(node.cores // ranks, 1))} if kind == "cpu" else {}
    Path(config.run_dir).mkdir(parents=True, exist_ok=True)
    parent = None if is_one_node(environ) else config.run_dir  # ranks of other nodes see run_dir
    with tempfile.TemporaryDirectory(prefix=".meshwright-", dir=parent) as made:
        folder = Path(made).resolve()
        (folder / "config.json").write_text(json.dumps(config.model_dump(mode="json", exclude_defaults=True)))
        train = ["-m", "meshwright.cli.main", "train", str(folder / "config.json"), *(["--json"] if as_json else [])]
        supervised = {SUPERVISOR_VARIABLE: str(folder), "MESHWRIGHT_INIT_METHOD": f"file://{folder / 'rendezvous'}"}
        command, env = mpirun_command(ranks, {**RANK_DEFAULTS, **environ, **threads, **script_env, **supervised}, cores=node.cores)
        try:
            ended = supervise([*command, sys.executable, *([script, *arguments] if script is not None else train)], env, sys.stderr)
        except KeyboardInterrupt as stop:
            _record_stop(read_run_folder(folder), stop)
            raise
        return _record_end(read_run_folder(folder), ended)


def announce_run_folder(supervisor: str, path: Path) -> None:
    """Tell the supervisor of this rank, if it has one, which run folder it made."""
    if supervisor:
        (Path(supervisor) / "run").write_text(str(path))


def read_run_folder(supervisor: Path) -> RunFolder | None:
    """The run folder that rank 0 has made; None before that, and for scripts."""
    file = supervisor / "run"
    return RunFolder(Path(file.read_text())) if file.exists() else None


def last_step(run: RunFolder) -> int:
    """The last step that rank 0 has finished; -1 before the first."""
    return max((int(record["step"]) for record in run.metrics() if "step_s" in record), default=-1)


def _record_end(run: RunFolder | None, ended: MpirunExit) -> int:
    """Record a failure that no rank has recorded; returns the exit code, or raises RankFailure."""
    fault = ended.fault
    if run is not None and ended.code in _STOPPED and run.status().state == "stopped":
        return ended.code  # a rank was told to stop, and all have saved
    if run is not None and ended.code:
        if fault is not None and all(known.secondary for known in run.faults()):
            with Recorder(run.path, max(fault.rank, 0)) as recorder:
                recorder.fault(fault, last_step(run))
        write_report(run)
    return ended.require_reported()


def _record_stop(run: RunFolder | None, stop: KeyboardInterrupt) -> None:
    """Record a stop that no rank has recorded: they do if they have saved."""
    if run is None or run.status().state == "stopped":
        return
    with Recorder(run.path, 0) as recorder:
        recorder.event("stop", reason=str(stop) or "interrupted")
    if not getattr(stop, "at_once", False):
        write_report(run)
