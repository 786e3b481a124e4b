"""Writes a page about a run: outcome, curves, division of time, waits, and the ends of the logs.

Problem: the numbers of a parallel run are in N logs, N event rings and a file of metrics. Viewers
for each of them need a server, an account or an installation.

Idea: write a single HTML file without scripts, fonts or other resources. It can be mailed, archived
and opened in ten years, and its content security policy forbids the browser to load anything.
`Story` has the contents of the page; the template only lays it out.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from statistics import median
from typing import NamedTuple

import jinja2

from braid._version import __version__
from braid.launch.observe.buckets import LateBucket, late_buckets
from braid.launch.observe.curves import charts
from braid.launch.observe.facts import by_step, facts, slowest_step
from braid.launch.observe.figures import Chart, Picture, picture
from braid.launch.observe.glance import Figure, glance
from braid.launch.observe.operations import OperationSummary, operations
from braid.launch.observe.pipelines import PipelineView, pipeline_views
from braid.launch.observe.run_directory import Run
from braid.launch.observe.servers import ServerRow, servers
from braid.launch.observe.timeline import RankTimeline, StepKey, StepTime, shares
from braid.launch.observe.weight_versions import VersionRow, version_rows
from braid.runtime.diagnose.block import error_block, render_block
from braid.runtime.text import bytes_text, count_text, duration_text, percent_text
from braid.types import Shares

__all__ = ["Story", "build_story", "page_template", "render_page", "this_machine"]

NO_END = "no end recorded"
NO_END_BLOCK = (
    "braid: the run goes on, or its launcher was killed: this report shows its files so far"
)
MAX_ROWS = 30  # number of buckets and operations in their tables
MAX_LANES = 16  # number of ranks in a picture of the timeline
MAX_LOGS = 16
MAX_ARGUMENT = 80  # characters of one argument in the title; the whole command stands below


class RankRow(NamedTuple):
    """Division of one rank's time into computation, waits and transfers."""

    rank: int
    shares: Shares
    num_steps: int
    total_ns: int


class PhaseRow(NamedTuple):
    """Median own work in a phase, for each rank."""

    name: str
    by_rank: tuple[float | None, ...]


@dataclass(frozen=True, kw_only=True)
class Story:
    """Contents of the report about a run.

    Attributes:
        run: The run.
        status: Status of the run in one or two words.
        outcome: Error block of the run.
        facts: Up to three sentences.
        rank_rows: Division of time, by rank.
        phases: Median time of each phase of a step, by rank.
        charts: Titles and curves; charts without data are missing.
        glance: Numbers that a person looks at first.
        pictures: Sections of the timeline.
        pipelines: Pipelines, measured and predicted.
        versions: Stages of an asynchronous pipeline, with the ages of their gradients.
        servers: Servers of a parameter server.
        buckets: Gradient buckets in order, with the ranks that were behind.
        operations: Collectives, the most expensive first.
        num_steps: Number of finished steps that all ranks have recorded.
        job: Description of the model and data; empty without metrics.
        notices: Descriptions of missing data.
    """

    run: Run
    status: str
    outcome: str
    facts: tuple[str, ...]
    rank_rows: tuple[RankRow, ...]
    phases: tuple[PhaseRow, ...]
    charts: tuple[tuple[str, Chart], ...]
    glance: tuple[Figure, ...]
    pictures: tuple[Picture, ...]
    pipelines: tuple[PipelineView, ...]
    versions: tuple[VersionRow, ...]
    servers: tuple[ServerRow, ...]
    buckets: tuple[LateBucket, ...]
    operations: tuple[OperationSummary, ...]
    num_steps: int
    job: str
    notices: tuple[str, ...]


def build_story(run: Run) -> Story:
    """Compute the contents of the report about a run."""
    outcome = run.record.outcome
    failed = outcome is not None and outcome.status != "finished"
    timelines = run.timelines
    steps = by_step(timelines)
    return Story(
        run=run,
        status=outcome.status if outcome else NO_END,
        outcome=render_block(error_block(outcome)) if outcome else NO_END_BLOCK,
        facts=tuple(facts(timelines)),
        rank_rows=tuple(
            RankRow(t.rank, shares(t), len(t.steps), sum(end - start for start, end in t.windows))
            for t in timelines
        ),
        phases=_phases(timelines, steps),
        charts=charts(run, steps),
        glance=glance(run, timelines, steps),
        pictures=_pictures(timelines, steps, failed=failed),
        pipelines=pipeline_views(timelines),
        versions=version_rows(timelines),
        servers=servers(timelines),
        buckets=tuple(late_buckets(timelines)),
        operations=tuple(operations(timelines)),
        num_steps=len(steps),
        job=_job(run.about),
        notices=(*run.notices, *_losses(timelines)),
    )


def render_page(story: Story, *, trace: str, machine: str) -> str:
    """Return the page as HTML; every text in it is escaped.

    Args:
        story: Contents of the page.
        trace: Name of the trace in the same directory; empty if there is none.
        machine: Machine on which the report is written; see `this_machine`.
    """
    outcome = story.run.record.outcome
    cause = {end.rank for end in outcome.verdict.cause} if outcome else set()
    logs = sorted(story.run.logs, key=lambda log: (log.rank not in cause, log.rank))
    return page_template("report.html.jinja").render(
        story=story,
        record=story.run.record,
        cause=cause,
        command=_shortened(story.run),
        logs=logs[:MAX_LOGS],
        num_more_logs=max(0, len(logs) - MAX_LOGS),
        buckets=_most_behind(story.buckets),
        num_more_buckets=max(0, len(story.buckets) - MAX_ROWS),
        operations=story.operations[:MAX_ROWS],
        num_more_operations=max(0, len(story.operations) - MAX_ROWS),
        trace=trace,
        machine=machine,
        version=__version__,
    )


