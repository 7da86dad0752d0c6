"""Level 3, no torch: a schedule run event by event on a network that exists only as numbers."""

from meshwright.simulate.engine import Simulation, simulate
from meshwright.simulate.network import Ideal, Linked, Network

__all__ = ["Ideal", "Linked", "Network", "Simulation", "simulate"]
