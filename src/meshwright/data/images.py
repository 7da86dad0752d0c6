"""Image data sets: scikit-learn's digits, and MNIST and CIFAR-10 from local files. Reading a file never runs code from it."""

from __future__ import annotations

import gzip
import importlib
import io
import itertools
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from meshwright.core.errors import RequestError
from meshwright.core.task import Field

Array = np.ndarray[Any, np.dtype[Any]]
_NUM_CLASSES = 10


class ImageDataset:
    """Images stored as bytes; a batch is scaled to [0, 1] and resized to the model's image shape."""

    def __init__(self, name: str, images: Array, labels: Array, max_value: float, fields: Mapping[str, Field]) -> None:
        self._shape, self._field_names = _image_shape(name, fields), tuple(fields)
        self._images = torch.from_numpy(np.require(images, requirements=["C", "W"]))  # torch warns about read-only memory
        self._labels = torch.from_numpy(labels.astype(np.int64))
        self._max_value = max_value

    def __len__(self) -> int:
        return self._images.shape[0]

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        columns = {"label": self._labels[indices]}
        if "image" in self._field_names:
            columns["image"] = _fit_to_shape(self._images[indices].float() / self._max_value, self._shape)
        return {name: columns[name] for name in self._field_names}


def _image_shape(name: str, fields: Mapping[str, Field]) -> tuple[int, ...]:
    if not fields or not set(fields) <= {"image", "label"}:
        raise RequestError(f"data set '{name}' has the fields image and label; this model's fields: {', '.join(fields) or 'none'}")
    if "label" in fields and (fields["label"].shape or 0 < fields["label"].high < _NUM_CLASSES):
        raise RequestError(f"data set '{name}' has one label of {_NUM_CLASSES} classes a sample; the model's label field is {fields['label']}")
    shape = fields["image"].shape if "image" in fields else (1, 1, 1)
    if len(shape) != 3:
        raise RequestError(f"data set '{name}': an image field is (channels, height, width), not {shape}")
    return shape


