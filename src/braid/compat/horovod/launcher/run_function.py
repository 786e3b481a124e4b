"""`horovod.run(func, args, np=4)`: calls a function on several ranks.

Problem: the function, its arguments and its results must reach other processes, and pickle runs
whatever it is given. So nobody but this user may write what is read.

Idea: one directory (0700) with files (0600): the function from here, a result from each rank.
Nothing travels over the network. For ranks on other hosts the caller names a directory that all
hosts share, and so says that whoever can write there is trusted.

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

# how arguments of `run` are called on the command line, where that is not the same
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
    """The function failed on a rank; `__cause__` is the exception that it raised there.

    Attributes:
        rank: The rank that failed first, -1 when none is to blame.
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
        func: Function; one of `__main__`, a lambda or a closure needs cloudpickle.
        args: Positional arguments of the function.
        kwargs: Keyword arguments of the function.
        np: Number of ranks (default: all slots of the hosts, or 1).
        num_proc: Another name of `np`.
        min_np: Refused, as the next six: members of an elastic run have no fixed results.
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
        disable_cache: Without effect: hosts are checked anew each time.
        output_filename: Directory for logs and the record of the run.
        verbose: Whether to print first what is going to be started.
        use_gloo: Without effect.
        use_mpi: Without effect.
        mpi_args: Without effect.
        network_interface: Interfaces or networks that ranks of several hosts may use, with commas.
        network_interfaces: The same, or a list.
        executable: Interpreter of the ranks; braid must be installed there.
        shared_directory: Directory that several hosts have under this path, and in which nobody
            writes who is not trusted. The function and the results pass through it, pickled.

    Returns:
        Results of the ranks, in their order.

    Raises:
        ConfigError: Options cannot work, or the function cannot be pickled; nothing has been
            started.
        RunError: The function failed on a rank.
    """
    values = _values(locals())
    elastic = sorted(f"--{name}" for name in values.keys() & {*OPENING, *FURTHER})
    if elastic:
        msg = (
            f"{', '.join(elastic)}: a function has one result for each of a fixed number of ranks; "
            "start a script with horovodrun"
        )
        raise ConfigError(msg)
    packed = _packed(func, args, kwargs or {})
    with _directory(shared_directory) as folder:
        wanted = _plan(values, folder, executable)
        _check_reach(wanted, shared_directory)
        return _call(packed, wanted, folder, verbose=bool(verbose))


def _values(given: Mapping[str, Any]) -> dict[str, str]:
    """Return arguments of `run` as options of horovodrun.

    Raises:
        ConfigError: One option is given by both of its names.
    """
    values: dict[str, str] = {}
    for name, value in given.items():
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
    """Return the job whose ranks read the function from `folder`."""
    command = (executable or "python", *RUNNER, json.dumps([str(folder)]))
    paths = _search_path(own=executable is None)
    flags = Flags(values=values, command=command)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return job_of(flags, environ, lambda _word: executable is None)


def _search_path(*, own: bool) -> list[str]:
    """Return the search path of a rank; another interpreter has libraries of its own."""
    paths = [path or str(Path.cwd()) for path in sys.path]
    if own:
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
            f"{target} is no function at the top level of a module: move it into a file of its "
            f"own and import it, or {INSTALL}, which brings cloudpickle"
        )
        raise ConfigError(msg)
    try:
        return bytes(dumps((func, tuple(args), dict(kwargs))))
    except Exception as exc:
        way = f"; {INSTALL} brings cloudpickle, which can do more" if by_name else ""
        msg = f"{target} and its arguments cannot be pickled: {exc}{way}"
        raise ConfigError(msg) from exc


@contextlib.contextmanager
def _directory(shared: str | os.PathLike[str] | None) -> Iterator[Path]:
    """Make a directory for this user alone."""
    try:
        folder = tempfile.mkdtemp(prefix="braid-run-", dir=shared)
    except OSError as exc:
        msg = f"directory in {shared or tempfile.gettempdir()} cannot be made: {exc.strerror}"
        raise ConfigError(msg) from exc
    try:
        yield Path(folder).absolute()  # the function may go elsewhere
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_reach(wanted: Launch, shared: str | os.PathLike[str] | None) -> None:
    away = (
        [host.name for host in wanted.hosts.hosts if not is_here(host.name)] if wanted.hosts else []
    )
    if away and shared is None:
        msg = (
            f"ranks on {', '.join(away)} cannot get the function, which is not sent over the "
            "network: name a directory that all hosts have with shared_directory=, or start a "
            "script with horovodrun"
        )
        raise ConfigError(msg)


def _failure(outcome: Outcome, folder: Path) -> BaseException:
    """Return the error for a run that has failed."""
    if outcome.exit_code == 128 + signal.SIGINT and not outcome.cause:
        return KeyboardInterrupt()
    for cause in outcome.cause:
        ended = read_ended(folder / result_name(cause.rank))
        if ended is not None and not ended.returned:
            return _error(ended, cause.rank)
    return RunError(str(outcome), rank=outcome.cause[0].rank if outcome.cause else -1)


def _error(ended: Ended, rank: int) -> RunError:
    error = RunError(f"rank {rank}: {ended.summary}\n\n{ended.stack}", rank=rank)
    with contextlib.suppress(Exception):  # an exception that cannot be made again
        error.__cause__ = loads(ended.value) if ended.value else None
    return error


def _result(folder: Path, rank: int) -> Any:
    ended = read_ended(folder / result_name(rank))
    if ended is None:
        msg = f"rank {rank} has ended without a result: does the function end the process?"
        raise RunError(msg, rank=rank)
    if not ended.returned:  # SystemExit without an error
        raise _error(ended, rank)
    try:
        return loads(ended.value)
    except Exception as exc:
        msg = f"what rank {rank} returned cannot be read here: {exc}"
        raise RunError(msg, rank=rank) from exc
