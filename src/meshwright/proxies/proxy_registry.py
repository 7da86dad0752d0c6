"""The registry of proxies: for each its config, the positional arguments of the original program, and its default numbers of steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from meshwright.core.errors import RequestError, unknown_name_error
from meshwright.core.schedule import Schedule
from meshwright.core.serialization import from_data
from meshwright.proxies.cosmoflow_dlrm_proxies import CosmoFlowProxyConfig, DLRMProxyConfig, cosmoflow, dlrm
from meshwright.proxies.data_parallel_proxies import (
    FSDPProxyConfig,
    ResNet50ProxyConfig,
    ResNet152ProxyConfig,
    StrongScalingProxyConfig,
    fsdp,
    resnet50,
    resnet152,
    resnet152_strong,
)
from meshwright.proxies.proxy_program import ProxyConfig
from meshwright.proxies.transformer_proxies import (
    BertProxyConfig,
    GPT3ProxyConfig,
    MoEProxyConfig,
    PipelineProxyConfig,
    bert,
    gpt2,
    gpt3,
    gpt3_moe,
    gpt3_moe_one_step,
    gpt3_one_step,
)


@dataclass(frozen=True)
class Proxy:
    """One proxy. `build(config, world)` returns its schedule and has no side effects."""

    name: str
    about: str
    config_class: Callable[..., ProxyConfig]
    build: Callable[[Any, int], Schedule]
    min_world: Callable[[Any], int]  # the smallest world size that it runs on
    positional: tuple[str, ...] = ()  # config fields given as positional arguments, in order
    warm: int = 8
    runs: int = 128
    defaults: Mapping[str, Any] | None = None

    def parse_config(self, arguments: Sequence[str] = (), settings: Mapping[str, Any] | None = None) -> ProxyConfig:
        """The config from the original's positional arguments and from named settings. Unknown names raise RequestError."""
        if len(arguments) > len(self.positional):
            takes = " ".join(self.positional).upper() or "none"
            raise RequestError(f"proxy {self.name} takes {len(self.positional)} arguments ({takes}), {len(arguments)} are given: use --set key=value")
        given: dict[str, Any] = dict(self.defaults or {})
        for name, text in zip(self.positional, arguments, strict=False):
            try:
                given[name] = int(text)
            except ValueError:
                raise RequestError(f"proxy {self.name}: {name} '{text}' is not a whole number") from None
        known = {f.name for f in fields(self.config_class)}  # type: ignore[arg-type]
        for key in settings or {}:
            if key not in known:
                raise unknown_name_error("key", key, known, f"--set for proxy {self.name}")
        return from_data(self.config_class, {**given, **(settings or {})}, f"proxy {self.name}")  # type: ignore[arg-type]


def _pipeline_min_world(config: PipelineProxyConfig) -> int:
    return max(config.stages, 1)


def _tensor_min_world(config: GPT3ProxyConfig) -> int:
    return max(config.stages * config.shards, 1)


def _expert_min_world(config: MoEProxyConfig) -> int:
    return max(config.stages * config.experts, 1)


_PIPELINE_ARGUMENTS = ("layers", "stages", "micro_batches")
_OVERLAPPED_1F1B = {"order": "1f1b", "overlap": True}
_PROXY_LIST = (
    Proxy(
        "gpt2",
        ("GPT-2 large, pipeline and replicas, communication alone"),
        PipelineProxyConfig,
        gpt2,
        _pipeline_min_world,
        _PIPELINE_ARGUMENTS,
        10,
        256,
    ),
    Proxy("bert", "BERT large, the same", BertProxyConfig, bert, _pipeline_min_world, _PIPELINE_ARGUMENTS, 10, 256),
    Proxy("resnet50", "ResNet-50, replicas, communication alone", ResNet50ProxyConfig, resnet50, lambda _: 1, (), 10, 512),
    Proxy("resnet152", "ResNet-152, replicas, reduction beside backward", ResNet152ProxyConfig, resnet152, lambda _: 1),
    Proxy(
        "resnet152-strong",
        ("the same at a fixed global batch"),
        StrongScalingProxyConfig,
        resnet152_strong,
        lambda d: d.table[0][0] if d.table else 1,
    ),
    Proxy("cosmoflow", "CosmoFlow, blocks of space and replicas", CosmoFlowProxyConfig, cosmoflow, lambda d: max(d.shards, 1)),
    Proxy("dlrm", "DLRM, table parallel", DLRMProxyConfig, dlrm, lambda _: 1, (), 0, 1),
    Proxy("gpt3", "GPT-3 175B, replicas × shards × stages", GPT3ProxyConfig, gpt3, _tensor_min_world, ("stages", "scale")),
    Proxy("gpt3-moe", "GPT-3 with experts, replicas × experts × stages", MoEProxyConfig, gpt3_moe, _expert_min_world, ("stages", "scale"), 4),
    Proxy(
        "gpt3-one-pipe-step",
        "one steady step between neighbouring stages of gpt3",
        GPT3ProxyConfig,
        gpt3_one_step,
        _tensor_min_world,
        ("stages", "scale"),
        0,
        1,
    ),
    Proxy("gpt3-moe-one-pipe-step", "the same of gpt3-moe", MoEProxyConfig, gpt3_moe_one_step, _expert_min_world, ("stages", "scale"), 0, 1),
    Proxy("fsdp", "sharded parameters (ZeRO-3), by units, with replicas", FSDPProxyConfig, fsdp, lambda d: max(d.sharding, 1), ("units", "sharding")),
    Proxy(
        "hybrid-2d",
        "replicas × stages, 1F1B, reduction beside backward",
        GPT3ProxyConfig,
        lambda d, w: gpt3(d, w, "hybrid-2d"),
        _tensor_min_world,
        ("stages", "scale"),
        defaults={**_OVERLAPPED_1F1B, "shards": 1, "forward_us": 4 * 15915, "backward_us": 4 * 31830},
    ),
    Proxy(
        "hybrid-3d",
        "replicas × shards × stages, likewise",
        GPT3ProxyConfig,
        lambda d, w: gpt3(d, w, "hybrid-3d"),
        _tensor_min_world,
        ("stages", "scale"),
        defaults=_OVERLAPPED_1F1B,
    ),
    Proxy(
        "hybrid-3d-moe",
        "replicas × experts × stages, likewise",
        MoEProxyConfig,
        lambda d, w: gpt3_moe(d, w, "hybrid-3d-moe"),
        _expert_min_world,
        ("stages", "scale"),
        defaults=_OVERLAPPED_1F1B,
    ),
)
PROXIES: dict[str, Proxy] = {proxy.name: proxy for proxy in _PROXY_LIST}


def find_proxy(name: str) -> Proxy:
    if name not in PROXIES:
        raise unknown_name_error("proxy", name, PROXIES)
    return PROXIES[name]
