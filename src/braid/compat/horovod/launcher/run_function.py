"""`horovod.run(func, args, np=4)`: calls a function on several ranks.

Problem: the function, its arguments and its results must be sent to other processes, and unpickling
can run any code. So only this user may be able to write the files that are read.

Idea: one directory (0700) with files (0600): the function from the caller, a result from each rank.
Nothing is sent over the network. For ranks on other hosts the caller passes a directory that all
hosts share; everyone who can write there must be trusted.

    caller   write function.pickle, start ranks                  read rank0.pickle, rank1.pickle
    rank r                       read, call, write rank{r}.pickle
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import shutil
import signal
import site
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from braid.compat.horovod.launcher.elastic_plan import FURTHER, OPENING
from braid.compat.horovod.launcher.flags import Flags
from braid.compat.horovod.launcher.function_rank import (
    FUNCTION,
    Ended,
    dumps,
    loads,
    read_ended,
    result_name,
    write_private,
)
from braid.compat.horovod.launcher.horovodrun import job_of, launch
from braid.compat.horovod.launcher.job_plan import Launch
from braid.errors import BraidError, ConfigError
from braid.launch import Outcome
from braid.launch.cluster.remote_shell import is_here

__all__ = ["RunError", "run"]

# arguments of `run` with a different name on the command line
RENAMED: Mapping[str, str] = {
    "np": "num-proc",
    "min_num_proc": "min-np",
    "max_num_proc": "max-np",
    "cooldown_range": "blacklist-cooldown-range",
    "use_gloo": "gloo",
    "use_mpi": "mpi",
    "network_interface": "network-interfaces",
}
NO_OPTIONS = frozenset({"func", "args", "kwargs", "executable", "shared_directory"})
LIBRARY_ZIP = re.compile(r"python3[0-9]+\.zip")
RUNNER = ("-m", "braid.launch.process.spawned", "braid.compat.horovod.launcher.function_rank:call")
INSTALL = "pip install 'braid-train[horovod]'"


class RunError(BraidError, RuntimeError):
    """Error of the function on a rank; `__cause__` is the exception that the function raised.

    Attributes:
        rank: The rank that failed first; -1 if no rank has failed.
    """

    def __init__(self, message: str, *, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int | None = None,
    *,
    num_proc: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | bool | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: str | Sequence[str] | None = None,
    executable: str | None = None,
    shared_directory: str | os.PathLike[str] | None = None,
) -> list[Any]:
    """Call `func(*args, **kwargs)` on several ranks. Call this from the main thread.

    Args:
        func: Function; functions of `__main__`, lambdas and closures need cloudpickle.
        args: Positional arguments of the function.
        kwargs: Keyword arguments of the function.
        np: Number of ranks (default: all slots of the hosts, or 1).
        num_proc: Another name of `np`.
        min_np: Refused, like the next six: an elastic run has no fixed list of results.
        max_np: See `min_np`.
        min_num_proc: See `min_np`.
        max_num_proc: See `min_np`.
        slots: See `min_np`.
        reset_limit: See `min_np`.
        cooldown_range: See `min_np`.
        hosts: Hosts, such as `a:2,b:2`; this host when None.
        hostfile: File that names hosts, in lines such as `a slots=2`.
        start_timeout: Seconds that hosts may take to answer.
        ssh_port: Port of ssh on the hosts.
        ssh_identity_file: Key for ssh.
        disable_cache: Without effect: hosts are checked in each run.
        output_filename: Directory for logs and the record of the run.
        verbose: Whether to print the equivalent `braid run` command first.
        use_gloo: Without effect.
        use_mpi: Whether mpirun starts the ranks.
        mpi_args: Options of mpirun.
        network_interface: Interfaces or networks that ranks of several hosts may use, with commas.
        network_interfaces: As `network_interface`, or a list.
        executable: Python interpreter of the ranks, with braid installed.
        shared_directory: Directory that all hosts have under this path, and in which only trusted
            users can write. The function and the results are pickled into files there.

    Returns:
        Results of the ranks, in rank order.

    Raises:
        ConfigError: Options are invalid, or the function cannot be pickled; no process has been
            started.
        RunError: The function failed on a rank.
    """
    values = _values(locals())
    elastic = sorted(f"--{name}" for name in values.keys() & {*OPENING, *FURTHER})
    if elastic:
        msg = (
            f"{', '.join(elastic)} cannot be used with a function, which needs a fixed number of "
            "ranks: start a script with horovodrun"
        )
        raise ConfigError(msg)
    packed = _packed(func, args, kwargs or {})
    with _directory(shared_directory) as folder:
        wanted = _plan(values, folder, executable)
        _check_reach(wanted, shared_directory)
        return _call(packed, wanted, folder, verbose=bool(verbose))


def _values(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return arguments of `run` as options of horovodrun.

    Raises:
        ConfigError: Two names of one option have different values.
    """
    values: dict[str, str] = {}
    for name, value in arguments.items():
        if name in NO_OPTIONS or value is None or value is False:
            continue
        option = RENAMED.get(name, name.replace("_", "-"))
        listed = isinstance(value, Sequence) and not isinstance(value, str)
        text = ",".join(map(str, value)) if listed else "1" if value is True else str(value)
        if values.setdefault(option, text) != text:
            msg = f"--{option} has two values, {values[option]} and {name}={text}: pass one of them"
            raise ConfigError(msg)
    if not values.keys() & {"num-proc", "hosts", "hostfile"}:
        values["num-proc"] = "1"
    return values


