"""observe: what a run did, as a page, as a trace and in three sentences; see README.md."""

from __future__ import annotations

from braid.observe.publish import Published, publish
from braid.observe.report import Story, render_page, tell, this_machine, write_report
from braid.observe.run_directory import Run, read_run
from braid.observe.summary import print_summary
from braid.observe.timeline import RankTimeline, Shares, read_timelines, shares
from braid.observe.trace import write_trace

__all__ = [
    "Published",
    "RankTimeline",
    "Run",
    "Shares",
    "Story",
    "print_summary",
    "publish",
    "read_run",
    "read_timelines",
    "render_page",
    "shares",
    "tell",
    "this_machine",
    "write_report",
    "write_trace",
]
