"""Shows what a run did: as a page, as a trace and in three sentences."""

from __future__ import annotations

from braid.observe.compare import (
    Comparison,
    compare_runs,
    print_comparison,
    publish_comparison,
)
from braid.observe.pipelines import PipelineView, pipeline_views
from braid.observe.publish import Published, publish
from braid.observe.report import Story, build_story, render_page, this_machine
from braid.observe.run_directory import Run, read_run
from braid.observe.summary import print_summary
from braid.observe.timeline import RankTimeline, Shares, read_timelines, shares
from braid.observe.trace import write_trace

__all__ = [
    "Comparison",
    "PipelineView",
    "Published",
    "RankTimeline",
    "Run",
    "Shares",
    "Story",
    "build_story",
    "compare_runs",
    "pipeline_views",
    "print_comparison",
    "print_summary",
    "publish",
    "publish_comparison",
    "read_run",
    "read_timelines",
    "render_page",
    "shares",
    "this_machine",
    "write_trace",
]
