"""What worker processes do in tests: train a small model under a plan and say what happened."""

from __future__ import annotations

import itertools
import time
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from meshwright import zoo
from meshwright.core.errors import RequestError
from meshwright.core.plan import Plan
from meshwright.core.serialization import from_data
from meshwright.core.task import Task
from meshwright.execute.apply import apply
from meshwright.execute.data_parallel import SUM
from meshwright.execute.full_state import full_state
from meshwright.execute.session import Session
from meshwright.execute.state_digest import replica_differences, state_digest
from meshwright.launch import Rendezvous, join_process_group, leave_process_group
from tests import architectures, convolutional
from tests.procs import expert_models


def random_network(sizes: list[int], activation: str, norm: bool, seed: int) -> nn.Module:
    """A multilayer perceptron of any shape, with blocks that ZeRO-3 can gather one by one."""
    torch.manual_seed(seed)
    kinds = {"relu": nn.ReLU, "gelu": nn.GELU, "tanh": nn.Tanh}
    blocks = []
    for a, b in itertools.pairwise(sizes):
        parts: list[nn.Module] = [nn.Linear(a, b), kinds[activation]()]
        if norm:
            parts.insert(1, nn.LayerNorm(b))
        blocks.append(nn.Sequential(*parts))
    return nn.Sequential(*blocks)


def squared_error(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def summed_error(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts only some samples, so that ranks have unequal weights."""
    keep = batch["mask"]
    errors = (model(batch["x"]) - batch["y"]).square().mean(dim=1)
    return (errors * keep).sum(), keep.sum()


def global_batch(model: dict[str, Any], size: int, step: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The whole batch of one step, the same whoever asks; where it is `fixed`, of every step: something that can be learned."""
    step = 0 if model.get("fixed") else step
    made = torch.Generator().manual_seed(1000 + step)
    if "positions" in model:
        return architectures.labelled_batch(size, step, model["positions"])
    if "family" in model:
        return architectures.batch(model["family"], size, step)
    if "images" in model:
        return convolutional.batch(model["images"], size, step)
    if "own" in model:
        return {k: v.to(dtype) if v.is_floating_point() else v for k, v in expert_models.batch(model["own"], size, made).items()}
    if "zoo" in model:
        fields = zoo.load(model["zoo"]).fields
        out = {}
        for name, f in fields.items():
            integer = f.dtype == "int64"
            shape = (size, *f.shape)
            out[name] = (
                torch.randint(0, f.high, shape, generator=made) if integer else torch.rand(shape, generator=made, dtype=torch.float64).to(dtype)
            )
        return out
    x = torch.randn(size, model["sizes"][0], generator=made, dtype=torch.float64).to(dtype)
    y = torch.randn(size, model["sizes"][-1], generator=made, dtype=torch.float64).to(dtype)
    mask = (torch.rand(size, generator=made) < 0.6).to(dtype)
    mask[0] = 1
    return {"x": x, "y": y, "mask": mask}


def build(model: dict[str, Any], dtype: torch.dtype, seed: int) -> tuple[nn.Module, Any]:
    if "zoo" in model:
        task: Task = zoo.load(model["zoo"], **({"dropout": model["dropout"]} if "dropout" in model else {}))
        torch.manual_seed(seed)
        return task.build().to(dtype), task.loss
    if "family" in model:
        torch.manual_seed(seed)
        losses = {"labels": architectures.labelled_loss, "own": architectures.own_loss}
        loss = losses.get(model.get("loss", "")) or architectures.loss(model["family"])
        return architectures.build(model["family"], **model.get("changes", {})).to(dtype), loss
    if "images" in model:
        torch.manual_seed(seed)
        return convolutional.build(model["images"]).to(dtype), convolutional.counted_loss if model.get("masked") else convolutional.loss
    if "own" in model:
        torch.manual_seed(seed)
        network, own_loss = expert_models.build(model["own"])
        return network.to(dtype), own_loss
    error = summed_error if model.get("masked") else squared_error
    return random_network(model["sizes"], model["activation"], model["norm"], seed).to(dtype), error


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    kinds = {"adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1), "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9)}
    return kinds[name](model.parameters())


def ledger_of(session: Session) -> list[dict[str, Any]]:
    """What was counted since the last time that somebody asked."""
    return [vars(line) | {"sent": line.bytes_sent} for line in session.applied.groups.ledger.drain()]


def train_curve(
    rank: int, world: int, init_method: str, plan: dict[str, Any], model: dict[str, Any], steps: int = 5, dtype: str = "float64",
    optimizer: str = "adamw", clip: float | None = None, seed: int = 7,
) -> dict[str, Any]:  # fmt: skip
    """Train `steps` steps under a plan; the losses, norms, what was sent, what is held, and the state's digest."""
    torch.set_num_threads(1)
    told = from_data(Plan, plan, "plan").for_rank(rank)
    with _group(rank, world, init_method):
        kind = getattr(torch, dtype)
        network, loss = build(model, kind, seed + rank)  # other values on every rank: rank 0's must win
        network.to(told.device)
        step_with = make_optimizer(optimizer, network)
        session = Session(told, network, step_with, seed=seed, clip=clip)
        started = ledger_of(session)
        losses, norms, ledgers = [], [], []
        first, count = told.sample_range(told.mesh.data_rank(rank))
        held: dict[str, int] = {}
        step_with.register_step_pre_hook(lambda *_: held.update(session.applied.memory_bytes()))
        for step in range(steps):
            whole = global_batch(model, told.global_batch, step, kind)
            result = session.step({k: v[first : first + count].to(told.device) for k, v in whole.items()}, loss)
            losses.append(float(result.loss))
            norms.append(float(result.grad_norm) if result.grad_norm is not None else None)
            ledgers.append(ledger_of(session))
        if told.memory.zero == 3 and told.mesh.shard > 1:
            with suppress(RequestError):
                network.state_dict()
                raise AssertionError("slices looked like a state")
        held["optimizer"] = session.applied.memory_bytes()["optimizer"]
        state = {name: tensor.double().sum().item() for name, tensor in full_state(session.applied)}
        assert replica_differences(session.applied) == [], "ranks that hold the same piece have other values"
        return {
            "losses": losses,
            "norms": norms,
            "started": started,
            "ledger": ledgers[-1] if ledgers else [],
            "held": held,
            "digest": state_digest(session.applied),
            "state": state,
        }


@contextmanager
def _group(rank: int, world: int, init_method: str) -> Any:
    join_process_group(Rendezvous(rank, world, init_method, timeout_s=60))
    try:
        yield
    finally:
        leave_process_group()


def own_loop(
    rank: int, world: int, init_method: str, plan: dict[str, Any], use_context: bool, model: dict[str, Any] | None = None
) -> dict[str, float]:
    """A user's loop after `apply`: two backwards a step, the mean over ranks; the final parameters, summed by name."""
    torch.set_num_threads(1)
    told = from_data(Plan, plan, "plan")
    model = model or {"sizes": [6, 9, 4], "activation": "tanh", "norm": False}
    with _group(rank, world, init_method):
        network, loss = build(model, torch.float64, 3)
        optimizer = make_optimizer("sgd", network)
        applied = apply(told, network, optimizer)
        first, count = told.sample_range(told.mesh.data_rank(rank))
        for step in range(4):
            for half in range(2):
                whole = global_batch(model, told.global_batch, 2 * step + half, torch.float64)
                mine = {k: v[first : first + count] for k, v in whole.items()}
                if half == 0 and use_context:
                    with applied.accumulate():
                        loss(network, mine).backward()
                else:
                    loss(network, mine).backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: tensor.double().sum().item() for name, tensor in full_state(applied) if "/" not in name}


