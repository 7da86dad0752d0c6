"""Steps in which every sequence computes its next token, as captured CUDA graphs: one launch a step, and several steps without waiting for the host.

[Note: decode graphs]
A graph replays the same kernels on the same memory, so a step's numbers go into tensors of fixed shapes: one set for each size of batch, padded with
rows that write to a page of their own. A graph also chooses the most likely token of each row and puts it in place for the next step. So a greedy
step can be repeated a few times before the host looks at what came: it learns of an answer's end a few tokens late, and drops them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from torch import Tensor

from meshwright.serve.decode_batch import DecodeBatch, PageKernels
from meshwright.serve.kv_memory import KVMemory
from meshwright.serve.steps import Step

_WARM_UPS = 3  # runs before a capture: libraries and compilers set themselves up
RunModel = Callable[[DecodeBatch], Tensor]  # logits (rows, vocabulary)


def batch_sizes(most: int) -> list[int]:
    """The sizes that are captured: powers of two, and multiples of 32 above 32."""
    sizes = [size for size in (1, 2, 4, 8, 16) if size < most] + list(range(32, most, 32))
    return [*sizes, most]


@dataclass
class _Captured:
    """One size of batch: what a step reads, what it gives, and how it is run again."""

    batch: DecodeBatch
    logits: Tensor
    chosen: Tensor  # (rows,)
    replay: Callable[[], None]


class DecodeGraphs:
    """Runs steps of single tokens for batches of up to `most_rows` sequences of up to `context` tokens. Memory has a spare page for padding. On a
    device without graphs the same code runs as it is."""

    def __init__(self, run_model: RunModel, memory: KVMemory, kernels: PageKernels, most_rows: int, context: int, spare_page: int) -> None:
        self._run_model, self._memory, self._kernels, self._spare = run_model, memory, kernels, spare_page
        self._sizes = batch_sizes(most_rows)
        self._pages = -(-context // memory.page_tokens)
        self._captured: dict[int, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle() if memory.device.type == "cuda" else None

    def split(self, step: Step) -> tuple[Step, Step]:
        """The single tokens that a step begins with, which can be run here, and the rest."""
        rows = len(list(takewhile(lambda chunk: chunk.generates and len(chunk.tokens) == 1, step.chunks[: self._sizes[-1]])))
        return replace(step, chunks=step.chunks[:rows]), replace(step, chunks=step.chunks[rows:])

    def capture_all(self) -> None:
        """Capture every size now, the largest first: smaller ones share its memory."""
        for size in reversed(self._sizes):
            self._get(size)

    def run(self, step: Step) -> Tensor:
        """Logits (rows, vocabulary), or the chosen tokens (rows, repeats) of a step that is repeated."""
        rows = len(step.chunks)
        captured = self._get(self._sizes[bisect_left(self._sizes, rows)])
        self._fill(captured.batch, step)
        if step.repeats == 1:
            captured.replay()
            return captured.logits[:rows].clone()
        found = torch.empty((step.repeats, rows), dtype=torch.int64, device=self._memory.device)
        for turn in range(step.repeats):
            captured.replay()
            found[turn] = captured.chosen[:rows]
        return found.t()

    def _fill(self, batch: DecodeBatch, step: Step) -> None:
        size = batch.tokens.shape[1]
        padding = size - len(step.chunks)
        tokens = [chunk.tokens[0] for chunk in step.chunks] + [0] * padding
        positions = [chunk.start for chunk in step.chunks] + [0] * padding
        pages = [[*chunk.pages[: self._pages], *[self._spare] * (self._pages - len(chunk.pages))] for chunk in step.chunks]
        pages += [[self._spare] * self._pages] * padding
        batch.tokens.copy_(torch.tensor([tokens]), non_blocking=True)
        batch.positions.copy_(torch.tensor([positions]), non_blocking=True)
        batch.pages.copy_(torch.tensor(pages, dtype=torch.int32), non_blocking=True)

    def _get(self, size: int) -> _Captured:
        if size not in self._captured:
            self._captured[size] = self._capture(size)
        return self._captured[size]

    def _capture(self, size: int) -> _Captured:
        device = self._memory.device
        numbers = torch.zeros((2, 1, size), dtype=torch.int64, device=device)
        pages = torch.full((size, self._pages), self._spare, dtype=torch.int32, device=device)
        batch = DecodeBatch(self._memory, numbers[0], numbers[1], pages, self._kernels)
        logits, chosen = self._step(batch)
        if device.type != "cuda":
            captured = _Captured(batch, logits, chosen, lambda: None)
            captured.replay = lambda: self._rerun(captured)
            return captured
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self._step(batch)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits, chosen = self._step(batch)
        return _Captured(batch, logits, chosen, graph.replay)

    def _rerun(self, captured: _Captured) -> None:
        captured.logits, captured.chosen = self._step(captured.batch)

    def _step(self, batch: DecodeBatch) -> tuple[Tensor, Tensor]:
        """One step, which leaves the chosen tokens in place for the next one."""
        batch.locate()
        logits = self._run_model(batch)
        chosen = logits.argmax(-1)
        batch.tokens.copy_(chosen.unsqueeze(0))
        batch.positions.add_(1)
        return logits, chosen
