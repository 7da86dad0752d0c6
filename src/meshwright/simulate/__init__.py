"""Level 3, no torch: discrete-event simulation of a schedule on a modelled network."""

from meshwright.simulate.core_network import CallTiming, CoreNetwork, TimeCurve
from meshwright.simulate.disturbances import Disturbances, LinkDegradation
from meshwright.simulate.engine import Simulation, simulate
from meshwright.simulate.network_model import AlphaBetaNetwork, FabricNetwork, IdealNetwork, Network, OverlapBehavior
from meshwright.simulate.network_topology import NonBlockingTopology

__all__ = [
    "AlphaBetaNetwork", "CallTiming", "CoreNetwork", "Disturbances", "FabricNetwork", "IdealNetwork", "LinkDegradation", "Network",
    "NonBlockingTopology", "OverlapBehavior", "Simulation", "TimeCurve", "simulate",
]  # fmt: skip
