"""Level 1, the Monitoring Subsystem: a run writes its folder with `Recorder`; everything that looks at a run reads it with `RunFolder`."""

from meshwright.observe.folder import Candidate, Decision, RunFolder, create, find
from meshwright.observe.lines import follow_lines
from meshwright.observe.live import follow
from meshwright.observe.memory import peak_resident_bytes, reset_peak, resident_bytes
from meshwright.observe.recorder import Recorder
from meshwright.observe.report import write_report
from meshwright.observe.sinks import JsonlSink, PrometheusSink, Sink, TensorBoardSink, open_sinks
from meshwright.observe.status import Status
from meshwright.observe.tail import Tail, Tails

__all__ = [
    "Candidate",
    "Decision",
    "JsonlSink",
    "PrometheusSink",
    "Recorder",
    "RunFolder",
    "Sink",
    "Status",
    "Tail",
    "Tails",
    "TensorBoardSink",
    "create",
    "find",
    "follow",
    "follow_lines",
    "open_sinks",
    "peak_resident_bytes",
    "reset_peak",
    "resident_bytes",
    "write_report",
]
