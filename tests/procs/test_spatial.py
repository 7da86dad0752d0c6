"""Spatial parallelism: blocks with halos equal one device, and every message is counted."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.core.mesh import Mesh
from tests.procs.spread import check, model_of, spread


@pytest.mark.parametrize(
    ("model", "ways", "grid"),
    [
        (model_of("cosmoflow-tiny"), 4, ()),
        (model_of("cnn"), 2, ()),
        ({"images": "windows"}, 2, ()),
        ({"images": "windows", "masked": True}, 4, ()),
        ({"images": "resnet"}, 4, ()),
        ({"images": "resnet"}, 3, (1, 3)),
        ({"images": "hourglass"}, 4, ()),
        ({"images": "hourglass"}, 4, (4, 1)),
    ],
)
def test_blocks_are_equal_to_one_device(pool: Any, model: dict[str, Any], ways: int, grid: tuple[int, ...]) -> None:
    check(pool, model, *spread(model, Mesh(cp=ways), grid=grid))


@pytest.mark.parametrize(
    ("model", "mesh", "zero", "micro", "recompute"),
    [
        (model_of("cosmoflow-tiny"), Mesh(dp=2, cp=2), 0, 2, "full"),
        (model_of("cnn"), Mesh(shard=2, cp=2), 1, 1, "full"),
        ({"images": "windows", "masked": True}, Mesh(shard=2, cp=2), 2, 2, "none"),
        ({"images": "hourglass"}, Mesh(shard=2, cp=2), 3, 1, "full"),
        (model_of("cosmoflow-tiny"), Mesh(shard=2, cp=2), 3, 2, "none"),
    ],
)
def test_with_data_parallelism_and_zero(pool: Any, model: dict[str, Any], mesh: Mesh, zero: int, micro: int, recompute: str) -> None:
    check(pool, model, *spread(model, mesh, 8, zero=zero, micro=micro, recompute=recompute))