def _plan(values: Mapping[str, str], folder: Path, executable: str | None) -> Launch:
    """Return the job with ranks that read the function from `folder`."""
    command = (executable or "python", *RUNNER, json.dumps([str(folder)]))
    paths = _search_path(is_current=executable is None)
    flags = Flags(values=values, command=command)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return job_of(flags, environ, lambda _word: executable is None)


def _search_path(*, is_current: bool) -> list[str]:
    """Return the search path of ranks; without this interpreter's libraries for another one."""
    paths = [path or str(Path.cwd()) for path in sys.path]
    if is_current:
        return paths
    named = sysconfig.get_paths()
    roots = [named[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    return [
        path
        for path in paths
        if LIBRARY_ZIP.fullmatch(Path(path).name) is None
        and not any(Path(path).is_relative_to(root) for root in (*roots, *site.getsitepackages()))
    ]


def _call(packed: bytes, wanted: Launch, folder: Path, *, verbose: bool) -> list[Any]:
    """Start the ranks on a packed function, and read their results."""
    write_private(folder / FUNCTION, packed)
    outcome = launch(wanted, verbose=verbose)
    if not outcome.ok:
        raise _failure(outcome, folder)
    return [_result(folder, rank) for rank in range(wanted.job.num_ranks)]


def _packed(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    target = f"{getattr(func, '__module__', '?')}:{getattr(func, '__qualname__', func)}"
    by_name = dumps is pickle.dumps
    if by_name and (target.startswith("__main__:") or "<" in target):
        msg = (
            f"{target} is not a function at the top level of a module: move it into a separate "
            f"file and import it, or {INSTALL}, which installs cloudpickle"
        )
        raise ConfigError(msg)
    try:
        return bytes(dumps((func, tuple(args), dict(kwargs))))
    except Exception as exc:
        way = f"; {INSTALL} installs cloudpickle, which can pickle more" if by_name else ""
        msg = f"{target} and its arguments cannot be pickled: {exc}{way}"
        raise ConfigError(msg) from exc


@contextlib.contextmanager
def _directory(shared: str | os.PathLike[str] | None) -> Iterator[Path]:
    """Create a temporary directory that only this user can access."""
    try:
        folder = tempfile.mkdtemp(prefix="braid-run-", dir=shared)
    except OSError as exc:
        msg = (
            f"no directory can be made in {shared or tempfile.gettempdir()}: {exc.strerror}. "
            "Pass another one as shared_directory="
        )
        raise ConfigError(msg) from exc
    try:
        yield Path(folder).absolute()  # the function may change the working directory
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_reach(wanted: Launch, shared: str | os.PathLike[str] | None) -> None:
    away = (
        [host.name for host in wanted.hosts.hosts if not is_here(host.name)] if wanted.hosts else []
    )
    if wanted.engine is not None:
        away = ["hosts that mpirun chooses"]
    if away and shared is None:
        msg = (
            f"ranks on {', '.join(away)} cannot receive the function, which is not sent over the "
            "network: pass a directory that all hosts share as shared_directory=, or start a "
            "script with horovodrun"
        )
        raise ConfigError(msg)


def _failure(outcome: Outcome, folder: Path) -> BaseException:
    """Return the exception for a failed run."""
    if outcome.exit_code == 128 + signal.SIGINT and not outcome.cause:
        return KeyboardInterrupt()
    for cause in outcome.cause:
        ended = read_ended(folder / result_name(cause.rank))
        if ended is not None and not ended.returned:
            return _error(ended, cause.rank)
    return RunError(str(outcome), rank=outcome.cause[0].rank if outcome.cause else -1)


def _error(ended: Ended, rank: int) -> RunError:
    error = RunError(f"rank {rank}: {ended.summary}\n\n{ended.stack}", rank=rank)
    with contextlib.suppress(Exception):  # an exception that cannot be unpickled
        error.__cause__ = loads(ended.value) if ended.value else None
    return error


def _result(folder: Path, rank: int) -> Any:
    ended = read_ended(folder / result_name(rank))
    if ended is None:
        msg = (
            f"rank {rank} ended without a result: look at its log, the function may have ended "
            "the process"
        )
        raise RunError(msg, rank=rank)
    if not ended.returned:  # SystemExit without an error
        raise _error(ended, rank)
    try:
        return loads(ended.value)
    except Exception as exc:
        msg = f"the result of rank {rank} cannot be unpickled here: {exc}"
        raise RunError(msg, rank=rank) from exc