class _Branching(nn.Module):
    """Uses its second half only for samples marked with a positive first value."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.always(x)
        return y + self.sometimes(x) if bool((x[:, 0] > 0).all()) else y


def branching(rank: int, world: int, init_method: str, plan: dict[str, Any]) -> list[float]:
    """Rank 0's samples take the branch, the others do not. On one rank the halves go through one by one, as micro-batches."""
    torch.set_num_threads(1)
    torch.manual_seed(5)
    told = from_data(Plan, plan, "plan")
    told = told if world > 1 else Plan(**{**vars(told), "micro_batches": 2})
    x = torch.randn(4, 3, dtype=torch.float64).abs()
    x[2:, 0] *= -1
    with _group(rank, world, init_method):
        network = _Branching().double()
        session = Session(told, network, make_optimizer("adamw", network))
        first, count = told.sample_range(told.mesh.data_rank(rank))
        for _ in range(3):
            session.step(x[first : first + count], lambda m, b: m(b).square().mean())
        return [p.detach().sum().item() for p in network.parameters()]


def fp16_steps(rank: int, world: int, init_method: str) -> dict[str, list[bool]]:
    """A scale that is far too large: steps are skipped until it has been halved enough, then parameters move."""
    torch.set_num_threads(1)
    plan = from_data(Plan, {"model": "t", "global_batch": 4, "mesh": {"dp": 2}, "memory": {"precision": "fp16"}}, "plan")
    skipped, moved = [], []
    with _group(rank, world, init_method):
        network = random_network([4, 4], "tanh", False, 0)
        session = Session(plan, network, make_optimizer("sgd", network), clip=1.0)
        assert session.loss_scaler is not None
        session.loss_scaler.value = 2.0**40
        for step in range(40):
            before = [p.detach().clone() for p in network.parameters()]
            whole = global_batch({"sizes": [4, 4]}, 4, step, torch.float32)
            result = session.step({k: v[2 * rank : 2 * rank + 2] for k, v in whole.items()}, squared_error)
            skipped.append(result.skipped)
            moved.append(any(not torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True)))
            if not result.skipped:
                break
    return {"skipped": skipped, "moved": moved}


