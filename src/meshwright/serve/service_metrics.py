"""What a server counts, in Prometheus' text format: requests, tokens, waits and the replicas' own counters. Needs no package."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Histogram:
    """Counts of values up to each bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds, self._counts, self.total, self.count = bounds, [0] * (len(bounds) + 1), 0.0, 0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value
        self.count += 1

    def lines(self, name: str) -> Iterator[str]:
        running = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            running += count
            yield f'{name}_bucket{{le="{"+Inf" if bound == float("inf") else f"{bound:g}"}"}} {running}'
        yield f"{name}_sum {self.total:.9g}"
        yield f"{name}_count {self.count}"


class ServiceMetrics:
    """Counters of one server since it started."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # (path, status)
        self.seconds = Histogram(_SECONDS)  # of whole requests
        self.first_token_s, self.between_tokens_s = Histogram(_SECONDS), Histogram(_SECONDS)
        self.predict_batch = Histogram(_SIZES)
        self.prompt_tokens = self.answer_tokens = self.cached_tokens = 0
        self.under_way = 0

    def token(self, seconds: float, *, is_first: bool) -> None:
        """A token came so long after its request, or after the one before."""
        (self.first_token_s if is_first else self.between_tokens_s).observe(seconds)
        self.answer_tokens += 1

    def render(self, replicas: Mapping[str, tuple[str, Mapping[str, Any]]], restarts: int) -> str:
        """`replicas`: by name, the state and the engine's counters."""
        lines = list(_family("requests_total", "counter", "Requests by path and status."))
        lines += [f'meshwright_requests_total{{path="{path}",status="{status}"}} {n}' for (path, status), n in sorted(self.requests.items())]
        for name, kind, text, value in (
            ("requests_under_way", "gauge", "Requests that are not answered yet.", self.under_way),
            ("prompt_tokens_total", "counter", "Tokens of prompts.", self.prompt_tokens),
            ("cached_prompt_tokens_total", "counter", "Tokens of prompts that were in memory already.", self.cached_tokens),
            ("answer_tokens_total", "counter", "Tokens that were generated.", self.answer_tokens),
            ("replica_restarts_total", "counter", "Replicas that died and were started again.", restarts),
        ):
            lines += [*_family(name, kind, text), f"meshwright_{name} {value}"]
        for name, text, histogram in (
            ("request_seconds", "Duration of requests.", self.seconds),
            ("first_token_seconds", "Time from a request to its first token.", self.first_token_s),
            ("between_tokens_seconds", "Time between the tokens of an answer.", self.between_tokens_s),
            ("predict_batch_size", "Samples that went through the model together.", self.predict_batch),
        ):
            lines += [*_family(name, "histogram", text), *histogram.lines(f"meshwright_{name}")]
        lines += _family("replica_ready", "gauge", "Whether a replica takes requests.")
        lines += [f'meshwright_replica_ready{{replica="{name}"}} {int(state == "ready")}' for name, (state, _) in replicas.items()]
        for key, name, kind, text in _OF_ENGINES:
            lines += _family(name, kind, text)
            lines += [f'meshwright_{name}{{replica="{replica}"}} {stats[key]:g}' for replica, (_, stats) in replicas.items() if key in stats]
        return "\n".join(lines) + "\n"


_OF_ENGINES = (
    ("running", "sequences_running", "gauge", "Answers that are being generated: the batch size."),
    ("waiting", "sequences_waiting", "gauge", "Requests that wait for memory or a place in the batch."),
    ("kv_used", "kv_memory_used_ratio", "gauge", "Part of the key-value memory that is in use."),
    ("preemptions", "preemptions_total", "counter", "Answers that gave their memory back and began again."),
    ("reused_tokens", "reused_tokens_total", "counter", "Tokens of prompts that were found in key-value memory."),
    ("steps", "steps_total", "counter", "Forward passes."),
)


def _family(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP meshwright_{name} {text}"
    yield f"# TYPE meshwright_{name} {kind}"
