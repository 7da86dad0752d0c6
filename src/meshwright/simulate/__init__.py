"""Level 3, no torch: discrete-event simulation of a schedule on a modelled network."""

from meshwright.simulate.core_network import CallTiming, CoreNetwork, TimeCurve
from meshwright.simulate.disturbances import Disturbances, LinkDegradation
from meshwright.simulate.engine import LostStep, Simulation, simulate
from meshwright.simulate.network_model import AlphaBetaNetwork, FabricNetwork, IdealNetwork, Network, OverlapBehavior
from meshwright.simulate.network_topology import DirectedLink, NonBlockingTopology, Topology

__all__ = [
    "AlphaBetaNetwork",
    "CallTiming",
    "CoreNetwork",
    "DirectedLink",
    "Disturbances",
    "FabricNetwork",
    "IdealNetwork",
    "LinkDegradation",
    "LostStep",
    "Network",
    "NonBlockingTopology",
    "OverlapBehavior",
    "Simulation",
    "TimeCurve",
    "Topology",
    "simulate",
]  # fmt: skip
