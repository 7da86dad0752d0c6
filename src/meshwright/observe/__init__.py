"""Level 1, the Monitoring Subsystem: a run writes its folder with `Recorder`; views and reports read it with `RunFolder`."""

from meshwright.observe.live_view import follow
from meshwright.observe.process_memory import peak_resident_bytes, reset_peak_resident, resident_bytes
from meshwright.observe.recorder import Recorder
from meshwright.observe.report import write_report
from meshwright.observe.run_folder import RunFolder, check_run_dir, create_run_folder, find_run_folder
from meshwright.observe.sinks import open_sinks
from meshwright.observe.step_lines import follow_step_lines

__all__ = [
    "Recorder",
    "RunFolder",
    "check_run_dir",
    "create_run_folder",
    "find_run_folder",
    "follow",
    "follow_step_lines",
    "open_sinks",
    "peak_resident_bytes",
    "reset_peak_resident",
    "resident_bytes",
    "write_report",
]
