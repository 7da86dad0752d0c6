"""Owners of experts and tables along `ep`: equal to one device, and counted."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.core.mesh import Mesh
from tests.procs.spread import check, model_of, spread


@pytest.mark.parametrize("name", ["Mixtral", "dlrm-tiny"])
@pytest.mark.parametrize("mesh", [Mesh(ep=2), Mesh(ep=4), Mesh(dp=2, ep=2)], ids=str)
def test_owners_are_equal_to_one_device(pool: Any, name: str, mesh: Mesh) -> None:
    model = model_of(name)
    check(pool, model, *spread(model, mesh, 8))
