"""Level 1: collectives on tensors, each call named and counted (the protocol is `core.comm.Comm`)."""

from meshwright.comm.composed import Composed, SharedMemoryGroup
from meshwright.comm.ledger import Ledger, Line
from meshwright.comm.null import NullComm
from meshwright.comm.pending import Then
from meshwright.comm.routed import RoutedComm
from meshwright.comm.threads import ThreadComm, ThreadWorld
from meshwright.comm.torch_comm import TorchComm
from meshwright.comm.window import Window, open_window

__all__ = [
    "Composed",
    "Ledger",
    "Line",
    "NullComm",
    "RoutedComm",
    "SharedMemoryGroup",
    "Then",
    "ThreadComm",
    "ThreadWorld",
    "TorchComm",
    "Window",
    "open_window",
]
