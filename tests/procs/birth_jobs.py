"""What worker processes do in tests of births: apply a plan to a model without values, and say what this rank then has and has needed."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.core.plan import Plan
from meshwright.core.serialization import from_data
from meshwright.core.task import Field, Task
from meshwright.execute.placeholders import Placeholders
from meshwright.execute.session import Session
from meshwright.execute.state_pieces import parameter_pieces
from meshwright.execute.weights import whole_state_dict
from meshwright.launch import Rendezvous, join_process_group, leave_process_group
from meshwright.observe import peak_resident_bytes, reset_peak_resident, resident_bytes
from meshwright.observe.process_memory import trim_heap
from meshwright.orchestrate.births import born_in_pieces, build_whole
from meshwright.orchestrate.config import RunConfig
from meshwright.orchestrate.job import load_task
from meshwright.orchestrate.rank_entrypoints import make_optimizer

WIDTH, LAYERS, ROWS = 1024, 12, 8192


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.layer(x))


class Deep(nn.Module):
    """Blocks of 4 MB and one table of 32 MB: 82 MB in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.blocks = nn.ModuleList(Residual() for _ in range(LAYERS))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        x = self.table(rows)
        for block in self.blocks:
            x = block(x)
        return x


def deep() -> Task:
    fields = {"rows": Field((4,), "int64", ROWS)}
    return Task("deep", Deep, lambda model, batch: model(batch["rows"]).square().mean(), fields, global_batch=8, learning_rate=1e-3)


def bear(rank: int, world: int, init_method: str, model: str, plan: dict[str, Any], expect_whole: bool = False) -> dict[str, Any]:
    """A model in pieces; the rank's peak memory meanwhile, what it has read, and differences from the model of a plain construction."""
    torch.set_num_threads(1)
    told = from_data(Plan, plan, "plan").for_rank(rank)
    join_process_group(Rendezvous(rank, world, init_method, timeout_s=60))
    try:
        job = RunConfig(model=model, learning_rate=1e-3, seed=5)
        task = load_task(job)
        network, birth, reason = born_in_pieces(job, task, told)
        assert (birth is None) == expect_whole, reason
        if network is None or birth is None:
            return {"reason": reason}
        gc.collect()
        trim_heap()
        before = resident_bytes()
        reset_peak_resident()
        placeholders = Placeholders(network, torch.device("cpu"))
        session = Session(told, network, make_optimizer(job, network), broadcasts=False, placeholders=placeholders)
        birth.fill(session.applied)
        peak = peak_resident_bytes() - before
        birth.check_replicas(session.applied)
        pieces = list(parameter_pieces(session.applied))
        found = dict(whole_state_dict(session.applied))
        expected = build_whole(job, task, told).state_dict() if rank == 0 else {}
        different = [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
        return {
            "peak": peak,
            "held": sum(piece.view.nbytes for piece in pieces),
            "whole": sum(torch.Size(shape).numel() * 4 for shape in session.applied.whole.shapes.values()),
            "loaded": vars(birth.loaded) if birth.loaded is not None else None,
            "different": different + sorted({*expected} ^ {*found} if rank == 0 else ()),
        }
    finally:
        leave_process_group()


def begin_with(rank: int, world: int, init_method: str, model: str, plan: dict[str, Any], folder: str, kind: str) -> dict[str, Any]:
    """A model of the zoo in pieces, with the weights of a folder of transformers: what this rank has read, and the difference of its outputs."""
    import transformers

    torch.set_num_threads(1)
    told = from_data(Plan, plan, "plan").for_rank(rank)
    join_process_group(Rendezvous(rank, world, init_method, timeout_s=60))
    try:
        job = RunConfig(model=model, learning_rate=1e-3, init_from=folder)
        task = load_task(job)
        network, birth, reason = born_in_pieces(job, task, told)
        assert network is not None and birth is not None, reason
        placeholders = Placeholders(network, torch.device("cpu"))
        session = Session(told, network, make_optimizer(job, network), broadcasts=False, placeholders=placeholders)
        birth.fill(session.applied)
        birth.check_replicas(session.applied)
        state = dict(whole_state_dict(session.applied))
        found = {"loaded": vars(birth.loaded) if birth.loaded is not None else None, "difference": 0.0}
        if rank == 0:
            plain, theirs = task.build(), getattr(transformers, kind).from_pretrained(folder).eval()
            plain.load_state_dict(state)
            tokens = torch.arange(24).view(2, 12)
            with torch.no_grad():
                outputs = theirs(tokens)[0]
                hidden = outputs if outputs.shape[-1] == plain.head.weight.shape[0] else outputs @ plain.head.weight.t()
                found["difference"] = float((plain.eval()(tokens) - hidden).abs().max())
        return found
    finally:
        leave_process_group()


def data_bytes() -> int:
    """What the kernel counts against RLIMIT_DATA."""
    match = re.search(r"^VmData:\s*(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024
