"""Level 1: start, monitor and stop ranks. On this machine by Meshwright's own supervisor; elsewhere by adopting ranks that a launcher started."""

from meshwright.launch.fork_server import ForkServer
from meshwright.launch.launch_environment import LaunchedRank, default_backend, detect_launched_rank
from meshwright.launch.rendezvous import Rendezvous, connect_store, join_process_group, leave_process_group
from meshwright.launch.worker_pool import RankFailure, WorkerPool
from meshwright.launch.worker_process import describe_fault

__all__ = [
    "ForkServer", "LaunchedRank", "RankFailure", "Rendezvous", "WorkerPool", "connect_store", "default_backend", "describe_fault",
    "detect_launched_rank", "join_process_group", "leave_process_group",
]  # fmt: skip