def page_template(name: str) -> jinja2.Template:
    """Return a template of `page/`, which escapes every text and knows the units."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("braid.launch.observe", "page"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "duration": duration_text,
        "bytes": bytes_text,
        "count": count_text,
        "percent": percent_text,
    }
    return environment.get_template(name)


def this_machine() -> str:
    """Return a description of this machine: host, cores and versions."""
    try:
        torch_version = f", torch {metadata.version('torch')}"
    except metadata.PackageNotFoundError:
        torch_version = ""
    return (
        f"{platform.node()}: {os.cpu_count()} cores, {platform.system()} {platform.machine()}, "
        f"Python {platform.python_version()}{torch_version}"
    )


def _shortened(run: Run) -> str:
    """Return the command line, with long arguments (such as JSON) replaced by dots."""
    if run.record.title:
        return run.record.title
    command = run.record.command
    short = tuple(arg if len(arg) <= MAX_ARGUMENT else "..." for arg in command)
    return replace(run, record=replace(run.record, command=short)).command_line


def _job(about: Mapping[str, object]) -> str:
    """Describe model, data and batch, as far as the header of the metrics has them."""
    parts = []
    if "model" in about:
        parts.append(f"model {about['model']}")
    if "device" in about:
        parts.append(f"on {about['device']} in {about.get('dtype', 'fp32')}")
    for key, unit in (
        ("num_params", "parameters"),
        ("tokens_per_step", "tokens per step"),
        ("peak_flops_per_s", f"FLOP/s peak per rank ({about.get('peak_source', 'measured')})"),
    ):
        value = about.get(key)
        if isinstance(value, (int, float)):
            parts.append(f"{count_text(value)} {unit}")
    if "data" in about:
        parts.append(f"data: {about['data']}")
    return ", ".join(parts)


def _phases(
    timelines: Sequence[RankTimeline], steps: Mapping[StepKey, Mapping[int, StepTime]]
) -> tuple[PhaseRow, ...]:
    ranks = [timeline.rank for timeline in timelines if timeline.steps]
    names = dict.fromkeys(name for row in steps.values() for s in row.values() for name in s.phases)
    rows = []
    for name in names:
        by_rank = []
        for rank in ranks:
            spent = [row[rank].phases[name] for row in steps.values() if name in row[rank].phases]
            by_rank.append(median(spent) if spent else None)
        if not any(by_rank):  # between steps without a gap
            continue
        rows.append(PhaseRow(name, tuple(by_rank)))
    return tuple(rows)


def _pictures(
    timelines: Sequence[RankTimeline],
    steps: Mapping[StepKey, Mapping[int, StepTime]],
    *,
    failed: bool,
) -> tuple[Picture, ...]:
    """Return pictures of the slowest, median and first step, after the end of a failed run."""
    shown = [timeline for timeline in timelines if timeline.intervals][:MAX_LANES]
    if not shown:
        return ()
    last_ns = max(timeline.span_ns[1] for timeline in shown)
    unfinished = [s.start_ns for t in shown for s in t.steps if s.open]
    windows: list[tuple[str, int, int]] = []
    if failed and (unfinished or steps):
        begin = min(unfinished, default=_window(steps, [list(steps)[-1]])[0] if steps else 0)
        windows.append(("The end of the run", begin, last_ns))
    keys = list(steps)
    slowest = slowest_step(steps)
    if slowest is not None and len(keys) > 3:
        by_length = sorted(keys, key=lambda key: max(s.dur_ns for s in steps[key].values()))
        for title, key in (
            ("The slowest step", slowest),
            ("The median step", by_length[len(keys) // 2]),
            ("The first step", keys[0]),
        ):
            lasted = duration_text(max(s.dur_ns for s in steps[key].values()))
            text = f"{title}: step {key.seq}, {lasted}"
            windows.append((text, *_window(steps, [key])))
    elif keys:
        windows.append(("All steps", *_window(steps, keys)))
    elif not windows:
        begin = min(unfinished, default=min(timeline.span_ns[0] for timeline in shown))
        title = "The step that did not end" if unfinished else "The whole recording"
        windows.append((title, begin, last_ns))
    return tuple(picture(shown, begin, end, title=title) for title, begin, end in windows)


def _window(
    steps: Mapping[StepKey, Mapping[int, StepTime]], keys: Sequence[StepKey]
) -> tuple[int, int]:
    rows = [step for key in keys for step in steps[key].values()]
    return min(step.start_ns for step in rows), max(step.end_ns for step in rows)


def _most_behind(buckets: Sequence[LateBucket]) -> list[LateBucket]:
    """Return the buckets with the longest waits, in their order."""
    shown = sorted(buckets, key=lambda row: row.num_behind * row.behind_ns, reverse=True)[:MAX_ROWS]
    return [row for row in buckets if row in shown]


def _losses(timelines: Sequence[RankTimeline]) -> list[str]:
    return [
        f"rank {t.rank}: the {t.num_lost:,} oldest events were overwritten; the figures show the "
        f"last {len(t.intervals):,}"
        for t in timelines
        if t.num_lost
    ]
