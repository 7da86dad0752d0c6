"""Backend `mpi` with tensors on a CUDA device: staged through host memory, or handed over where the MPI is CUDA-aware."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from meshwright.launch.mpi_launcher import find_mpirun, mpirun_command

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(not torch.cuda.is_available() or find_mpirun() is None, reason="needs a CUDA device and mpirun")
def test_cuda_tensors_over_mpi() -> None:
    command, environ = mpirun_command(2, {"OMP_NUM_THREADS": "1"})
    done = subprocess.run(
        [*command, sys.executable, str(Path(__file__).parent / "mpi_cuda.py")], env=environ, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("all held") == 2
