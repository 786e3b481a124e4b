"""Writes the files of `braid report`: the page and the trace."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from braid.errors import ConfigError
from braid.launch.observe.report import Story, build_story, render_page, this_machine
from braid.launch.observe.run_directory import read_run
from braid.launch.observe.trace import write_trace

__all__ = ["Published", "publish", "write_page"]


class Published(NamedTuple):
    """Paths of the files that `publish` has written.

    Attributes:
        story: Contents of the page.
        report: Path of the page.
        trace: Path of the trace; None if no rank has recorded events.
    """

    story: Story
    report: Path
    trace: Path | None


def publish(run_path: Path, out: Path | None = None) -> Published:
    """Write the report of a run.

    Args:
        run_path: Directory of the run.
        out: Path of the page; `report.html` in the run's directory when None. The trace is written
            to the same directory.

    Raises:
        ConfigError: `run_path` is not the directory of a run, or the files cannot be written.

    Cost: about two seconds for 100,000 events.
    """
    run = read_run(run_path)
    page = run_path / "report.html" if out is None else out
    story = build_story(run)
    try:
        trace = write_trace(run, page.with_name("trace.json")) if run.rings else None
        name = trace.name if trace else ""
        write_page(render_page(story, trace=name, machine=this_machine()), page)
    except OSError as exc:
        msg = (
            f"cannot write {page} and a trace beside it: {exc.strerror}; choose another path with "
            "--out"
        )
        raise ConfigError(msg) from exc
    return Published(story, page, trace)


def write_page(html: str, path: Path) -> None:
    """Write a page atomically.

    Raises:
        OSError: The page cannot be written.
    """
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(html, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
