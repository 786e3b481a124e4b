"""Claims that every launcher keeps, wherever it starts ranks: here, by ssh, on an engine.

    for claim in CLAIMS.values():
        claim(start)        # start: function of a job and a console that returns the outcome

A job has three ranks here. Ranks of engines are on other hosts or act as if they were.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from braid.launch import JobSpec, Outcome, QuietConsole
from support.launched import FAULT, NUM_LINES

__all__ = ["CLAIMS", "NUM_RANKS", "Start"]

NUM_RANKS = 3
PROGRAM = "support.launched"
UP_LIMIT_S = 60.0
SLOW_S = 20.0


class Start(Protocol):
    """A launcher under test."""

    def __call__(self, job: JobSpec, console: QuietConsole) -> Outcome:
        """Run a job to its end."""
        ...


def ranks_know_their_places(start: Start, directory: Path) -> None:
    """Every rank knows its number, that on its host, and how many there are; all lines arrive."""
    outcome, lines = _run(start, directory, "places")
    assert outcome.ok, str(outcome)
    places = [tuple(map(int, lines[rank][0].split())) for rank in range(NUM_RANKS)]
    assert [place[0] for place in places] == list(range(NUM_RANKS))
    assert {place[1] for place in places} == {NUM_RANKS}
    nodes: dict[int, list[int]] = {}
    for _, _, local, size, node, num_nodes in places:
        nodes.setdefault(node, []).append(local)
        assert local < size
        assert node < num_nodes
    assert all(locals_ == list(range(len(locals_))) for locals_ in nodes.values())
    for rank, own in lines.items():
        assert own[1:] == [f"line {number} of rank {rank}" for number in range(NUM_LINES)]


def an_exit_code_is_that_of_the_run(start: Start, directory: Path) -> None:
    """A rank that exits with a code ends the run with it, and is named."""
    outcome, _ = _run(start, directory, "exit")
    assert (outcome.exit_code, [end.rank for end in outcome.cause]) == (3, [1])


def an_exception_is_named(start: Start, directory: Path) -> None:
    """The error block has the exception of the rank that raised it; the others are ended."""
    outcome, _ = _run(start, directory, "raise")
    assert (outcome.exit_code, [end.rank for end in outcome.cause]) == (1, [1])
    assert f"ValueError: {FAULT}" in str(outcome)
    assert [end.rank for end in outcome.affected] == [0, 2]


def a_killed_rank_is_named(start: Start, directory: Path) -> None:
    """A rank that a signal kills is named with it, and the run ends soon."""
    begin_s = time.monotonic()
    outcome, _ = _run(start, directory, "kill")
    assert outcome.exit_code == 128 + signal.SIGKILL
    assert "killed by signal 9 (SIGKILL)" in str(outcome)
    assert [end.rank for end in outcome.cause] == [1]
    assert time.monotonic() - begin_s < SLOW_S


def a_signal_ends_all_ranks(start: Start, directory: Path) -> None:
    """SIGTERM to the launcher reaches all ranks, and the run says so."""
    console = _Watched(NUM_RANKS, lambda: os.kill(os.getpid(), signal.SIGTERM))
    outcome, _ = _run(start, directory, "wait", console=console)
    assert (outcome.exit_code, outcome.status) == (128 + signal.SIGTERM, "interrupted")
    assert len(outcome.affected) == NUM_RANKS


def a_time_limit_ends_all_ranks(start: Start, directory: Path) -> None:
    """A run that takes too long is ended."""
    outcome, _ = _run(start, directory, "wait", timeout_s=1.0)
    assert (outcome.exit_code, outcome.status) == (124, "timed out")


class _Watched(QuietConsole):
    """A console that does something once all ranks have printed a line."""

    def __init__(self, num_ranks: int, then: Callable[[], None]) -> None:
        super().__init__()
        self._missing = set(range(num_ranks))
        self._then = then

    def line(self, rank: int, stream: int, text: bytes, end: bytes = b"\n") -> None:
        """See `Console`."""
        super().line(rank, stream, text, end)
        if rank in self._missing:
            self._missing.discard(rank)
            if not self._missing:
                threading.Timer(0.05, self._then).start()


def _run(
    start: Start, directory: Path, what: str, *, console: QuietConsole | None = None, **options: Any
) -> tuple[Outcome, dict[int, list[str]]]:
    """Run the program on three ranks; return the outcome and the lines of each rank."""
    console = console or QuietConsole()
    options = {"grace_s": 0.2, "interrupt_limit_s": 5.0, "timeout_s": UP_LIMIT_S, **options}
    job = JobSpec(
        command=(PROGRAM, what),
        kind="module",
        num_ranks=NUM_RANKS,
        log_dir=str(directory / what),
        **options,
    )
    outcome = start(job, console)
    lines: dict[int, list[str]] = {rank: [] for rank in range(NUM_RANKS)}
    for rank, stream, text in console.lines:
        if stream == 1:
            lines[rank].append(text.decode())
    return outcome, lines


CLAIMS: Mapping[str, Callable[[Start, Path], None]] = {
    claim.__name__: claim
    for claim in (
        ranks_know_their_places,
        an_exit_code_is_that_of_the_run,
        an_exception_is_named,
        a_killed_rank_is_named,
        a_signal_ends_all_ranks,
        a_time_limit_ends_all_ranks,
    )
}
