"""Progress of a training: a progress bar on a terminal, a plain line every two seconds elsewhere.

The launcher passes every line of its ranks to a console. `TrainConsole` parses the reports of one
rank and draws them; all other output of ranks appears above, prefixed with the rank. A separate
thread draws, so that a blocked terminal does not block the launcher.
"""

from __future__ import annotations

import queue
import threading
from contextlib import suppress

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from braid.runtime.clock import Clock, MonotonicClock
from braid.runtime.closing import Closing
from braid.train.reports import (
    Checkpointed,
    Evaluated,
    Report,
    Sampled,
    Stepped,
    TrainingFinished,
    TrainingStarted,
    parse_report,
)

__all__ = ["TrainConsole", "describe_step"]

PLAIN_LINE_NS = 2_000_000_000
TRACEBACK = b"Traceback (most recent call last)"
MAX_WAITING = 5000
CLOSE_LIMIT_S = 2.0


class TrainConsole(Closing):
    """A `braid.launch.Console` that shows a training; a context manager.

    Attributes:
        started: Rank 0's report of the start; None before the start.
        evaluated: Report of the last evaluation.
        finished: Rank 0's report of the end.

    Args:
        out: Console to draw on.
        title: If set, show only this title and the progress bar; the caller prints the rest.
        clock: Clock that decides when a plain line is due.
    """

    def __init__(self, out: Console, *, title: str = "", clock: Clock | None = None) -> None:
        self.started: TrainingStarted | None = None
        self.evaluated: Evaluated | None = None
        self.finished: TrainingFinished | None = None
        self.step: Stepped | None = None
        self._out = out
        self._title = title
        self._clock = clock or MonotonicClock()
        self._shown_ns = 0
        # Tracebacks of these ranks are in the logs; the error block has the cause.
        self._failing: set[int] = set()
        self._left_s = LeftTime()
        self._progress: Progress | None = None
        self._queue: queue.Queue[Report | Text | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._draw, name="braid-train-view", daemon=True)
        self._thread.start()

    def line(self, rank: int, stream: int, text: bytes, end: bytes = b"\n") -> None:  # noqa: ARG002
        """Show a line that a rank has printed; see `braid.launch.Console`."""
        report = parse_report(text) if stream == 1 else None  # rank 0 writes reports to stdout
        if report is None:
            if stream == 2 and text.startswith(TRACEBACK):
                self._failing.add(rank)
            if rank not in self._failing:
                self._put(Text(f"[rank {rank}] {text.decode(errors='replace')}"))
            return
        self._keep(report)
        self._put(report)

    def is_limited(self, stream: int) -> bool:
        """Return whether the rate of lines is limited; not on stdout, which has the reports."""
        return stream == 2

    def notice(self, text: str) -> None:
        """Show a message of the launcher."""
        if not self._title:
            self._put(Text(f"braid: {text}"))

    def close(self) -> None:
        """Draw the pending items and end the thread. Idempotent."""
        with suppress(queue.Full):
            self._queue.put(None, timeout=CLOSE_LIMIT_S)
            self._thread.join(CLOSE_LIMIT_S)

    def _keep(self, report: Report) -> None:
        if isinstance(report, TrainingStarted):
            self.started = report
        elif isinstance(report, Evaluated):
            self.evaluated = report
        elif isinstance(report, TrainingFinished):
            self.finished = report
        elif isinstance(report, Stepped):
            self.step = report

    def _put(self, item: Report | Text) -> None:
        with suppress(queue.Full):  # a blocked terminal loses output
            self._queue.put_nowait(item)

    # The drawing thread

    def _draw(self) -> None:
        with suppress(OSError, ValueError):
            self._open()
        while (item := self._queue.get()) is not None:
            with suppress(OSError, ValueError):  # a closed pipe: the training goes on
                self._show(item)
        if self._progress is not None:
            with suppress(OSError, ValueError):
                self._progress.stop()

    def _open(self) -> None:
        if not self._out.is_terminal:
            if self._title:
                self._print(Text(f"  {self._title} ..."))
            return
        self._progress = Progress(
            TextColumn(f"  {self._title} " if self._title else " "),
            BarColumn(bar_width=16, complete_style="green", finished_style="green"),
            _Figures(),
            console=self._out,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._progress.add_task("", total=None, figures="starting")
        self._progress.start()

    def _show(self, item: Report | Text) -> None:
        if isinstance(item, Text):
            self._print(item)
        elif isinstance(item, TrainingStarted):
            self._begin(item)
        elif isinstance(item, Stepped):
            self._advance(item)
        elif not self._title:
            self._show_report(item)

    def _show_report(self, report: Report) -> None:
        if isinstance(report, Evaluated):
            self._print(
                Text(f"step {report.step}: loss on held-out text {report.eval_loss:.3f} nats/byte")
            )
        elif isinstance(report, Checkpointed):
            times = f"{report.stall_s:.2f} s, written in {report.write_s:.2f} s behind it"
            text = f"step {report.step}: saved {report.path}, the training waited {times}"
            self._print(Text(text, style="dim"))
        elif isinstance(report, Sampled):
            self._print(Text("text generated by the model:", style="bold"))
            self._print(Text(report.text, style="italic"))
        elif isinstance(report, TrainingFinished):
            state = f"stopped by {report.stopped_by}" if report.stopped_by else "finished"
            saved = report.checkpoint or "the last checkpoint could not be saved"
            self._print(
                Text(
                    f"{state} at step {report.step} after {report.seconds:.1f} s: loss "
                    f"{report.first_loss:.3f} -> {report.last_loss:.3f}, {saved}"
                )
            )

    def _begin(self, start: TrainingStarted) -> None:
        if not self._title:
            for line in describe_start(start):
                self._print(Text(line))
        if self._progress is not None:
            task = self._progress.task_ids[0]
            self._progress.update(task, total=start.steps, completed=start.first_step, refresh=True)

    def _advance(self, step: Stepped) -> None:
        total = self.started.steps if self.started is not None else step.step
        now_ns = self._clock.now_ns()
        figures = describe_step(step, self._left_s.after(step.step, total, now_ns))
        if self._progress is not None:
            task = self._progress.task_ids[0]
            figures = f"{step.step}/{total}  {figures}"
            self._progress.update(task, completed=step.step, figures=figures, refresh=True)
        elif now_ns - self._shown_ns >= PLAIN_LINE_NS:
            self._shown_ns = now_ns
            width = len(str(total))
            indent = "      " if self._title else "  "
            self._print(Text(f"{indent}step {step.step:>{width}}/{total}  {figures}"))

    def _print(self, text: Text) -> None:
        self._out.print(text, soft_wrap=True, highlight=False)


class LeftTime:
    """Estimates the remaining time from the past steps."""

    def __init__(self) -> None:
        self._first: tuple[int, int] | None = None

    def after(self, step: int, total: int, now_ns: int) -> float | None:
        """Estimate the seconds remaining after `step` of `total`; None after the first step."""
        if self._first is None:
            self._first = (step, now_ns)
        num_steps, elapsed_ns = step - self._first[0], now_ns - self._first[1]
        return (total - step) * elapsed_ns / num_steps / 1e9 if num_steps > 0 else None


class _Figures(ProgressColumn):
    """Column with the text behind the bar, as plain text because it may contain brackets."""

    def render(self, task: Task) -> Text:
        return Text(str(task.fields["figures"]), no_wrap=True, overflow="ellipsis")


def describe_start(start: TrainingStarted) -> list[str]:
    """Return lines that describe the model, the data and the ranks of a training."""
    shards = f" as {start.mesh}" if start.mesh else f" running {start.shards} shards in turn"
    if start.shards == start.num_ranks:
        shards = ""
    lines = [
        f"model    {start.model}, {_count(start.num_params)} parameters, torch {start.torch}",
        (
            f"data     {start.data}: {start.num_files} files, {_count(start.data_bytes)} bytes to "
            "train on"
        ),
        (
            f"ranks    {start.num_ranks}{shards}, {start.threads} thread"
            f"{'s' * (start.threads != 1)} each, on {start.device} in {start.dtype}"
        ),
        f"step     {start.tokens_per_step:,} tokens, {start.flops_per_step / 1e9:.2g} GFLOP",
        (f"MFU      of {start.peak_flops_per_s / 1e9:.0f} GFLOP/s a rank, {start.peak_source}"),
    ]
    if start.resumed_from:
        lines.append(f"resumed  {start.resumed_from}, step {start.first_step}")
    return lines + [f"note     {note}" for note in start.notes]


def describe_step(step: Stepped, left_s: float | None) -> str:
    """Return loss, speed, remaining time and time shares of a step as one short line."""
    parts = [f"loss {step.loss:.3f}", f"{_count(step.tokens_per_s)} tok/s"]
    if left_s is not None:
        parts.append(f"{left_s:.0f} s left")
    parts += [
        f"compute {step.compute:.0%} wait {step.wait:.0%} transfer {step.transfer:.0%}",
        f"MFU {step.mfu:.0%}",
    ]
    return "  ".join(parts)  # a narrow terminal cuts the end


def _count(value: float) -> str:
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"
