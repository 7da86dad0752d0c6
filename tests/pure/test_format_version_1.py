"""Files of format version 1 are read: plans that an earlier Meshwright wrote, and a calibration's keys."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from fake_inputs import rates

from meshwright.core import calibration, context_policy, expert_policy, plan, routes, schedule, spatial_policy, tensor_policy
from meshwright.core.errors import RequestError
from meshwright.core.format_version_1 import VERSION_1_KEYS
from meshwright.core.plan import Plan
from meshwright.core.plan_checks import VERSION
from meshwright.core.serialization import from_data, to_data

GOLDEN = Path(__file__).parent.parent / "golden" / "plans_v1"
LATER_KEYS = ("samples", "batch_norm", "serve")  # that version 1 did not have
MODULES = (calibration, context_policy, expert_policy, plan, routes, schedule, spatial_policy, tensor_policy)


@pytest.mark.parametrize("file", sorted(GOLDEN.glob("*.json")), ids=lambda file: file.stem)
def test_a_plan_of_version_1_is_read_and_written_as_version_2(file: Path, tmp_path: Path) -> None:
    old = json.loads(file.read_text())
    found = Plan.load(file)
    found.save(tmp_path / "plan.json")
    new = json.loads((tmp_path / "plan.json").read_text())
    assert (old["version"], new["version"]) == (1, VERSION)
    assert Plan.load(tmp_path / "plan.json") == found
    known = {key: value for key, value in new.items() if key not in LATER_KEYS}
    assert sorted(_leaves({**old, "version": 0})) == sorted(_leaves({**known, "version": 0})), "every value is kept"


def _leaves(data: Any) -> list[str]:
    if isinstance(data, dict):
        return [leaf for value in data.values() for leaf in _leaves(value)]
    if isinstance(data, list):
        return [leaf for value in data for leaf in _leaves(value)]
    return [repr(float(data) if isinstance(data, int) and not isinstance(data, bool) else data)]


def test_every_old_key_names_a_field_and_hides_none() -> None:
    classes = {name: kind for module in MODULES for name, kind in vars(module).items() if dataclasses.is_dataclass(kind)}
    for kind, keys in VERSION_1_KEYS.items():
        if "." in kind:  # the keys of a mapping
            continue
        fields = {field.name for field in dataclasses.fields(classes[kind])}
        assert set(keys.values()) <= fields and not fields & set(keys), kind


def test_fixed_seconds_of_an_old_calibration_keep_their_meaning() -> None:
    written = to_data(rates(2))
    old = {**written, "fixed": {"meeting": 1e-3, "handing": 2e-3, "parted": 3e-3, "hook": 4e-3}}
    assert from_data(calibration.Rates, old, "rates").fixed == {"tp_sync": 1e-3, "p2p": 2e-3, "split_backward": 3e-3, "hook": 4e-3}


def test_an_old_key_beside_its_new_name_is_refused() -> None:
    data = {**to_data(Plan("m", 8)), "seats": []}
    with pytest.raises(RequestError, match="'seats' is the old name of 'device_order'"):
        from_data(Plan, data, "plan.json")
