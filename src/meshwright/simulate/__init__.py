"""Level 3, no torch: a schedule run event by event on a network that exists only as numbers."""

from meshwright.simulate.cores import Cores, Curve, Taken
from meshwright.simulate.disturb import Degraded, Disturbances
from meshwright.simulate.engine import Lost, Simulation, simulate
from meshwright.simulate.network import Fabric, Habits, Ideal, Linked, Network
from meshwright.simulate.topology import Flat, Hop, Topology

__all__ = [
    "Cores", "Curve", "Degraded", "Disturbances", "Fabric", "Flat", "Habits", "Hop", "Ideal", "Linked", "Lost", "Network", "Simulation", "Taken",
    "Topology", "simulate",
]  # fmt: skip
