"""Ranks as processes, reused from test to test: importing torch takes longer than most tests.

`ProcessPool.run(size, main, *args)` is `run_threads` with processes: functions and arguments travel
by pickle between a test and its children, results and exceptions travel back.

Children are forked from a server that has only imported torch and braid: it has neither threads nor
tensors, so a new child takes milliseconds. A child that dies, does not end in time or leaves
something behind is replaced alone. The error includes its stack, if it still lives.

After each job a child reports what the job has left behind: threads, descriptors, shared memory.
`ProcessPool.left_behind` waits for these reports, so that the test that ran the job can fail.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

from braid.comm import Group
from braid.errors import CommError
from braid.runtime.events import EventRing, Recorder
from braid.runtime.rendezvous.rank import join
from braid.runtime.store import FileStore
from support.leaks import Belongings, ImportFreezer, belongings, described, left_since
from support.signals import default_signals
from support.worlds import last_events

__all__ = ["ProcessPool", "RankDiedError", "RemoteError"]

TIMEOUT_S = 120.0
REPORT_S = 20.0  # for a child's report on its job; threads that are about to end use part of it
RING_CAPACITY = 1024
# modules that the server imports for its children; those not installed are skipped
PRELOAD = (
    "pytest",
    "hypothesis",
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "braid.comm.autograd",
    "braid.checkpoint",
    "braid.compat.horovod.torch",
    "braid.parallel.data_parallel",
    "braid.compat.horovod.fusion",
    "braid.comm.torch_backend",
    "support.group_conformance",
    "support.pool_server",
)


class RemoteError(Exception):
    """An exception of a rank that could not be pickled; holds its text."""


class RankDiedError(Exception):
    """A rank's process ended without an answer; holds rank -> exit code in `codes`."""

    def __init__(self, message: str, codes: dict[int, int]) -> None:
        super().__init__(message)
        self.codes = codes


class _Job(NamedTuple):
    """A job for a child of the pool."""

    rank: int
    size: int
    directory: str
    main: Callable[..., Any]
    args: tuple[Any, ...]
    portable: bool
    ranks_per_host: int
    sum_order: str


class _Answer(NamedTuple):
    """The outcome of a job."""

    result: Any
    error: BaseException | None
    ended_ns: int


class _Report(NamedTuple):
    """Text about what a job left behind in its process; empty when there is nothing."""

    problems: str


