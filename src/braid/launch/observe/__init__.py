"""Shows what a run did: as a page, as a trace and in three sentences."""

from __future__ import annotations

from braid.launch.observe.compare import (
    RunComparison,
    compare_runs,
    print_comparison,
    publish_comparison,
)
from braid.launch.observe.pipelines import PipelineView, pipeline_views
from braid.launch.observe.publish import Published, publish
from braid.launch.observe.report import Story, build_story, render_page, this_machine
from braid.launch.observe.run_directory import Run, read_run
from braid.launch.observe.summary import print_summary
from braid.launch.observe.timeline import RankTimeline, read_timelines, shares
from braid.launch.observe.trace import write_trace

__all__ = [
    "PipelineView",
    "Published",
    "RankTimeline",
    "Run",
    "RunComparison",
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
