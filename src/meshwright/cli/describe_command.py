"""`describe cluster` and `describe model`: prints this machine's hardware, and a model's cost by layer."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from meshwright.cli.common import (
    ClusterFlag,
    DevicesFlag,
    GlobalBatchFlag,
    JsonFlag,
    SeqFlag,
    SetFlag,
    log_progress,
    make_config,
    parse_devices,
    print_json,
    require_torch,
    stdout,
)
from meshwright.core.errors import RequestError
from meshwright.core.quantities import show_bytes, show_count, show_rate, show_seconds
from meshwright.core.serialization import to_data

if TYPE_CHECKING:
    from meshwright.core.calibration import Calibration
    from meshwright.core.cluster import Cluster
    from meshwright.core.model import ModelProfile

app = typer.Typer(help="What this machine is; what a model costs, layer by layer.", no_args_is_help=True)


@app.command("cluster")
def cluster(
    probe: Annotated[bool, typer.Option("--probe", help="Measure arithmetic, memory, copies and collectives, and keep the result.")] = False,
    devices: DevicesFlag = None,
    name: ClusterFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Show devices, cores, memory, NUMA, network and scheduler of this machine, or what is known of another cluster.

    Example: meshwright describe cluster --probe

    Example: meshwright describe cluster --cluster leonardo:64
    """
    if name not in (None, "here"):
        if probe or devices:
            raise RequestError(f"--probe and --devices are for this machine, and --cluster {name} is another: leave them out")
        from meshwright.cli.describe_cluster import show_named_cluster

        show_named_cluster(str(name), as_json)
        return
    from meshwright.describe.discover import discover

    found = discover(os.environ, devices=tuple(parse_devices(devices) or ()) or None)
    measured: Calibration | None = None
    path = None
    if probe:
        require_torch()
        from meshwright.orchestrate import Orchestrator, calibrate

        with Orchestrator(make_config(devices=parse_devices(devices)), os.environ, log_progress) as orchestrator:
            measured = orchestrator.calibration(remeasure=True, quick=False)
            path = calibrate.cache_path(orchestrator.cluster, os.environ)
    if as_json:
        print_json({"cluster": to_data(found), "calibration": to_data(measured) if measured else None})
        return
    _show_cluster(found)
    if measured is not None:
        _show_calibration(measured)
        stdout.print(f"kept in {path}")


def _show_cluster(discovered: Cluster) -> None:
    node = discovered.nodes[0]
    stdout.print(
        f"[bold]{node.name}[/bold]: {node.cpu}, {node.cores} cores, {show_bytes(node.memory_bytes)} memory, started by: {discovered.scheduler}"
    )
    table = Table(box=None, header_style="bold")
    for column in ("device", "name", "memory", "peak", "bandwidth", "source"):
        table.add_column(column)
    for device in node.devices:
        peak = max(device.peak_flops.items(), key=lambda item: item[1], default=None)
        table.add_row(
            f"{device.kind}:{device.index}",
            device.name,
            show_bytes(device.memory_bytes),
            f"{show_rate(peak[1], 'FLOP/s')} ({peak[0]})" if peak else "not measured",
            show_rate(device.memory_bandwidth, "B/s") if device.memory_bandwidth else "not measured",
            device.source,
        )
    stdout.print(table)
    stdout.print(f"NUMA domains: {len(node.numa) or 1}; link between devices: {node.link.name}")
    for interface in node.interfaces:
        speed = show_rate(interface.bits_per_s, "bit/s") if interface.bits_per_s else "speed unknown"
        stdout.print(f"interface {interface.name}: {interface.address or 'no address'}, {speed}")


