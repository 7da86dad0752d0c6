"""All proxies by name: what they can be told, in which order the originals take it, and how often they run it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from meshwright.core.errors import RequestError, unknown
from meshwright.core.schedule import Schedule
from meshwright.core.serial import from_data
from meshwright.proxies.data_parallel import FSDPDims, ResNet50Dims, ResNet152Dims, StrongDims, fsdp, resnet50, resnet152, resnet152_strong
from meshwright.proxies.hybrids import CosmoFlowDims, DLRMDims, cosmoflow, dlrm
from meshwright.proxies.parts import Dims
from meshwright.proxies.transformers import (
    BertDims,
    GPT3Dims,
    MoEDims,
    PipelineDims,
    bert,
    gpt2,
    gpt3,
    gpt3_moe,
    gpt3_moe_one_step,
    gpt3_one_step,
)


@dataclass(frozen=True)
class Proxy:
    """One proxy. `build(dims, world)` returns its schedule and does nothing else."""

    name: str
    about: str
    dims: Callable[..., Dims]
    build: Callable[[Any, int], Schedule]
    smallest: Callable[[Any], int]  # the smallest world that it runs on
    arguments: tuple[str, ...] = ()  # dims that stand without a name, in order
    warm: int = 8
    runs: int = 128
    defaults: Mapping[str, Any] | None = None

    def settle(self, arguments: Sequence[str] = (), settings: Mapping[str, Any] | None = None) -> Dims:
        """Dims from the originals' positional arguments and named settings; anything unknown is an error."""
        if len(arguments) > len(self.arguments):
            takes = " ".join(self.arguments).upper() or "none"
            raise RequestError(f"proxy {self.name} takes {len(self.arguments)} arguments ({takes}), {len(arguments)} are given: use --set key=value")
        given: dict[str, Any] = dict(self.defaults or {})
        for name, text in zip(self.arguments, arguments, strict=False):
            try:
                given[name] = int(text)
            except ValueError:
                raise RequestError(f"proxy {self.name}: {name} '{text}' is not a whole number") from None
        known = {f.name for f in fields(self.dims)}  # type: ignore[arg-type]
        for key in settings or {}:
            if key not in known:
                raise unknown("key", key, known, f"--set for proxy {self.name}")
        return from_data(self.dims, {**given, **(settings or {})}, f"proxy {self.name}")  # type: ignore[arg-type]


def _stages(dims: PipelineDims) -> int:
    return max(dims.stages, 1)


def _sharded(dims: GPT3Dims) -> int:
    return max(dims.stages * dims.shards, 1)


def _owned(dims: MoEDims) -> int:
    return max(dims.stages * dims.experts, 1)


_PIPELINED = ("layers", "stages", "micro_batches")
_ONE_F_ONE_B = {"order": "1f1b", "overlap": True}
_ALL = (
    Proxy("gpt2", "GPT-2 large, pipeline and replicas, communication alone", PipelineDims, gpt2, _stages, _PIPELINED, 10, 256),
    Proxy("bert", "BERT large, the same", BertDims, bert, _stages, _PIPELINED, 10, 256),
    Proxy("resnet50", "ResNet-50, replicas, communication alone", ResNet50Dims, resnet50, lambda _: 1, (), 10, 512),
    Proxy("resnet152", "ResNet-152, replicas, reduction beside backward", ResNet152Dims, resnet152, lambda _: 1),
    Proxy("resnet152-strong", "the same at a fixed global batch", StrongDims, resnet152_strong, lambda d: d.table[0][0] if d.table else 1),
    Proxy("cosmoflow", "CosmoFlow, blocks of space and replicas", CosmoFlowDims, cosmoflow, lambda d: max(d.shards, 1)),
    Proxy("dlrm", "DLRM, tables at owners", DLRMDims, dlrm, lambda _: 1, (), 0, 1),
    Proxy("gpt3", "GPT-3 175B, replicas × shards × stages", GPT3Dims, gpt3, _sharded, ("stages", "scale")),
    Proxy("gpt3-moe", "GPT-3 with experts, replicas × experts × stages", MoEDims, gpt3_moe, _owned, ("stages", "scale"), 4),
    Proxy("gpt3-one-pipe-step", "one steady step between neighbouring stages of gpt3", GPT3Dims, gpt3_one_step, _sharded, ("stages", "scale"), 0, 1),
    Proxy("gpt3-moe-one-pipe-step", "the same of gpt3-moe", MoEDims, gpt3_moe_one_step, _owned, ("stages", "scale"), 0, 1),
    Proxy("fsdp", "sharded parameters (ZeRO-3), by units, with replicas", FSDPDims, fsdp, lambda d: max(d.sharding, 1), ("units", "sharding")),
    Proxy(
        "hybrid-2d", "replicas × stages, 1F1B, reduction beside backward", GPT3Dims, lambda d, w: gpt3(d, w, "hybrid-2d"), _sharded,
        ("stages", "scale"), defaults={**_ONE_F_ONE_B, "shards": 1, "forward_us": 4 * 15915, "backward_us": 4 * 31830},
    ),
    Proxy(
        "hybrid-3d", "replicas × shards × stages, likewise", GPT3Dims, lambda d, w: gpt3(d, w, "hybrid-3d"), _sharded,
        ("stages", "scale"), defaults=_ONE_F_ONE_B,
    ),
    Proxy(
        "hybrid-3d-moe", "replicas × experts × stages, likewise", MoEDims, lambda d, w: gpt3_moe(d, w, "hybrid-3d-moe"), _owned,
        ("stages", "scale"), defaults=_ONE_F_ONE_B,
    ),
)  # fmt: skip
PROXIES: dict[str, Proxy] = {proxy.name: proxy for proxy in _ALL}


def find(name: str) -> Proxy:
    if name not in PROXIES:
        raise unknown("proxy", name, PROXIES)
    return PROXIES[name]