def clipped_norm(rank: int, world: int, init_method: str, plan: dict[str, Any]) -> tuple[float, float]:
    """In a user's own loop: the gradient's norm before and after clipping to 0.2."""
    torch.set_num_threads(1)
    told = from_data(Plan, plan, "plan")
    model = {"sizes": [6, 9, 4], "activation": "tanh", "norm": False}
    with _group(rank, world, init_method):
        network, loss = build(model, torch.float64, 3)
        applied = apply(told, network, make_optimizer("sgd", network))
        first, count = told.sample_range(told.mesh.data_rank(rank))
        whole = global_batch(model, told.global_batch, 0, torch.float64)
        loss(network, {k: v[first : first + count] for k, v in whole.items()}).backward()
        before = applied.clip_gradients(0.2)
        return float(before), float(applied.squared_norm().sqrt())


def dropout_under_tensor_parallelism(rank: int, world: int, init_method: str, plan: dict[str, Any]) -> list[float]:
    """torch's own dropout on a whole activation, on ranks whose scripts seeded themselves differently: the whole parameters' sums."""
    torch.set_num_threads(1)
    told = from_data(Plan, plan, "plan")
    with _group(rank, world, init_method):
        torch.manual_seed(1)
        network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.Dropout(0.5), nn.LayerNorm(4))
        torch.manual_seed(100 + rank)
        session = Session(told, network, make_optimizer("sgd", network))
        for step in range(3):
            x = torch.randn(told.global_batch, 4, generator=torch.Generator().manual_seed(step))
            session.step({"x": x}, lambda m, b: m(b["x"]).square().mean())
        return [float(p.detach().double().sum()) for name, p in network.named_parameters() if name in ("2.bias", "4.weight", "4.bias")]


def uneven_tokens(rank: int, world: int, init_method: str, plan: dict[str, Any], model: dict[str, Any], counts: list[int]) -> dict[str, Any]:
    """Each rank brings another number of tokens, or none, to a mixture: the squares of its results and of the experts' gradients."""
    torch.set_num_threads(1)
    told = from_data(Plan, plan, "plan")
    with _group(rank, world, init_method):
        network, _ = build(model, torch.float64, 3)
        applied = apply(told, network, make_optimizer("sgd", network))
        if applied.gradient_sync is not None:
            applied.gradient_sync.set_reduction(lambda: SUM)
        made = torch.Generator().manual_seed(1)
        tokens = torch.randn(sum(counts), expert_models.WIDTH, generator=made, dtype=torch.float64)
        choices = torch.randint(0, expert_models.EXPERTS, (sum(counts), 2), generator=made)
        weights = torch.rand(sum(counts), 2, generator=made, dtype=torch.float64).requires_grad_()
        first, count = (sum(counts[:rank]), counts[rank]) if world > 1 else (0, sum(counts))
        mine = slice(first, first + count)
        results = network.experts[0](choices[mine], tokens[mine], weights[mine])
        with applied.accumulate():
            results.square().sum().backward()
        squares = [float(p.grad.square().sum()) for p in network.experts[0].parameters()]
        return {"results": float(results.detach().square().sum()), "weights": float(weights.grad[mine].square().sum()), "squares": squares}


def failing_rank(rank: int, world: int, init_method: str, plan: dict[str, Any], model: dict[str, Any], guilty: int) -> None:
    """Trains a step, then one rank's code fails in the middle of the next, while the others wait for it."""
    torch.set_num_threads(1)
    told = from_data(Plan, plan, "plan")
    with _group(rank, world, init_method):
        network, loss = build(model, torch.float64, 7)
        session = Session(told, network, make_optimizer("sgd", network))
        first, count = told.sample_range(told.mesh.data_rank(rank))

        def fails(given: nn.Module, batch: Any) -> torch.Tensor:
            if rank == guilty and session.steps_done == 1:
                raise ValueError(f"boom at {time.time()}")
            return loss(given, batch)

        for step in range(3):
            whole = global_batch(model, told.global_batch, step, torch.float64)
            session.step({k: v[first : first + count] for k, v in whole.items()}, fails)


def mixed_units(rank: int, world: int, init_method: str, zero: int) -> dict[str, float]:
    """Units with parameters that are not trained, in front and behind, and an optimizer of two groups: the final state, summed by name."""
    torch.set_num_threads(1)
    memory = {"zero": zero, "units": ["0", "1"], "precision": "fp64"} if zero else {"precision": "fp64"}
    told = from_data(Plan, {"model": "t", "global_batch": 4, "mesh": {"shard": world}, "memory": memory}, "plan")
    with _group(rank, world, init_method):
        network = random_network([6, 9, 5, 4], "tanh", True, 3).double()
        for name in ("0.0.weight", "1.1.weight", "2.0.bias"):
            network.get_parameter(name).requires_grad_(False)
        trained = [p for p in network.parameters() if p.requires_grad]
        groups = [{"params": [p for p in trained if p.dim() > 1], "lr": 1e-2}, {"params": [p for p in trained if p.dim() == 1], "lr": 3e-2}]
        session = Session(told, network, torch.optim.AdamW(groups), clip=0.5)
        first, count = told.sample_range(told.mesh.data_rank(rank))
        for step in range(3):
            whole = global_batch({"sizes": [6, 4]}, 4, step, torch.float64)
            session.step({k: v[first : first + count] for k, v in whole.items()}, squared_error)
        return {name: tensor.double().sum().item() for name, tensor in full_state(session.applied)}
