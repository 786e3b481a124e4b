"""Runs a job as `braid run` does, injects planned faults into its ranks, and reports the results.

The run is a separate, unchanged process: the ranks are read from its log, and faults are signals
that this process sends.
"""

from __future__ import annotations

import errno
import heapq
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from braid.errors import BraidError, ConfigError, raise_all
from braid.launch.chaos.account import ChaosAccount, Strike, account_of
from braid.launch.chaos.comparison import WeightComparison
from braid.launch.chaos.hosts import NamespaceHosts
from braid.launch.chaos.plan import (
    KINDS,
    Fault,
    choose_host,
    choose_ranks,
    plan_faults,
    signals_of,
)
from braid.launch.chaos.undisturbed import compared_again, started
from braid.launch.observe.live_run import LiveRun
from braid.launch.observe.status import RankStatus, status_of
from braid.launch.supervise.run_record import new_log_dir
from braid.runtime.option_types import Interval
from braid.runtime.variables import FAULTS

__all__ = ["ChaosOptions", "ChaosRun", "run_chaos"]

DEFAULT_KINDS = ("kill", "stop", "slow", "leave", "newcomer", "two")
POLL_S = 0.02
LEAST_GAP = 0.25  # part of the mean time between two faults that passes after one that has waited
LEAST_AGAIN_S, TIMES_AGAIN = 120.0, 3.0  # limit of the run without faults
CLOCK_S = 0.1  # times of files are coarse
NAMED_S = 1.0  # no fault begins later before the end: the launcher must have time to name it
ENDED = ("left", "lost", "failed", "finished", "ended")
MOST_TO_FILL_BYTES = 1 << 30
INTERRUPTED = 128 + signal.SIGTERM
FILLER = "chaos.filler"


@dataclass(frozen=True, kw_only=True, slots=True)
class ChaosOptions:
    """Options of `braid chaos`: which faults strike a run, and when.

    Attributes:
        every_s: Mean time between two faults, such as 30s or 2m.
        minutes: Minutes after the first step at which the run is ended, unless it ends before.
        seed: Seed of the plan.
        kinds: Kinds of faults, separated by commas: kill, stop, slow, leave, newcomer, two,
            bitflip, disk, partition. With partition, the hosts of `braid run -H a:2,b:2` are made
            as network namespaces of this machine, and all but the first are cut off for a while.
        compare: The same command runs again without faults, up to the last step, and weights are
            compared after every tenth step. With --no-compare the command runs once.
    """

    every_s: Interval = 30.0
    minutes: float = 10.0
    seed: int = 0
    kinds: str = ",".join(DEFAULT_KINDS)
    compare: bool = True

    def __post_init__(self) -> None:
        problems = [
            f"--{name} must be more than 0, got {value:g}"
            for name, value in (("every", self.every_s), ("minutes", self.minutes))
            if not value > 0
        ]
        problems += [
            f"--kinds {kind} is unknown: choose from {', '.join(KINDS)}"
            for kind in self.names
            if kind not in KINDS
        ]
        raise_all(problems)

    @property
    def names(self) -> tuple[str, ...]:
        """Kinds of faults as a tuple."""
        return tuple(self.kinds.split(","))


class ChaosRun(NamedTuple):
    """A run under faults, after its end.

    Attributes:
        run: The run.
        options: Options of the faults.
        account: Figures.
        exit_code: Exit code of the run.
        was_ended: Whether the run was ended when its time was over.
        unstruck: Planned faults that were skipped, because no rank could be struck at their time,
            or the run ended first.
        weights: Comparison of its weights with the weights of the same run without faults.
    """

    run: LiveRun
    options: ChaosOptions
    account: ChaosAccount
    exit_code: int
    was_ended: bool
    unstruck: tuple[Fault, ...]
    weights: WeightComparison

    @property
    def has_failed(self) -> bool:
        """Whether the run has ended with an error."""
        return self.exit_code != (INTERRUPTED if self.was_ended else 0)

    @property
    def problems(self) -> tuple[str, ...]:
        """Reasons why the run has not passed the test; empty if it has."""
        problems = []
        if self.has_failed:
            problems.append(f"the run has failed with exit code {self.exit_code}")
        for word in ("wrong", "unknown"):
            kinds = [f.strike.kind for f in self.account.faults if f.judgement == word]
            if kinds:
                hint = ": pass verify=1, which finds flipped bits"
                text = f"the cause of {len(kinds)} faults is {word} ({', '.join(kinds)})"
                problems.append(text + hint * ("bitflip" in kinds))
        if self.account.num_lost_steps:
            problems.append(f"{self.account.num_lost_steps} finished steps were lost")
        problems += filter(None, [self.weights.problem])
        if not self.has_failed and not self.account.num_struck:
            problems.append(
                "no fault has struck the run, so nothing was tested: lower --every, now "
                f"{self.options.every_s:g}s, or let the run last longer"
            )
        return tuple(problems)


