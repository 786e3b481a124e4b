"""Shows what a run did: as a page, as a trace and in three sentences."""

from __future__ import annotations

from braid.launch.observe.compare import (
    compare_runs,
    print_comparison,
    publish_comparison,
)
from braid.launch.observe.pipelines import pipeline_views
from braid.launch.observe.publish import publish
from braid.launch.observe.report import build_story, render_page
from braid.launch.observe.run_directory import read_run
from braid.launch.observe.summary import print_summary
from braid.launch.observe.timeline import read_timelines

__all__ = [
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
]
