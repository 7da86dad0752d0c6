"""The run's folder: written by the recorder, read back by everything that looks at a run, whole or half."""

from __future__ import annotations

import io
import json
import mmap
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from meshwright.core.errors import RequestError
from meshwright.core.estimate import Estimate
from meshwright.core.event import Fault
from meshwright.core.mesh import Mesh
from meshwright.core.plan import Plan
from meshwright.core.serialization import write_json
from meshwright.observe import Recorder, RunFolder, check_run_dir, create_run_folder, find_run_folder, follow, process_memory, sinks
from meshwright.observe.jsonl_tail import JsonlTail, JsonlTails
from meshwright.observe.live_frame import render_view
from meshwright.observe.progress import ProgressTracker, sparkline
from meshwright.observe.run_folder import Decision, PlanCandidate

ESTIMATE = Estimate(0.1, {"forward": 0.1}, (1000,), {"parameters": 1000}, 80.0, True, "fits", 0.1)


def step_record(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": 3.0 - step / 100, "step_s": 0.1, "samples_per_s": 812.0, "memory_bytes": 900, **more}


def started(path: Path, steps: int = 150, pid: int | None = None) -> Recorder:
    """A run on this machine that has begun; by default with a process that lives."""
    recorder = Recorder(path, 0)
    write_json(path / "job.json", {"model": "gpt-tiny", "steps": steps})
    recorder.event("start", device="cpu", **({} if pid is None else {"pid": pid}))
    return recorder


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_what_is_recorded_is_read_back(tmp_path: Path) -> None:
    fault = Fault(5.0, 1, "ValueError", "bad <thing>", "Traceback", False)
    with Recorder(tmp_path / "run", 0) as zero, Recorder(tmp_path / "run", 1) as one:
        zero.event("start", pid=1, host="a", device="cpu")
        one.fault(fault, step=3)
        zero.event("validation", step=4, loss=1.5)
        for recorder in (zero, one):
            recorder.metrics(step_record(1))
    run = RunFolder(tmp_path / "run")
    assert [(e.rank, e.kind, e.step) for e in run.events()] == [(0, "start", -1), (1, "fault", 3), (0, "validation", 4)]
    assert run.events()[2].data == {"loss": 1.5}
    assert run.faults() == [fault]
    (record,) = run.metrics()
    assert record.pop("time") == pytest.approx(time.time(), abs=60)
    assert record == step_record(1)


def test_a_killed_process_loses_at_most_one_line(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from meshwright.observe.recorder import Recorder\n"
        "r = Recorder(Path(sys.argv[1]), 0); i = 0\n"
        "while True: r.metrics({'step': i, 'loss': 1.0}); print(i, flush=True); i += 1\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = [int(process.stdout.readline()) for _ in range(300)]
    process.send_signal(signal.SIGKILL)
    said += [int(line) for line in process.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
    process.wait()
    steps = [r["step"] for r in RunFolder(tmp_path).metrics()]
    assert steps[: len(said)] == said, "a record that was written is gone"


def test_a_record_after_half_a_line_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    with Recorder(tmp_path, 0) as recorder:
        recorder.metrics({"step": 2, "loss": 1.0})
    assert [(r["step"], r["loss"]) for r in RunFolder(tmp_path).metrics()] == [(1, 2.0), (2, 1.0)]


def test_odd_values_do_not_stop_a_run(tmp_path: Path) -> None:
    class Scalar:
        def __init__(self, value: float = 2.5) -> None:
            self.value = value

        def item(self) -> float:
            return self.value

    sink = sinks.JsonlSink(tmp_path / "x.jsonl")
    sink.write({"scalar": Scalar(), "path": Path("/a"), "nan": float("nan"), "odd": Scalar(float("inf"))})
    sink.close()
    record = json.loads((tmp_path / "x.jsonl").read_text())
    assert (record["scalar"], record["path"]) == (2.5, "/a")
    assert record["nan"] is record["odd"] is None  # JSON has no NaN


def test_a_folder_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match=r"file/x.*--run-dir"):
        Recorder(tmp_path / "file" / "x", 0)
    (tmp_path / "events-0.jsonl").mkdir()
    with pytest.raises(RequestError, match=r"events-0.jsonl.*--run-dir"):
        Recorder(tmp_path, 0)


def test_prometheus_serves_this_machine_only(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    sink = sinks.PrometheusSink(0)
    assert sink.address == "127.0.0.1"
    with Recorder(tmp_path, 0, [sink]) as recorder:
        recorder.metrics(step_record(7, mfu=None))
        with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=5) as answer:
            text = answer.read().decode()
        with pytest.raises(RequestError, match="choose another port"):
            sinks.PrometheusSink(sink.port)
    assert re.search(r"^meshwright_loss 2\.93$", text, re.M)
    assert re.search(r"^meshwright_step 7\.0$", text, re.M)
    assert "mfu" not in text
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", sink.port), timeout=1).close()


def test_tensorboard_gets_the_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Recorder(tmp_path, 0, sinks.open_sinks(tmp_path, tensorboard=True)) as recorder:
        recorder.metrics(step_record(3))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (scalar,) = events.Scalars("train/loss")
    assert (scalar.step, scalar.value) == (3, pytest.approx(2.97))


ASKED = [({"tensorboard": True}, "torch.utils.tensorboard"), ({"prometheus_port": 0}, "prometheus_client")]


@pytest.mark.parametrize(("asked", "module"), ASKED)
def test_a_missing_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert sinks.open_sinks(tmp_path) == []
    with pytest.raises(RequestError, match=r"pip install 'meshwright\[viz\]'"):
        sinks.open_sinks(tmp_path, **asked)


def test_tail_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    tail = JsonlTail(path)
    assert tail.read() == []
    line = json.dumps({"name": "zwölf"}, ensure_ascii=False).encode()
    middle = line.index("ö".encode()) + 1  # inside a character
    path.write_bytes(b'{"a": 1}\n' + line[:middle])
    assert tail.read() == [{"a": 1}]
    assert tail.read() == []
    with path.open("ab") as file:
        file.write(line[middle:] + b"\nnot json\n[1]\n" + b'{"b": 2}\n')
    assert tail.read() == [{"name": "zwölf"}, {"b": 2}]
    path.write_bytes(b'{"c": 3}\n')
    assert tail.read() == [{"c": 3}], "a file that was begun again is read from its beginning"


def test_tails_pick_up_new_files(tmp_path: Path) -> None:
    tails = JsonlTails(tmp_path, "events-*.jsonl")
    (tmp_path / "events-0.jsonl").write_text('{"a": 1}\n')
    assert tails.read() == [{"a": 1}]
    (tmp_path / "events-12.jsonl").write_text('{"b": 1}\n')
    assert tails.read() == [{"b": 1}]


def test_an_empty_folder_reads_as_nothing(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert (run.plan(), run.estimate(), run.decision(), run.cluster(), run.result()) == (None,) * 5
    assert (run.job(), run.metrics(), run.events(), run.faults()) == ({}, [], [], [])
    assert run.status().state == "waiting"


def test_plan_and_decision_round_trip(tmp_path: Path) -> None:
    plan = Plan("gpt-tiny", 8, Mesh(dp=2))
    decision = Decision(ESTIMATE, "because\nof this", (PlanCandidate("a", 0.1, 5, True, "r"), PlanCandidate("b", None, 6, False)))
    plan.save(tmp_path / "plan.json")
    write_json(tmp_path / "estimate.json", decision)
    run = RunFolder(tmp_path)
    assert (run.plan(), run.decision(), run.estimate()) == (plan, decision, ESTIMATE)


def test_events_of_all_ranks_in_order_and_half_a_line_ignored(tmp_path: Path) -> None:
    (tmp_path / "events-0.jsonl").write_text('{"time": 1, "rank": 0, "kind": "start"}\n{"time": 4, "rank": 0, "kind": "end"}\n')
    (tmp_path / "events-1.jsonl").write_text('{"time": 3, "rank": 1, "kind": "stop", "step": 9, "data": {}}\n{"time": 2, "rank": 1, "kind": "st')
    assert [(e.time, e.kind) for e in RunFolder(tmp_path).events()] == [(1.0, "start"), (3.0, "stop"), (4.0, "end")]


def test_create_gives_fresh_names(tmp_path: Path) -> None:
    first = create_run_folder(tmp_path / "a" / "runs", prefix="hf:my/gpt mini")
    assert re.fullmatch(r"hf-my-gpt-mini-\d{8}-\d{6}", first.name) and first.path.is_dir()
    assert [create_run_folder(tmp_path, "x").name for _ in range(3)] == ["x", "x-2", "x-3"]


@pytest.mark.parametrize("name", ["a/b", "..", "", "a b"])
def test_create_refuses_a_name_that_is_no_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(RequestError, match="cannot name a run"):
        create_run_folder(tmp_path, name)


def test_create_says_which_folder_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(RequestError, match=r"runs.*--run-dir") as caught:
        create_run_folder(tmp_path / "runs", "x")
    assert "\n" not in str(caught.value)


def test_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "runs"
    with pytest.raises(RequestError, match="no runs in"):
        find_run_folder("last", root)
    for age, name in enumerate(["new", "old", "older"]):
        run = create_run_folder(root, name)
        write_json(run.path / "job.json", {})
        os.utime(run.path / "job.json", (1000 - age, 1000 - age))
    (root / "old" / "report.html").write_text("written later")
    assert find_run_folder("last", root).name == "new"
    assert find_run_folder("old", root).path == root / "old"
    assert find_run_folder(str(root / "older"), tmp_path / "elsewhere").name == "older"
    monkeypatch.chdir(root / "old")
    assert find_run_folder(".", root).name == "old"
    with pytest.raises(RequestError, match=r"unknown run 'odl'.*did you mean 'old'"):
        find_run_folder("odl", root)


def test_status_follows_the_run(tmp_path: Path) -> None:
    run, recorder = RunFolder(tmp_path), started(tmp_path)
    assert run.status().state == "running"
    recorder.event("end", memory_bytes=1, seconds=2.0)
    assert run.status().state == "done"
    recorder.event("start")
    assert run.status().state == "running", "resumed"
    recorder.event("stop", reason="asked")
    recorder.event("end")
    assert (run.status().state, run.status().detail) == ("stopped", "asked")


def test_a_run_whose_processes_are_gone_is_interrupted(tmp_path: Path) -> None:
    started(tmp_path, pid=dead_pid())
    assert RunFolder(tmp_path).status().state == "interrupted"


def test_the_cause_is_the_fault_that_follows_from_no_other(tmp_path: Path) -> None:
    recorder = started(tmp_path)
    recorder.fault(Fault(time.time(), 0, "RuntimeError", "peer closed", secondary=True))
    recorder.fault(Fault(time.time(), 2, "KeyError", "'x'"))
    recorder.event("end")
    status = RunFolder(tmp_path).status()
    assert status.state == "failed"
    assert status.fault is not None and status.fault.rank == 2


def test_a_fault_only_the_result_knows_and_one_both_know(tmp_path: Path) -> None:
    recorder = started(tmp_path, steps=2)
    own = Fault(time.time(), 0, "RuntimeError", "x")
    recorder.fault(own)
    killed = {"time": own.time + 1, "rank": 3, "kind": "killed by SIGKILL", "message": ""}
    write_json(tmp_path / "result.json", {"losses": [1.0], "faults": [{**vars(own), "time": own.time + 0.5}, killed]})
    run = RunFolder(tmp_path)
    assert [f.rank for f in run.faults()] == [0, 3]
    assert run.status().state == "failed"
    write_json(tmp_path / "result.json", {"losses": [1.0, 0.9], "faults": [killed]})
    assert run.status().state == "done", "it was survived: all steps are there"


def test_sparkline() -> None:
    assert sparkline([1, 2, 3, 4, 5, 6, 7, 8], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([1, 1, 8, 8], 2) == "▁█"
    assert sparkline([1, float("nan"), 2], 3) == "▁×█"
    assert sparkline([], 5) == ""
    assert sparkline([5.0] * 100_000, 10) == "▁" * 10


def test_progress_counts_resumes_and_guesses_what_is_left(tmp_path: Path) -> None:
    recorder = started(tmp_path, steps=20)
    progress = ProgressTracker(RunFolder(tmp_path))
    for i, step in enumerate([1, 2, 3, 4, 3, 4, 5]):
        recorder.metrics(step_record(step, time=1000.0 + 2 * i))
    progress.poll()
    now = progress.snapshot()
    assert (now.steps_done, now.steps, len(now.losses)) == (5, 20, 5)
    assert now.remaining_s == pytest.approx(30.0)
    assert now.step_s == pytest.approx(0.1)


def test_steps_written_at_once_do_not_make_the_rest_instant(tmp_path: Path) -> None:
    recorder = started(tmp_path, steps=100)
    for step in range(50):
        recorder.metrics(step_record(step, time=1000.0, step_s=0.2))
    progress = ProgressTracker(RunFolder(tmp_path))
    progress.poll()
    assert progress.snapshot().remaining_s == pytest.approx(10.0)


def plain_console() -> Console:
    return Console(file=io.StringIO(), width=40)


def output(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_plain_mode_prints_few_lines_and_the_last_state(tmp_path: Path) -> None:
    recorder, console, asked = started(tmp_path, steps=150), plain_console(), threading.Event()
    thread = threading.Thread(target=follow, args=(RunFolder(tmp_path), asked.is_set, console, 0.01))
    begun = time.monotonic()
    thread.start()
    for step in range(1, 41):
        recorder.metrics(step_record(step))
        time.sleep(0.01)
    asked.set()
    thread.join()
    lines = output(console)
    assert 1 <= len(lines) <= 2 + (time.monotonic() - begun) / 2, "at most a line every 2 s, and the last one"
    assert re.fullmatch(r"step 40/150  loss 2\.6  812 samples/s  27%  left \d+ s", lines[-1])


def test_plain_mode_returns_when_the_run_ends(tmp_path: Path) -> None:
    with started(tmp_path, steps=2) as recorder:
        for step in (0, 1):
            recorder.metrics(step_record(step))
        recorder.event("end")
    console = plain_console()
    follow(RunFolder(tmp_path), lambda: False, console, 0.01)
    assert output(console) == ["step 2/2  loss 2.99  812 samples/s  100%  done"]


def test_plain_mode_tells_a_failure(tmp_path: Path) -> None:
    with started(tmp_path) as recorder:
        recorder.metrics(step_record(3, loss=float("nan")))
        recorder.fault(Fault(time.time(), 2, "RuntimeError", "[bold]no markup[/bold]"))
    for path in tmp_path.iterdir():
        os.utime(path, (1000, 1000))  # long ago: nobody will put it back
    console = plain_console()
    follow(RunFolder(tmp_path), lambda: False, console, 0.01)
    assert output(console) == ["step 3/150  loss nan  812 samples/s  2%  failed: rank 2: RuntimeError: [bold]no markup[/bold]"]


def test_live_view_shows_the_numbers(tmp_path: Path) -> None:
    with started(tmp_path, steps=10) as recorder:
        Plan("gpt-tiny", 8, Mesh(dp=2)).save(tmp_path / "plan.json")
        write_json(tmp_path / "estimate.json", Decision(ESTIMATE))
        for step in range(1, 11):
            recorder.metrics(step_record(step, tokens_per_s=4096.0, mfu=0.25))
        recorder.metrics({"step": 10, "validation_loss": 2.5})
        recorder.event("end", memory_bytes=900)
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    follow(RunFolder(tmp_path), lambda: False, console, 0.01)
    text = "\n".join(output(console))
    for part in ("gpt-tiny", "done", "data parallel on 2 × cpu", "step 10/10", "100 %", "2.9", "validation 2.5"):
        assert part in text, part
    for part in ("4,096 tokens/s", "MFU 25.0 %", "900 B  predicted peak 1 kB (90 %)", "100 ms  predicted 100 ms (+0.0 %)"):
        assert part in text, part


def test_live_view_of_a_run_that_has_only_begun(tmp_path: Path) -> None:
    progress = ProgressTracker(RunFolder(tmp_path))
    progress.poll()
    console = Console(file=io.StringIO(), width=80)
    console.print(render_view(progress.snapshot(), 80))
    assert "waiting" in output(console)[0]


def test_memory_goes_up_and_the_peak_stays() -> None:
    before = process_memory.resident_bytes()
    block = mmap.mmap(-1, 60_000_000)  # from the kernel: the allocator may have as much left over from a test before, resident already
    for _ in range(60):
        block.write(bytes(1_000_000))
    during = process_memory.resident_bytes()
    assert during - before > 40_000_000
    block.close()
    assert process_memory.peak_resident_bytes() > during - 4_000_000  # the kernel's peak is that exact
    if process_memory.reset_peak_resident():
        assert process_memory.peak_resident_bytes() < during - 20_000_000


def test_memory_without_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process_memory, "_PROC_STATUS", tmp_path / "none")
    monkeypatch.setattr(process_memory, "_PROC_CLEAR_REFS", tmp_path / "none" / "none")
    assert process_memory.resident_bytes() > 1_000_000
    assert process_memory.peak_resident_bytes() > 1_000_000
    assert process_memory.reset_peak_resident() is False


def test_importing_loads_nothing_heavy() -> None:
    code = "import sys, meshwright.observe; print([m for m in ('torch', 'rich', 'tensorboard', 'prometheus_client') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_a_full_disk_drops_records_and_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Writes that fail, and one that is cut short, stop nothing; when space returns, an event counts them and no line is torn."""
    write, answers = os.write, iter([None, OSError(28, "No space left on device"), 5, OSError(28, "No space left on device")])

    def full(file: int, line: bytes) -> int:
        answer = next(answers, None)
        if isinstance(answer, OSError):
            raise answer
        return write(file, line[:answer])

    monkeypatch.setattr(sinks.os, "write", full)
    with Recorder(tmp_path, 0) as recorder:
        for step in range(6):
            recorder.metrics(step_record(step))
    assert [r["step"] for r in RunFolder(tmp_path).metrics()] == [0, 4, 5]
    assert [(e.kind, e.data["records"]) for e in RunFolder(tmp_path).events()] == [("dropped", 3)]
    err = capsys.readouterr().err
    assert err.count("training goes on") == 1 and "no space left on device" in err


def test_a_run_folder_that_cannot_be_made_is_known_beforehand(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "runs", Path("/proc/runs")):
        with pytest.raises(RequestError, match="choose another with --run-dir"):
            check_run_dir(place)
    check_run_dir(tmp_path / "new" / "runs")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
