"""Self-correction: what earlier runs on this machine measured against what was predicted for them, and rates that take it into account.

[Note: corrections]
A record keeps a run's prediction under the rates as they were measured by the probe, never under corrected ones, and the file keeps those rates: so
a correction is worked out anew from all records each time, and is never applied to itself. A new probe or new lines of a network are other rates,
and the records of the old ones are dropped with them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from meshwright.core.calibration import AlphaBetaModel, Calibration, CalibrationRecord, Rates

_MAX_FACTOR = 3.0  # a single run counts no more than this factor, and neither does a correction
_FACTOR_PRIOR_RUNS = 0.5  # runs' worth of doubt: one run of the same model moves a prediction two thirds of the way
_ERROR_PRIOR_RUNS = 2.0  # runs' worth of the error that was stated before any
_MIN_ERROR = 0.03
_MIN_COMMUNICATION_SHARE = 0.05  # of a step: communication below that says nothing about the network
MAX_RECORDS = 64  # records that a file holds


def correct_calibration(calibration: Calibration, model: str, kind: str, precision: str) -> Calibration:
    """The calibration with rates as runs of this precision suggest, most of all runs of this model, and the error that is left."""
    found = [(r, _record_weight(r, model, kind)) for r in calibration.records if r.precision == precision]
    if not found:
        return calibration
    compute = _correction_factor([(r.compute, w) for r, w in found])
    network = _correction_factor([(r.network, w) for r, w in found if r.network is not None])
    memory = _correction_factor([(r.memory, w) for r, w in found])
    layouts = tuple(_scale_rates(rates, compute, network, memory) for rates in calibration.layouts)
    runs = sum(w for _, w in found)
    spread = (
        _weighted_median([(abs(math.log(_clip_ratio(r.step)) - _median_log_ratio([(r.step, w) for r, w in found])), w) for r, w in found]) * 1.48
    )  # as of a normal one
    error = math.sqrt((runs * spread**2 + _ERROR_PRIOR_RUNS * calibration.error**2) / (runs + _ERROR_PRIOR_RUNS))
    off = 1.0 / math.exp(_median_log_ratio([(r.step, w) for r, w in found])) - 1.0
    names = ", ".join(dict.fromkeys(r.model for r, _ in sorted(found, key=lambda item: -item[1])))
    low = f"{abs(off):.0%} {'low' if off < 0 else 'high'}"
    basis = f"a probe of this machine, corrected by {len(found)} run{'s' * (len(found) > 1)} of {names}: predicted steps of this kind were {low}"
    return replace(calibration, layouts=layouts, error=max(error, _MIN_ERROR), basis=basis)


def _record_weight(record: CalibrationRecord, model: str, kind: str) -> float:
    """Most for the same model, less for one of the same make, next to none for others: small steps are late for reasons that large ones do not have
    (docs/measured/planner.md: two runs of small models, at a quarter each, put a larger one's prediction 50% off)."""
    return 1.0 if record.model == model else 0.25 if record.kind == kind else 0.05


def _clip_ratio(ratio: float) -> float:
    return min(max(ratio, 1.0 / _MAX_FACTOR), _MAX_FACTOR)


def _median_log_ratio(weighted: Sequence[tuple[float, float]]) -> float:
    """The weighted median of logarithms: one run on a busy machine among several does not move it."""
    return _weighted_median([(math.log(_clip_ratio(ratio)), weight) for ratio, weight in weighted])


def _weighted_median(weighted: Sequence[tuple[float, float]]) -> float:
    order = sorted(weighted)
    half, seen = sum(w for _, w in order) / 2, 0.0
    for index, (value, weight) in enumerate(order):
        seen += weight
        if math.isclose(seen, half) and index + 1 < len(order):
            return (value + order[index + 1][0]) / 2
        if seen > half:
            return value
    return 0.0


def _correction_factor(weighted: Sequence[tuple[float, float]]) -> float:
    """The median, drawn towards 1 where runs are few."""
    runs = sum(w for _, w in weighted)
    return math.exp(_median_log_ratio(weighted) * runs / (runs + _FACTOR_PRIOR_RUNS)) if weighted else 1.0


def _scale_rates(rates: Rates, compute: float, network: float, memory: float) -> Rates:
    return replace(
        rates,
        compute={key: tuple((size, rate / compute) for size, rate in points) for key, points in rates.compute.items()},
        memory=tuple((size, rate / compute) for size, rate in rates.memory),
        op_overhead_s=rates.op_overhead_s * compute,
        collectives={
            key: AlphaBetaModel(line.alpha_s * network, line.bytes_per_s / network, None if line.gap_s is None else line.gap_s * network)
            for key, line in rates.collectives.items()
        },
        curves={key: tuple((sent, seconds * network) for sent, seconds in points) for key, points in rates.curves.items()},
        memory_correction=rates.memory_correction * memory,
    )


def add_record(calibration: Calibration, record: CalibrationRecord) -> Calibration:
    """One run more; the oldest go."""
    return replace(calibration, records=(*calibration.records, record)[-MAX_RECORDS:])


def measured_over_predicted(predicted: tuple[float, float], measured: tuple[float, float | None]) -> tuple[float, float | None]:
    """(computation, network) of a run over their prediction, from (step, exposed communication) of both. Where the run did not tell
    communication apart, or there is next to none, all of the difference is computation's."""
    (step, waited), (took, exposed) = predicted, measured
    if exposed is None or waited < _MIN_COMMUNICATION_SHARE * step or exposed < _MIN_COMMUNICATION_SHARE * took:
        return _clip_ratio(max(took - waited, 0.1 * took) / max(step - waited, 1e-12)), None
    return _clip_ratio((took - exposed) / max(step - waited, 1e-12)), _clip_ratio(exposed / waited)
