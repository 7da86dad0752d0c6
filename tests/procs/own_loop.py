"""Training loops as scripts have them. Each runs as it is on one device, and on several ranks after `mw.prepare`, which is all that differs."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_  # as scripts import it, long before a model is prepared
from torch.utils.data import DataLoader, TensorDataset

import meshwright as mw
from meshwright.core.plan import BalancePolicy
from meshwright.execute.averaged_buffers import average_buffers
from meshwright.execute.full_state import full_state
from meshwright.zoo.keyed_random import KeyedDropout
from tests import convolutional
from tests.procs import expert_models

FEATURES, CLASSES, BATCH = 6, 3, 8


class Overflow(torch.autograd.Function):
    """Identity, whose gradient overflows in one element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.index_fill(0, torch.tensor([0]), torch.inf)


class Head(nn.Linear):
    overflows = False

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, Overflow.apply(self.bias)) if self.overflows else super().forward(input)


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(FEATURES, 32), nn.BatchNorm1d(16) if norm else nn.LayerNorm(16), nn.Linear(32, 16)
        self.dropout = KeyedDropout(dropout, 0) if dropout else nn.Identity()
        self.head = Head(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.norm(self.down(self.up(x).tanh())).relu())
        return self.head(x)  # type: ignore[no-any-return]


class Branching(Net):
    """One layer is never used, and one only for some samples, of which a rank's share or a batch may have none."""

    def __init__(self) -> None:
        super().__init__()
        self.spare, self.branch = nn.Linear(16, 16), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        rare = x[:, 0] > 1.0
        out = super().forward(x)
        return out.index_add(0, rare.nonzero()[:, 0], self.branch(x[rare])) if rare.any() else out


def samples(count: int) -> TensorDataset:
    x = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, (x.sum(1) * 2).long().clamp(-1, 1) + 1, torch.arange(count))


class Augmented(TensorDataset):
    """Samples to which a loader's worker adds noise, from torch's generator, Python's and numpy's."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        x, y, i = super().__getitem__(index)
        return x + 0.1 * torch.randn(FEATURES) + random.random() + np.random.random(), y, i


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class Script:
    """What a script makes before its loop. `prepare` is None on one device."""

    def __init__(
        self, count: int = 29, prepare: Callable[..., Any] | None = None, fused: bool = False, branches: bool = False, workers: int = 0, **net: Any
    ) -> None:
        torch.manual_seed(0)
        self.model: Any = Branching().double() if branches else Net(**net).double()
        params = self.model.parameters()
        decaying = torch.optim.SGD(params, lr=0.2, momentum=0.9, weight_decay=0.1) if branches else None
        self.optimizer = decaying or torch.optim.AdamW(params, lr=0.02, fused=fused)
        self.scheduler: Any = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.7)
        data = Augmented(*samples(count).tensors) if workers else samples(count)
        self.loader: Any = DataLoader(data, BATCH, shuffle=True, num_workers=workers)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        if prepare is not None:
            things = self.model, self.optimizer, self.loader, self.scheduler, self.scaler
            self.model, self.optimizer, self.loader, self.scheduler, self.scaler = prepare(*things)


def plain(s: Script) -> Iterator[float]:
    for _ in range(2):
        for x, y, _ in s.loader:
            loss = F.cross_entropy(s.model(x), y)
            s.optimizer.zero_grad()
            loss.backward()
            s.optimizer.step()
            s.scheduler.step()
            yield float(mw.mean(loss))


def clipped(s: Script) -> Iterator[float]:
    """By norm through either name, by the infinity norm, of some parameters, and by value; the norms are part of what is compared."""
    for index, (x, y, _) in enumerate(s.loader):
        loss = F.cross_entropy(s.model(x), y)
        loss.backward()
        yield float(clip_grad_norm_(s.model.parameters(), 0.5))
        yield float(nn.utils.clip_grad_norm_(parameters=s.model.parameters(), max_norm=0.2, norm_type=torch.inf))
        yield float(nn.utils.clip_grad_norm_([*s.model.up.parameters(), s.model.head.bias], 0.1))
        yield float(clip_grad_norm_([p for group in s.optimizer.param_groups for p in group["params"]], 0.4, norm_type=1.0))
        if index % 2:
            nn.utils.clip_grad_value_(s.model.parameters(), 0.003)
        s.optimizer.step()
        s.model.zero_grad()
        yield float(mw.mean(loss))


def accumulated(s: Script) -> Iterator[float]:
    """Several backwards a step, of which the last covers a short batch; gradients are zeroed in place."""
    for index, (x, y, _) in enumerate(s.loader):
        loss = F.cross_entropy(s.model(x), y) / 2
        loss.backward()
        yield float(mw.mean(loss))
        if index % 2:
            s.optimizer.step()
            s.optimizer.zero_grad(set_to_none=False)
            s.scheduler.step()


def without_sync(s: Script) -> Iterator[float]:
    """Several backwards a step, of which only the last sends gradients; on one device, torch's modules have no such method."""
    for index, (x, y, _) in enumerate(s.loader):
        with getattr(s.model, "no_sync", contextlib.nullcontext)() if index % 4 < 3 else contextlib.nullcontext():
            loss = F.cross_entropy(s.model(x), y) / 4
            loss.backward()
        yield float(mw.mean(loss))
        if index % 4 == 3:
            s.optimizer.step()
            s.optimizer.zero_grad()


