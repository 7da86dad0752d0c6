"""The cells of `bench/families.py` as jobs: other people's models under a plan, beside one device."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import family_cells


def run_cell(rank: int, world: int, init_method: str, key: str, cell: str) -> dict[str, Any]:
    if key not in family_cells._references:
        built = family_cells.reference(rank, world, init_method, key)
        if not built["built"]:
            return {"status": "not built", "why": built["why"]}
    return family_cells.run_cell(rank, world, init_method, key, cell)


def model_names() -> list[str]:
    return sorted(family_cells.families())
