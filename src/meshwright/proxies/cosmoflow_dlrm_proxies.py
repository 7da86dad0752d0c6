"""Proxies of CosmoFlow (spatial parallelism) and DLRM (embedding tables sharded by table, MLPs replicated)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from meshwright.core.errors import RequestError
from meshwright.core.schedule import Schedule
from meshwright.proxies.proxy_program import ProgramBuilder, ProxyConfig, build_schedule, require_multiple, world_group


@dataclass(frozen=True)
class CosmoFlowProxyConfig(ProxyConfig):
    """Five convolutions on spatial blocks and three dense layers, sharded over `shards` ranks; lists are in execution order."""

    shards: int = 4  # a power of two: spatial dims are halved in turn
    batch: int = 8  # per group of shards
    forward_us: tuple[float, ...] = (6567, 13135, 6567, 3283, 1641, 5, 3, 1)
    backward_us: tuple[float, ...] = (2, 6, 10, 3283, 6567, 13135, 26270, 13135)
    forward_halos: tuple[int, ...] = (2097152, 1048576, 524288, 262144)  # floats per neighbour, before convolutions 1 to 4
    gathers: tuple[int, ...] = (65536, 256, 128)  # floats per rank, before each dense layer
    scatters: tuple[int, ...] = (128, 256, 65536)  # floats per rank after the reduce-scatter in each dense layer's backward
    backward_halos: tuple[int, ...] = (131072, 262144, 524288, 1048576)
    dense_gradient: int = 1_050_737  # floats, reduced among ranks with the same shard
    gradients_of: tuple[int, ...] = (3539456, 884992, 221312, 55360, 3488)  # floats of each convolution, reduced over all ranks


# Forward FLOPs per sample and layer: convolutions of 3³ on 128³ to 8³ positions with 4-32-64-128-256-512 channels, dense 32768-128-64-4.
_CONVOLUTIONS = tuple(54.0 * (4 if i == 0 else 16 * 2**i) * 32 * 2**i * (128 / 2**i) ** 3 for i in range(5))
_COSMOFLOW_FLOPS = (*_CONVOLUTIONS, 2.0 * 32768 * 128, 2.0 * 128 * 64, 2.0 * 64 * 4)
_COSMOFLOW_DENSE = (1_048_576, 32, 2048, 16, 64, 1)


def cosmoflow(config: CosmoFlowProxyConfig, world: int) -> Schedule:
    """CosmoFlow. The shard indices of neighbours differ in one bit: one neighbour for two shards, two for four, three for eight."""
    shards = config.shards
    if shards < 1 or shards & (shards - 1):
        raise RequestError(f"cosmoflow: shards={shards} is not a power of two: use {max(1, 1 << max(shards, 1).bit_length() - 1)}")
    _check_lists(config)
    require_multiple("cosmoflow", world, shards, "shards")
    groups = {
        "shards": tuple(tuple(range(g, g + shards)) for g in range(0, world, shards)),
        "dp": tuple(tuple(range(s, world, shards)) for s in range(shards)),
        **world_group(world),
    }
    programs = [_CosmoFlowProgramBuilder(config, index, world).program() for index in range(shards)]
    return build_schedule("cosmoflow", world, groups, programs, lambda rank: rank % shards)


class _CosmoFlowProgramBuilder:
    """Builds the program of one shard."""

    def __init__(self, config: CosmoFlowProxyConfig, shard_index: int, world: int) -> None:
        self.config, self.world, self.builder = config, world, ProgramBuilder()
        self.neighbours = [shard_index ^ (1 << bit) for bit in range(config.shards.bit_length() - 1)]

    def program(self) -> ProgramBuilder:
        config, out = self.config, self.builder
        convolutions, layers = len(config.gradients_of), len(config.forward_us)
        for layer, microseconds in enumerate(config.forward_us):
            if 1 <= layer < convolutions:
                self._exchange_halo(f"forward/{layer}", config.forward_halos[layer - 1])
            elif layer >= convolutions and self.neighbours:
                out.collective(f"gather/{layer}", "all_gather", "shards", config.float_bytes(config.gathers[layer - convolutions]) * config.shards)
            out.compute(f"forward/{layer}", config.scaled_seconds(microseconds), self._flops(layer))
        dense = layers - convolutions
        reductions: list[str] = []
        for step, microseconds in enumerate(config.backward_us):
            out.compute(f"backward/{step}", config.scaled_seconds(microseconds), 2 * self._flops(layers - 1 - step), op="backward")
            if step < dense and self.neighbours:
                out.collective(f"scatter/{step}", "reduce_scatter", "shards", config.float_bytes(config.scatters[step]) * config.shards)
            elif dense <= step < layers - 1:
                self._exchange_halo(f"backward/{step}", config.backward_halos[step - dense])
            reductions += self._reduce_gradients(step, dense)
        out.wait("wait/gradients", reductions)
        return out

    def _flops(self, layer: int) -> float:
        flops = _COSMOFLOW_FLOPS[layer] if layer < len(_COSMOFLOW_FLOPS) else 0.0
        return self.config.scaled_flops(flops * self.config.batch / self.config.shards)

    def _exchange_halo(self, tag: str, floats: int) -> None:
        size = self.config.float_bytes(floats)
        names = [self.builder.send(f"halo/{tag}/{n}", "shards", n, size) for n in self.neighbours]
        names += [self.builder.receive(f"halo/{tag}/{n}/in", "shards", n, size) for n in self.neighbours]
        self.builder.wait(f"wait/{tag}", names)

    def _reduce_gradients(self, step: int, dense: int) -> list[str]:
        """Async all-reduces: all dense layers together after the last of them, then each convolution."""
        config, by_tensor = self.config, self.config.gradients == "tensor"
        if step == dense - 1 and self.world > config.shards:
            return self.builder.all_reduces("grads/dense", "dp", map(config.float_bytes, _COSMOFLOW_DENSE if by_tensor else [config.dense_gradient]))
        if step >= dense and self.world > 1:
            number, numel = len(config.gradients_of) - 1 - (step - dense), config.gradients_of[step - dense]
            sizes = [numel - 32 * 2**number, 32 * 2**number] if by_tensor else [numel]  # the weight, and the bias
            return self.builder.all_reduces(f"grads/conv{number}", "world", map(config.float_bytes, sizes))
        return []


def _check_lists(config: CosmoFlowProxyConfig) -> None:
    convolutions, layers = len(config.gradients_of), len(config.forward_us)
    halos, dense = convolutions - 1, layers - convolutions
    needed = {"backward_us": layers, "forward_halos": halos, "backward_halos": halos, "gathers": dense, "scatters": dense}
    for name, count in needed.items():
        given = len(getattr(config, name))
        if given != count:
            raise RequestError(f"cosmoflow: {name} has {given} entries, {layers} layers with {convolutions} convolutions need {count}")


@dataclass(frozen=True)
class DLRMProxyConfig(ProxyConfig):
    """Embedding tables sharded by table, two MLPs replicated. Microseconds are per rank and step, whatever the world size."""

    batch: int = 2048  # global
    features: int = 128  # per embedding
    bottom: tuple[int, ...] = (128, 128, 128, 128)
    top: tuple[int, ...] = (138, 512, 512, 512, 256, 1)
    embedding_us: float = 95.0
    bottom_us: float = 341.0
    interaction_us: float = 209.0
    top_us: float = 455.0

    @property
    def exchanged_floats(self) -> int:
        """Floats of a rank's all-to-all: the batch's embeddings of one table."""
        return self.batch * self.features


def mlp_tensors(widths: tuple[int, ...]) -> list[int]:
    """Sizes of the weight and bias of each layer, in order."""
    return [n for a, b in itertools.pairwise(widths) for n in (a * b, b)]


def dlrm(config: DLRMProxyConfig, world: int) -> Schedule:
    if world < 1 or config.exchanged_floats % world:
        floats = f"{config.exchanged_floats} = batch × features"
        raise RequestError(f"dlrm: {world} ranks do not divide {floats}: use a power of two, or change one of these")
    out = ProgramBuilder()
    local_batch = config.batch / world
    reductions: list[str] = []

    def compute(name: str, microseconds: float, num_weights: float = 0.0, times: int = 1) -> None:
        """Add a forward, or with `times` = 2 a backward; `num_weights` is the number of weights that a sample is multiplied with."""
        flops = config.scaled_flops(2.0 * num_weights * local_batch * times)
        out.compute(name, config.scaled_seconds(times * microseconds), flops, op="forward" if times == 1 else "backward")

    def exchange(name: str) -> None:
        if world > 1:
            out.collective(name, "all_to_all", "world", config.float_bytes(config.exchanged_floats / world) * world)

    def reduce(name: str, widths: tuple[int, ...]) -> None:
        sizes = mlp_tensors(widths) if config.gradients == "tensor" else [sum(mlp_tensors(widths))]
        if world > 1:
            reductions.extend(out.all_reduces(f"grads/{name}", "world", map(config.float_bytes, sizes)))

    bottom, top = sum(mlp_tensors(config.bottom)), sum(mlp_tensors(config.top))
    compute("embedding/forward", config.embedding_us)
    exchange("embeddings/forward")
    compute("bottom/forward", config.bottom_us, bottom)
    compute("interaction/forward", config.interaction_us)
    compute("top/forward", config.top_us, top)
    compute("top/backward", config.top_us, top, 2)
    reduce("top", config.top)
    compute("interaction/backward", config.interaction_us)
    compute("bottom/backward", config.bottom_us, bottom, 2)
    reduce("bottom", config.bottom)
    exchange("embeddings/backward")
    compute("embedding/backward", config.embedding_us, 0.0, 2)
    out.wait("wait/gradients", reductions)
    return build_schedule("dlrm", world, world_group(world), [out], lambda _: 0)
