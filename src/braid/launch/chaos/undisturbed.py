"""Runs a job a second time, without faults, to compare the weights; see `comparison`."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from braid.errors import BraidError
from braid.launch.chaos.comparison import Digest, WeightComparison, compared, digests_of
from braid.launch.observe.live_run import LiveRun

__all__ = ["compared_again", "started"]

POLL_S = 0.2
FOLDER = "undisturbed"  # in the directory of the run under faults


def compared_again(
    struck: LiveRun,
    command: Sequence[str],
    environ: Mapping[str, str],
    note: Callable[[str], object],
) -> WeightComparison:
    """Run a job again, up to the last step of the run under faults, and compare the weights.

    Args:
        struck: The run under faults, which has ended.
        command: Command of the run.
        environ: Environment of the run.
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
    note(f"braid: the same run follows without faults, up to step {last}, to compare the weights")
    path = struck.path / FOLDER
    index = command.index("--") if "--" in command else len(command)
    words = [*command[:index], "--log-dir", str(path), *command[index:]]  # the last one counts
    again = _digests_until(last, words, environ, path)
    if again and min(again) > last:
        reason = (
            f"the run without faults has begun after step {last}, with checkpoints of the run "
            "under faults; let the program keep them below the environment variable BRAID_LOG_DIR"
        )
        return WeightComparison(reason=reason)
    return compared(digests, again)


def _digests_until(
    last_step: int, command: list[str], environ: Mapping[str, str], path: Path
) -> dict[int, Digest]:
    """Run a job up to a step, and return the digests of its weights by step."""
    run: LiveRun | None = None
    digests: dict[int, Digest] = {}
    with started(command, environ) as process:
        is_running = True
        while is_running and max(digests, default=0) < last_step:
            time.sleep(POLL_S)
            is_running = process.poll() is None  # before the last look
            with suppress(BraidError):  # it has not been written yet
                run = run or LiveRun(path)
                run.refresh()
                digests = digests_of(run.rows)
    return digests


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
            with suppress(KeyboardInterrupt):  # Ctrl-C has reached the launcher, too
                process.terminate()
                process.wait()
