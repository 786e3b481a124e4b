"""The command `horovodrun`: reads files, and starts the job like `braid run`."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from braid._version import __version__
from braid.compat.horovod.launcher.check_build import check_build
from braid.compat.horovod.launcher.config_file import with_config
from braid.compat.horovod.launcher.flags import Flags, help_text, parse_flags
from braid.compat.horovod.launcher.job_plan import Launch, plan, with_rank_variables
from braid.compat.horovod.launcher.slots import HostSlots, discovered
from braid.errors import ConfigError
from braid.launch import Console, Outcome, Supervisor, TerminalConsole, parse_hostfile
from braid.launch.cluster.remote_shell import is_here
from braid.launch.cluster.several_hosts import HostsSupervisor
from braid.launch.engines.client import EngineSupervisor
from braid.runtime.last_words import drop_unwritten, ending_well, print_error

__all__ = ["is_own_python", "job_of", "launch", "main"]

USAGE_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 130


class TimedConsole:
    """Console that prefixes the lines of ranks with the time.

    Args:
        inner: Console that shows the lines.
    """

    def __init__(self, inner: Console) -> None:
        self._inner = inner

    def line(self, rank: int, stream: int, text: bytes, end: bytes = b"\n") -> None:
        """Show a line."""
        now = datetime.now().astimezone().isoformat(sep=" ", timespec="milliseconds")
        self._inner.line(rank, stream, now.encode() + b" " + text, end)

    def notice(self, text: str) -> None:
        """Show a message of the launcher."""
        self._inner.notice(text)

    def is_limited(self, stream: int) -> bool:
        """Return whether the stream is a terminal."""
        return self._inner.is_limited(stream)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    Args:
        arguments: Arguments of `horovodrun`; the arguments of this process when None.
    """
    words = sys.argv[1:] if arguments is None else arguments
    return ending_well(lambda: _answer(words))


def job_of(
    flags: Flags, environ: Mapping[str, str], is_own_python: Callable[[str], bool]
) -> Launch:
    """Return the job for a command line; reads the host file or runs the discovery script.

    Raises:
        ConfigError: As for `plan`; or the host file cannot be read or is empty; or the discovery
            script fails.
    """
    name, script = flags["hostfile"], flags["host-discovery-script"]
    hosts = parse_hostfile(_read(name, "file of hosts"), name) if name else ()
    if script:
        per_host = flags["slots"]
        hosts = discovered(script, int(per_host) if per_host.isdecimal() else 0)
    return plan(flags, environ, hosts=hosts, is_own_python=is_own_python, is_here=is_here)


def launch(
    wanted: Launch, *, verbose: bool, with_times: bool = False, owns_process: bool = False
) -> Outcome:
    """Run a job and show the output of its ranks.

    Args:
        wanted: Job, and the hosts where it runs.
        verbose: Whether to show the job before it starts.
        with_times: Whether to prefix the lines of ranks with the time.
        owns_process: As for `Supervisor`.

    Raises:
        ConfigError: The job cannot work; no process has been started.
    """
    prefixed = wanted.hosts is not None or wanted.job.num_ranks > 1
    with TerminalConsole(sys.stdout, sys.stderr, prefixed=prefixed) as terminal:
        console: Console = TimedConsole(terminal) if with_times else terminal
        if verbose:
            console.notice(f"the same as: {wanted}")
        for note in wanted.notes:
            console.notice(note)
        wanted = with_rank_variables(wanted)
        if wanted.elastic is not None:
            with HostSlots(wanted.elastic) as slots:
                if wanted.hosts is not None:
                    return HostsSupervisor(console).run(wanted.job, wanted.hosts, slots)
                return Supervisor(console, owns_process=owns_process).run(wanted.job, slots)
        if wanted.engine is not None:
            return EngineSupervisor(console).run_on(wanted.job, wanted.engine)
        if wanted.hosts is None:
            return Supervisor(console, owns_process=owns_process).run(wanted.job)
        return HostsSupervisor(console).run(wanted.job, wanted.hosts)


def _answer(words: Sequence[str]) -> int:
    try:
        flags = parse_flags(words)
        if flags.is_on("help"):
            print(help_text(), end="")
        elif flags.is_on("version"):
            print(__version__)
        elif flags.is_on("check-build"):
            print(check_build())
        else:
            return _start(flags)
    except ConfigError as exc:
        print_error(f"nothing was started (exit {USAGE_EXIT_CODE})", str(exc))
        return USAGE_EXIT_CODE
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE
    return 0


def _start(flags: Flags) -> int:
    if flags["config-file"]:
        flags = with_config(flags, _yaml(flags["config-file"]), flags["config-file"])
    outcome = launch(
        job_of(flags, os.environ, is_own_python),
        verbose=flags.is_on("verbose"),
        with_times=flags.is_on("prefix-output-with-timestamp"),
        owns_process=True,
    )
    drop_unwritten()  # the logs have all output; the job determines the exit code
    if not outcome.ok:
        print(outcome, file=sys.stderr, flush=True)
    return outcome.exit_code


def is_own_python(word: str) -> bool:
    """Return whether `word` is the current interpreter, in the same environment."""
    path = shutil.which(word)
    if path is None:
        return os.sep not in word
    other, current = Path(path).absolute(), Path(sys.executable).absolute()
    return other.parent == current.parent and other.resolve() == current.resolve()


def _yaml(name: str) -> object:
    text = _read(name, "configuration file")
    try:
        import yaml
    except ImportError as exc:
        msg = "--config-file needs PyYAML: pip install 'braid-train[horovod]'"
        raise ConfigError(msg) from exc
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as exc:
        msg = f"{name} is not valid YAML: {' '.join(str(exc).split())}"
        raise ConfigError(msg) from exc


def _read(name: str, kind: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8-sig")  # editors on Windows add a mark
    except (OSError, UnicodeDecodeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8 text"
        msg = f"{kind} {name} cannot be read: {why}"
        raise ConfigError(msg) from exc
