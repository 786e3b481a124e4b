"""Writing what `braid report` writes: the page and, beside it, the trace."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from braid.errors import ConfigError
from braid.observe.report import Story, tell, this_machine, write_report
from braid.observe.run_directory import read_run
from braid.observe.trace import write_trace

__all__ = ["Published", "publish"]


class Published(NamedTuple):
    """What was written, and what it says; `trace` is None when no rank recorded events."""

    story: Story
    report: Path
    trace: Path | None


def publish(run_path: Path, out: Path | None = None) -> Published:
    """Write the report of a run.

    Args:
        run_path: Directory of the run.
        out: File of the page; `report.html` in the run's directory when None. The trace lies beside
            it.

    Raises:
        ConfigError: There is no such run, or the files cannot be written.

    Cost: about two seconds for 100,000 events.
    """
    run = read_run(run_path)
    page = run_path / "report.html" if out is None else out
    story = tell(run)
    try:
        trace = write_trace(run, page.with_name("trace.json")) if run.rings else None
        write_report(story, page, trace=trace.name if trace else "", machine=this_machine())
    except OSError as exc:
        msg = (
            f"expected to write {page} and a trace beside it, found: {exc.strerror}; choose "
            "another place with --out"
        )
        raise ConfigError(msg) from exc
    return Published(story, page, trace)
