"""The page that `bench/families.py --page` writes: counts, goals and reasons from a few results."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from family_page import general_reason, markdown

UNTRACED = "model {} could not be traced, so data parallelism alone can run it: Python reads a value in `{}` (/site-packages/{}.py:17)\nmore"


def equal(cut: float = 0.0) -> dict[str, Any]:
    return {"status": "equal", "difference": 1e-7, "cut": cut}


def result(model: str, tp: dict[str, Any], pp: dict[str, Any]) -> dict[str, Any]:
    return {"model": model, "built": True, "class": "Some", "parameters": 1234, "cells": {"dp": equal(), "zero3": equal(), "tp": tp, "pp": pp}}


def refused(why: str) -> dict[str, Any]:
    return {"status": "refused", "why": why}


RESULTS = [
    result("transformers/b", equal(1.0), equal()),
    result("transformers/a", equal(0.5), refused(UNTRACED.format("A", "if x > 0:", "a"))),
    result("timm/c", {"status": "wrong", "difference": 0.25, "cut": 1.0}, refused(UNTRACED.format("C", "x.item() | y", "c"))),
    {"model": "transformers/d", "built": False, "why": "ValueError: D: ImportError: D requires the natten library", "cells": {}},
    {"model": "transformers/e", "built": False, "why": "ValueError: E: ImportError: E requires the detectron2 library", "cells": {}},
]


def rows(page: str, start: str) -> list[str]:
    return [line for line in page.splitlines() if line.startswith(f"| {start}")]


def test_counts_and_goals_are_on_top() -> None:
    page = markdown(RESULTS)
    assert "3 of 5 models could be built" in page
    assert rows(page, "data parallel") == ["| data parallel, dp=2 | 3 | 100.0% | 98% | reached | 0 | 0 | 0 | 0 | 0 |  |"]
    assert rows(page, "tensor") == ["| tensor parallel, tp=2 | 2 | 66.7% | 80% | missed | 0 | 0 | 1 | 0 | 0 | ≥ 90% in 1 of 2 (50.0%) |"]
    assert rows(page, "pipeline") == ["| pipeline, pp=2 | 1 | 33.3% | 85% | missed | 2 | 0 | 0 | 0 | 0 |  |"]


def test_libraries_count_what_was_not_built() -> None:
    page = markdown(RESULTS)
    assert rows(page, "transformers |") == ["| transformers | 2 of 4 | 2 (100.0%) | 2 (100.0%) | 2 (100.0%) | 1 (50.0%) |"]
    assert rows(page, "timm |") == ["| timm | 1 of 1 | 1 (100.0%) | 1 (100.0%) | 0 (0.0%) | 0 (0.0%) |"]


def test_a_reason_stands_once_with_its_models() -> None:
    page = markdown(RESULTS)
    (row,) = rows(page, "2 | refused")
    assert "| timm/c (pp), a (pp) |" in row
    assert "if x > 0" not in row
    assert "/site-packages" not in row
    assert row.count("|") == 5  # nothing in a reason ends a cell


def test_failures_are_listed() -> None:
    page = markdown(RESULTS)
    assert rows(page, "`timm/c` | tp") == ["| `timm/c` | tp | **wrong** | differs by 2.5e-01 |"]
    assert "## Failures" not in markdown(RESULTS[:2])


def test_models_left_out_are_folded_by_reason() -> None:
    page = markdown(RESULTS)
    assert "- need a library that is not installed: d, e" in page
    assert page.index("<summary>2 models, by reason</summary>") < page.index("- need a library")


def test_every_model_has_a_row() -> None:
    page = markdown(RESULTS)
    assert rows(page, "`transformers/a`") == ["| `transformers/a` | Some | 1,234 | = | = | = | refused |"]
    assert len(rows(page, "`transformers/")) == 2


def test_what_differs_between_models_leaves_the_reason() -> None:
    one = "tp=2: nothing in this model can be sharded (convolution in backbone.encoder.conv1 needs all of it): use --mesh dp=2"
    other = "tp=2: nothing in this model can be sharded (convolution in stem.conv needs all of it): use --mesh dp=2"
    assert (
        general_reason(one)
        == general_reason(other)
        == "tp=2: nothing in this model can be sharded (convolution in … needs all of it): use --mesh dp=2"
    )
    assert general_reason(one) != general_reason(one.replace("tp=2", "tp=4"))


def test_no_results_make_a_page_too() -> None:
    assert "0 of 0 models" in markdown([])
