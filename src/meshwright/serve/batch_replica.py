"""A replica that computes its part of a data set: loads the model on its ranks, runs batch after batch, and writes the outputs' columns to files.

[Note: one forward pass]
The task's loss is computed on each batch, and the model's outputs are taken from the call that the loss makes. So the loss is that of validation, and
nothing is computed twice. In the first batch, the outputs of single samples are compared with what they get alone: where samples meet in the model
itself, outputs would depend on the batch, and each sample is computed alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from meshwright import data, zoo
from meshwright.core.errors import MeshwrightError, RequestError, RunError
from meshwright.core.plan import Plan
from meshwright.core.serialization import from_data
from meshwright.core.task import Batch, Task
from meshwright.execute.counted_loss import run_counted
from meshwright.execute.exchange import broadcast_data
from meshwright.execute.rank_device import setup_device
from meshwright.launch import Rendezvous, join_process_group, leave_process_group
from meshwright.observe.pictures import image_rows, write_png
from meshwright.serve.column_files import ColumnWriter
from meshwright.serve.loading import PRECISIONS, load_model
from meshwright.serve.model_source import ModelSource
from meshwright.serve.output_kinds import Columns, OutputKind, find_kind, flatten_outputs
from meshwright.serve.predict_model import first_line, is_close
from meshwright.zoo.vae import VAE

PICTURE = "images.png"
DRAWN = "drawn"  # the column of images from the prior
_PICTURE_IMAGES = 16  # in a row
_SAY_S = 5.0  # between lines of progress
_CHANNELS = (1, 3)  # that a picture can have
Say = Callable[[str], None]


@dataclass(frozen=True)
class BatchJob:
    """Which samples of which data set, in batches of how many, by how many replicas; and the folder for what they write."""

    data: str
    data_dir: str
    split: str
    samples: int
    batch: int
    replicas: int
    folder: str
    parts: str  # a folder for the replicas' own files
    seed: int  # of what is drawn

    def samples_of(self, replica: int) -> range:
        return range(replica * self.samples // self.replicas, (replica + 1) * self.samples // self.replicas)


def load_samples(job: BatchJob, task: Task, seed: int) -> data.Dataset:
    """The data set; `seed` is that of the run, for synthetic samples."""
    return data.load(job.data, task.fields, split=job.split, folder=Path(job.data_dir) if job.data_dir else None, seed=seed)  # type: ignore[arg-type]


def run_batch_rank(
    rank: int, world: int, init_method: str, source: Mapping[str, Any], plan: Mapping[str, Any], job: Mapping[str, Any]
) -> dict[str, Any]:
    """One rank of one of the replicas, which do not talk to each other."""
    own = from_data(Plan, plan, "plan")
    replica, place = divmod(rank, own.world)
    local = replica * own.world + (own.device_order[place] if own.device_order else place)
    device = setup_device(own.device_of(place, local), own.threads)
    address = f"{init_method}-{replica}"
    join_process_group(Rendezvous(place, own.world, address, own.backend, device.type, local, own.sync.timeout_s))
    try:
        say = (lambda text: print(f"· {text}", file=sys.stderr, flush=True)) if rank == 0 else (lambda text: None)
        return BatchReplica(from_data(ModelSource, source, "source"), own, from_data(BatchJob, job, "job"), replica, device, say).run()
    finally:
        leave_process_group()


class BatchReplica:
    """One rank's model and what it has computed. Only the first rank of a replica writes."""

    def __init__(self, source: ModelSource, plan: Plan, job: BatchJob, replica: int, device: torch.device, say: Say) -> None:
        self._task, self._job, self._replica, self._device, self._say = source.load_task(), job, replica, device, say
        self._dataset = load_samples(job, self._task, source.seed)
        started = time.perf_counter()
        loaded = load_model(source, self._task, plan, device)
        self._model, self._world = loaded.model, loaded.applied.groups.world
        if loaded.note and (source.weights or source.checkpoint):  # of random weights the plan's line tells
            say(f"{source.name}: {loaded.note}")
        say(f"loaded in {time.perf_counter() - started:.1f} s")
        self._calls = _Calls(self._model, PRECISIONS[plan.memory.precision])
        if plan.compile != "none":
            self._model.forward = torch.compile(self._model.forward)  # type: ignore[method-assign]
        self._plan = plan
        self._left_out: set[str] = set()
        self._said_calls = False
        self._writes = self._world.rank == 0
        self._columns = ColumnWriter(Path(job.parts), replica)
        self._kind: OutputKind | None = None
        self._row_names: set[str] | None = None  # outputs with a row for each sample, as far as it is known
        self._written: set[str] = set()
        self._has_loss = zoo.has_loss(self._task)
        self._loss = [0.0, 0.0]  # sum and count
        self._nonfinite = 0
        self._batch = job.batch
        self._shown: list[tuple[Tensor, Tensor]] = []  # images and their reconstructions, for the picture

    @torch.inference_mode()
    def run(self) -> dict[str, Any]:
        """All samples of this replica. Returns what the columns are, the loss, and how long it took."""
        samples = self._job.samples_of(self._replica)
        self._check_samples(samples)
        started = said = time.perf_counter()
        done = 0
        for first, batch in self._batches(samples):
            self._add(batch, first)
            done = first + _count(batch) - samples.start
            now = time.perf_counter()
            if now - said > _SAY_S and done < len(samples):
                said = now
                self._say(
                    f"{done * self._job.replicas:,} of {self._job.samples:,} samples, {done * self._job.replicas / (now - started):,.0f} a second"
                )
        seconds = time.perf_counter() - started
        assert self._kind is not None
        rows = self._draw() if self._replica == 0 and self._kind.image else 0
        return {
            "kind": self._kind.name, "columns": {name: list(about) for name, about in self._columns.described.items()}, "nonfinite": self._nonfinite,
            "loss": self._loss if self._has_loss else None, "samples": len(samples), "seconds": seconds, "batch": self._batch, "picture_rows": rows,
        }  # fmt: skip

    def _batches(self, samples: range) -> Iterator[tuple[int, Batch]]:
        """The samples in order; the next batch is prepared while one is computed. The last may be smaller."""
        with ThreadPoolExecutor(1, thread_name_prefix="samples") as pool:
            first = samples.start
            future = pool.submit(self._fetch, first, min(first + self._batch, samples.stop))
            while first < samples.stop:
                batch, first_of_it = future.result(), first
                first += _count(batch)
                future = pool.submit(self._fetch, first, min(first + self._batch, samples.stop)) if first < samples.stop else future
                yield first_of_it, {name: tensor.to(self._device) for name, tensor in batch.items()}

    def _fetch(self, first: int, end: int) -> dict[str, Tensor]:
        return self._dataset.batch(torch.arange(first, end))

    def _compute(self, batch: Batch, first: int) -> tuple[Any, Any]:
        """(loss, outputs of the model's call in it)."""
        self._calls.clear()
        try:
            loss = run_counted(self._task.loss, self._model, batch)
        except MeshwrightError:
            raise
        except torch.OutOfMemoryError:
            raise RunError(f"a batch of {_count(batch)} samples does not fit in memory: use --set batch={max(_count(batch) // 4, 1)}") from None
        except Exception as error:  # the model's own code may raise anything
            where = f"samples {first} to {first + _count(batch) - 1} of {self._job.data}"
            raise RequestError(f"{self._task.name}: it fails on {where}: {first_line(error)}") from error
        outputs, more = self._calls.outputs(self._task.name)
        if more and not self._said_calls:
            self._said_calls = True
            self._say(f"its loss calls the model {more + 1} times: the outputs are those of the first call")
        return loss, outputs

    def _check_samples(self, samples: range) -> None:
        """Compute single samples of the first batch alone; if they differ from what they get in it, every sample is computed alone."""
        end = min(samples.start + self._batch, samples.stop)
        if end - samples.start < 2:
            return
        together, differs = self._rows(samples.start, end), False
        for place in (0, end - samples.start - 1):
            try:
                alone = self._rows(samples.start + place, samples.start + place + 1)
            except RequestError as error:
                self._say(f"whether samples meet in this model is not known: alone, {error}")
                return
            have_rows = {n for n in together.keys() & alone.keys() if together[n].shape[0] == end - samples.start and alone[n].shape[0] == 1}
            self._row_names = have_rows if self._row_names is None else self._row_names & have_rows
            differs = differs or not all(is_close(alone[name][0], together[name][place]) for name in have_rows)
        if broadcast_data(self._world, differs, self._plan.device, "batch/verdict"):
            self._batch = 1
            self._say("samples meet in this model, so each is computed alone")

    def _rows(self, first: int, end: int) -> dict[str, Tensor]:
        batch = {name: tensor.to(self._device) for name, tensor in self._fetch(first, end).items()}
        return {name: tensor for name, tensor in flatten_outputs(self._compute(batch, first)[1]).items() if tensor.dim()}

    def _add(self, batch: Batch, first: int) -> None:
        count = _count(batch)
        loss, outputs = self._compute(batch, first)
        if isinstance(loss, tuple):
            self._loss = [self._loss[0] + float(loss[0]), self._loss[1] + float(loss[1])]
        else:
            self._loss = [self._loss[0] + float(loss) * count, self._loss[1] + count]
        self._kind = self._kind or find_kind(self._task, outputs, count)
        columns = self._columns_of(outputs, batch, count)
        is_finite = [tensor.flatten(1).isfinite().all(1) if tensor.dim() > 1 else tensor.isfinite() for tensor in columns.values()]
        self._nonfinite += int((~torch.stack(is_finite).all(0)).sum())
        if self._writes:
            self._columns.add(columns)
        self._keep_images(batch, columns)

    def _columns_of(self, outputs: Any, batch: Batch, count: int) -> Columns:
        """The outputs that have a row for each sample: the same ones in every batch."""
        assert self._kind is not None
        found = self._kind.columns(outputs, batch)
        may_have_rows = self._row_names if self._kind.name == "tensors" and self._row_names is not None else found.keys()
        columns = {name: t for name, t in found.items() if name in may_have_rows and t.dim() and t.shape[0] == count}
        self._written = self._written or set(columns)
        if not columns or self._written != set(columns):
            shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in found.items()) or f"a {type(outputs).__name__} without tensors"
            problem = (
                "other ones have a row for each sample than before" if columns else "none has a row for each sample, so there is nothing to write"
            )
            raise RequestError(f"{self._task.name}: its outputs for {count} samples are {shapes}: {problem}")
        self._note_left_out(found.keys() - columns.keys())
        return columns

    def _note_left_out(self, names: set[str]) -> None:
        for name in sorted(names - self._left_out):
            self._left_out.add(name)
            self._say(f"the output {name} has no row for each sample: it is left out")

    # -- the picture of a variational autoencoder --

    def _keep_images(self, batch: Batch, columns: Mapping[str, Tensor]) -> None:
        kind = self._kind
        missing = _PICTURE_IMAGES - sum(len(images) for images, _ in self._shown)
        if kind is not None and kind.image and self._replica == 0 and missing > 0:
            self._shown.append((batch[kind.image][:missing].float().cpu(), columns[kind.reconstruction][:missing].cpu()))

    def _draw(self) -> int:
        """A picture of originals, reconstructions and, below them, images from the prior. Returns its number of rows."""
        rows = [torch.cat(tensors).numpy() for tensors in zip(*self._shown, strict=True)]
        if isinstance(self._model, VAE):
            drawn = self._model.draw(len(rows[0]), self._job.seed).cpu()
            rows.append(drawn.numpy())
            if self._writes:
                self._columns.add({DRAWN: drawn})
        if rows[0].shape[1] not in _CHANNELS:
            return 0
        if self._writes:
            write_png(Path(self._job.folder) / PICTURE, image_rows(rows))
        return len(rows)


class _Calls:
    """Records the outputs of the model's calls; gives it floats in its own precision."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._found: list[Any] = []
        self._dtype = dtype
        model.register_forward_pre_hook(self._cast, with_kwargs=True)
        model.register_forward_hook(lambda _, __, outputs: self._found.append(outputs))

    def clear(self) -> None:
        self._found.clear()

    def outputs(self, name: str) -> tuple[Any, int]:
        """What the first call gave, and how many more there were."""
        if not self._found:
            raise RequestError(f"{name}: its loss does not call the model, so its outputs are not known: let the loss call model(…)")
        return self._found[0], len(self._found) - 1

    def _cast(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._dtype == torch.float32:
            return None
        cast = lambda leaf: leaf.to(self._dtype) if isinstance(leaf, Tensor) and leaf.dtype == torch.float32 else leaf  # noqa: E731
        return pytree.tree_map(cast, (args, kwargs))


def _count(batch: Batch) -> int:
    return int(next(iter(batch.values())).shape[0])
