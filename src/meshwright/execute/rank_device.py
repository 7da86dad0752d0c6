"""A rank's own device."""

from __future__ import annotations

import warnings

import torch

from meshwright.core.rank_devices import device_index


def setup_device(device_name: str, threads: int) -> torch.device:
    """Select and configure the device that a name such as 'cuda:0' or 'cpu' means."""
    if device_name != "cpu":
        torch.cuda.set_device(device_index(device_name))
        torch.set_float32_matmul_precision("high")
        return torch.device(device_name)
    if threads:
        torch.set_num_threads(threads)
    # On a CPU without bf16 support torch falls back and warns, with a page of C++ frames from every rank.
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    return torch.device("cpu")
