"""The wheel: built, installed away from the checkout, and run there, on a machine that nobody has measured; data files and type marker included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(1200)  # the machine is probed, which takes minutes where it is busy
def test_the_wheel_runs_outside_the_checkout(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, text=True)
    (wheel,) = tmp_path.glob("*.whl")
    home = tmp_path / "site"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(home), str(wheel)], check=True, capture_output=True)
    for name in (
        "py.typed",
        "describe/catalog/devices.json",
        "describe/catalog/machines/leonardo.toml",
        "observe/report.css",
        "observe/report.js",
        "zoo/configs/phi-1_5.json",
    ):
        assert (home / "meshwright" / name).exists(), name
    env = {**os.environ, "PYTHONPATH": str(home), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    where = subprocess.run(
        [sys.executable, "-c", "import meshwright; print(meshwright.__file__)"], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert where.stdout.startswith(str(home)), where
    words = ["train", "gpt-tiny", "--steps", "3", "--json"]
    done = subprocess.run([sys.executable, "-m", "meshwright.cli.main", *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / json.loads(done.stdout)["report"]).exists()
    assert list((tmp_path / "cache").glob("meshwright/calibration-*.json"))