class _Due(NamedTuple):
    """Something to do at a time: a signal to a rank, or the end of a fault (signal 0).

    Attributes:
        unix_s: The time.
        rank: The rank; -1 for a fault of a host.
        signum: The signal.
        host: Host that is connected again; empty for a disk that is full no longer.
    """

    unix_s: float
    rank: int
    signum: int
    host: str = ""


def run_chaos(
    options: ChaosOptions,
    arguments: Sequence[str],
    command: str = "run",
    note: Callable[[str], object] = print,
) -> ChaosRun:
    """Run a job under faults, and then without faults to compare the weights.

    Args:
        options: The faults.
        arguments: Arguments of the command; of `braid run` options, `--`, the script and its
            arguments.
        command: Command of braid that starts the job, run or train.
        note: Called with a line for the user when the second run begins.

    Raises:
        ConfigError: The arguments do not describe a run into which faults can be injected.
    """
    words, path = _run_words(options, arguments)
    environ = dict(os.environ) | {FAULTS: "1"}
    start = [sys.executable, "-m", "braid", command]
    with ExitStack() as stack:
        hosts = None
        if "partition" in options.names:
            own_words = words[: words.index("--")] if "--" in words else words
            stack.enter_context(_raised(signal.SIGTERM, signal.SIGHUP))
            hosts = stack.enter_context(NamespaceHosts(_hosts_of(own_words)))
            start = [*hosts.on(hosts.names[0], start), "--rsh", hosts.rsh]
        begin_s = time.time()
        with ExitStack() as struck:
            process = struck.enter_context(started([*start, *words], environ))
            if hosts is not None:
                struck.callback(hosts.mend_all)  # before the ranks save and end
            strikes = _Strikes(options, process, path, hosts)
            strikes.run_to_end()
        ended = strikes.concluded()
        if ended.has_failed:
            weights = WeightComparison(reason="the run has failed")
        elif options.compare:
            limit_s = max(LEAST_AGAIN_S, TIMES_AGAIN * (time.time() - begin_s))
            weights = compared_again(ended.run, [*start, *words], environ, limit_s, note)
        else:
            weights = WeightComparison(reason="--no-compare")
    return ended._replace(weights=weights)


def _hosts_of(words: Sequence[str]) -> list[str]:
    """Return the names of the hosts on which the ranks run."""
    listed = _value(words, "-H") or _value(words, "--hosts") or ""
    names = [place.partition(":")[0].strip() for place in listed.split(",")]
    if len(names) < 2 or _value(words, "--rsh") is not None:
        msg = (
            "--kinds partition needs several hosts: add `-H a:2,b:2` (names and numbers of ranks) "
            "to braid run, without --rsh; braid chaos simulates these hosts on this machine"
        )
        raise ConfigError(msg)
    return names


def _run_words(options: ChaosOptions, arguments: Sequence[str]) -> tuple[list[str], Path]:
    """Return the words of the run, and its directory; refuse what faults cannot strike."""
    index = arguments.index("--") if "--" in arguments else len(arguments)
    words = list(arguments[:index])
    if _value(words, "--min-ranks") is None:
        msg = (
            "the run would end when the first rank dies: add --min-ranks, as in braid chaos run "
            "-n 3 --min-ranks 2 train.py, where train.py trains with braid.elastic"
        )
        raise ConfigError(msg)
    log_dir = _value(words, "--log-dir")
    if log_dir is None:
        log_dir = new_log_dir("chaos-")
        words += ["--log-dir", log_dir]
    if _value(words, "--restarts") is None:
        words += ["--restarts", str(2 * round(60 * options.minutes / options.every_s) + 2)]
    if "disk" in options.names:
        _check_disk(Path(log_dir))
    return [*words, *arguments[index:]], Path(log_dir)


