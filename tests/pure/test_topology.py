"""Topologies: paths connect, are as long one way as the other, and what a group gets of them is what counting by hand gives."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.core.cluster import Cluster, Device, Link, Node
from meshwright.core.cluster_changes import map_links
from meshwright.core.fabric import Dragonfly, Fabric, FatTree, HammingMesh, SingleSwitch, Torus
from meshwright.core.mesh import AXES, Mesh
from meshwright.core.node_topology import FullyConnected, NodeSwitch, NodeTopology, PcieTree
from meshwright.core.serialization import from_data, to_data
from meshwright.cost.collective_cost import group_ranks

NVLINK, NIC, LOCAL, GLOBAL = Link("NVLink", 3e-6, 300e9), Link("nic", 5e-6, 25e9), Link("local", 1e-6, 25e9), Link("global", 2e-6, 25e9)
INSIDES: dict[str, NodeTopology] = {
    "switched": NodeSwitch(NVLINK), "wired": FullyConnected(Link("wire", 3e-6, 100e9)),
    "pcie": PcieTree(Link("PCIe", 1e-5, 32e9), switch=2, socket=4, bridge=Link("UPI", 1e-6, 60e9)),
}  # fmt: skip
FABRICS: dict[str, Fabric] = {
    "flat": SingleSwitch(NIC, ports=4),
    "fat-tree": FatTree(NIC, leaf=4, ports=4, taper=2.0),
    "pods": FatTree(NIC, leaf=2, ports=4, pod=3, taper=1.5, pod_taper=2.0),
    "rails": FatTree(NIC, leaf=6, ports=8, rails=True),
    "dragonfly": Dragonfly(NIC, switch=2, group=3, local=LOCAL, between=GLOBAL, ports=4, global_links=2),
    "dragonfly+": Dragonfly(NIC, switch=2, group=3, local=LOCAL, between=GLOBAL, ports=4, spines=3),
    "torus 2": Torus(NIC, (4, 6)),
    "torus 3": Torus(NIC, (2, 3, 4)),
    "hammingmesh": HammingMesh(NIC, board=(2, 2), boards=(2, 3)),
    "hammingmesh 4": HammingMesh(NIC, board=(4, 2), boards=(1, 3), taper=2.0),
}
NODES = 24


def cluster(fabric: Fabric | None, inside: NodeTopology | None = INSIDES["switched"], nodes: int = NODES, devices: int = 8) -> Cluster:
    every = tuple(Device("cuda", "GPU", i, 80 << 30) for i in range(devices))
    return Cluster("made up", (Node("node", every, 64, 1 << 40, link=NVLINK, inside=inside),) * nodes, NIC, fabric=fabric)


def any_fabric() -> st.SearchStrategy[str]:
    return st.sampled_from(sorted(FABRICS))


ranks = st.integers(0, NODES * 8 - 1)
groups = st.sets(ranks, min_size=2, max_size=24).map(lambda found: tuple(sorted(found)))


@given(any_fabric(), st.sampled_from(sorted(INSIDES)), ranks, ranks)
@settings(max_examples=300, deadline=None)
def test_paths(fabric: str, inside: str, a: int, b: int) -> None:
    found = cluster(FABRICS[fabric], INSIDES[inside])
    there, back = found.path(a, b), found.path(b, a)
    assert (there == ()) == (a == b)
    assert len(there) == len(back), "as many hops back"
    assert sum(h.latency_s for h in there) == pytest.approx(sum(h.latency_s for h in back))
    assert min((h.bandwidth for h in there), default=1) == min((h.bandwidth for h in back), default=1)
    assert len({h.key for h in there}) == len(there), "no wire is passed twice"
    assert all(h.bandwidth > 0 and h.source_ranks >= 1 and h.kind_count >= 1 for h in there)
    assert found.path(a, b) == there, "keys are stable"


@given(st.sampled_from(["torus 2", "torus 3"]), st.integers(0, NODES - 1), st.integers(0, NODES - 1))
@settings(max_examples=150, deadline=None)
def test_a_torus_walks_from_neighbour_to_neighbour_the_shorter_way(name: str, a: int, b: int) -> None:
    fabric = FABRICS[name]
    assert isinstance(fabric, Torus)
    path = cluster(fabric, devices=1).path(a, b)
    here, goal = _coordinates(a, fabric.shape), _coordinates(b, fabric.shape)
    assert len(path) == sum(min((x - y) % n, (y - x) % n) for x, y, n in zip(here, goal, fabric.shape, strict=True))
    for hop in path:
        assert hop.key[1:] == tuple(here), "each wire begins where the last one ended"
        dim, sign = int(str(hop.kind)[-2]), str(hop.kind)[-1]
        here[dim] = (here[dim] + (1 if sign == "+" else -1)) % fabric.shape[dim]
    assert here == goal


@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 3), st.integers(0, 199), st.integers(0, 199))
@settings(max_examples=200, deadline=None)
def test_a_dragonfly_has_at_most_three_hops_between_switches(switch: int, group: int, spines: int, a: int, b: int) -> None:
    found = cluster(Dragonfly(NIC, switch, group, LOCAL, GLOBAL, spines=spines), nodes=200, devices=1)
    path = found.path(a, b)
    between = [hop for hop in path if hop.switches]
    assert len(between) <= 3
    assert sum(hop.kind == "between groups" for hop in path) == (a // (switch * group) != b // (switch * group))
    if not spines:  # the switches passed are joined end to end
        ends = [tuple(hop.key[1:]) for hop in between if hop.kind == "local"]
        assert all(first != last for first, last in ends)
        assert not ends or a == b or ends[0][0] == a // switch or ends[-1][1] == b // switch


@given(st.sampled_from(["hammingmesh", "hammingmesh 4"]), st.integers(0, NODES - 1), st.integers(0, NODES - 1))
@settings(max_examples=100, deadline=None)
def test_hammingmesh_leaves_a_board_only_for_another(name: str, a: int, b: int) -> None:
    fabric = FABRICS[name]
    assert isinstance(fabric, HammingMesh)
    jumps = Counter(str(hop.kind).split()[0] for hop in cluster(fabric, devices=1).path(a, b) if hop.switches)
    (row, column), (goal_row, goal_column) = (_coordinates(n, fabric.shape) for n in (a, b))
    assert jumps["row"] == 2 * (column // fabric.board[1] != goal_column // fabric.board[1])
    assert jumps["column"] == 2 * (row // fabric.board[0] != goal_row // fabric.board[0])


@given(any_fabric(), st.sampled_from(sorted(INSIDES)), groups, st.sampled_from(["ring", "all_to_all"]), st.booleans(), st.floats(1.0, 10.0))
@settings(max_examples=150, deadline=None)
def test_more_bandwidth_never_gives_less(fabric: str, inside: str, group: tuple[int, ...], pattern: str, everyone: bool, factor: float) -> None:
    found = cluster(FABRICS[fabric], INSIDES[inside])
    better = map_links(found, lambda link: replace(link, bandwidth=link.bandwidth * factor))
    before, after = (c.group_bandwidth(group, pattern, everyone).rate for c in (found, better))  # type: ignore[arg-type]
    assert after == pytest.approx(before * factor)
    if found.link == NIC:  # the cards alone: never less, and never more than they give
        cards = replace(found, fabric=replace(FABRICS[fabric], link=replace(NIC, bandwidth=NIC.bandwidth * factor)))
        assert before * (1 - 1e-9) <= cards.group_bandwidth(group, pattern, everyone).rate <= before * factor * (1 + 1e-9)  # type: ignore[arg-type]


@given(any_fabric(), groups, st.sampled_from(["ring", "all_to_all"]))
@settings(max_examples=150, deadline=None)
def test_company_never_helps(fabric: str, group: tuple[int, ...], pattern: str) -> None:
    found = cluster(FABRICS[fabric])
    alone, together = (found.group_bandwidth(group, pattern, everyone).rate for everyone in (False, True))  # type: ignore[arg-type]
    assert together <= alone * (1 + 1e-9)


@pytest.mark.parametrize("name", ["flat", "fat-tree", "rails"])
@pytest.mark.parametrize(("tp", "dp"), [(8, 24), (4, 48), (2, 96), (1, 192), (1, 8), (2, 16)])
def test_contention_by_sort_is_contention_by_counting(name: str, tp: int, dp: int) -> None:
    """All groups of the data axis walked one by one: the busiest wire has as many rings as `span` says from one group."""
    found = cluster(FABRICS[name])
    load: Counter[tuple[str | int, ...]] = Counter()
    wires = {}
    for first in range(0, tp * dp, dp * tp):
        for offset in range(tp):
            group = [first + offset + tp * i for i in range(dp)]
            for a, b in zip(group, group[1:] + group[:1], strict=True):
                for hop in found.path(a, b):
                    if hop.kind in ("nic up", "leaf up"):
                        load[hop.key] += 1
                        wires[hop.key] = hop
    reach = found.group_bandwidth(range(0, tp * dp, tp))
    if load:
        slowest = min(wires[key].bandwidth / count for key, count in load.items())
        cards = min(8 // tp, dp) * 25e9  # a group has no more cards than ranks on a node
        assert reach.rate == pytest.approx(min(slowest, cards, 300e9))
    else:
        assert reach.rate == 300e9


def test_wires_of_a_node() -> None:
    wired, pcie = cluster(None, INSIDES["wired"], 1, 4), cluster(None, INSIDES["pcie"], 1, 8)
    assert [wired.group_bandwidth(tuple(range(n))).rate for n in (2, 3, 4)] == [100e9, 200e9, 300e9], "a ring for each neighbour"
    assert pcie.group_bandwidth((0, 1)).rate == 32e9, "below one switch"
    assert pcie.group_bandwidth((0, 2)).rate == 16e9, "two such groups share a switch's way up"
    assert pcie.group_bandwidth((0, 2), all_groups_active=False).rate == 32e9
    assert pcie.group_bandwidth((0, 4)).rate == 15e9, "four share the bridge between sockets"
    assert cluster(None, None, 2).group_bandwidth(range(16)).rate == 25e9, "without a topology, the link's figure"


def test_all_to_all_by_hand() -> None:
    tree = cluster(FABRICS["fat-tree"])
    inside, crossing = 300e9, (192 - 32) / 191  # of a rank's bytes, those that leave its leaf of four nodes
    assert tree.group_bandwidth(range(8), "all_to_all").rate == pytest.approx(inside)
    assert tree.group_bandwidth(range(192), "all_to_all").rate == pytest.approx(4 * 100e9 / 2 / (32 * crossing), rel=0.1)
    two = cluster(Dragonfly(NIC, 2, 3, LOCAL, GLOBAL, ports=4), nodes=12)
    assert two.group_bandwidth(range(96), "all_to_all").rate == pytest.approx(25e9 / (48 * 48 / 95), rel=0.1), "one link joins the two groups"


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_members_are_the_mesh_s_first_group(data: st.DataObject) -> None:
    degrees = {axis: data.draw(st.integers(1, 3)) for axis in AXES if axis != "tp"}
    mesh = Mesh(**degrees, tp=tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))))  # type: ignore[arg-type]
    axes = {"data": ("dp", "shard", "cp", "ep"), "replica": ("dp", "cp", "ep"), "tp": ("tp",), "pp": ("pp",), "dp": ("dp",), "tpx": ("tpx",)}
    name = data.draw(st.sampled_from(sorted(axes)))
    assert list(group_ranks(name, 0, mesh)) == mesh.groups(*axes[name])[0]
    assert list(group_ranks("world", 0, mesh)) == list(range(mesh.size))


@pytest.mark.parametrize("name", sorted(FABRICS))
def test_topologies_are_data(name: str) -> None:
    found = cluster(FABRICS[name], INSIDES["pcie"], 2)
    assert from_data(Cluster, to_data(found), "cluster.json") == found


def _coordinates(number: int, shape: tuple[int, ...]) -> list[int]:
    found: list[int] = []
    for size in reversed(shape):
        number, place = divmod(number, size)
        found.insert(0, place)
    return found
