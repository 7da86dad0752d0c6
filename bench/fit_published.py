"""Fit the closed form's constants to the training part of the published runs, and write the file that the product ships.

A constant is a common value times a factor of the device kind times a factor of the framework generation, all in logarithms, with a Gaussian
prior on each: common values near what physics and measurements of their own say, factors near 1, so that few rows move them little. Step times
and memory are fitted apart, by least squares on smoothed absolute log errors; a source counts by the square root of its rows. Deterministic.
"""

from __future__ import annotations

import collections
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer
from scipy.optimize import least_squares

from meshwright.core.serialization import write_json
from meshwright.cost import constants as shipped
from meshwright.cost.closed_form_memory import closed_form_peak
from meshwright.cost.closed_form_step import closed_form_step
from meshwright.cost.constants import CostConstants, FittedConstants
from published import DATA, HERE, ROOM, Prediction, errors, is_test, part, predict_all, settled
from published_rows import Job, read

# Where a common value starts, and one sigma of its logarithm.
PRIORS: dict[str, tuple[float, float]] = {
    "matmul": (0.8, 0.1), "matmul_half_s": (1.5e-5, 0.7), "matmul_power": (0.7, 0.3), "fp8": (0.85, 0.1), "casts": (2.2, 0.4),
    "attention": (0.45, 0.3),
    "memory": (0.85, 0.05), "unfused": (1.5, 0.5), "kernel_s": (4e-6, 0.3), "host_s": (2e-5, 0.5), "micro_s": (1e-3, 0.7), "step_s": (5e-3, 0.7),
    "optimizer": (1.2, 0.5), "intra": (0.74, 0.05), "inter": (0.8, 0.1), "hop_s": (5e-6, 0.7), "exposed_tp": (0.9, 0.1), "exposed_dp": (0.4, 0.5),
    "exposed_pp": (1.0, 0.5), "jitter": (0.005, 0.5), "grad_bytes": (2.0, 0.05),
    "held_bytes": (6.0, 0.1), "state_bytes": (12.0, 0.1), "kept": (1.0, 0.1), "buffered": (1.0, 0.05),
    "logit_bytes": (9.0, 0.3), "slack": (1.04, 0.03), "base_bytes": (1.5e9, 0.5),
}  # fmt: skip
MEMORY = ("held_bytes", "state_bytes", "kept", "buffered", "logit_bytes", "slack", "base_bytes")
# One sigma of a factor's logarithm, by what it is a factor of.
BY_DEVICE = {"matmul": 0.1, "attention": 0.3, "memory": 0.05, "matmul_half_s": 0.4}
BY_GENERATION = {
    "unfused": 0.4, "host_s": 0.4, "micro_s": 0.4, "step_s": 0.4, "exposed_dp": 0.4, "exposed_tp": 0.3, "exposed_pp": 0.4, "optimizer": 0.4,
    "hop_s": 0.8, "jitter": 0.4, "grad_bytes": 0.3, "matmul": 0.05, "attention": 0.15, "held_bytes": 0.2, "state_bytes": 0.3, "kept": 0.2,
    "buffered": 0.3, "logit_bytes": 0.3,
    "slack": 0.05, "base_bytes": 0.5,
}  # fmt: skip
# Factors that recipes fix before anything is fitted. Megatron-Core in NeMo: gradients stay in bf16, so a weight and its gradient are 4 bytes and
# not 6, and the fp32 copy is kept as what the weight lacks of it, so a state is 10 bytes and not 12. FSDP: the fp32 weights are the only ones
# held, 16 bytes a parameter in all, and the loss is written out in torch: logits, their fp32 copy, their logarithms. Eager, on one device: fp32
# weights and states and the low copy that autocast keeps, gradients come as activations go, norms keep wide copies, and no pool is counted that
# the allocator holds and does not use (measured on an H200: results/gpu_memory.csv).
RECIPES = {
    "nemo": {"held_bytes": 4 / 6, "state_bytes": 10 / 12},
    "fsdp1": {"state_bytes": 10 / 12, "logit_bytes": 12 / 9},
    "eager": {"held_bytes": 2 / 5.74, "state_bytes": 12 / 12.33, "kept": 1.18, "logit_bytes": 12 / 5.82, "slack": 1 / 1.025, "base_bytes": 0.04},
}
# Kinds without rows of their own take the factors of the nearest: (kind, of what) → kind.
NEAREST_DEVICE = {"blackwell": "hopper", "cdna": "hopper"}
NEAREST_GENERATION = {("megatron-core", "time"): "nemo", ("megatron-core", "memory"): "megatron", ("fsdp2", "memory"): "fsdp1"}
COMMON_DEVICE = "ampere"  # the kind with most rows is the common value itself
SMOOTH = 0.08  # log errors below this count squared, above it as they are
THINNED = {"vtrain-single": 6}  # of so many rows of this source, one: they differ little, and a fit takes minutes otherwise
STEP = 1e-4