def scaled(s: Script) -> Iterator[float]:
    """The second step overflows in one element, so that every rank must skip it."""
    for index, (x, y, _) in enumerate(s.loader):
        s.optimizer.zero_grad()
        s.model.head.overflows = index == 1
        with torch.autocast("cpu", enabled=False):
            loss = F.cross_entropy(s.model(x), y)
        s.scaler.scale(loss).backward()
        if index % 2:
            s.scaler.unscale_(s.optimizer)
            yield float(clip_grad_norm_(s.model.parameters(), 0.3))
        s.scaler.step(s.optimizer)
        s.scaler.update()
        yield float(mw.mean(loss))
        yield s.scaler.get_scale()


def overflowing_shard(s: Script) -> Iterator[float]:
    """In the second step a gradient overflows in the part of one rank alone, so that every rank must skip it."""
    for index, (x, y, _) in enumerate(s.loader):
        s.optimizer.zero_grad()
        loss = F.cross_entropy(s.model(x), y)
        s.scaler.scale(loss).backward()
        if index == 1 and (not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1):
            s.model.up.weight.grad[-1, 0] = torch.inf
        s.scaler.step(s.optimizer)
        s.scaler.update()
        yield float(mw.mean(loss))
        yield s.scaler.get_scale()


def with_closure(s: Script) -> Iterator[float]:
    for x, y, _ in s.loader:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            s.optimizer.zero_grad()
            loss = F.cross_entropy(s.model(x), y)
            loss.backward()
            return loss

        yield float(mw.mean(s.optimizer.step(closure)))


LOOPS = {f.__name__: f for f in (plain, clipped, accumulated, without_sync, scaled, overflowing_shard, with_closure)}


def alone(loop: str, **made: Any) -> list[float]:
    return list(LOOPS[loop](Script(**made)))


@contextmanager
def group(rank: int, world: int, init_method: str) -> Iterator[None]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def plan_for(mesh: str, shares: tuple[int, ...] = (), model: nn.Module | None = None, **constraints: Any) -> mw.Plan:
    batch = [t[:BATCH] for t in samples(BATCH).tensors]
    made = mw.plan_for(model or Net().double(), batch, loss_fn, world=mw.Mesh.parse(mesh).size, mesh=mw.Mesh.parse(mesh), **constraints).best.plan
    return replace(made, balance=replace(made.balance, shares=shares)) if shares else made


def run_loop(rank: int, world: int, init_method: str, loop: str, mesh: str, made: dict[str, Any] | None = None, **constraints: Any) -> dict[str, Any]:
    """What the loop yields, and the whole state that it leaves."""
    with group(rank, world, init_method), redirect_stderr(io.StringIO()) as said:
        runs, plan = [], plan_for(mesh, model=Branching().double() if (made or {}).get("branches") else None, **constraints)

        def prepare(*things: Any) -> Any:
            runs.append(mw.prepare(*things, plan=plan))
            return runs[0]

        found = list(LOOPS[loop](Script(prepare=prepare, **(made or {}))))
        ledger = runs[0].session.applied.groups.ledger
        state = {name: float(t.double().square().sum()) for name, t in full_state(runs[0].session.applied) if "/" not in name}
        sent = sum(line.calls for line in ledger.drain() if line.name.startswith("grads/"))
        return {"found": found, "state": state, "said": said.getvalue(), "plan": runs[0].plan.summary(), "sent": sent}


