"""Closed-form collectives over equal nodes: α–β of the links that a group crosses, shared with its sibling groups."""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.core.calibration import AlphaBetaModel
from meshwright.core.schedule import wire_factor
from meshwright.cost.constants import CostConstants
from meshwright.cost.parallel_config import UniformCluster

# Seconds to start a collective of 1 MB or more, at one rank or node, and for each doubling: NCCL all-reduce among 2 to 8 A100s of one node and among
# 2 to 16 nodes (bench/fit_published.py prints the fit).
_INTRA_NODE_START_S, _INTRA_NODE_DOUBLING_S = 40e-6, 11.5e-6
_INTER_NODE_START_S, _INTER_NODE_DOUBLING_S = 60e-6, 33e-6


@dataclass(frozen=True)
class Ring:
    """One process group: its number of ranks and the stride between their rank numbers."""

    ranks: int
    stride: int = 1

    def ranks_per_node(self, per_node: int) -> int:
        return max(min(self.ranks, per_node // self.stride), 1)


def ring_alpha_beta(op: str, ring: Ring, cluster: UniformCluster, constants: CostConstants) -> AlphaBetaModel:
    """α–β per rank while all sibling groups communicate too: groups side by side share a node's network."""
    intra = cluster.link.bandwidth * constants.intra
    local = ring.ranks_per_node(cluster.per_node)
    if local == ring.ranks:
        return AlphaBetaModel(_INTRA_NODE_START_S + _INTRA_NODE_DOUBLING_S * math.log2(max(ring.ranks, 1)), intra)
    nodes = ring.ranks / local
    # A ring enters and leaves a node once, over all the NICs of its members; in pairwise exchanges each rank has one NIC.
    nics = 1 if op in ("all_to_all", "send") else local
    inter = cluster.network.bandwidth * constants.inter * min(nics / cluster.per_node, 1.0)
    if op == "all_to_all":
        inter *= ring.ranks / (ring.ranks - local)  # what stays in the node does not cross
    return AlphaBetaModel(_INTER_NODE_START_S + _INTER_NODE_DOUBLING_S * math.log2(max(nodes, 1)), min(intra, inter))


def ring_seconds(op: str, size: float, ring: Ring, cluster: UniformCluster, constants: CostConstants, messages: float = 1.0) -> float:
    """Seconds for `size` bytes of a tensor in `messages` calls; each all-gather or reduce-scatter goes around the whole ring."""
    if ring.ranks <= 1 or size <= 0:
        return 0.0
    line = ring_alpha_beta(op, ring, cluster, constants)
    rounds = ring.ranks - 1 if op in ("all_gather", "reduce_scatter") and ring.ranks_per_node(cluster.per_node) < ring.ranks else 0
    return line.seconds(size * wire_factor(op, ring.ranks)) + messages * rounds * constants.hop_s
