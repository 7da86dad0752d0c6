"""A loop of the user's own on a prepared model: `model(x)`, `loss.backward()`, `optimizer.step()` train as on one device.

[Note: the weight of a backward]
Each rank's loss is a mean over its own samples. The gradient of the mean over the global batch is the sum over ranks of n/N times their gradients,
where n and N are the samples of the rank and of the batch. The loader knows both, so the reduction of gradients, which divides by the number of
ranks anyway, divides by N/n instead where ranks have different numbers. Nothing more is sent. Gradients that an earlier backward has reduced, and
that ZeRO-0 reduces once more together with the new ones, are the same on all ranks: their weighted mean is what they were.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from meshwright.core.errors import RequestError
from meshwright.core.plan import Plan
from meshwright.execute.averaged_buffers import average_buffers
from meshwright.execute.batch_share import Share
from meshwright.execute.data_parallel import MEAN, Reduction
from meshwright.execute.offload import has_closure
from meshwright.execute.rank_loader import RankLoader, current_loader
from meshwright.execute.session import Session


class OwnLoop:
    """Connects a session's model and optimizer with the loaders of the script, by hooks. They do nothing within the session's own steps."""

    def __init__(self, session: Session, loaders: Sequence[RankLoader]) -> None:
        self.session, self.loaders = session, loaders
        applied, self._model = session.applied, session.model
        self.refusal = own_loop_refusal(session.plan)
        self._has_warned = self._is_stale = False
        self._frozen = [p for p in self._model.parameters() if not p.requires_grad] if applied.gradient_sync is not None else []
        self._decides_by_loss = type(session.optimizer).__name__ == "LBFGS" and session.plan.world > 1
        session.own_loop_reduction = self.reduction
        self._has_unsent = False  # gradients that a backward within `no_sync` has left
        if not self.refusal and not hasattr(self._model, "no_sync"):
            self._model.no_sync = lambda: self.no_sync()  # type: ignore[assignment]  # a function, which copies of the model share
        session.optimizer.register_step_pre_hook(lambda _optimizer, args, kwargs: self._before_step(has_closure(args, kwargs)))
        if self.refusal or applied.random_keys.has_modules:
            self._model.register_forward_pre_hook(self._before_forward, prepend=True)
        if session.has_low_precision and not self.refusal:
            self._run_in_autocast()
        if applied.groups.data.size > 1 and any(name.rpartition(".")[2] == "running_mean" for name, _ in self._model.named_buffers()):
            for loader in loaders:
                loader.pass_callbacks.append(self._average_buffers)

    def share(self) -> Share | None:
        """This rank's share of the item that the script works on."""
        loader = self._loader()
        return loader.share if loader is not None else None

    def reduction(self) -> Reduction:
        """How a backward of the script's own combines gradients; see [Note: the weight of a backward]."""
        share, mesh = self.share(), self.session.plan.mesh
        if self.session.plan.samples.loss == "sum":  # over the samples of a batch, and so over its ranks
            parts = mesh.cp * (share.copies if share is not None else 1)
            return Reduction("sum", 1.0 / parts if parts > 1 else None)
        if share is None or share.is_even:
            return MEAN
        if self._has_unsent:
            why = "this batch is split unequally, and its gradients would be reduced together with others that were not"
            raise RequestError(f"no_sync: {why}: leave out short batches (drop_last=True), or leave no_sync out")
        if mesh.ep > 1:
            why = "an expert's gradient mixes the samples of ranks that have different numbers of them"
            raise RequestError(f"mesh {mesh}: {why}: leave out short batches (drop_last=True), or use run.step(batch, loss_fn)")
        return Reduction("sum", share.weight / mesh.cp)  # ranks along cp have the same samples

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """As in DDP: backwards in this context accumulate gradients and send nothing; the next backward outside sends them all. A batch that is split
        unequally is sent at once, for its weights, and so is every one where there is nothing to accumulate in (ZeRO-2 and 3)."""
        share = self.share()
        if share is not None and not share.is_even and not self._has_unsent:
            yield
            return
        self.reduction()  # refuses what the weights do not allow
        self._has_unsent = True
        with self.session.applied.accumulate():
            yield

    def _loader(self) -> RankLoader | None:
        loader = current_loader(self.loaders)
        if loader is not None and loader not in self.loaders and not loader.splits(self.session.plan):
            raise RequestError(
                f"the loader was prepared for mesh {loader.plan.mesh} and this model for {self.session.plan.mesh}, which split a batch differently: "
                "iterate over the loader that was prepared with the model, or give both one mesh"
            )
        return loader

    # -- hooks --

    def _before_step(self, has_closure: bool) -> None:
        self._is_stale, self._has_unsent = True, False
        if not self._model.training and not self._has_warned:
            self._has_warned = True
            self._say("the model trains in eval mode, without dropout and with fixed running statistics: call model.train() before the loop")
        if has_closure and self._decides_by_loss:
            raise RequestError("LBFGS decides by the loss of one rank, so ranks would part ways: use another optimizer, or one rank")
        if any(p.requires_grad for p in self._frozen):
            raise RequestError("a parameter was frozen when prepare was called and is trained now: set requires_grad before prepare")

    def _before_forward(self, *_: Any) -> None:
        if self.session.is_running:
            return
        if self.refusal:
            raise RequestError(self.refusal)
        loader = self._loader()
        if loader is not None and loader.share is not None:
            index = loader.num_yielded - 1
            step = index if self._model.training else -1 - index  # as in `Session`
            self.session.applied.random_keys.set(self.session.seed, step, loader.share.first_sample)

    def _run_in_autocast(self) -> None:
        """Run forward in the plan's precision. `Session` does it itself, with the loss."""
        contexts: list[Any] = []

        def enter(*_: Any) -> None:
            contexts.append(self.session.autocast())
            contexts[-1].__enter__()

        def leave(*_: Any) -> None:
            contexts.pop().__exit__(None, None, None)

        self._model.register_forward_pre_hook(enter, prepend=True)
        self._model.register_forward_hook(leave, always_call=True)

    def _average_buffers(self) -> None:
        """Make running statistics equal on all ranks, if a step was taken since: before they are used or saved."""
        if self._is_stale:
            self._is_stale = False
            average_buffers(self.session.applied)

    def _say(self, text: str) -> None:
        if self.session.applied.groups.rank == 0:
            print(f"meshwright: {text}", file=sys.stderr)


def own_loop_refusal(plan: Plan) -> str:
    """Why a loop of the user's own cannot run this plan; empty if it can."""
    instead = "use run.step(batch, loss_fn), or"
    if plan.mesh.pp > 1:
        return f"a pipeline (mesh {plan.mesh}) orders micro-batches itself, so model(x) cannot be called in your loop: {instead} a mesh without pp"
    if plan.mesh.cp > 1 and plan.context.attention_sites:
        return f"under mesh {plan.mesh} a rank holds some positions of each sequence, and its loss is a part of the mean: {instead} a mesh without cp"
    if plan.memory.precision == "fp16":
        return f"precision=fp16 scales the loss in run.step, not in your loop: {instead} torch.autocast and torch.amp.GradScaler with precision=fp32"
    return ""


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The optimizer steps parameters of this model, and no others: others' gradients would not be reduced."""
    known = {id(p) for p in model.parameters()}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    others = sum(id(p) not in known for p in params)
    if others:
        what = "is of another model" if others == len(params) else f"also holds {others} parameters that are not in the model"
        raise RequestError(f"the optimizer {what}: make it from the parameters of the {type(model).__name__} that is prepared with it")