def in_low_precision(rank: int, world: int, init_method: str, **constraints: Any) -> dict[str, Any]:
    """A plain loop after `mw.prepare(precision="bf16", …)`, without autocast of its own: losses, and what the model computes in."""
    with group(rank, world, init_method):
        torch.manual_seed(0)
        model, kinds = Net(), set()
        model.head.register_forward_hook(lambda _, args, out: kinds.add((str(args[0].dtype), str(out.dtype))))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        x, y, index = samples(32).tensors
        loader = DataLoader(TensorDataset(x.float(), y, index), BATCH)
        run = mw.prepare(model, optimizer, loader, loss_fn=loss_fn, precision="bf16", **constraints)
        model, optimizer, loader = run
        kinds.clear()
        losses = []
        for x, y, _ in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(mw.mean(loss)))
        kept = {str(tensor.dtype) for tensor in run.state_dict().values()} | {"torch.float32"}
        return {"losses": losses, "kinds": sorted(kinds), "kept": sorted(kept), "precision": run.plan.memory.precision}


def state_alone(loop: str, **made: Any) -> dict[str, float]:
    script = Script(**made)
    list(LOOPS[loop](script))
    return {name: float(p.detach().square().sum()) for name, p in script.model.named_parameters()}


# -- several models --


def adversaries(prepare: Callable[..., Any] | None = None, again: bool = False) -> list[float]:
    """A generator and a discriminator that take turns on one loader; the discriminator is frozen every other time in the generator's turn. The
    generator is prepared with the loader `again`, or without one."""
    torch.manual_seed(0)
    maker: Any = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, FEATURES)).double()
    judge: Any = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, 1)).double()
    judging, making = torch.optim.AdamW(judge.parameters(), lr=1e-2), torch.optim.AdamW(maker.parameters(), lr=1e-2)
    loader: Any = DataLoader(samples(29), BATCH, shuffle=True)
    if prepare is not None:
        judge, judging, loader = prepare(judge, judging, loader)
        if again:
            maker, making, loader = prepare(maker, making, loader)
        else:
            maker, making = prepare(maker, making)
    found, bce = [], F.binary_cross_entropy_with_logits
    for index, (x, _, _) in enumerate(loader):
        made = maker(x.flip(1))
        judging.zero_grad()
        real, fake = judge(x), judge(made.detach())
        judged = bce(real, torch.ones_like(real)) + bce(fake, torch.zeros_like(fake))
        judged.backward()
        judging.step()
        making.zero_grad()
        judge.requires_grad_(index % 2 == 0)
        fake = judge(made)
        fooled = bce(fake, torch.ones_like(fake))
        fooled.backward()
        making.step()
        judge.requires_grad_(True)
        found += [float(mw.mean(judged)), float(mw.mean(fooled))]
    return found


def run_adversaries(rank: int, world: int, init_method: str, zero: int, offload: str = "none") -> list[float]:
    with group(rank, world, init_method):
        mesh = mw.Mesh(shard=world) if zero else mw.Mesh(dp=world)
        plan = mw.Plan("t", BATCH, mesh, memory=mw.MemoryPolicy(zero=zero, offload=offload))  # type: ignore[arg-type]
        return adversaries(lambda *things: mw.prepare(*things, plan=plan), again=zero == 1)


# -- metrics, state, errors --


def evaluated(rank: int, world: int, init_method: str, mesh: str, count: int) -> dict[str, Any]:
    """Which samples a validation loop sees, gathered, and its sums."""
    with group(rank, world, init_method):
        torch.manual_seed(0)
        net = Net().double()
        plan = plan_for(mesh, **({"zero": 3} if "shard" in mesh else {}))
        loaders = DataLoader(samples(16), BATCH), DataLoader(samples(count), 4)
        run = mw.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), *loaders, plan=plan)
        model, _, _, held_out = run
        model.eval()
        seen, right, scalars, total = [], 0, [], 0.0
        with torch.no_grad():
            for x, y, index in held_out:
                out = model(x)
                got = mw.gather({"index": index, "right": (out.argmax(1) == y), "out": out})
                seen += got["index"].tolist()
                right += int(got["right"].sum())
                total += float(F.cross_entropy(out, y, reduction="sum") if world == 1 else 0)
                scalars.append((mw.gather(len(y)).tolist(), float(mw.gather(F.cross_entropy(out, y, reduction="sum")).sum())))
        mean = run.validate(DataLoader(samples(count), 4), loss_fn)
        return {"seen": seen, "right": right, "scalars": scalars, "mean": mean, "length": len(held_out.dataset)}


