"""Figures of batch inference agree with their definitions, and pictures with what was drawn; what cannot be told is not guessed."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from meshwright import zoo
from meshwright.core.errors import RunError
from meshwright.core.task import Field, Task
from meshwright.observe.pictures import GAP, image_rows, write_png
from meshwright.serve.column_files import ColumnWriter, check_alike, join_columns, read_numbers
from meshwright.serve.output_kinds import KINDS, area_under_curve, find_kind, flatten_outputs


def decode_png(path: Path) -> np.ndarray[Any, Any]:
    """(height, width, channels), by the PNG standard: lengths, checksums, and lines without a filter."""
    data, chunks = path.read_bytes(), dict[bytes, bytes]()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    place = 8
    while place < len(data):
        (length,), kind = struct.unpack(">I", data[place : place + 4]), data[place + 4 : place + 8]
        content = data[place + 8 : place + 8 + length]
        assert struct.unpack(">I", data[place + 8 + length : place + 12 + length]) == (zlib.crc32(kind + content),)
        chunks[kind] = content
        place += 12 + length
    width, height, depth, colour, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert (depth, rest, list(chunks)[-1]) == (8, [0, 0, 0], b"IEND")
    channels = {0: 1, 2: 3}[colour]
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + width * channels)
    assert not lines[:, 0].any()
    return lines[:, 1:].reshape(height, width, channels)


@pytest.mark.parametrize(("channels", "side", "zoom"), [(1, 8, 8), (3, 32, 2), (1, 100, 1)])
def test_a_picture_has_the_images_in_rows(tmp_path: Path, channels: int, side: int, zoom: int) -> None:
    rows = [np.random.default_rng(seed).random((count, channels, side, side)) for seed, count in ((0, 3), (1, 3), (2, 2))]
    write_png(tmp_path / "p.png", image_rows(rows))
    found, step = decode_png(tmp_path / "p.png"), side * zoom + GAP
    assert found.shape == (3 * step + GAP, 3 * step + GAP, channels)
    for y, images in enumerate(rows):
        for x, image in enumerate(images):
            cell = found[GAP + y * step : (y + 1) * step : zoom, GAP + x * step : (x + 1) * step : zoom]
            assert (cell == np.rint(255 * image).transpose(1, 2, 0)).all()


def test_a_picture_of_what_is_no_colour() -> None:
    picture = image_rows([np.array([[[[np.nan, -1.0], [2.0, np.inf]]]])])
    assert [picture[GAP, GAP, 0], picture[GAP, -GAP - 1, 0], picture[-GAP - 1, GAP, 0], picture[-GAP - 1, -GAP - 1, 0]] == [0, 0, 255, 255]


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=40))
def test_the_area_under_the_curve_counts_pairs(samples: list[tuple[int, bool]]) -> None:
    scores, label = np.array([s for s, _ in samples], float), np.array([int(y) for _, y in samples])
    hits, misses = scores[label == 1], scores[label == 0]
    pairs = [1.0 if h > m else 0.5 if h == m else 0.0 for h in hits for m in misses]
    assert area_under_curve(scores, label) == (pytest.approx(sum(pairs) / len(pairs)) if pairs else None)


def test_the_area_under_the_curve_of_nan_is_none() -> None:
    assert area_under_curve(np.array([0.1, np.nan]), np.array([0, 1])) is None


def numbers(columns: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in columns.items() if tensor.dim() == 1}


def test_classes_first_and_among_five() -> None:
    torch.manual_seed(0)
    scores, label = torch.randn(200, 20).round(decimals=1), torch.randint(20, (200,))  # with equal scores
    columns = KINDS["classes"].columns(scores, {"label": label})
    figures = {figure.key: figure.value for figure in KINDS["classes"].figures(numbers(columns))}
    order = torch.sort(scores, dim=1, descending=True, stable=True).indices
    assert figures["accuracy"] == pytest.approx((order[:, 0] == label).double().mean().item())
    assert figures["top5_accuracy"] == pytest.approx((order[:, :5] == label[:, None]).any(1).double().mean().item())
    assert not KINDS["classes"].columns(torch.full((2, 3), torch.nan), {"label": torch.zeros(2, dtype=torch.int64)})["correct"].any()


def test_clicks_agree_with_torch() -> None:
    torch.manual_seed(0)
    logits, label = 30 * torch.randn(300), torch.randint(2, (300,))
    figures = {f.key: f.value for f in KINDS["clicks"].figures(numbers(KINDS["clicks"].columns(logits, {"label": label})))}
    assert figures["log_loss"] == pytest.approx(F.binary_cross_entropy_with_logits(logits.double(), label.double()).item())
    assert figures["accuracy"] == pytest.approx(((logits > 0) == (label == 1)).double().mean().item())


def test_a_kind_is_found_by_the_loss_or_by_shapes() -> None:
    assert [find_kind(zoo.load(name), None, 4).name for name in ("vae", "cnn", "dlrm", "cosmoflow-tiny")] == [
        "reconstructions", "classes", "clicks", "values"
    ]  # fmt: skip

    def kind(outputs: Any, **fields: Field) -> str:
        return find_kind(Task("own", torch.nn.Identity, lambda *_: torch.zeros(()), fields), outputs, 4).name

    scores, three, two = torch.zeros(4, 3), Field((), "int64", 3), Field((), "int64", 2)
    assert kind(scores, x=Field((2,)), label=three) == kind({"logits": scores}, targets=three) == "classes"
    assert kind(torch.zeros(4), label=two) == kind(torch.zeros(4, 1), label=two) == "scores"
    others = [kind(scores, label=two), kind(scores), kind(scores, label=three, target=three), kind(torch.zeros(4), label=three)]
    others += [kind((scores, scores), label=three), kind(scores.long(), label=three), kind(scores, label=Field((), "float32"))]
    assert set(others) == {"tensors"}


def test_outputs_have_names() -> None:
    a, b, c = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    assert {name: len(t) for name, t in flatten_outputs({"x": a, "y": (b, {"z": c}), "n": 3}).items()} == {"x": 1, "y.0": 2, "y.1.z": 3}
    assert list(flatten_outputs(a)) == ["output"] and list(flatten_outputs([a, b])) == ["output.0", "output.1"] and flatten_outputs("text") == {}


def test_columns_of_replicas_are_joined_in_order(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    columns = {"a": torch.arange(14).reshape(7, 2).float(), "b": torch.arange(7), "c": torch.ones(7, 3, dtype=torch.bfloat16)}
    writers = [ColumnWriter(tmp_path, replica) for replica in range(2)]
    for writer, (first, end) in zip([writers[0], writers[0], writers[1]], [(0, 3), (3, 4), (4, 7)], strict=True):
        writer.add({name: tensor[first:end] for name, tensor in columns.items()})
    writers[0].add({"more": torch.zeros(2)})
    described = [writer.described for writer in writers]
    check_alike(described, ("more",))
    with pytest.raises(RunError, match="the output more differs"):
        check_alike(described)
    join_columns(tmp_path, described, tmp_path / "out.safetensors")
    found = load_file(tmp_path / "out.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in columns.items()) and found["more"].shape == (2,)
    assert {name: values.tolist() for name, values in read_numbers(tmp_path, described).items()} == {"b": list(range(7))}
    with pytest.raises(RunError, match="one file cannot hold it"):
        writers[1].add({"a": torch.zeros(1, 5)})
