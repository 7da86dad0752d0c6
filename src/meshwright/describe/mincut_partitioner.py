"""Predicts which activations torch.compile saves for backward, where eager execution saves whatever each operation asks for.

[Note: min-cut recomputation]
A compiler sees forward and backward of a layer at once, and need not save the results of element-wise operations: its fused backward kernels can
recompute them from other saved tensors. Inputs of backward's matmuls and attention are always saved, since they must be in memory anyway. The rest is
saved where it is smallest: of a norm that casts its input up, the narrow input. So among all cuts that separate what backward needs from what only
forward can compute (matmuls, random numbers, inputs from other layers) the compiler takes the one of fewest bytes: a minimum cut, found by maximum
flow.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass
class _StorageNode:
    """A storage that forward allocated, or that existed before."""

    bytes: int
    layer: str | None  # the layer that allocated it; None: it existed before
    recomputable: bool = False  # whether backward can recompute it
    sources: tuple[int, ...] = ()  # nodes it is recomputed from, besides constants
    saved_by: str | None = None
    read_by_matmul: bool = False  # read by a matmul in backward


class MinCutPartitioner:
    """The storages of one traced step as a graph; addresses identify them while they are alive."""

    def __init__(self, constants: Iterable[int]) -> None:
        self._constants = frozenset(constants)  # parameters, buffers, the batch: always in memory
        self._nodes: list[_StorageNode] = []
        self._index_by_address: dict[int, int] = {}

    def record_op(self, storages: Iterable[Any], sources: Iterable[Any], layer: str, recomputable: bool) -> None:
        """Record a forward operation; `recomputable`: a compiler may recompute it in backward."""
        distinct = {s._cdata: s for s in sources if s._cdata not in self._constants} if recomputable else {}
        inputs = tuple(map(self._node_index, distinct.values()))
        for storage in storages:
            if storage._cdata not in self._index_by_address and storage._cdata not in self._constants:
                self._index_by_address[storage._cdata] = len(self._nodes)
                self._nodes.append(_StorageNode(storage.nbytes(), layer, recomputable, inputs))

    def mark_saved(self, storage: Any, layer: str) -> None:
        """Record that eager execution saves the storage, for this layer."""
        self._nodes[self._node_index(storage)].saved_by = layer

    def reassign_saver(self, address: int, layer: str) -> None:
        if address in self._index_by_address:
            self._nodes[self._index_by_address[address]].saved_by = layer

    def mark_read_by_matmul(self, storages: Iterable[Any]) -> None:
        """Record that a matmul in backward reads these storages."""
        for storage in storages:
            if storage._cdata in self._index_by_address:
                self._nodes[self._index_by_address[storage._cdata]].read_by_matmul = True

    def forget(self, address: int) -> None:
        self._index_by_address.pop(address, None)

    def rematerialized_bytes(self) -> dict[str, int]:
        """By layer: bytes that eager execution saves and a compiler does not."""
        saved: dict[str, list[int]] = {}
        for index, node in enumerate(self._nodes):
            if node.saved_by is not None and not node.read_by_matmul:
                saved.setdefault(node.saved_by, []).append(index)
        return {layer: max(sum(self._nodes[n].bytes for n in needed) - self._min_cut_bytes(layer, needed), 0) for layer, needed in saved.items()}

    def _node_index(self, storage: Any) -> int:
        if storage._cdata not in self._index_by_address:
            self._index_by_address[storage._cdata] = len(self._nodes)
            self._nodes.append(_StorageNode(storage.nbytes(), None))
        return self._index_by_address[storage._cdata]

    def _min_cut_bytes(self, layer: str, needed: list[int]) -> int:
        """The fewest bytes to save from which everything needed can be recomputed in this layer."""
        capacity: dict[int, dict[int, float]] = {}  # residual capacities; a storage is two nodes, its input and its output side
        todo, seen = deque(needed), set(needed)
        start, end = -1, -2

        def add_edge(a: int, b: int, size: float) -> None:
            capacity.setdefault(a, {})[b] = size
            capacity.setdefault(b, {}).setdefault(a, 0.0)

        while todo:
            index = todo.popleft()
            node = self._nodes[index]
            add_edge(2 * index, 2 * index + 1, 0.0 if node.read_by_matmul else float(node.bytes))
            if node.read_by_matmul:
                continue  # saved in any case
            if not node.recomputable or node.layer not in (layer, ""):
                add_edge(start, 2 * index, math.inf)
                continue
            for source in node.sources:
                add_edge(2 * source + 1, 2 * index, math.inf)
                if source not in seen:
                    seen.add(source)
                    todo.append(source)
        for index in needed:
            add_edge(2 * index + 1, end, math.inf)
        return int(_max_flow(capacity, start, end))


def _max_flow(capacity: dict[int, dict[int, float]], source: int, sink: int) -> float:
    """The maximum flow by shortest augmenting paths; modifies `capacity`."""
    total = 0.0
    while path := _augmenting_path(capacity, source, sink):
        flow = min(capacity[a][b] for a, b in path)
        for a, b in path:
            capacity[a][b] -= flow
            capacity[b][a] += flow
        total += flow
    return total


def _augmenting_path(capacity: dict[int, dict[int, float]], source: int, sink: int) -> list[tuple[int, int]]:
    """The edges of a shortest path with capacity left, from the sink back; empty if there is none."""
    previous: dict[int, int] = {source: source}
    todo = deque([source])
    while todo and sink not in previous:
        node = todo.popleft()
        for neighbor, residual in capacity.get(node, {}).items():
            if residual > 0 and neighbor not in previous:
                previous[neighbor] = node
                todo.append(neighbor)
    path, node = list[tuple[int, int]](), sink
    while node != source and node in previous:
        path.append((previous[node], node))
        node = previous[node]
    return path
