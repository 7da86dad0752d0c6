"""`checkpoints ls|verify|prune|export|import`: looks after the checkpoints of a run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import track

from meshwright.cli import options
from meshwright.cli.console import log_progress, make_table, print_json, require_torch, stderr, stdout
from meshwright.core.errors import RequestError, RunError
from meshwright.core.quantities import show_bytes

if TYPE_CHECKING:
    from meshwright.checkpoint.manifest import Manifest

app = typer.Typer(no_args_is_help=True)

_Step = Annotated[int | None, typer.Option("--step", help="The checkpoint of this step; the newest unless given.")]


@app.callback()
def checkpoints() -> None:
    """List, check, remove and convert the checkpoints of a run.

    Example: meshwright checkpoints ls last
    """


@app.command("ls")
def ls(run: options.Run = "last", run_dir: options.RunDir = "runs", as_json: options.Json = False) -> None:
    """List a run's checkpoints: step, size, age, the ranks and the plan that wrote it; which one has the best validation loss.

    Example: meshwright checkpoints ls last
    """
    from meshwright.checkpoint.checkpoint_folder import saved_steps, step_folder
    from meshwright.checkpoint.manifest import read_manifest

    root = _root(run, run_dir)
    rows, best = list[dict[str, Any]](), dict[str, float]()
    for step in saved_steps(root):
        try:
            manifest = read_manifest(step_folder(root, step))
        except RequestError as error:
            rows.append({"step": step, "error": str(error)})
            continue
        best = _best_of(manifest) or best
        rows.append({"step": step, "bytes": manifest.bytes, "time": manifest.time, "ranks": manifest.world, "plan": _summary(manifest)})
    if as_json:
        print_json({"folder": str(root), "checkpoints": rows, "best": best or None})
        return
    table = make_table(">step", ">size", ">age", ">ranks", "plan", title=str(root))
    for row in rows:
        if "error" in row:
            table.add_row(str(row["step"]), "", "", "", row["error"])
        else:
            note = f"; validation loss {best['loss']:.4f}, the best" if row["step"] == best.get("step") else ""
            table.add_row(str(row["step"]), show_bytes(row["bytes"]), _age(row["time"]), str(row["ranks"]), row["plan"] + note)
    stdout.print(table)


@app.command("verify")
def verify(run: options.Run = "last", step: _Step = None, run_dir: options.RunDir = "runs", as_json: options.Json = False) -> None:
    """Read every byte of a run's checkpoints, or of one, and compare the checksums. Exit code 1 if something is wrong.

    Example: meshwright checkpoints verify last
    """
    from meshwright.checkpoint.checkpoint_folder import problems_of, saved_steps, step_folder
    from meshwright.checkpoint.manifest import read_manifest

    root = _root(run, run_dir)
    found: dict[int, list[str]] = {}
    for number in track([step] if step is not None else saved_steps(root), description="verifying", console=stderr):
        folder = step_folder(root, number)
        try:
            found[number] = list(problems_of(folder, read_manifest(folder)))
        except RequestError as error:
            found[number] = [str(error)]
    if as_json:
        print_json({"folder": str(root), "problems": found})
    else:
        for number, problems in found.items():
            stdout.print(f"step {number}: {problems[0] if problems else 'whole'}", markup=False, soft_wrap=True)
    if wrong := [number for number, problems in found.items() if problems]:
        raise RunError(f"{len(wrong)} of {len(found)} checkpoints are not whole; a run that goes on uses an older one")


@app.command("prune")
def prune(
    run: options.Run = "last",
    keep: Annotated[int, typer.Option("--keep", min=1, help="How many of the newest stay.")] = 1,
    run_dir: options.RunDir = "runs",
    as_json: options.Json = False,
) -> None:
    """Remove all but the newest checkpoints of a run and the one with the best validation loss, and what interrupted saves have left.

    Example: meshwright checkpoints prune last --keep 1
    """
    from meshwright.checkpoint.checkpoint_folder import remove_checkpoint, remove_leftovers, saved_steps, steps_to_remove

    root = _root(run, run_dir)
    best = [int(found["step"]) for step in saved_steps(root) if (found := _best_at(root, step))]
    removed = steps_to_remove(saved_steps(root), keep, also_keep=best[-1:])
    for step in removed:
        remove_checkpoint(root, step)
    remove_leftovers(root)
    if as_json:
        print_json({"folder": str(root), "removed": removed, "kept": saved_steps(root)})
    else:
        log_progress(f"removed {', '.join(map(str, removed)) or 'nothing'}; kept {', '.join(map(str, saved_steps(root)))}")


@app.command("export")
def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, its name below --run-dir, or 'last'.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder for the result.")],
    to: Annotated[str, typer.Option("--to", help="hf (safetensors, for from_pretrained), torch (one file for torch.load) or dcp.")] = "hf",
    step: _Step = None,
    run_dir: options.RunDir = "runs",
    as_json: options.Json = False,
) -> None:
    """Write a checkpoint as other software reads it: weights alone (hf), or with the optimizer's state (torch, dcp).

    Example: meshwright checkpoints export last exported --to hf
    """
    require_torch()
    from meshwright.checkpoint.checkpoint_folder import newest_whole, problems_of, step_folder
    from meshwright.checkpoint.manifest import read_manifest
    from meshwright.orchestrate.checkpoint_export import FORMATS, export_checkpoint

    if to not in FORMATS:
        raise RequestError(f"--to {to}: give one of {', '.join(FORMATS)}")
    if folder.exists():
        raise RequestError(f"{folder} is there already: name a new folder")
    root = _root(run, run_dir)
    if step is None:
        step, manifest, _ = newest_whole(root)
    else:
        manifest = read_manifest(step_folder(root, step))
        if problems := list(problems_of(step_folder(root, step), manifest)):
            raise RequestError(problems[0])
    log_progress(f"writing step {step} ({show_bytes(manifest.bytes)}) as {to}")
    export_checkpoint(step_folder(root, step), manifest, folder, to)
    if as_json:
        print_json({"folder": str(folder), "step": step, "format": to})
    else:
        log_progress(f"wrote {folder}")


@app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A folder of torch.distributed.checkpoint, or a file of torch.save.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder for the weights.")],
    key: Annotated[str | None, typer.Option("--key", help="The key of the state that holds the weights, such as app.model. Default: found.")] = None,
    trust: Annotated[bool, typer.Option("--trust", help="Read it with Python's pickle, which runs what is in it.")] = False,
    as_json: options.Json = False,
) -> None:
    """Write the weights of torch's own checkpoints as safetensors, for `train --init-from FOLDER`. Nothing in the source is executed.

    Example: meshwright checkpoints import dcp-folder weights
    """
    require_torch()
    from meshwright.orchestrate.checkpoint_import import import_weights

    if not source.exists():
        raise RequestError(f"{source}: there is no such file or folder")
    if folder.exists():
        raise RequestError(f"{folder} is there already: name a new folder")
    names = import_weights(source, folder, key=key, trust=trust)
    if as_json:
        print_json({"folder": str(folder), "tensors": names})
    else:
        log_progress(f"wrote {len(names)} tensors to {folder}; to begin with them: meshwright train MODEL --init-from {folder}")


def _root(run: str, run_dir: str) -> Path:
    from meshwright.checkpoint.checkpoint_folder import FOLDER_NAME, saved_steps
    from meshwright.observe import find_run_folder

    path = Path(run)
    if path.is_dir() and saved_steps(path):  # a script's own folder of checkpoints
        return path
    root = find_run_folder(run, Path(run_dir)).path / FOLDER_NAME
    if not root.is_dir():
        raise RequestError(f"{root.parent} has no checkpoints: save some with --set checkpoint_every=100")
    return root


def _best_of(manifest: Manifest) -> dict[str, float]:
    """Step and validation loss of the best checkpoint so far, as the run knew it when it wrote this one."""
    state = manifest.state if isinstance(manifest.state, dict) else {}
    return state.get("best") or {}


def _best_at(root: Path, step: int) -> dict[str, float]:
    from meshwright.checkpoint.checkpoint_folder import step_folder
    from meshwright.checkpoint.manifest import read_manifest

    try:
        return _best_of(read_manifest(step_folder(root, step)))
    except RequestError:
        return {}


def _summary(manifest: Manifest) -> str:
    from meshwright.core.plan import Plan
    from meshwright.core.serialization import from_data

    try:
        return from_data(Plan, manifest.plan, "plan").summary()
    except RequestError:
        return "a plan that this version does not read"


def _age(when: float) -> str:
    seconds = max(time.time() - when, 0)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