Level = Literal["base", "device", "generation"]


@dataclass(frozen=True)
class Name:
    """One number of the fit: a constant's common value, or a factor of it."""

    level: Level
    owner: str
    constant: str

    @property
    def sigma(self) -> float:
        table = {"base": {k: v[1] for k, v in PRIORS.items()}, "device": BY_DEVICE, "generation": BY_GENERATION}[self.level]
        return table[self.constant]

    def touches(self, job: Job) -> bool:
        return self.level == "base" or self.owner == (job.kind if self.level == "device" else job.generation)


Values = Mapping[Name, float]
Residual = Callable[[Job, CostConstants], float]


def names(jobs: Iterable[Job], of: Iterable[str]) -> list[Name]:
    kinds = sorted({j.kind for j in jobs} - {COMMON_DEVICE})
    generations = sorted({j.generation for j in jobs})
    wanted = list(of)
    common = [Name("base", "", c) for c in wanted]
    devices = [Name("device", k, c) for k in kinds for c in BY_DEVICE if c in wanted]
    return common + devices + [Name("generation", g, c) for g in generations for c in BY_GENERATION if c in wanted]


def assemble(values: Values, how: str = "", errors_by: Mapping[str, float] | None = None) -> FittedConstants:
    base = {c: start for c, (start, _) in PRIORS.items()}
    factors: dict[Level, dict[str, dict[str, float]]] = {"device": {}, "generation": {g: dict(f) for g, f in RECIPES.items()}}
    for name, value in values.items():
        if name.level == "base":
            base[name.constant] *= float(np.exp(value))
        else:
            prior = RECIPES.get(name.owner, {}).get(name.constant, 1.0)
            factors[name.level].setdefault(name.owner, {})[name.constant] = prior * float(np.exp(value))
    for kind, near in NEAREST_DEVICE.items():
        factors["device"].setdefault(kind, dict(factors["device"].get(near, {})))
    for (generation, what), near in NEAREST_GENERATION.items():
        alike = {c: f for c, f in factors["generation"].get(near, {}).items() if (c in MEMORY) == (what == "memory")}
        factors["generation"][generation] = {**alike, **factors["generation"].get(generation, {})}
    return FittedConstants(how, str(date(2026, 11, 15)), base, factors["device"], factors["generation"], errors_by or {})


def solve(jobs: Sequence[Job], of: Iterable[str], residual: Residual, start: Values, rounds: int) -> dict[Name, float]:
    """Least squares over the numbers that `of` needs; the others stay as in `start`."""
    free = names(jobs, of)
    counts = collections.Counter(j.source for j in jobs)
    weights = np.array([counts[j.source] ** -0.25 for j in jobs])
    weights /= weights.mean()
    sigmas = np.array([n.sigma for n in free])
    everything = list(range(len(jobs)))
    rows = [[i for i in everything if n.touches(jobs[i])] for n in free]

    def raw(x: np.ndarray, which: Sequence[int]) -> np.ndarray:
        file = assemble({**start, **dict(zip(free, x, strict=True))})
        known: dict[tuple[str, str], CostConstants] = {}
        for i in which:
            known.setdefault((jobs[i].kind, jobs[i].generation), file.constants(jobs[i].kind, jobs[i].generation))
        return np.array([residual(jobs[i], known[jobs[i].kind, jobs[i].generation]) for i in which])

    def smoothed(r: np.ndarray) -> np.ndarray:
        return np.sign(r) * np.sqrt(2 * (np.sqrt(1 + (r / SMOOTH) ** 2) - 1))

    def cost(x: np.ndarray) -> np.ndarray:
        return np.concatenate([weights * smoothed(raw(x, everything)), x / sigmas])

    def slope(x: np.ndarray) -> np.ndarray:
        now = raw(x, everything)
        table = np.zeros((len(jobs) + len(free), len(free)))
        for column, which in enumerate(rows):
            moved = x.copy()
            moved[column] += STEP
            change = smoothed(raw(moved, which)) - smoothed(now[which])
            table[which, column] = weights[which] * change / STEP
            table[len(jobs) + column, column] = 1 / sigmas[column]
        return table

    first = np.array([start.get(n, 0.0) for n in free])
    found = least_squares(cost, first, slope, max_nfev=rounds, ftol=1e-4, xtol=1e-3)
    return {**start, **dict(zip(free, found.x.tolist(), strict=True))}


