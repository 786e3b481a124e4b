"""Determines which rank made a run fail or hang, and explains the failure in words."""

from __future__ import annotations

from braid.runtime.diagnose.block import (
    SavedCheckpoint,
    StopReport,
    error_block,
    rank_list,
    render_block,
)
from braid.runtime.diagnose.hang import HangReport, find_hang
from braid.runtime.diagnose.hang_view import Process, RankView, SpanView
from braid.runtime.diagnose.last_events import last_events, last_operation_end, last_step
from braid.runtime.diagnose.reach_table import reach_table, why_unreachable
from braid.runtime.diagnose.run_record import RunHost, RunRecord
from braid.runtime.diagnose.tracebacks import (
    ParsedError,
    Stack,
    final_error,
    parse_error,
    parse_stack,
    printable,
    short_site,
)
from braid.runtime.diagnose.verdict import (
    Ending,
    MemoryKill,
    RankEnd,
    Verdict,
    clause,
    describe,
    exit_code,
    judge,
    signal_name,
)

__all__ = [
    "Ending",
    "HangReport",
    "MemoryKill",
    "ParsedError",
    "Process",
    "RankEnd",
    "RankView",
    "RunHost",
    "RunRecord",
    "SavedCheckpoint",
    "SpanView",
    "Stack",
    "StopReport",
    "Verdict",
    "clause",
    "describe",
    "error_block",
    "exit_code",
    "final_error",
    "find_hang",
    "judge",
    "last_events",
    "last_operation_end",
    "last_step",
    "parse_error",
    "parse_stack",
    "printable",
    "rank_list",
    "reach_table",
    "render_block",
    "short_site",
    "signal_name",
    "why_unreachable",
]
