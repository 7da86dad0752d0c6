"""What a profiled step says about communication: of any thread, and nothing that is computed inside a call hides it."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from meshwright.comm.work_queue import WorkQueue
from meshwright.execute.step_profiler import _split_spans, intersect_spans, profile_step, subtract_spans, total_length


def event(name: str, start: float, end: float, thread: int = 1, is_async: bool = False) -> SimpleNamespace:
    return SimpleNamespace(name=name, thread=thread, is_async=is_async, time_range=SimpleNamespace(start=start * 1e6, end=end * 1e6))


def test_operations_of_a_work_queues_thread_are_seen() -> None:
    queue = WorkQueue("a queue that was there before")
    queue.submit("first", (), (), False, lambda: None)
    slept = 0.05

    def step() -> None:
        work = queue.submit("all_reduce", (), (torch.empty(1 << 18),), True, lambda: time.sleep(slept))
        assert work is not None
        time.sleep(slept / 5)  # so that the thread runs the operation
        work.wait()

    _, found = profile_step(step, torch.device("cpu"), None)
    queue.close()
    assert found["communication_s"] >= slept and found["exposed_s"] >= 0.9 * slept


def test_what_the_caller_computes_hides_an_asynchronous_call() -> None:
    events = [event("gloo:all_reduce", 1.0, 3.0, is_async=True), event("aten::mm", 1.5, 2.5)]
    assert _split_spans(events, gpu=False) == ([(1.0, 3.0)], [(1.5, 2.5)])


def test_what_is_added_up_inside_a_call_does_not_hide_it() -> None:
    events = [
        event("mpi:all_reduce", 1.0, 3.0, thread=2),
        event("aten::add", 1.5, 2.5, thread=2),
        event("aten::mm", 0.0, 1.25),
        event("aten::mm", 2.75, 4.0),
    ]
    talk, work = _split_spans(events, gpu=False)
    assert talk == [(1.0, 3.0)] and work == [(0.0, 1.25), (2.75, 4.0)]
    assert total_length(talk) - total_length(intersect_spans(talk, work)) == pytest.approx(1.5)


def test_spans_without_others() -> None:
    assert subtract_spans([(0.0, 4.0), (5.0, 6.0)], [(1.0, 2.0), (3.0, 5.5)]) == [(0.0, 1.0), (2.0, 3.0), (5.5, 6.0)]
    assert subtract_spans([(1.0, 2.0)], [(0.0, 3.0)]) == [] and subtract_spans([(1.0, 2.0)], []) == [(1.0, 2.0)]