def _show_calibration(calibration: Calibration) -> None:
    for rates in calibration.layouts:
        table = Table(title=f"{rates.ranks} rank{'s' * (rates.ranks > 1)} at once", title_justify="left", box=None, header_style="bold")
        table.add_column("what")
        table.add_column("by size")
        for name, points in rates.compute.items():
            table.add_row(name, ", ".join(f"{show_count(size)}FLOP: {show_rate(rate, 'FLOP/s')}" for size, rate in points))
        table.add_row("memory", ", ".join(f"{show_bytes(size)}: {show_rate(rate, 'B/s')}" for size, rate in rates.memory))
        table.add_row("one call", show_seconds(rates.op_overhead_s))
        for name, line in rates.collectives.items():
            table.add_row(name, f"{show_seconds(line.alpha_s)} + bytes / {show_rate(line.bytes_per_s, 'B/s')}")
        if rates.ranks > 1:
            table.add_row("overlap", f"{rates.overlap:.0%} of a collective is hidden behind arithmetic")
        stdout.print(table)
    for name, rate in calibration.copies.items():
        stdout.print(f"{name}: {show_rate(rate, 'B/s')}")


@app.command("model")
def model(
    name: Annotated[str, typer.Argument(metavar="MODEL", help="Zoo name, hf:PATH, or package.module:factory.")],
    global_batch: GlobalBatchFlag = None,
    seq: SeqFlag = None,
    settings: SetFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Show parameters, FLOPs and memory of each layer, traced without allocating the model.

    Example: meshwright describe model gpt2-124m --global-batch 8
    """
    require_torch()
    from meshwright import zoo
    from meshwright.describe.profile_tracer import trace_task

    config = make_config(settings=settings, model=name, global_batch=global_batch, seq=seq)
    task = zoo.load(config.model, seq=config.seq, dropout=config.dropout)
    log_progress(f"tracing {task.name}")
    precision = "fp32" if config.precision in ("auto", "best") else config.precision
    profile = trace_task(task, precision=precision).at_batch(config.global_batch or task.global_batch)
    if as_json:
        print_json(_profile_to_json(profile))
    else:
        _show_model(profile)


def _tied_names(profile: ModelProfile) -> list[str]:
    """The further names of tied parameters, beside the name each is counted under."""
    return [name for names in profile.tied_parameters for name in names[1:]]


def _profile_to_json(profile: ModelProfile) -> dict[str, Any]:
    keys = ("parameters", "flops_forward", "flops_backward", "activation_bytes")
    layers = [
        {"name": layer.name, "kind": layer.kind, "block": layer.block, **{k: getattr(layer, k) for k in keys}, "output_bytes": layer.output_bytes}
        for layer in profile.layers
    ]
    return {"model": profile.name, "batch": profile.batch, **{k: getattr(profile, k) for k in keys}, "tied": _tied_names(profile), "layers": layers}


def _show_model(profile: ModelProfile) -> None:
    stdout.print(f"{profile.name} at batch {profile.batch}, {profile.precision}", markup=False, soft_wrap=True)
    table = Table(box=None, header_style="bold")
    table.add_column("layer")
    for column in ("parameters", "forward", "backward", "saved", "output"):
        table.add_column(column, justify="right")
    skipped = 0
    seen: set[str] = set()
    for layer in profile.layers:
        if layer.block and layer.block in seen:
            skipped += 1
            continue
        repeats = sum(other.block == layer.block for other in profile.layers) if layer.block else 1
        seen.add(layer.block)
        table.add_row(
            escape(f"{layer.name} ({layer.kind})") + (f" × {repeats}" if repeats > 1 else ""),
            show_count(layer.parameters),
            show_rate(layer.flops_forward, "FLOP"),
            show_rate(layer.flops_backward, "FLOP"),
            show_bytes(layer.activation_bytes),
            show_bytes(layer.output_bytes),
        )
    table.add_section()
    table.add_row(
        "[bold]all[/bold]",
        show_count(profile.parameters),
        show_rate(profile.flops_forward, "FLOP"),
        show_rate(profile.flops_backward, "FLOP"),
        show_bytes(profile.activation_bytes),
        "",
    )
    stdout.print(table)
    if profile.tied_parameters:
        stdout.print(f"tied, counted once: {', '.join(_tied_names(profile))}")
