"""Level 1: collectives on tensors. Every call has a name and is counted in a ledger; the protocol is `core.comm.Comm`."""

from meshwright.comm.async_comm import ChainedWork
from meshwright.comm.comm_ledger import Ledger, LedgerEntry
from meshwright.comm.composed_collectives import ComposedComm, SharedMemoryGroup
from meshwright.comm.null_comm import NullComm
from meshwright.comm.routed_comm import RoutedComm
from meshwright.comm.shared_memory_window import SharedMemoryWindow, open_window
from meshwright.comm.thread_comm import ThreadComm, ThreadWorld
from meshwright.comm.torch_comm import TorchComm

__all__ = [
    "ChainedWork", "ComposedComm", "Ledger", "LedgerEntry", "NullComm", "RoutedComm", "SharedMemoryGroup", "SharedMemoryWindow", "ThreadComm",
    "ThreadWorld", "TorchComm", "open_window",
]  # fmt: skip
