"""Hypothesis strategies: random small models, and random plans that are legal for them on one to four ranks."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from meshwright.core.mesh import Mesh
from meshwright.core.plan import OVERLAPS, BalancePolicy, MemoryPolicy, Plan, SyncPolicy

OVERLAPPED = st.sampled_from([(), OVERLAPS])

ZOO_UNITS = {"gpt-tiny": ("blocks.0", "blocks.1"), "llama-tiny": ("blocks.0", "blocks.1"), "vae": ("encoder", "decoder"), "cnn": ("dense1",)}


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    """A random perceptron, masked or not; or a model of the zoo, with dropout where it has any."""
    if draw(st.integers(0, 3)) == 0:
        name = draw(st.sampled_from(sorted(ZOO_UNITS)))
        return {"zoo": name, **({"dropout": 0.2} if name == "gpt-tiny" and draw(st.booleans()) else {})}
    # LayerNorm over one or two features is a step function of them: which side a sample falls on hangs on the last bit of a sum.
    norm = draw(st.booleans())
    return {
        "sizes": draw(st.lists(st.integers(4 if norm else 1, 24), min_size=2, max_size=6)),
        "activation": draw(st.sampled_from(["relu", "gelu", "tanh"])),
        "norm": norm,
        "masked": draw(st.booleans()),
    }


def states(shards: int) -> st.SearchStrategy[tuple[float, ...]]:
    """Equal, or any parts of one whole, none at all among them."""
    parts = st.lists(st.integers(0, 5), min_size=shards, max_size=shards).filter(any)
    return st.just(()) if shards == 1 else st.one_of(st.just(()), parts.map(lambda p: tuple(x / sum(p) for x in p)))


@st.composite
def plans(draw: st.DrawFn, model: dict[str, Any], precision: str) -> Plan:
    """Any mesh of dp and shard up to four ranks, any ZeRO stage, micro-batches, recomputation, bucket sizes, uneven shares and states."""
    mesh = draw(st.sampled_from([Mesh(dp=d, shard=s) for d in (1, 2, 3, 4) for s in (1, 2, 3, 4) if d * s <= 4]))
    zero = draw(st.integers(1, 3)) if mesh.shard > 1 else 0
    micro = draw(st.integers(1, 3))
    share = draw(st.integers(1, 2)) * micro
    shares = [share] * mesh.data_parallel_size
    uneven = draw(st.booleans()) and mesh.data_parallel_size > 1
    if uneven:
        shares = [share + draw(st.integers(0, 2)) for _ in shares]
    units = ZOO_UNITS[model["zoo"]] if "zoo" in model else tuple(str(i) for i in range(len(model["sizes"]) - 1))
    if draw(st.booleans()):
        units = units[:1]
    return Plan(
        model="test",
        global_batch=sum(shares),
        mesh=mesh,
        micro_batches=micro,
        memory=MemoryPolicy(zero, units, draw(st.sampled_from(["none", "selective", "full"])), precision),  # type: ignore[arg-type]
        sync=SyncPolicy(draw(st.sampled_from([200, 5_000, 2**20])), draw(st.sampled_from([50, 2**20])), draw(OVERLAPPED), timeout_s=60),
        balance=BalancePolicy(tuple(shares) if uneven else (), draw(states(mesh.shard))),
    )


@st.composite
def cases(draw: st.DrawFn, precision: str) -> tuple[dict[str, Any], Plan, str, float | None]:
    """(model, plan, optimizer, clip)."""
    model = draw(models())
    return model, draw(plans(model, precision)), draw(st.sampled_from(["adamw", "sgd"])), draw(st.sampled_from([None, 0.3]))
