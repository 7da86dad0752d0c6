"""What worker processes do in tests of state in a user's own script: whole tensors out and in, exports, and what cannot be gone on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import meshwright as mw
from tests.procs.own_loop import BATCH, Net, group, loss_fn, plan_for, samples, told


class Tied(nn.Module):
    """Its head is its embedding, under two names; a buffer is a part of the state, another is not."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.body, self.head = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 9, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("count", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.words(x)).tanh())  # type: ignore[no-any-return]


def tied_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def after_parallelize(rank: int, world: int, init_method: str, mesh: str, folder: str, **constraints: Any) -> dict[str, Any]:
    """One step, the whole state out, other values in; and what is refused."""
    with group(rank, world, init_method):
        torch.manual_seed(0)
        net, batch = Tied(), torch.arange(8).view(4, 2)
        plain = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        made = mw.plan_for(net, batch, tied_loss, world=world, mesh=mw.Mesh.parse(mesh), **constraints).best.plan
        applied = mw.parallelize(net, torch.optim.SGD(net.parameters(), lr=0.1), made)
        state = mw.state_dict(applied)
        same = sorted(state) == sorted(plain) and all(torch.equal(state[name], plain[name]) for name in plain) if rank == 0 else state == {}
        mw.load_state_dict(applied, {name: tensor + 1 for name, tensor in plain.items()} if rank == 0 else {})
        raised = mw.state_dict(applied)
        return {
            "same": same,
            "raised": all(torch.equal(raised[name], plain[name] + 1) for name in plain) if rank == 0 else raised == {},
            "missing": told(lambda: mw.load_state_dict(applied, {k: v for k, v in plain.items() if k != "body.bias"})),
            "unknown": told(lambda: mw.load_state_dict(applied, {**plain, "other": torch.zeros(1)})),
            "shape": told(lambda: mw.load_state_dict(applied, {**plain, "body.bias": torch.zeros(7)})),
            "no mapping": told(lambda: mw.load_state_dict(applied, [1])),  # type: ignore[arg-type]
        }


def exported(rank: int, world: int, init_method: str, mesh: str, folder: str, **constraints: Any) -> dict[str, Any]:
    """`run.export`, and a model that begins with what it has written, under the same plan."""
    with group(rank, world, init_method):
        plan = plan_for(mesh, **constraints)
        runs = []
        for weights in (None, folder):
            torch.manual_seed(len(runs))
            net = Net().double()
            loader = DataLoader(samples(BATCH), BATCH)
            runs.append(mw.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader, plan=plan, weights=weights))
            if weights is None:
                for batch in runs[0].loader:
                    runs[0].step(batch, loss_fn)
                runs[0].export(folder)
        first, second = (run.state_dict() for run in runs)
        return {"names": list(first), "same": all(torch.equal(first[name], second[name]) for name in first)}


def not_gone_on(rank: int, world: int, init_method: str, folder: str) -> dict[str, str]:
    """What is said where a script's checkpoint cannot be gone on with, by what has changed. Saved in the middle of a pass."""
    with group(rank, world, init_method):

        def prepare(net: nn.Module, kind: Any = torch.optim.AdamW, size: int = BATCH, count: int = 32, schedules: int = 1) -> mw.Run:
            optimizer = kind(net.parameters(), lr=0.1)
            made = [torch.optim.lr_scheduler.StepLR(optimizer, 2) for _ in range(schedules)]
            return mw.prepare(net, optimizer, DataLoader(samples(count), size), *made, plan=mw.Plan("t", size, mw.Mesh(dp=world)))

        run = prepare(Net().double())
        for index, batch in enumerate(run.loader):
            run.step(batch, loss_fn)
            if index == 1:
                saved = run.save(folder, extra={"at": index})
        said = {
            "what is extra": told(lambda: run.save(folder, extra={"model": object()})),
            "nothing": str(prepare(Net().double()).resume(Path(folder) / "none")),
            "name": told(lambda: prepare(nn.Sequential(nn.Linear(6, 3)).double()).resume(folder)),
            "shape": told(lambda: prepare(Wider().double()).resume(folder)),
            "optimizer": told(lambda: prepare(Net().double(), torch.optim.Adam).resume(folder)),
            "batch": told(lambda: prepare(Net().double(), size=4).resume(folder)),
            "data": told(lambda: prepare(Net().double(), count=40).resume(folder)),
            "schedules": told(lambda: prepare(Net().double(), schedules=2).resume(folder)),
        }
        torch.distributed.barrier()
        if rank == 0:
            (saved / "rank-00000.safetensors").unlink()
        torch.distributed.barrier()
        said["shard"] = told(lambda: prepare(Net().double()).resume(folder))
        return said


class Wider(Net):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(48, 16), nn.Linear(6, 48)
