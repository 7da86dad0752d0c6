"""Pictures as PNG files: rows of images under each other, enlarged so that small ones can be seen. Needs numpy and zlib alone."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
CELL_PIXELS = 64  # an image is enlarged by a whole number to about this height
GAP = 2  # pixels between images
_BACKGROUND = 128
_COLOUR_TYPES = {1: 0, 3: 2}  # of the PNG format, by channels


def image_rows(rows: Sequence[Array]) -> Array:
    """One picture (height, width, channels) of rows of images, each (count, channels, height, width) in [0, 1] with 1 or 3 channels. NaN is black."""
    channels, height, width = rows[0].shape[1:]
    zoom, count = max(CELL_PIXELS // height, 1), max(map(len, rows))
    picture = np.full((len(rows) * (height * zoom + GAP) + GAP, count * (width * zoom + GAP) + GAP, channels), _BACKGROUND, np.uint8)
    for y, images in enumerate(rows):
        top = GAP + y * (height * zoom + GAP)
        for x, image in enumerate(images):
            left = GAP + x * (width * zoom + GAP)
            pixels = np.rint(255.0 * np.clip(np.nan_to_num(image, nan=0.0), 0.0, 1.0)).astype(np.uint8).transpose(1, 2, 0)
            picture[top : top + height * zoom, left : left + width * zoom] = pixels.repeat(zoom, axis=0).repeat(zoom, axis=1)
    return picture


def write_png(path: Path, picture: Array) -> None:
    """Write a picture (height, width, channels) of bytes, with 1 or 3 channels."""
    height, width, channels = picture.shape
    lines = np.concatenate(
        [np.zeros((height, 1), np.uint8), picture.reshape(height, width * channels)], axis=1
    )  # each line begins with its filter: none
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPES[channels], 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in chunks))


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