def told(function: Callable[[], Any]) -> str:
    """The one line of an error that a user can act on."""
    try:
        function()
    except mw.RequestError as error:
        return str(error)
    return ""


def guarded(rank: int, world: int, init_method: str, mesh: str, **constraints: Any) -> dict[str, Any]:
    """What state_dict says under a plan, and what a loop of one's own does."""
    with group(rank, world, init_method):
        torch.manual_seed(0)
        net = Net().double()
        whole = {name: tuple(t.shape) for name, t in net.state_dict().items()}
        weights = {name: t.clone() for name, t in net.state_dict().items()}
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        loader = DataLoader(samples(16), BATCH)
        run = mw.prepare(net, optimizer, loader, plan=plan_for(mesh, **constraints), loss_fn=loss_fn)
        said = {
            "model": told(net.state_dict), "part": told(net.up.state_dict), "optimizer": told(optimizer.state_dict),
            "load": told(lambda: net.load_state_dict(weights)), "unpack": told(lambda: list(run)), "call": told(lambda: net(samples(4).tensors[0])),
            "norm": told(lambda: nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None])),
        }  # fmt: skip
        if not said["model"]:
            assert {name: tuple(t.shape) for name, t in net.state_dict().items()} == whole
        loss = [float(run.step(batch, loss_fn)) for batch in run.loader]
        return {**said, "loss": loss}


def key_of_dropout(rank: int, world: int, init_method: str, mesh: str) -> list[float]:
    """Keyed dropout in a loop of one's own, with a short last batch and one of a single sample."""
    with contextlib.ExitStack() as stack:
        if world > 1:
            stack.enter_context(group(rank, world, init_method))
        plan = plan_for(mesh, model=Net(dropout=0.5).double())
        return list(plain(Script(25, prepare=lambda *things: mw.prepare(*things, plan=plan), dropout=0.5)))


def buffers(rank: int, world: int, init_method: str) -> list[list[float]]:
    """Running statistics after a pass over the loader: the same on every rank."""
    with group(rank, world, init_method):
        script = Script(prepare=lambda *things: mw.prepare(*things, plan=mw.Plan("t", BATCH, mw.Mesh(dp=world))), norm=True)
        list(plain(script))
        return [b.tolist() for name, b in script.model.named_buffers() if "running" in name]


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        for name, value in (("statistic", torch.zeros(2)), ("table", torch.full((3,), 0.1)), ("count", torch.zeros((), dtype=torch.long))):
            self.register_buffer(name, value)
        self.register_buffer("flag", torch.tensor(True))


def averaged(rank: int, world: int, init_method: str, shares: tuple[int, ...]) -> dict[str, list[Any]]:
    """Buffers after averaging, of which two differ between ranks before it."""
    with group(rank, world, init_method):
        model = Buffered()
        plan = mw.Plan("t", 8, mw.Mesh(dp=world), balance=BalancePolicy(shares))
        applied = mw.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
        model.statistic += rank  # type: ignore[operator]
        model.count += rank  # type: ignore[operator]
        average_buffers(applied)
        return {name: buffer.view(-1).tolist() for name, buffer in model.named_buffers()}


# -- experts, tables and blocks of images --


