"""What `--resume` and `--init-from` name: a run's folder, one of its checkpoints, or a folder of weights; and what may differ when a run goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.checkpoint.checkpoint_folder import FOLDER_NAME, saved_steps, step_folder
from meshwright.checkpoint.manifest import FILE_NAME, Manifest, read_manifest
from meshwright.core.errors import RequestError
from meshwright.core.plan import Plan
from meshwright.core.serialization import show_json
from meshwright.describe.discover import discover
from meshwright.observe import RunFolder, find_run_folder
from meshwright.orchestrate.config import RunConfig
from meshwright.orchestrate.knobs import KNOBS

MODEL_FOLDER = "model"
_SAMPLED_BY = ("model", "data", "seq", "seed", "global_batch", "optimizer")  # settings that decide which samples a step has, and what it does

_OF_MESH = ("mesh", "order", "placements", "zero", "schedule", "micro_batches", "sequence", "spatial")  # settings that make sense for one mesh


def checkpoints_of(path: Path) -> tuple[Path, int | None]:
    """(the folder of checkpoints, the step or None for the newest) of a run's folder, or of one checkpoint in it."""
    if (path / FILE_NAME).exists() and path.name.isdecimal():
        return path.parent, int(path.name)
    root = path if path.name == FOLDER_NAME else path / FOLDER_NAME
    if not saved_steps(root):
        hint = f"; its weights can begin a new run: --init-from {path}" if (path / MODEL_FOLDER).is_dir() else ""
        raise RequestError(f"--resume {path}: there is no checkpoint in it{hint}")
    return root, None


def weights_folder(path: Path, option: str = "--init-from ") -> Path:
    """The folder that has the weights which a path means: itself, with safetensors files; a run's model, or its newest checkpoint."""
    for folder in (path / MODEL_FOLDER, path):
        if any(folder.glob("*.safetensors")):
            return folder
    for root in (path, path / FOLDER_NAME):
        if steps := saved_steps(root):
            return step_folder(root, steps[-1])
    if (path / ".metadata").exists() or path.is_file():
        hint = f"it is of another format, which `meshwright checkpoints import {path} FOLDER` converts"
    else:
        hint = f"there are no weights in it: give a run that has {MODEL_FOLDER}/ or a checkpoint, or a folder with *.safetensors files"
    raise RequestError(f"{option}{path}: {hint if path.exists() else 'there is no such folder'}")


def named_folder(name: str, run_dir: Path) -> Path:
    """What a user means by the name of a run or by a path: a path has a slash in it, or is a folder here that is no run's name."""
    path = Path(name)
    if "/" in name or (path.is_dir() and not (run_dir / name).is_dir()):
        return path
    return find_run_folder(name, run_dir).path


def with_weights(config: RunConfig) -> RunConfig:
    """The configuration with the folder of weights that `init_from` means."""
    if config.init_from is None:
        return config
    folder = weights_folder(named_folder(config.init_from, Path(config.run_dir)))
    return config.model_copy(update={"init_from": str(folder.resolve())})


def describe_names(folder: str, missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """One line on the names that a folder and a model do not share."""
    parts = [(missing, "of the model are not in it, and stay as initialised"), (unexpected, "in it are not of the model, and are left out")]
    lines = (f"{len(names)} tensors {what} ({', '.join(names[:3])}{', …' * (len(names) > 3)})" for names, what in parts if names)
    return f"{folder}: {'; '.join(lines)}"


def resumed_config(path: Path, given: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[RunConfig, str]:
    """The configuration of a run that goes on, with what the request gives anew, and a line that says which plan it follows: its own if the devices
    are what they were and nothing that decides the plan was given, and otherwise one for what there is now."""
    root, step = checkpoints_of(path)
    home = RunFolder(root.parent)
    job = home.job()
    if not job:
        raise RequestError(f"--resume {path}: {home.path} has no job.json: give a run that `meshwright train` made")
    changed = [key for key in _SAMPLED_BY if key in given and given[key] != job.get(key)]
    if changed and not given.get("allow_changes"):
        raise _changed_error(str(path), changed[0], job.get(changed[0]), given[changed[0]])
    known = {key: value for key, value in job.items() if key in RunConfig.model_fields}
    if given.keys() & {"mesh", "nproc"}:  # what was chosen for the mesh that the run had may not be possible under another
        known = {key: value for key, value in known.items() if key not in (*_OF_MESH, "nproc")}
    if known.get("plan") == str(home.path / "plan.json"):  # it went on before
        known["plan"] = "auto"
    known.pop("inject", None)  # a fault that was rehearsed has happened
    branch = {"name": None} if step is not None else {}
    config = RunConfig(**{**known, "init_from": None, **branch, **given, "resume": str(path)})
    if config.epochs is None and (manifest := _newest_manifest(root, step)) is not None:
        _check_steps_left(config, manifest)
    plan, cluster = home.plan(), home.cluster()
    if changed or given.keys() & {knob.key for knob in KNOBS} or given.get("plan") or config.plan != "auto":
        return config, "planning again, as the request asks"
    devices = discover(environ, ranks=config.nproc, devices=config.devices).devices
    was = [device.kind for device in cluster.devices] if cluster is not None else []
    if plan is not None and was == [device.kind for device in devices]:
        return config.model_copy(update={"plan": str(home.path / "plan.json")}), f"the run's own plan: {plan.summary()}"
    free = config.model_copy(update={key: RunConfig.model_fields[key].get_default(call_default_factory=True) for key in _OF_MESH})
    return free, f"planning again: the run had {len(was)} × {''.join(sorted(set(was)))}, and there are {len(devices)} × {devices[0].kind}"


def check_resumable(config: RunConfig, plan: Plan) -> None:
    """Refuse to go on where the samples would be others than the run had, or where nothing is left to do. Checkpoints that cannot be read are left to
    the ranks, which use an older one."""
    assert config.resume is not None
    root, step = checkpoints_of(Path(config.resume))
    manifest = _newest_manifest(root, step)
    if manifest is None:
        return
    _check_steps_left(config, manifest)
    now = {**config.model_dump(mode="json"), "global_batch": plan.global_batch}
    for key in _SAMPLED_BY if not config.allow_changes else ():
        if manifest.state["config"].get(key) != now.get(key):
            raise _changed_error(config.resume, key, manifest.state["config"].get(key), now.get(key))


def _check_steps_left(config: RunConfig, manifest: Manifest) -> None:
    if manifest.step >= config.steps:
        raise RequestError(f"--resume {config.resume}: it has done {manifest.step} of {config.steps} steps: give more with --steps")


def _changed_error(run: str, key: str, before: Any, now: Any) -> RequestError:
    line = f"--resume {run}: it was trained with {key}={show_json(before)}, and the request says {show_json(now)}"
    return RequestError(f"{line}: leave it out, or --set allow_changes=true")


def _newest_manifest(root: Path, step: int | None) -> Manifest | None:
    errors: list[RequestError] = []
    for candidate in [step] if step is not None else reversed(saved_steps(root)):
        try:
            return read_manifest(step_folder(root, candidate))
        except RequestError as error:
            errors.append(error)
    if errors and (step is not None or "format version" in str(errors[0])):
        raise errors[0]
    return None
