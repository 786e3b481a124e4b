"""Runs a job a second time, without faults, to compare the weights; see `comparison`."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from braid.errors import BraidError
from braid.launch.chaos.comparison import (
    Digest,
    StepOfRun,
    WeightComparison,
    compared,
    digests_of,
)
from braid.launch.observe.live_run import LiveRun

__all__ = ["compared_again", "started"]

POLL_S = 0.2
FOLDER = "undisturbed"  # in the directory of the run under faults


def compared_again(
    struck: LiveRun,
    command: Sequence[str],
    environ: Mapping[str, str],
    limit_s: float,
    note: Callable[[str], object],
) -> WeightComparison:
    """Run a job again, up to the last step of the run under faults, and compare the weights.

    Args:
        struck: The run under faults, which has ended.
        command: Command of the run.
        environ: Environment of the run.
        limit_s: Longest time of the second run.
        note: Called with a line for the user.
    """
    digests = digests_of(struck.rows)
    if not digests:
        reason = (
            "no member has logged its weights, as the training has ended before step 10, or keeps "
            "the batch of each rank"
        )
        return WeightComparison(reason=reason)
    last = max(digests)
    note(
        f"braid: the same run follows without faults, up to step {last.step}, to compare the "
        "weights (--no-compare skips it)"
    )
    path = _new_directory(struck.path)
    index = command.index("--") if "--" in command else len(command)
    words = [*command[:index], "--log-dir", str(path), *command[index:]]  # the last one counts
    try:
        again, code = _digests_until(last, words, environ, path, limit_s)
    except KeyboardInterrupt:
        return WeightComparison(reason="the run without faults was interrupted")
    reason = ""
    if again and min(again) > last:
        reason = (
            f"the run without faults has begun after step {last.step}, with checkpoints of the run "
            "under faults; let the program keep them below the environment variable BRAID_LOG_DIR"
        )
    elif code:
        reason = f"the run without faults has failed with exit code {code}, see {path}"
    elif max(again, default=last) < last or not again:
        reason = f"the run without faults has not reached step {last.step}, see {path}"
    return WeightComparison(reason=reason, is_wrong=True) if reason else compared(digests, again)


def _new_directory(run: Path) -> Path:
    """Return a directory for the second run, in which no earlier run has written."""
    number = 1
    while (path := run / (FOLDER + f"-{number}" * (number > 1))).exists():
        number += 1
    return path


def _digests_until(
    last: StepOfRun, command: list[str], environ: Mapping[str, str], path: Path, limit_s: float
) -> tuple[dict[StepOfRun, Digest], int]:
    """Run a job up to a step.

    Returns:
        Digests of its weights, and its exit code if it has ended by itself; else 0.
    """
    run: LiveRun | None = None
    digests: dict[StepOfRun, Digest] = {}
    end_s = time.monotonic() + limit_s
    with started(command, environ) as process:
        code = None
        while code is None and max(digests, default=StepOfRun(0, 0)) < last:
            time.sleep(POLL_S)
            code = process.poll()  # before the last look
            with suppress(BraidError):  # it has not been written yet
                run = run or LiveRun(path)
                run.refresh()
                digests = digests_of(run.rows)
            if time.monotonic() > end_s:
                break
    return digests, code or 0


@contextmanager
def started(
    command: Sequence[str], environ: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a launcher; it is ended at the end of the block, also by an exception like Ctrl-C."""
    process = subprocess.Popen(command, env=environ)
    try:
        yield process
    finally:
        if process.poll() is None:
            with suppress(KeyboardInterrupt):  # Ctrl-C has also reached the launcher
                process.terminate()
                process.wait()