class _Child:
    """One process of the pool."""

    def __init__(self, directory: str) -> None:
        others = belongings().fds
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe()
        descriptor, name = tempfile.mkstemp(dir=directory, prefix="stacks-")
        os.close(descriptor)
        self.stacks = Path(name)
        self.pipe: Connection = ours
        self.reports = False  # whether a report on a job is still to come
        self.process = context.Process(target=_serve, args=(theirs, name), daemon=True)
        self.process.start()
        theirs.close()
        self.fds = belongings().fds - others  # descriptors of this process that belong to the child

    def report(self) -> str | None:
        """Return what the last job left behind, as text; None if no report comes in time."""
        if not self.reports:
            return ""
        self.reports = False
        try:
            return self.pipe.recv().problems if self.pipe.poll(REPORT_S) else None
        except (EOFError, ConnectionResetError):
            return None

    def stack(self) -> str:
        """Return the Python stacks of the child.

        It works while the child holds the interpreter lock.
        """
        if self.process.pid is None or not self.process.is_alive():
            return f"(ended with exit code {self.process.exitcode})"
        os.kill(self.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 2.0
        while not self.stacks.stat().st_size and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.stacks.read_text()

    def close(self, *, kill: bool) -> None:
        """End the process and release everything."""
        if kill:
            self.process.kill()
        self.pipe.close()
        self.process.join()
        self.process.close()


class ProcessPool:
    """Reused processes; a context manager.

    Args:
        portable: Whether ranks send each other copies instead of sharing memory, unless a job says
            otherwise.
        ranks_per_host: Number of ranks of each simulated host, unless a job says otherwise; 0 for
            one host.
    """

    def __init__(self, *, portable: bool = False, ranks_per_host: int = 0) -> None:
        self._portable = portable
        self._ranks_per_host = ranks_per_host
        self._directory = tempfile.TemporaryDirectory(prefix="braid-pool-")
        self._children: list[_Child] = []
        self._problems: list[str] = []
        self._num_jobs = 0
        _start_server()

    def belongings(self) -> Belongings:
        """List the processes and descriptors that this process holds for the pool."""
        server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        tracker = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
        return Belongings(
            children=frozenset(pid for pid in (server, tracker) if pid is not None),
            fds=frozenset(fd for child in self._children for fd in child.fds),
        )

    def left_behind(self) -> list[str]:
        """Wait for the processes' reports; return what their jobs left behind, by process.

        A process that has left something behind is replaced.
        """
        self._read_reports(list(self._children))
        problems, self._problems = self._problems, []
        return problems

    def run(
        self,
        size: int,
        main: Callable[..., Any],
        *args: Any,
        timeout_s: float = TIMEOUT_S,
        sum_order: str = "any",
        portable: bool | None = None,
        ranks_per_host: int | None = None,
    ) -> list[Any]:
        """Run `main(group, *args)` on `size` processes; return their results in the order of ranks.

        Args:
            size: Number of ranks.
            main: Function of the group of all ranks; it, its arguments and results are pickled.
            args: Further arguments of `main`.
            timeout_s: Seconds until the ranks are killed.
            sum_order: See `Group.world`.
            portable: Whether ranks send each other copies instead of sharing memory; None for the
                pool's way.
            ranks_per_host: Number of ranks of each simulated host, 0 for one host; None for the
                pool's way.

        Raises:
            TimeoutError: Some ranks did not end in time; holds their stacks.
            RankDiedError: A process ended without an answer.
            Exception: The exception of the rank that failed first.
        """
        self._read_reports(list(self._children))
        while len(self._children) < size:
            self._children.append(_Child(self._directory.name))
        self._num_jobs += 1
        directory = Path(self._directory.name) / f"job-{self._num_jobs}"
        directory.mkdir()
        children = self._children[:size]
        copies = self._portable if portable is None else portable
        per_host = self._ranks_per_host if ranks_per_host is None else ranks_per_host
        for rank, child in enumerate(children):
            how = (copies, per_host, sum_order)
            child.reports = True
            job = _Job(rank, size, str(directory), main, args, *how)
            child.pipe.send_bytes(pickle.dumps(job))
        try:
            answers = self._collect(children, directory, timeout_s)
        except BaseException:  # such as an alarm: no later job must read these ranks' answers
            self._remove([child for child in children if child in self._children])
            raise
        return _results(answers)

    def close(self) -> None:
        """End all processes."""
        for child in self._children:
            child.close(kill=False)
        self._children.clear()
        self._directory.cleanup()

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _collect(self, children: list[_Child], directory: Path, timeout_s: float) -> list[_Answer]:
        answers: dict[int, _Answer] = {}
        died: dict[int, int] = {}
        end = time.monotonic() + timeout_s
        while len(answers) + len(died) < len(children):
            open_ranks = [r for r in range(len(children)) if r not in answers and r not in died]
            pipes = {children[r].pipe: r for r in open_ranks}
            ready = wait(list(pipes), max(0.0, end - time.monotonic()))
            if not ready:
                stacks = "\n".join(f"--- rank {r}\n{children[r].stack()}" for r in open_ranks)
                events = _last_events(directory, len(children))
                msg = f"ranks {open_ranks} still run after {timeout_s:g} s\n{stacks}\n{events}"
                raise TimeoutError(msg)
            for pipe in ready:
                rank = pipes[pipe]  # type: ignore[index]  # these are the connections given above
                try:
                    answers[rank] = pickle.loads(children[rank].pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    children[rank].process.join()
                    died[rank] = children[rank].process.exitcode or 0
        if died:
            errors = {r: repr(a.error) for r, a in answers.items() if a.error}
            msg = f"ranks ended without an answer, with exit codes {died}; the others: {errors}"
            error = RankDiedError(msg, died)
            error.__dict__["answers"] = answers
            raise error
        return [answers[rank] for rank in range(len(children))]

    def _read_reports(self, children: list[_Child]) -> None:
        for child in children:
            pid, report = child.process.pid, child.report()
            if report is None:
                report = (
                    f"no report on what it left behind within {REPORT_S:g} s, at\n{child.stack()}"
                )
            if report:
                self._problems.append(f"process {pid}: {report}")
                self._remove([child])

    def _remove(self, children: list[_Child]) -> None:
        for child in children:
            child.close(kill=True)
            self._children.remove(child)


def _results(answers: list[_Answer]) -> list[Any]:
    failed = sorted((a for a in answers if a.error is not None), key=lambda a: a.ended_ns)
    causes = [a for a in failed if not isinstance(a.error, CommError)]
    for answer in (causes or failed)[:1]:
        assert answer.error is not None
        answer.error.__dict__["rank_errors"] = {
            r: a.error for r, a in enumerate(answers) if a.error is not None
        }
        raise answer.error
    return [answer.result for answer in answers]


def _last_events(directory: Path, size: int) -> str:
    parts = []
    for rank in range(size):
        path = _ring_path(directory, rank)
        text = last_events(EventRing(path.read_bytes())) if path.exists() else "    (none)"
        parts.append(f"--- last events of rank {rank}\n{text}")
    return "\n".join(parts)


def _ring_path(directory: Path, rank: int) -> Path:
    return directory / f"rank{rank}.ring"


def _recorder(directory: Path, rank: int) -> Recorder:
    """Make a recorder on a file, which the test can read when the rank hangs."""
    path = _ring_path(directory, rank)
    path.write_bytes(b"")
    os.truncate(path, EventRing.nbytes_for(RING_CAPACITY))
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    return Recorder(EventRing(memory, RING_CAPACITY, rank=rank))


def _start_server() -> None:
    """Start the process from which children are forked, unless it runs."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOAD))
    # numpy starts threads when it is imported, and threads do not survive a fork; without the name
    # of a test, torch is imported unchanged (`startup`), since some jobs compile
    with _environment(OPENBLAS_NUM_THREADS="1", PYTEST_CURRENT_TEST=None):
        resource_tracker.ensure_running()
        forkserver.ensure_running()


@contextlib.contextmanager
def _environment(**changes: str | None) -> Iterator[None]:
    """Set variables of the environment, or remove them if they are None, inside the context."""
    usual = {name: os.environ.pop(name, None) for name in changes}
    os.environ.update({name: value for name, value in changes.items() if value is not None})
    try:
        yield
    finally:
        for name, value in usual.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _serve(pipe: Connection, stacks: str) -> None:
    """Run a child: jobs until the pipe ends."""
    default_signals()
    freeze_imports = ImportFreezer()
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-3)
    with Path(stacks).open("w") as file:
        faulthandler.register(signal.SIGUSR1, file)
        with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the pool's end
            while True:
                before = belongings()
                job: _Job = pickle.loads(pipe.recv_bytes())
                pipe.send_bytes(_pickled(_carry_out(job)))
                del job
                pipe.send(_Report(described(left_since(before))))
                freeze_imports()


def _carry_out(job: _Job) -> _Answer:
    store = FileStore(str(Path(job.directory) / "store"))
    result, error = None, None
    group = None
    with contextlib.ExitStack() as stack:
        stack.callback(store.close)
        try:
            host = f"host{job.rank // job.ranks_per_host}" if job.ranks_per_host else ""
            context, transport = join(
                store,
                job.rank,
                job.size,
                portable=job.portable,
                host=host,
                recorder=_recorder(Path(job.directory), job.rank),
            )
            stack.callback(transport.close)
            group = Group.world(context, transport, sum_order=job.sum_order)
            result = job.main(group, *job.args)
            transport.announce_end()
        except BaseException as exc:  # noqa: BLE001 - travels back to the test
            error = exc
            if group is not None:  # this process lives on, so its peers would not notice
                group.abort(f"{type(exc).__name__}: {exc}")
        ended_ns = time.monotonic_ns()
    return _Answer(result, error, ended_ns)


def _pickled(answer: _Answer) -> bytes:
    """Pickle by value; torch's pickler would share tensors, which needs a server per process."""
    try:
        data = pickle.dumps(answer)
        pickle.loads(data)
    except Exception:  # noqa: BLE001 - anything may go wrong in somebody's __reduce__
        text = "".join(traceback.format_exception(answer.error)) if answer.error else "result"
        return pickle.dumps(_Answer(None, RemoteError(f"not picklable: {text}"), answer.ended_ns))
    return data
