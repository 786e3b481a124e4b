"""Runs the ranks of a bench on this host, by braid's launcher; `several` uses other hosts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from braid.errors import ConfigError
from braid.launch import JobSpec, QuietConsole, Supervisor

__all__ = ["figures_of", "run_here"]

T = TypeVar("T")


def run_here(
    num_ranks: int,
    module: str,
    plan: bytes,
    *,
    log_dir: Path,
    on_line: Callable[[str], None] | None = None,
) -> None:
    """Run a module on all ranks, to its end.

    Args:
        num_ranks: World size.
        module: Name of the module.
        plan: Argument of the module.
        log_dir: Directory for the run's logs.
        on_line: Called with each JSON object that the first rank prints.

    Raises:
        ConfigError: A rank failed; the message is the launcher's error block.
    """
    job = JobSpec(
        command=(module, plan.decode()),
        kind="module",
        num_ranks=num_ranks,
        threads=1,
        log_dir=str(log_dir),
        hang_report_s=0.0,
    )
    outcome = Supervisor(_LineConsole(on_line)).run(job)
    if not outcome.ok:
        raise ConfigError(str(outcome))


def figures_of(
    num_ranks: int,
    module: str,
    plan: Callable[[str], msgspec.Struct],
    kind: type[T],
    *,
    out: Path,
    run: str = "run",
) -> T:
    """Run a module on all ranks, and return the figures that rank 0 writes.

    Args:
        num_ranks: World size.
        module: Name of the module; its argument is the plan.
        plan: Function of the path of a file, to which rank 0 writes the figures as JSON.
        kind: Type of the figures.
        out: Directory of the bench, made if it is not there.
        run: Name of the run's directory in it.

    Raises:
        ConfigError: A rank failed; the message is the launcher's error block.
    """
    out.mkdir(parents=True, exist_ok=True)
    file = out / "figures.json"
    encoded = msgspec.json.encode(plan(str(file.resolve())))
    run_here(num_ranks, module, encoded, log_dir=out / run)
    figures = msgspec.json.decode(file.read_bytes(), type=kind)
    file.unlink()
    return figures


class _LineConsole(QuietConsole):
    """A console that passes on the first rank's JSON lines."""

    def __init__(self, on_line: Callable[[str], None] | None) -> None:
        super().__init__()
        self._on_line = on_line

    def line(self, rank: int, stream: int, text: bytes, end: bytes = b"\n") -> None:
        super().line(rank, stream, text, end)
        if self._on_line is not None and rank == 0 and text.startswith(b"{"):
            self._on_line(text.decode())