def other_models(rank: int, world: int, init_method: str, kind: str, mesh: str, sizes: list[int], **constraints: Any) -> list[float]:
    """Losses and norms of a loop of one's own over batches of these sizes; without `mesh`, on one device."""
    with group(rank, world, init_method) if world > 1 else contextlib.nullcontext():
        torch.manual_seed(0)
        if kind == "resnet":
            model, loss = convolutional.build(kind).double(), convolutional.loss
            batches = [convolutional.batch(kind, size, step) for step, size in enumerate(sizes)]
        else:
            model, loss = expert_models.build(kind)
            model, generator = model.double(), torch.Generator().manual_seed(1)
            batches = [expert_models.batch(kind, size, generator) for size in sizes]
        optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), batches
        if mesh:
            plan = mw.plan_for(model, batches[0], loss, world=world, mesh=mw.Mesh.parse(mesh), **constraints).best.plan
            model, optimizer, loader = mw.prepare(model, optimizer, batches, plan=plan)
        found = []
        for batch in loader:
            optimizer.zero_grad()
            value = loss(model, batch)
            value.backward()
            found += [float(mw.mean(value)), float(clip_grad_norm_(model.parameters(), 0.5))]
            optimizer.step()
        return found


def clipped_by_nan(rank: int, world: int, init_method: str, zero: int) -> list[float]:
    """Gradient norms of three backwards, of which the second is NaN and its step is left out."""
    with group(rank, world, init_method):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1)).double()  # 26 parameters, which a shard pads
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        memory = mw.MemoryPolicy(zero=zero)  # type: ignore[arg-type]
        applied = mw.parallelize(net, optimizer, mw.Plan("t", 6, mw.Mesh(shard=world), memory=memory))
        norms = []
        for factor in (1.0, torch.nan, 1.0):
            (net(torch.ones(2, 3, dtype=torch.float64)).sum() * factor).backward()
            norms.append(float(applied.clip_gradients(1.0)))
            optimizer.zero_grad()
        return norms


def refusals(rank: int, world: int, init_method: str) -> dict[str, str]:
    """What is said where a loop would go wrong on several ranks."""
    with group(rank, world, init_method):
        plan, said = mw.Plan("t", BATCH, mw.Mesh(dp=world)), {}
        net = Net().double()
        net.up.requires_grad_(False)
        model, optimizer, loader, short = mw.prepare(
            net, torch.optim.LBFGS(net.parameters()), DataLoader(samples(16), BATCH), DataLoader(samples(3), BATCH), plan=plan
        )
        x, y, _ = next(iter(loader))
        said["lbfgs"] = told(lambda: optimizer.step(lambda: loss_fn(model, (x, y))))
        net.up.requires_grad_(True)
        said["unfrozen"] = told(lambda: optimizer.step(None))
        for _ in short:
            said["inside"] = told(lambda: mw.mean(1.0))
        said["between"] = told(lambda: mw.mean(1.0))
        said["named"] = told(lambda: mw.mean(1.0, loader))
        said["shapes"] = told(lambda: mw.gather(torch.zeros(2, 3 + rank)))
        other = Net().double()
        said["split"] = told(lambda: mw.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1), loader, plan=plan_for(f"tp={world}")))
        return said


def save_and_go_on(
    rank: int, world: int, init_method: str, mesh: str, folder: str, resume: bool, workers: int = 0, **constraints: Any
) -> dict[str, Any]:  # fmt: skip
    """Two passes over a shuffled loader in a loop of one's own, saved in the middle of the second; or what is left of them in another process."""
    with group(rank, world, init_method):
        given: list[Any] = []

        def prepare(*things: Any) -> Any:
            given.append(mw.prepare(*things, loss_fn=loss_fn, plan=plan_for(mesh, **constraints)))
            return given[0]

        s = Script(33, prepare, workers=workers)
        run, losses, seen = given[0], [], []
        resumed = run.resume(folder) if resume else None
        for _ in range(run.epoch, 2):
            for x, y, index in s.loader:
                loss = F.cross_entropy(s.model(x), y)
                loss.backward()
                s.optimizer.step()
                s.optimizer.zero_grad()
                s.scheduler.step()
                losses.append(float(mw.mean(loss)))
                seen.append(sorted(mw.gather(index).tolist()))
                if len(losses) == 7 and not resume:
                    run.save(folder, extra={"best": 0.5})
        whole = run.state_dict()
        sums = {name: float(tensor.double().sum()) for name, tensor in whole.items()}
        run.load_state_dict({name: tensor + 1 for name, tensor in whole.items()})
        raised = {name: float((tensor - 1).double().sum()) for name, tensor in run.state_dict().items()}
        return {"losses": losses, "seen": seen, "resumed": resumed and vars(resumed), "sums": sums, "raised": raised}
