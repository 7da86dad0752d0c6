"""Level 1: start ranks, watch them, end them. On this machine by a supervisor of our own; elsewhere by adopting the ranks we find."""

from meshwright.launch.adopt import Place, adopted, default_backend
from meshwright.launch.nursery import Nursery
from meshwright.launch.rendezvous import Rendezvous, join, leave
from meshwright.launch.workers import RankFailure, Workers

__all__ = ["Nursery", "Place", "RankFailure", "Rendezvous", "Workers", "adopted", "default_backend", "join", "leave"]
