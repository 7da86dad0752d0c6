"""A replica that answers samples: loads the model on its ranks, finds what it takes, and runs batches that come over a socket."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.errors import RequestError
from meshwright.core.plan import Plan
from meshwright.core.serialization import from_data
from meshwright.core.task import Task
from meshwright.execute.exchange import broadcast_data
from meshwright.execute.rank_device import setup_device
from meshwright.launch import Rendezvous, join_process_group, leave_process_group
from meshwright.serve.input_specs import specs_to_data
from meshwright.serve.loading import load_model
from meshwright.serve.messages import connect_channel
from meshwright.serve.model_inputs import find_inputs
from meshwright.serve.model_source import ModelSource
from meshwright.serve.pooling import Pooling, find_pooling, make_pooled
from meshwright.serve.predict_model import Outputs, PredictModel, bind_model
from meshwright.serve.replica import model_context
from meshwright.serve.tensor_messages import DTYPES, Array, TensorSocket

_KEEP_ALIVE_S = 10.0  # between messages to ranks that wait; less than any timeout of a collective
_TRIED = 3  # samples in the first batch


@dataclass(frozen=True)
class PredictOptions:
    """How batches are made and texts become vectors. `sizes`: those that a batch may have; none: any."""

    sizes: tuple[int, ...] = ()
    pooling: str = "auto"
    embeds: bool = False  # whether the model's folder has a tokenizer


def serve_predict_rank(
    rank: int, world: int, init_method: str, source: Mapping[str, Any], plan: Mapping[str, Any], options: Mapping[str, Any], channel: str,
    devices: list[int] | None = None,
) -> None:  # fmt: skip
    """One rank of a replica. The first connects to `channel`; the replica ends when that is closed. `devices`: of each rank,
    among those that its process sees; in order unless given."""
    own = from_data(Plan, plan, "plan")
    place = own.device_order[rank] if own.device_order else rank
    local = devices[place] if devices else place
    device = setup_device(own.device_of(rank, local), own.threads)
    join_process_group(Rendezvous(rank, world, init_method, own.backend, device.type, local, own.sync.timeout_s))
    try:
        predictor = Predictor(from_data(ModelSource, source, "source"), own, from_data(PredictOptions, options, "options"), device)
        if rank:
            predictor.follow()
            return
        with connect_channel(channel) as peer:
            predictor.serve(TensorSocket(peer))
    finally:
        leave_process_group()


class Predictor:
    """The model on this rank, and what may be asked of it: "predict", and "embed" for encoders of texts."""

    def __init__(self, source: ModelSource, plan: Plan, options: PredictOptions, device: torch.device) -> None:
        started = time.perf_counter()
        task = source.load_task()
        loaded = load_model(source, task, plan, device)
        self._device, self._world, self._plan = device, loaded.applied.groups.world, plan
        self._batches = self._samples = 0
        self._compute_s = 0.0
        with torch.inference_mode():
            self._inputs = find_inputs(loaded.model, task, device)
            if plan.compile != "none":
                loaded.model.forward = torch.compile(loaded.model.forward)  # type: ignore[method-assign]
            self._kinds = {"predict": PredictModel(bind_model(loaded.model, self._inputs), options.sizes, self._agreed)}
            self._embedding = self._find_embedding(loaded.model, source, options)
            note = self._try_out()
        self.facts = self._facts(task, time.perf_counter() - started, [loaded.note, note])

    def _find_embedding(self, model: nn.Module, source: ModelSource, options: PredictOptions) -> dict[str, Any] | None:
        names = {spec.name for spec in self._inputs.specs}
        if not options.embeds or "input_ids" not in names or not hasattr(model, "base_model"):
            return None
        pooling: Pooling = find_pooling(Path(source.weights or source.tokenizer), options.pooling)
        pooled = PredictModel(make_pooled(model, pooling), options.sizes, self._agreed)
        vectors = pooled.run({k: v for k, v in (self._inputs.made_up(_TRIED, self._device) or {}).items() if k in ("input_ids", "attention_mask")})
        if vectors[0].error:
            raise RequestError(f"{source.name}: its embeddings cannot be computed: {vectors[0].error}")
        self._kinds["embed"] = pooled
        config: Any = model.config
        return {
            "width": vectors[0].tensors[0].shape[-1], "pooling": str(pooling), "max_tokens": _max_tokens(model), "pads": "attention_mask" in names,
            "pad_token": getattr(config, "pad_token_id", None) or 0,
        }  # fmt: skip

    def _try_out(self) -> str:
        """Answer a made-up batch, where the shapes are known: what is wrong shows now, and whether samples may go together."""
        batch = self._inputs.made_up(_TRIED, self._device)
        if batch is None:
            return "its shapes are not known before the first request"
        model = self._kinds["predict"]
        if error := next((outputs.error for outputs in model.run(batch) if outputs.error), ""):
            raise RequestError(f"the model fails on made-up samples ({', '.join(map(str, self._inputs.specs))}): {error}")
        left_out = f"outputs of these types are left out: {', '.join(sorted(model.left_out))}" if model.left_out else ""
        return "samples meet in this model, so each is computed alone" if model.samples_meet else left_out

    def _agreed(self, verdict: bool) -> bool:
        """The first rank's verdict."""
        return bool(broadcast_data(self._world, verdict, self._plan.device, "serve/verdict"))

    def _facts(self, task: Task, load_s: float, notes: Sequence[str]) -> dict[str, Any]:
        return {
            "plan": self._plan.summary(), "inputs": specs_to_data(self._inputs.specs), "embedding": self._embedding, "load_s": load_s,
            "note": "; ".join(filter(None, notes)), "batches_samples": not self._kinds["predict"].samples_meet, "name": task.name,
        }  # fmt: skip

    def serve(self, lines: TensorSocket) -> None:
        """The first rank's loop: {"batch": id, "kind": …, "names": […]} with an array for each input; {"done": id, "groups": […]} with the arrays of
        the outputs comes back."""
        lines.send({"ready": self.facts})
        try:
            while True:
                while not lines.wait(_KEEP_ALIVE_S):
                    self._tell({})
                header, arrays = lines.receive()
                lines.send(*self._answer(header, arrays))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            pass
        finally:
            self._tell({"stop": True})

    def follow(self) -> None:
        """The other ranks' loop: the same batches."""
        while True:
            message = broadcast_data(self._world, None, self._plan.device, "serve/batch")
            if message.get("stop"):
                return
            if message:
                tensors = {
                    name: torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
                    for name, (dtype, shape) in zip(message["names"], message["arrays"], strict=True)
                }
                self._run(message["kind"], self._shared(tensors))

    def _tell(self, message: Mapping[str, Any]) -> None:
        broadcast_data(self._world, dict(message), self._plan.device, "serve/batch")

    def _shared(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The first rank's tensors, on every rank."""
        if self._world.size > 1:
            for tensor in tensors.values():
                self._world.sync.broadcast(tensor, "serve/batch").wait()
        return tensors

    def _answer(self, header: Mapping[str, Any], arrays: Sequence[Array]) -> tuple[dict[str, Any], list[Array]]:
        tensors = {name: torch.from_numpy(array).to(self._device) for name, array in zip(header["names"], arrays, strict=True)}
        started = time.perf_counter()
        if self._world.size > 1:
            described = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors.values()]
            self._tell({"kind": header["kind"], "names": header["names"], "arrays": described})
        groups: list[dict[str, Any]] = []
        found: list[Array] = []
        for outputs in self._run(header["kind"], self._shared(tensors)):
            begin = len(found)
            found += [_to_array(tensor) for tensor in outputs.tensors]
            about = {"tree": outputs.tree, "first": begin, "count": len(outputs.tensors), "rows": sorted(outputs.rows), "error": outputs.error}
            groups.append({"samples": outputs.samples, **about})
        self._batches += 1
        self._samples += arrays[0].shape[0] if arrays else 0
        self._compute_s += time.perf_counter() - started
        stats = {"batches": self._batches, "samples": self._samples, "compute_s": self._compute_s}
        return {"done": header["batch"], "groups": groups, "stats": stats}, found

    def _run(self, kind: str, tensors: dict[str, Tensor]) -> list[Outputs]:
        return self._kinds[kind].run(tensors)


def _to_array(tensor: Tensor) -> Array:
    tensor = tensor.detach()
    if str(tensor.dtype).removeprefix("torch.") not in DTYPES:  # bfloat16
        tensor = tensor.float() if tensor.is_floating_point() else tensor.long()
    return tensor.cpu().numpy()  # type: ignore[no-any-return]


def _max_tokens(model: nn.Module) -> int | None:
    """The longest text, where positions are learnt: some models number them from behind the padding token's."""
    limit = model_context(model)
    for name, module in model.named_modules():
        if limit is not None and name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return limit - module.padding_idx - 1
    return limit