def _value(words: Sequence[str], name: str) -> str | None:
    """Return the value of an option, written as `--name value` or `--name=value`."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        option, has_value, value = word.partition("=")
        if option.replace("_", "-") == name:
            return value if has_value else following
    return None


def _check_disk(log_dir: Path) -> None:
    parent = next(path for path in (log_dir, *log_dir.absolute().parents) if path.exists())
    free = shutil.disk_usage(parent).free
    if free > MOST_TO_FILL_BYTES:
        msg = (
            f"--kinds disk would fill {free >> 30} GiB at {parent}: give a --log-dir on a file "
            "system of at most 1 GiB, such as mount -t tmpfs -o size=64m tmpfs DIR"
        )
        raise ConfigError(msg)


@contextmanager
def _raised(*signums: signal.Signals) -> Iterator[None]:
    """Turn signals into SystemExit, so that the resources of the block are released."""

    def end(signum: int, _: object) -> None:
        raise SystemExit(128 + signum)

    before = {signum: signal.signal(signum, end) for signum in signums}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


class _Strikes:
    """The faults of one run.

    Args:
        options: Options of the faults.
        process: The launcher.
        path: Directory of the run.
        hosts: Hosts that can be cut off; None if all ranks are on this host.
    """

    def __init__(
        self,
        options: ChaosOptions,
        process: subprocess.Popen[bytes],
        path: Path,
        hosts: NamespaceHosts | None,
    ) -> None:
        self._options = options
        self._process = process
        self._hosts = hosts
        self._path = path
        self._run: LiveRun | None = None
        self._started_s = time.time()
        self._begin_s = 0.0  # time of the first step
        self._end_s = 0.0  # time at which the run was ended
        self._waiting = list(
            plan_faults(options.seed, options.names, options.every_s, 60 * options.minutes)
        )
        self._next_s = 0.0  # time before which no fault begins
        self._due: list[_Due] = []
        self._strikes: list[Strike] = []
        self._busy_until_s: dict[int, float] = {}  # rank -> end of its fault

    def run_to_end(self) -> None:
        """Inject the planned faults until the run has ended."""
        try:
            while self._process.poll() is None:
                time.sleep(POLL_S)
                if self._refreshed():
                    self._take_turn(time.time())
        finally:  # the run has ended before the end of this fault
            (self._path / FILLER).unlink(missing_ok=True)

    def concluded(self) -> ChaosRun:
        """Return the ended run with the account of its faults.

        Raises:
            ConfigError: The run was not started.
        """
        if self._run is None or not self._run.events:
            msg = (
                f"the run did not start (exit code {self._process.returncode}): see its message "
                "above"
            )
            raise ConfigError(msg)
        run = self._run
        run.refresh()
        finished = [
            (rank, int(row["step"]), row["unix_s"])
            for rank, rows in run.rows.items()
            for row in rows
            if "unix_s" in row
        ]
        last_s = max((t for _, _, t in finished), default=time.time())
        was_ended = bool(self._end_s)
        code = self._process.returncode
        if code and run.events:
            last_s = max(last_s, run.events[-1].unix_s)  # the failure counts
        account = account_of(self._strikes, run.events, finished, self._end_s or last_s)
        unstruck = tuple(self._waiting)
        return ChaosRun(run, self._options, account, code, was_ended, unstruck, WeightComparison())

    def _refreshed(self) -> bool:
        """Read the run's directory; return whether its training has begun."""
        try:
            if self._run is None:
                if (self._path / "run.json").stat().st_mtime < self._started_s - CLOCK_S:
                    return False  # of an earlier run in this directory
                self._run = LiveRun(self._path)
            self._run.refresh()
        except (BraidError, FileNotFoundError):  # it has not been written yet
            return False
        if not self._begin_s and any(self._run.rows.values()):
            self._begin_s = time.time()
        return bool(self._begin_s)

    def _take_turn(self, now_s: float) -> None:
        while self._due and self._due[0].unix_s <= now_s:
            self._execute(heapq.heappop(self._due))
        if self._end_s:
            return
        left_s = self._begin_s + 60 * self._options.minutes - now_s
        if left_s <= 0:
            self._end_s = now_s
            for due in self._due:  # no rank stays stopped
                if due.signum == signal.SIGCONT or not due.signum:
                    self._execute(due)
            self._due.clear()
            self._process.terminate()
            return
        if left_s < NAMED_S:
            return
        for fault in self._waiting:
            # a newcomer exists only for a moment after another fault
            if now_s < self._next_s and fault.kind != "newcomer":
                continue
            if fault.at_s <= now_s - self._begin_s and self._strike(fault, now_s):
                self._waiting.remove(fault)
                # two ranks cannot decide which one computes wrongly: lose no rank meanwhile
                lasts_s = fault.lasts_s if fault.kind == "bitflip" else 0.0
                gap_s = max(lasts_s, LEAST_GAP * self._options.every_s)
                self._next_s = max(self._next_s, now_s + gap_s)
                break

    def _strike(self, fault: Fault, now_s: float) -> bool:
        """Begin a fault; return whether there is something to strike."""
        assert self._run is not None
        if fault.kind == "disk":
            self._fill()
            self._strikes.append(Strike(now_s, fault.kind, (), fault.lasts_s))
            heapq.heappush(self._due, _Due(now_s + fault.lasts_s, -1, 0))
            return True
        status = status_of(self._run)
        free = [
            rank
            for rank in status.ranks.values()
            if rank.pid
            and (not rank.host or self._hosts is not None)  # signals reach this machine
            and self._busy_until_s.get(rank.rank, 0.0) < now_s
        ]
        if fault.kind == "partition":
            return self._cut(fault, now_s, free)
        members = [rank.rank for rank in free if rank.state == "training"]
        newcomers = [rank.rank for rank in free if rank.state in {"starting", "waiting"}]
        ranks = choose_ranks(fault, members, newcomers)
        if not ranks:
            return False
        signals = signals_of(fault, ranks)
        lasts_s = max(sent.after_s for sent in signals)
        is_newcomer = fault.kind == "newcomer"
        at_s = now_s + lasts_s * is_newcomer
        self._strikes.append(Strike(at_s, fault.kind, ranks, 0.0 if is_newcomer else lasts_s))
        for sent in signals:
            heapq.heappush(self._due, _Due(now_s + sent.after_s, sent.rank, sent.signum))
            ends_s = float("inf") if lasts_s == 0 or is_newcomer else now_s + lasts_s
            self._busy_until_s[sent.rank] = ends_s
        while self._due and self._due[0].unix_s <= now_s:
            self._execute(heapq.heappop(self._due))
        return True

    def _cut(self, fault: Fault, now_s: float, free: Sequence[RankStatus]) -> bool:
        """Cut a host off, if one has members; its ranks get no other fault meanwhile."""
        assert self._hosts is not None
        members: dict[str, list[int]] = {}
        for rank in free:
            if rank.state == "training" and rank.host != self._hosts.names[0]:  # the launcher's
                members.setdefault(rank.host, []).append(rank.rank)
        host = choose_host(fault, members)
        if not host:
            return False
        self._hosts.cut(host)
        ranks = tuple(members[host])
        self._strikes.append(Strike(now_s, fault.kind, ranks, fault.lasts_s))
        heapq.heappush(self._due, _Due(now_s + fault.lasts_s, -1, 0, host))
        self._busy_until_s.update(dict.fromkeys(ranks, now_s + fault.lasts_s))
        return True

    def _execute(self, due: _Due) -> None:
        assert self._run is not None
        if due.host:
            assert self._hosts is not None
            self._hosts.mend(due.host)
            return
        if not due.signum:
            (self._path / FILLER).unlink(missing_ok=True)
            return
        events = [event for event in self._run.events if event.rank == due.rank]
        gone = (
            ENDED if due.signum != signal.SIGCONT else ENDED[1:]
        )  # one that leaves may stand still
        pid = next((event.pid for event in events if event.pid), 0)
        if pid and not any(event.kind in gone for event in events):
            with suppress(ProcessLookupError):
                os.kill(pid, due.signum)

    def _fill(self) -> None:
        """Fill the file system of the run's directory."""
        with (self._path / FILLER).open("wb", buffering=0) as file:
            size = 1 << 20
            while size:
                try:
                    file.write(bytes(size))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    size //= 2
