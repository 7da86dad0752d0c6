"""`describe cluster` and `describe model`: prints this machine's hardware, and a model's cost by layer."""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from meshwright.cli import options
from meshwright.cli.console import log_progress, make_table, print_json, require_torch, stdout
from meshwright.core.errors import RequestError
from meshwright.core.quantities import show_bytes, show_count, show_rate, show_seconds
from meshwright.core.serialization import to_data

if TYPE_CHECKING:
    from meshwright.core.calibration import Calibration
    from meshwright.core.cluster import Cluster
    from meshwright.core.model import LayerProfile, ModelProfile

app = typer.Typer(no_args_is_help=True)


@app.callback()
def describe() -> None:
    """Show the devices of this machine or of a known cluster, or the cost of a model by layer.

    Example: meshwright describe model gpt-mini
    """


@app.command("cluster")
def cluster(
    probe: Annotated[bool, typer.Option("--probe", help="Measure arithmetic, memory, copies and collectives, and store the result.")] = False,
    devices: options.Devices = None,
    name: options.Cluster = None,
    as_json: options.Json = False,
) -> None:
    """Show devices, cores, memory, NUMA, network and scheduler of this machine, or the data sheet of another cluster.

    Examples:
      meshwright describe cluster --probe
      meshwright describe cluster --cluster leonardo:64
    """
    if name not in (None, "here"):
        if probe or devices:
            raise RequestError(f"--probe and --devices are for this machine, not for --cluster {name}: leave them out")
        from meshwright.cli.describe_cluster import show_named_cluster

        show_named_cluster(str(name), as_json)
        return
    from meshwright.describe.discover import discover

    discovered = discover(os.environ, devices=tuple(options.parse_devices(devices) or ()) or None)
    measured, path = None, None
    if probe:
        require_torch()
        from meshwright.orchestrate import Orchestrator, calibrate

        with Orchestrator(options.make_config(devices=options.parse_devices(devices)), os.environ, log_progress) as orchestrator:
            measured = orchestrator.calibration(remeasure=True, quick=False)
            path = calibrate.cache_path(orchestrator.cluster, os.environ)
    if as_json:
        print_json({"cluster": to_data(discovered), "calibration": to_data(measured) if measured else None})
        return
    _show_cluster(discovered)
    if measured is not None:
        _show_calibration(measured)
        stdout.print(f"stored in {path}")


def _show_cluster(cluster: Cluster) -> None:
    node = cluster.nodes[0]
    memory = show_bytes(node.memory_bytes)
    stdout.print(f"[bold]{node.name}[/bold]: {node.cpu}, {node.cores} cores, {memory} memory, scheduler: {cluster.scheduler}")
    table = make_table("device", "name", "memory", "peak", "bandwidth", "source")
    for device in node.devices:
        best = max(device.peak_flops.items(), key=lambda item: item[1], default=None)
        peak = f"{show_rate(best[1], 'FLOP/s')} ({best[0]})" if best else "not measured"
        bandwidth = show_rate(device.memory_bandwidth, "B/s") if device.memory_bandwidth else "not measured"
        table.add_row(f"{device.kind}:{device.index}", device.name, show_bytes(device.memory_bytes), peak, bandwidth, device.source)
    stdout.print(table)
    stdout.print(f"NUMA domains: {len(node.numa) or 1}; link between devices: {node.link.name}")
    for interface in node.interfaces:
        speed = show_rate(interface.bits_per_s, "bit/s") if interface.bits_per_s else "speed unknown"
        stdout.print(f"interface {interface.name}: {interface.address or 'no address'}, {speed}")


def _show_calibration(calibration: Calibration) -> None:
    for rates in calibration.layouts:
        table = make_table("operation", "rate by size", title=f"{rates.ranks} rank{'s' * (rates.ranks > 1)} at once")
        for name, points in rates.compute.items():
            table.add_row(name, ", ".join(f"{show_count(size)}FLOP: {show_rate(rate, 'FLOP/s')}" for size, rate in points))
        table.add_row("memory", ", ".join(f"{show_bytes(size)}: {show_rate(rate, 'B/s')}" for size, rate in rates.memory))
        table.add_row("overhead of a call", show_seconds(rates.op_overhead_s))
        for name, line in rates.collectives.items():
            table.add_row(name, f"{show_seconds(line.alpha_s)} + bytes / {show_rate(line.bytes_per_s, 'B/s')}")
        if rates.ranks > 1:
            table.add_row("overlap", f"{rates.overlap:.0%} of a collective overlaps with arithmetic")
        stdout.print(table)
    for name, rate in calibration.copies.items():
        stdout.print(f"{name}: {show_rate(rate, 'B/s')}")
    stdout.print(f"step times predicted from it: ± {calibration.error:.0%}" + (f", from {calibration.basis}" if calibration.basis else ""))


@app.command("model")
def model(
    name: options.Model,
    global_batch: options.GlobalBatch = None,
    seq: options.Seq = None,
    settings: options.Set = None,
    as_json: options.Json = False,
) -> None:
    """Show the parameters, FLOPs and activation memory of each layer, traced without allocating the model.

    Example: meshwright describe model gpt2-124m --global-batch 8
    """
    require_torch()
    from meshwright import zoo
    from meshwright.describe.profile_tracer import trace_task

    config = options.make_config(settings=settings, model=name, global_batch=global_batch, seq=seq)
    task = zoo.load(config.model, seq=config.seq, dropout=config.dropout)
    log_progress(f"tracing {task.name}")
    precision = "fp32" if config.precision in ("auto", "best") else config.precision
    profile = trace_task(task, precision=precision).at_batch(config.global_batch or task.global_batch)
    tied = [name for names in profile.tied_parameters for name in names[1:]]  # without the name that each is counted under
    if as_json:
        print_json(_profile_to_json(profile, tied))
    else:
        _show_model(profile, tied)


def _profile_to_json(profile: ModelProfile, tied: list[str]) -> dict[str, Any]:
    keys = ("parameters", "flops_forward", "flops_backward", "activation_bytes")
    layers = [
        {"name": layer.name, "kind": layer.kind, "block": layer.block, **{k: getattr(layer, k) for k in keys}, "output_bytes": layer.output_bytes}
        for layer in profile.layers
    ]
    return {"model": profile.name, "batch": profile.batch, **{k: getattr(profile, k) for k in keys}, "tied": tied, "layers": layers}


def _show_model(profile: ModelProfile, tied: list[str]) -> None:
    """The cost of each layer; of repeated blocks only the first is shown, with their number."""
    stdout.print(f"{profile.name} at batch {profile.batch}, {profile.precision}", markup=False, soft_wrap=True)
    table = make_table("layer", ">parameters", ">forward", ">backward", ">saved", ">output")

    def costs(item: ModelProfile | LayerProfile) -> list[str]:
        flops = (show_rate(item.flops_forward, "FLOP"), show_rate(item.flops_backward, "FLOP"))
        return [show_count(item.parameters), *flops, show_bytes(item.activation_bytes)]

    repeats = Counter(layer.block for layer in profile.layers)
    shown: set[str] = set()
    for layer in profile.layers:
        if layer.block and layer.block in shown:
            continue
        shown.add(layer.block)
        times = f" × {repeats[layer.block]}" if layer.block and repeats[layer.block] > 1 else ""
        table.add_row(escape(f"{layer.name} ({layer.kind})") + times, *costs(layer), show_bytes(layer.output_bytes))
    table.add_section()
    table.add_row("[bold]all[/bold]", *costs(profile), "")
    stdout.print(table)
    if tied:
        stdout.print(f"tied, counted once: {', '.join(tied)}")
