"""Runs the ranks of a bench on several hosts, by `braid run -H`.

The first rank may be on another host than the user, so figures return as output of the job, not
as a file.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from braid.errors import ConfigError

__all__ = ["Where", "figures_in", "run_ranks"]

END_S = 15.0  # until a job is killed after Ctrl-C, with its hosts
FIRST = "[rank 0] {"


@dataclass(frozen=True, kw_only=True, slots=True)
class Where:
    """Hosts on which ranks run.

    Attributes:
        hosts: Hosts as for `braid run -H`, such as a:2,b:2.
        rsh: Command that reaches a host; ssh when empty.
        remote_python: Interpreter on the hosts; the same path as here when empty.
        inside: Words that precede the launcher's own command.
    """

    hosts: str
    rsh: str = ""
    remote_python: str = ""
    inside: tuple[str, ...] = ()

    def command(self, module: str, plan: bytes, log_dir: Path) -> list[str]:
        """Return the launcher's command."""
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
        return [*launcher, "-m", module, plan.decode()]


def run_ranks(
    where: Where, module: str, plan: bytes, *, on_line: Callable[[str], None], log_dir: Path
) -> None:
    """Run a module on all ranks, to its end.

    Args:
        where: Hosts to run on.
        module: Name of the module.
        plan: Argument of the module.
        on_line: Called with each JSON object that the first rank prints.
        log_dir: Directory for the run's logs.

    Raises:
        ConfigError: A rank failed, or a host could not be reached; the message is the launcher's.
    """
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            where.command(module, plan, log_dir),
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
                    on_line(text)
        except BaseException:
            process.send_signal(signal.SIGINT)  # so that it ends its ranks on all hosts
            _end(process)
            raise
        code = _end(process)
        errors.seek(0)
        if code:
            msg = (
                f"the ranks on {where.hosts} did not end well (exit {code}):\n"
                f"{errors.read().strip()}"
            )
            raise ConfigError(msg)


def figures_in(line: str) -> str:
    """Return the JSON object in a line of a job; empty for other lines and other ranks."""
    return line[len(FIRST) - 1 :].strip() if line.startswith(FIRST) else ""


def _end(process: subprocess.Popen[str]) -> int:
    """Wait for the launcher to end, then kill it."""
    with process:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(END_S)
        process.kill()
        return process.wait()
