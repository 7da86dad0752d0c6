"""Every test here plans from the same calibration, whatever the runs before it measured; servers end with the module that started them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.procs.served import serve

__all__ = ["serve"]


@pytest.fixture(autouse=True)
def uncorrected(measured: Callable[[], None]) -> None:
    measured()