def time_residual(job: Job, constants: CostConstants) -> float:
    return float(np.log(closed_form_step(job.model, job.spread, job.machine, constants).seconds / job.seconds))


def memory_residual(job: Job, constants: CostConstants) -> float:
    """Off what was measured; of a run that only says that it ran, by how much it would not have fitted."""
    bytes_ = sum(closed_form_peak(job.model, job.spread, constants).values())
    if job.memory_bytes:
        return float(np.log(bytes_ / job.memory_bytes))
    return max(float(np.log(bytes_ / (ROOM * job.machine.device.memory_bytes))), 0.0)


def fit(jobs: Sequence[Job], rounds: int) -> dict[Name, float]:
    """Memory first: it decides what rows that leave recomputation or the micro-batch open must have done."""
    thinned = [j for j in jobs if zlib.crc32(j.row.encode()) % THINNED.get(j.source, 1) == 0]
    said = [j for j in thinned if j.recompute_given and j.micro_batch_given and not j.spread.frozen]
    values = solve(said, MEMORY, memory_residual, {}, rounds)
    file = assemble(values)
    timed = [replace(j, spread=settled(j, file.constants(j.kind, j.generation))) for j in thinned if j.seconds]
    return solve(timed, [c for c in PRIORS if c not in MEMORY], time_residual, values, rounds)


def unseen(jobs: Sequence[Job], rounds: int, key: Callable[[Job], str]) -> list[Prediction]:
    """Every row predicted by constants that never saw a row with its key."""
    found: list[Prediction] = []
    for each in dict.fromkeys(key(j) for j in jobs):
        values = fit([j for j in jobs if key(j) != each], rounds)
        own = predict_all([j for j in jobs if key(j) == each], assemble(values))
        print(each, json.dumps(_summary(own)), file=sys.stderr, flush=True)
        found += own
    return found


def _summary(predictions: Sequence[Prediction]) -> dict[str, Any]:
    timed = [p for p in predictions if p.job.seconds]
    return {
        "time": errors([p.time_error for p in timed]),
        "multi_node": errors([p.time_error for p in timed if p.job.multi_node]),
        "memory": errors([p.memory_error for p in predictions if p.job.memory_bytes]),
    }


def by_source(predictions: Sequence[Prediction]) -> dict[str, Any]:
    sources = dict.fromkeys(p.job.source for p in predictions)
    return {"all": _summary(predictions), **{s: _summary([p for p in predictions if p.job.source == s]) for s in sources}}


def main(
    data: Annotated[Path, typer.Option(help="A table with the columns of the published one.")] = DATA,
    output: Annotated[Path, typer.Option(help="Where the constants go.")] = Path(shipped.__file__).parent / "fitted.json",
    validate: Annotated[bool, typer.Option(help="Also fit without each part and each source in turn; write how these are then predicted.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Most iterations of a fit.")] = 15,
) -> None:
    """Fit and write. Takes a minute; with --validate, twenty times that.

    Example:
      python bench/fit_published.py --output fitted.json
    """
    jobs, _ = read(data)
    train = [j for j in jobs if not is_test(j)]
    values = fit(train, rounds)
    timed = [p for p in predict_all([j for j in jobs if is_test(j)], assemble(values)) if p.job.seconds]
    by = {g: errors([p.time_error for p in timed if p.job.generation == g])["mape"] / 100 for g in sorted({p.job.generation for p in timed})}
    by[""] = errors([p.time_error for p in timed])["mape"] / 100
    how = f"bench/fit_published.py on {len(train)} of {len(jobs)} rows of {data.name}; the others are its test part"
    write_json(output, assemble(values, how, by))
    if validate:
        parts = by_source(unseen(jobs, rounds, lambda j: f"part {part(j)}"))
        sources = by_source(unseen(jobs, rounds, lambda j: j.source))
        write_json(HERE / "results" / "published_unseen.json", {"unseen_configurations": parts, "unseen_sources": sources})


if __name__ == "__main__":
    typer.run(main)
