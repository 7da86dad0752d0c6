"""Self-correction of a calibration: compares earlier runs on this machine with their predictions and returns rates scaled accordingly.

[Note: corrections]
A record stores a run's measurement over its prediction under the uncorrected rates of the probe, and the file keeps those rates: so a
correction is recomputed from all records each time and never compounds. A new probe or newly measured α–β lines of a network are different
rates; the records of the old ones are dropped with them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from meshwright.core.calibration import AlphaBetaModel, Calibration, CalibrationRecord, Rates

_MAX_FACTOR = 3.0  # upper limit of a single run's ratio and of a correction
_FACTOR_PRIOR_RUNS = 0.5  # weight of the prior (factor 1), in runs: one run of the same model moves a prediction two thirds of the way
_ERROR_PRIOR_RUNS = 2.0  # weight of the error stated before any run, in runs
_MIN_ERROR = 0.03
_SIGMA_PER_DEVIATION = 1.48  # sigma of a normal distribution over its median absolute deviation
_MIN_COMMUNICATION_SHARE = 0.05  # share of a step: communication below it says nothing about the network
MAX_RECORDS = 64  # most records that a file keeps


def correct_calibration(calibration: Calibration, model: str, kind: str, precision: str) -> Calibration:
    """The calibration with rates scaled by what runs at this precision measured, runs of this model weighted most, and with the remaining error."""
    records = [(r, _record_weight(r, model, kind)) for r in calibration.records if r.precision == precision]
    if not records:
        return calibration
    compute = _correction_factor([(r.compute, w) for r, w in records])
    network = _correction_factor([(r.network, w) for r, w in records if r.network is not None])
    memory = _correction_factor([(r.memory, w) for r, w in records])
    layouts = tuple(_scale_rates(rates, compute, network, memory) for rates in calibration.layouts)
    runs = sum(w for _, w in records)
    median = _median_log_ratio([(r.step, w) for r, w in records])
    sigma = _weighted_median([(abs(math.log(_clip_ratio(r.step)) - median), w) for r, w in records]) * _SIGMA_PER_DEVIATION
    error = math.sqrt((runs * sigma**2 + _ERROR_PRIOR_RUNS * calibration.error**2) / (runs + _ERROR_PRIOR_RUNS))
    bias = 1.0 / math.exp(median) - 1.0
    names = ", ".join(dict.fromkeys(r.model for r, _ in sorted(records, key=lambda item: -item[1])))
    basis = f"{calibration.basis or 'a probe of this machine'}, corrected by {len(records)} run{'s' * (len(records) > 1)} of {names}: "
    basis += f"predicted steps of this kind were {abs(bias):.0%} {'low' if bias < 0 else 'high'}"
    return replace(calibration, layouts=layouts, error=max(error, _MIN_ERROR), basis=basis)


def _record_weight(record: CalibrationRecord, model: str, kind: str) -> float:
    """Weight of a record: 1 for the same model, less for the same kind, next to none for others, because small steps are slow for reasons that
    large ones do not have (docs/measured/planner.md: two runs of small models, weighted a quarter each, put a larger one's prediction 50% off)."""
    return 1.0 if record.model == model else 0.25 if record.kind == kind else 0.05


def _clip_ratio(ratio: float) -> float:
    return min(max(ratio, 1.0 / _MAX_FACTOR), _MAX_FACTOR)


def _median_log_ratio(weighted: Sequence[tuple[float, float]]) -> float:
    """The weighted median of the log ratios: a single run on a busy machine does not move it."""
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
    """The median ratio, shrunk towards 1 where runs are few."""
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
    """The calibration with one more record; the oldest are dropped beyond MAX_RECORDS."""
    return replace(calibration, records=(*calibration.records, record)[-MAX_RECORDS:])


def measured_over_predicted(predicted: tuple[float, float], measured: tuple[float, float | None]) -> tuple[float, float | None]:
    """Measured over predicted (computation, network), from (step, exposed communication) of each. Where the run did not measure communication
    separately, or there is next to none, the whole difference is attributed to computation."""
    (predicted_step, predicted_exposed), (step, exposed) = predicted, measured
    predicted_compute = max(predicted_step - predicted_exposed, 1e-12)
    if exposed is None or predicted_exposed < _MIN_COMMUNICATION_SHARE * predicted_step or exposed < _MIN_COMMUNICATION_SHARE * step:
        return _clip_ratio(max(step - predicted_exposed, 0.1 * step) / predicted_compute), None
    return _clip_ratio((step - exposed) / predicted_compute), _clip_ratio(exposed / predicted_exposed)