def _fit_to_shape(images: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Interpolate to the height and width; repeat grey into colour, or average colour to grey."""
    if images.shape[2:] != shape[1:]:
        images = F.interpolate(images, size=shape[1:], mode="bilinear", align_corners=False)
    if images.shape[1] == shape[0]:
        return images
    if images.shape[1] > 1:
        images = images.mean(dim=1, keepdim=True)
    return images.expand(-1, shape[0], -1, -1).contiguous()


def load_digits(fields: Mapping[str, Field], split: str) -> ImageDataset:
    """1797 digits of 8×8 pixels, in one fixed random order; the last 15% is the validation part."""
    try:
        digits = importlib.import_module("sklearn.datasets").load_digits()
    except ImportError:
        raise RequestError("data set 'digits' comes with scikit-learn: pip install 'meshwright[data]'") from None
    order = np.random.Generator(np.random.PCG64(0)).permutation(len(digits.target))
    border = int(len(order) * 0.85)
    part = order[:border] if split == "train" else order[border:]
    return ImageDataset("digits", digits.images[part, None].astype(np.uint8), digits.target[part], 16.0, fields)


def load_mnist(fields: Mapping[str, Field], split: str, folder: Path) -> ImageDataset:
    """The IDX files, plain or gzipped, in `folder` or where torchvision puts them below it."""
    prefix = "train" if split == "train" else "t10k"
    images = _read_idx(_find_idx(folder, f"{prefix}-images-idx3-ubyte"), dimensions=3)
    labels = _read_idx(_find_idx(folder, f"{prefix}-labels-idx1-ubyte"), dimensions=1)
    if len(images) != len(labels):
        raise RequestError(f"{folder}: {len(images)} {prefix} images but {len(labels)} labels: the files do not belong together")
    return ImageDataset("mnist", images[:, None], labels, 255.0, fields)


def _find_idx(folder: Path, name: str) -> Path:
    dotted = name.replace("-idx", ".idx")
    for below, file in itertools.product((".", "raw", "MNIST/raw"), (name, f"{name}.gz", dotted, f"{dotted}.gz")):
        if (path := folder / below / file).is_file():
            return path
    raise RequestError(f"data set 'mnist': there is no {name} or {name}.gz in {folder}")


def _read_idx(path: Path, dimensions: int) -> Array:
    """IDX: two zero bytes, the type (8 is unsigned byte), the number of dimensions, their sizes, then the values."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError) as error:
        raise RequestError(f"{path}: cannot be read: {error}") from error
    start = 4 + 4 * dimensions
    if len(raw) < start or raw[:4] != bytes((0, 0, 8, dimensions)):
        raise RequestError(f"{path}: not an IDX file of unsigned bytes in {dimensions} dimensions")
    shape = tuple(int(n) for n in np.frombuffer(raw, ">u4", dimensions, offset=4))
    if len(raw) - start != int(np.prod(shape)):
        raise RequestError(f"{path}: its header promises {shape}, but it holds {len(raw) - start} bytes of values: fetch it again")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def load_cifar10(fields: Mapping[str, Field], split: str, folder: Path) -> ImageDataset:
    """The binary version or the Python version, in `folder` or in the archive's own folder below it."""
    stems = [f"data_batch_{i}" for i in range(1, 6)] if split == "train" else ["test_batch"]
    parts = [_read_cifar(_find_cifar(folder, stem)) for stem in stems]
    images = np.concatenate([p[0] for p in parts]).reshape(-1, 3, 32, 32)
    return ImageDataset("cifar10", images, np.concatenate([p[1] for p in parts]), 255.0, fields)


def _find_cifar(folder: Path, stem: str) -> Path:
    for path in (folder / f"{stem}.bin", folder / "cifar-10-batches-bin" / f"{stem}.bin", folder / stem, folder / "cifar-10-batches-py" / stem):
        if path.is_file():
            return path
    raise RequestError(f"data set 'cifar10': there is no {stem}.bin (binary version) or {stem} (Python version) in {folder}")


def _read_cifar(path: Path) -> tuple[Array, Array]:
    """(images as rows of 3072 bytes, labels) of one file."""
    raw = path.read_bytes()
    if path.suffix == ".bin":
        if not raw or len(raw) % 3073:
            raise RequestError(f"{path}: {len(raw)} bytes are not whole CIFAR-10 records of 3073: fetch it again")
        rows = np.frombuffer(raw, np.uint8).reshape(-1, 3073)
        return rows[:, 1:], rows[:, 0]
    try:
        content = ArrayUnpickler(io.BytesIO(raw), encoding="bytes").load()
        images, labels = np.asarray(content[b"data"], np.uint8), np.asarray(content[b"labels"], np.int64)
    except Exception as error:  # a broken pickle may raise anything
        raise RequestError(f"{path}: not a CIFAR-10 batch: {error}") from error
    if images.ndim != 2 or images.shape[1] != 3072 or labels.shape != images.shape[:1]:
        raise RequestError(f"{path}: not a CIFAR-10 batch: images of shape {images.shape}, labels of shape {labels.shape}")
    return images, labels


def _encode_latin1(text: str, encoding: str) -> bytes:
    """Stands in for `_codecs.encode`, by which old pickles encode bytes: latin1 is the only codec needed, so no other is allowed."""
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"codec {encoding} is not allowed")
    return text.encode("latin1")


class ArrayUnpickler(pickle.Unpickler):
    """Reads plain containers and numpy arrays. Any other class or function that a pickle could call is refused."""

    # The function that rebuilds an array, taken from an array, since its module differs between numpy versions.
    _REBUILD = np.zeros(0).__reduce__()[0]
    _ALLOWED: Mapping[tuple[str, str], Any] = {
        ("numpy.core.multiarray", "_reconstruct"): _REBUILD,
        ("numpy._core.multiarray", "_reconstruct"): _REBUILD,
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("_codecs", "encode"): _encode_latin1,
    }

    def find_class(self, module_name: str, global_name: str) -> Any:
        try:
            return self._ALLOWED[module_name, global_name]
        except KeyError:
            raise pickle.UnpicklingError(f"it refers to {module_name}.{global_name}, which data never needs; it was not run") from None
