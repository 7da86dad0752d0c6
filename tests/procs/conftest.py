"""Every test here plans from the same calibration, whatever the runs before it measured."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture(autouse=True)
def uncorrected(measured: Callable[[], None]) -> None:
    measured()
