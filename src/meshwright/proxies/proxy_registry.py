"""The registry of proxies: for each its config, the positional arguments of the original program, and its default numbers of steps."""

from __future__ import annotations

import math
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
    one_pipeline_step,
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


def _product_of(*degrees: str) -> Callable[[Any], int]:
    """The smallest world size of a config: the product of these degrees."""
    return lambda config: max(math.prod(getattr(config, degree) for degree in degrees), 1)


_PIPELINE, _TENSOR, _EXPERTS = _product_of("stages"), _product_of("stages", "shards"), _product_of("stages", "experts")
_LAYERS, _SCALE = ("layers", "stages", "micro_batches"), ("stages", "scale")
_OVERLAPPED = {"order": "1f1b", "overlap": True}
_REPLICAS_AND_STAGES = {**_OVERLAPPED, "shards": 1, "forward_us": 4 * 15915, "backward_us": 4 * 31830}


def _named(build: Callable[[Any, int, str], Schedule], name: str) -> Callable[[Any, int], Schedule]:
    return lambda config, world: build(config, world, name)


_PROXY_LIST = (
    Proxy("gpt2", "GPT-2 large, pipeline and replicas, communication only", PipelineProxyConfig, gpt2, _PIPELINE, _LAYERS, 10, 256),
    Proxy("bert", "BERT large, the same", BertProxyConfig, bert, _PIPELINE, _LAYERS, 10, 256),
    Proxy("resnet50", "ResNet-50, replicas, communication only", ResNet50ProxyConfig, resnet50, _product_of(), (), 10, 512),
    Proxy("resnet152", "ResNet-152, replicas, gradient reduction overlapped with backward", ResNet152ProxyConfig, resnet152, _product_of()),
    Proxy("resnet152-strong", "the same, fixed global batch", StrongScalingProxyConfig, resnet152_strong, lambda c: c.table[0][0] if c.table else 1),
    Proxy("cosmoflow", "CosmoFlow, blocks of space and replicas", CosmoFlowProxyConfig, cosmoflow, _product_of("shards")),
    Proxy("dlrm", "DLRM, table parallel", DLRMProxyConfig, dlrm, _product_of(), (), 0, 1),
    Proxy("gpt3", "GPT-3 175B, replicas × shards × stages", GPT3ProxyConfig, gpt3, _TENSOR, _SCALE),
    Proxy("gpt3-moe", "GPT-3 with experts, replicas × experts × stages", MoEProxyConfig, _named(gpt3, "gpt3-moe"), _EXPERTS, _SCALE, 4),
    *(
        Proxy(name, about, config_class, _named(one_pipeline_step, name), min_world, _SCALE, 0, 1)
        for name, about, config_class, min_world in (
            ("gpt3-one-pipe-step", "one steady step between neighbouring stages of gpt3", GPT3ProxyConfig, _TENSOR),
            ("gpt3-moe-one-pipe-step", "the same of gpt3-moe", MoEProxyConfig, _EXPERTS),
        )
    ),
    Proxy("fsdp", "sharded parameters (ZeRO-3), by units, with replicas", FSDPProxyConfig, fsdp, _product_of("sharding"), ("units", "sharding")),
    *(
        Proxy(name, about, config_class, _named(gpt3, name), min_world, _SCALE, defaults=defaults)
        for name, about, config_class, min_world, defaults in (
            ("hybrid-2d", "replicas × stages, 1F1B, gradient reduction overlapped with backward", GPT3ProxyConfig, _TENSOR, _REPLICAS_AND_STAGES),
            ("hybrid-3d", "replicas × shards × stages, likewise", GPT3ProxyConfig, _TENSOR, _OVERLAPPED),
            ("hybrid-3d-moe", "replicas × experts × stages, likewise", MoEProxyConfig, _EXPERTS, _OVERLAPPED),
        )
    ),
)
PROXIES: dict[str, Proxy] = {proxy.name: proxy for proxy in _PROXY_LIST}


def find_proxy(name: str) -> Proxy:
    if name not in PROXIES:
        raise unknown_name_error("proxy", name, PROXIES)
    return PROXIES[name]
