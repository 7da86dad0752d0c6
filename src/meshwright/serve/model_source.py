"""What a request names as a model: a run, a checkpoint, a Hugging Face folder, a GGUF file, a model of the zoo or a user's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from meshwright import zoo
from meshwright.checkpoint.manifest import FILE_NAME
from meshwright.core.errors import RequestError
from meshwright.core.serialization import read_json
from meshwright.core.task import Task
from meshwright.observe import RunFolder, find_run_folder
from meshwright.zoo.gguf_folder import folder_of_gguf, packaged_file

MODEL_FOLDER = "model"  # of a run: its weights


@dataclass(frozen=True)
class ModelSource:
    """A model, where its weights are, and where its tokenizer is. Plain data: ranks get it as JSON."""

    name: str  # as the user gave it, and as the server lists it
    model: str  # what the zoo loads: a name, hf:PATH or package.module:factory
    weights: str = ""  # a folder of safetensors; empty: those of a checkpoint, or random ones
    checkpoint: str = ""  # a checkpoint's folder
    tokenizer: str = ""  # a folder; empty: bytes
    seed: int = 0
    draft: ModelSource | None = None  # a smaller model that guesses its next tokens
    kind: Literal["text", "predict"] = "text"  # whether it generates text or answers samples
    run: str = ""  # the folder of the run that trained it

    def load_task(self, seq: int | None = None) -> Task:
        return zoo.load(self.model, seq=seq) if self.kind == "text" else zoo.load_for_inference(self.model, self.kind)


def find_model(name: str, run_dir: Path, environ: Mapping[str, str]) -> ModelSource:
    """Resolve a name: a model that a package carries, hf:PATH, a folder with config.json, *.gguf, a checkpoint, a run (name, path or `last`), a name
    of the zoo, or package.module:factory."""
    if (file := packaged_file(name)) is not None:
        return _folder_source(name, folder_of_gguf(file, environ))
    path = Path(name.removeprefix("hf:"))
    if path.suffix == ".gguf":
        return _folder_source(name, folder_of_gguf(path, environ))
    if (path / FILE_NAME).is_file():
        return _run_source(name, RunFolder(path.parent.parent), path)
    if path.is_dir() and (path / "config.json").is_file() and not (path / "job.json").is_file():
        return _folder_source(name, path)
    if name.startswith("hf:") or name in zoo.names() or (":" in name and not path.exists()):
        return ModelSource(name, name)
    run = find_run_folder(name, run_dir)
    return _run_source(name, run, None)


def _folder_source(name: str, folder: Path) -> ModelSource:
    has_weights = any(folder.glob("*.safetensors"))
    return ModelSource(name, f"hf:{folder.resolve()}", weights=str(folder.resolve()) if has_weights else "", tokenizer=str(folder.resolve()))


def _run_source(name: str, run: RunFolder, checkpoint: Path | None) -> ModelSource:
    job = run.job()
    if not isinstance(job.get("model"), str):
        raise RequestError(f"{name}: {run.path} has no job.json that names its model: give a run that `meshwright train` made")
    folder = (run.path / MODEL_FOLDER).resolve()
    model = str(job["model"])
    trained = Path(model.removeprefix("hf:"))
    tokenizer = trained if model.startswith("hf:") and trained.is_dir() else folder
    known = ModelSource(name, model, tokenizer=str(tokenizer), seed=int(job.get("seed") or 0), run=str(run.path.resolve()))
    if checkpoint is not None:
        return replace(known, checkpoint=str(checkpoint.resolve()))
    if not any(folder.glob("*.safetensors")):
        newest = sorted((p.parent for p in (run.path / "checkpoints").glob(f"*/{FILE_NAME}")), key=lambda p: int(p.name))
        if not newest:
            raise RequestError(
                f"{name}: {run.path} has neither {MODEL_FOLDER}/ nor a checkpoint: let the run finish, or train with --set export=true"
            )
        return replace(known, checkpoint=str(newest[-1].resolve()))
    return replace(known, weights=str(folder))


def describe_source(source: ModelSource) -> str:
    """Where the weights come from, in a few words."""
    if source.checkpoint:
        step = read_json(Path(source.checkpoint) / FILE_NAME).get("step")
        return f"the checkpoint of step {step} in {source.checkpoint}"
    return f"the weights in {source.weights}" if source.weights else "random weights"
