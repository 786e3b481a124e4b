"""Runs the ranks of a benchmark on this host, or on several hosts with `braid run -H`.

Ranks import a function by its name, and receive its argument as JSON. With several hosts the first
rank may be on another host than the user, so it prints its results; it does not write a file.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from braid.errors import ConfigError
from braid.launch import QuietConsole, spawn
from braid.launch.supervise.spawning import spawned_command

__all__ = ["Where", "figures_in", "figures_of", "figures_there", "run_here"]

P = TypeVar("P", bound=msgspec.Struct)
T = TypeVar("T")
END_S = 15.0  # seconds from Ctrl-C until a job on several hosts is killed
FIRST = "[rank 0] {"


def run_here(
    num_ranks: int,
    function: Callable[[P], object],
    plan: P,
    *,
    log_dir: Path,
    on_line: Callable[[str], None] | None = None,
    results: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> None:
    """Call a function on ranks of this host.

    Args:
        num_ranks: World size.
        function: Function of a module.
        plan: Argument of the function.
        log_dir: Directory for the run's logs.
        on_line: Called with each JSON object that the first rank prints.
        results: File for the result that one rank returns.
        environ: Additional environment variables of the ranks.

    Raises:
        ConfigError: A rank failed; the message is the launcher's error block.
    """
    outcome = spawn(
        function,
        num_ranks,
        (plan,),
        console=_LineConsole(on_line),
        results=results,
        threads=1,
        log_dir=str(log_dir),
        hang_report_s=0.0,
        environ={**os.environ, **(environ or {})},
    )
    if not outcome.ok:
        raise ConfigError(str(outcome))


def figures_of(
    num_ranks: int,
    function: Callable[[P], object],
    plan: P,
    kind: type[T],
    *,
    out: Path,
    run: str = "run",
    environ: Mapping[str, str] | None = None,
) -> T:
    """Call a function on ranks of this host, and return the result that one rank returns.

    Args:
        num_ranks: World size.
        function: Function of a module.
        plan: Argument of the function.
        kind: Type of the result.
        out: Directory of the benchmark, created if it is missing.
        run: Name of the run's directory in `out`.
        environ: Additional environment variables of the ranks.

    Raises:
        ConfigError: A rank failed; the message is the launcher's error block.
    """
    out.mkdir(parents=True, exist_ok=True)
    file = out / "figures.json"
    run_here(num_ranks, function, plan, log_dir=out / run, results=file, environ=environ)
    figures = msgspec.json.decode(file.read_bytes(), type=kind)
    file.unlink()
    return figures


class _LineConsole(QuietConsole):
    """A console that passes the first rank's JSON lines to a function."""

    def __init__(self, on_line: Callable[[str], None] | None) -> None:
        super().__init__()
        self._on_line = on_line

    def line(self, rank: int, stream: int, text: bytes, end: bytes = b"\n") -> None:
        super().line(rank, stream, text, end)
        if self._on_line is not None and rank == 0 and text.startswith(b"{"):
            self._on_line(text.decode())


@dataclass(frozen=True, kw_only=True, slots=True)
class Where:
    """Hosts on which the ranks of a benchmark run.

    Attributes:
        hosts: Hosts as for `braid run -H`, such as a:2,b:2.
        rsh: Command that runs a program on a host; ssh if empty.
        remote_python: Interpreter on the hosts; the same path as on this host if empty.
        inside: Words before the launcher's command, such as those of another program that runs it.
    """

    hosts: str
    rsh: str = ""
    remote_python: str = ""
    inside: tuple[str, ...] = ()

    def command(self, words: tuple[str, ...], log_dir: Path) -> list[str]:
        """Return the launcher's command that runs the module `words`, with logs in `log_dir`."""
        options = {
            "-H": self.hosts,
            "--rsh": self.rsh,
            "--remote-python": self.remote_python,
            "--threads": "1",
            "--hang-report": "0",
            "--log-dir": str(log_dir.resolve()),
        }
        options_given = [part for name, value in options.items() if value for part in (name, value)]
        launcher = [*self.inside, sys.executable, "-m", "braid", "run", *options_given]
        return [*launcher, "-m", *words]


def figures_there(
    where: Where,
    function: Callable[[P], object],
    plan: P,
    kind: type[T],
    *,
    log_dir: Path,
) -> Iterator[T]:
    """Call a function on ranks of several hosts, and yield the results that the first rank prints.

    Args:
        where: Hosts to run on.
        function: Function of a module that is installed on all hosts.
        plan: Argument of the function.
        kind: Type of the results.
        log_dir: Directory for the run's logs.

    Raises:
        ConfigError: A rank failed, or a host could not be reached; has the launcher's message.
    """
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            where.command(spawned_command(function, (plan,)), log_dir),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"},
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if text := figures_in(line):
                    yield msgspec.json.decode(text, type=kind)
        except BaseException:
            process.send_signal(signal.SIGINT)  # the launcher then ends its ranks on all hosts
            _end(process)
            raise
        code = _end(process)
        errors.seek(0)
        if code:
            msg = f"the ranks on {where.hosts} failed (exit {code}):\n{errors.read().strip()}"
            raise ConfigError(msg)


def figures_in(line: str) -> str:
    """Return the JSON object in a line of the first rank; empty for any other line."""
    return line[len(FIRST) - 1 :].strip() if line.startswith(FIRST) else ""


def _end(process: subprocess.Popen[str]) -> int:
    """Wait for the launcher to end; kill it after `END_S`."""
    with process:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(END_S)
        process.kill()
        return process.wait()
