"""Slots of an elastic run of horovodrun: slots from a discovery script, minus blocked slots.

The launcher runs the script every second in the background. If it fails before the ranks start,
that is an error. Later failures are a notice, once each, and the slots do not change.

As in Horovod, a host on which a rank has died is blocked. If it is the only host, only the slot of
the rank is blocked, as there is no other host to continue on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import IO, NamedTuple

from braid.compat.horovod.launcher.elastic_plan import (
    SCRIPT,
    ElasticPlan,
    hosts_of_script,
    local_slots,
)
from braid.errors import ConfigError
from braid.launch import Host
from braid.launch.cluster.rank_assignment import used_slots
from braid.launch.cluster.remote_shell import is_here
from braid.launch.process.job import MAX_RANKS
from braid.runtime.clock import Clock, MonotonicClock

__all__ = ["HostSlots", "discovered"]

PERIOD_S = 1.0
LOOK_S = 0.05  # between checks while a script runs
SCRIPT_LIMIT_S = 30.0  # as in Horovod
MAX_OUTPUT_BYTES = 1 << 20


class ScriptRun(AbstractContextManager["ScriptRun"]):
    """One run of a discovery script without standard input; closing it ends all its processes.

    Args:
        script: Shell command.
        clock: Time source.
        limit_s: Longest time of the run in seconds.
    """

    def __init__(self, script: str, clock: Clock, limit_s: float = SCRIPT_LIMIT_S) -> None:
        self._script = script
        self._clock = clock
        self._limit_s = limit_s
        self._end_ns = clock.after_ns(limit_s)
        with contextlib.ExitStack() as stack:
            self._output = stack.enter_context(tempfile.TemporaryFile())
            self._errors = stack.enter_context(tempfile.TemporaryFile())
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", script],  # it may be a command with arguments, as in Horovod
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._errors,
                start_new_session=True,  # so that its child processes can also be ended
            )
            self._stack = stack.pop_all()

    def poll(self) -> str | None:
        """Return the output once the script has ended; None while it runs.

        Raises:
            ConfigError: The script has failed, takes too long or prints too much.
        """
        code = self._process.poll()
        if os.fstat(self._output.fileno()).st_size > MAX_OUTPUT_BYTES:
            msg = f"{SCRIPT} {self._script} has printed more than {MAX_OUTPUT_BYTES >> 20} MiB"
            raise ConfigError(msg)
        if code is None and self._clock.now_ns() < self._end_ns:
            return None
        if code is None:
            msg = f"{SCRIPT} {self._script} has not ended within {self._limit_s:g} s"
            raise ConfigError(msg)
        if code:
            last = _text(self._errors).strip().rpartition("\n")[2]
            ended = f"exited with code {code}" if code > 0 else f"was killed by signal {-code}"
            msg = f"{SCRIPT} {self._script} {ended}{': ' * bool(last)}{last[:200]}"
            raise ConfigError(msg)
        return _text(self._output)

    def __exit__(self, *exc_info: object) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._stack.close()


def discovered(
    script: str, slots_per_host: int, limit_s: float = SCRIPT_LIMIT_S
) -> tuple[Host, ...]:
    """Run a discovery script, and return the hosts that it lists.

    Raises:
        ConfigError: The script fails, takes too long or prints invalid lines.
    """
    clock = MonotonicClock()
    with ScriptRun(script, clock, limit_s) as run:
        while (text := run.poll()) is None:
            clock.sleep(LOOK_S)
    return hosts_of_script(text, slots_per_host)


class BlockedSlots(NamedTuple):
    """Slots of a host that are blocked until a time; all of them if there are `MAX_RANKS`."""

    host: str
    num_slots: int
    end_ns: float


class HostSlots(AbstractContextManager["HostSlots"]):
    """Slots of an elastic run, a `braid.launch.supervise.slots.SlotSource`; a context manager.

    Args:
        plan: Elastic part of the job.
        clock: Time source; the clock of this host when None.

    Attributes:
        hosts: Slots that ranks may use, by host; the name of the host is empty on this host only.
    """

    def __init__(self, plan: ElasticPlan, clock: Clock | None = None) -> None:
        self._plan = plan
        self._clock = clock or MonotonicClock()
        self._listed: Mapping[str, int] = dict(plan.hosts) or {"": plan.num_ranks}
        self._blocked: list[BlockedSlots] = []
        self._num_losses: Counter[str] = Counter()
        self._shown: dict[str, str] = {}  # last notice about each blocked host
        self._run: ScriptRun | None = None
        self._next_ns = self._clock.after_ns(PERIOD_S)
        self._problem = ""
        self._notices: list[str] = []
        self._has_lost = False  # a rank, since the last `poll`
        self.hosts = used_slots(self._listed, {}, {}, plan.limits.max_ranks)

    @property
    def deadline_ns(self) -> int:
        """Time at which `poll` is due."""
        return self._clock.after_ns(LOOK_S) if self._run is not None else self._next_ns

    def lost(self, host: str, *, is_gone: bool = False) -> None:
        """Block a host, or a slot of the only host: permanently, or each time twice as long."""
        if any(blocked[:2] == (host, MAX_RANKS) for blocked in self._blocked):
            return
        num_slots = MAX_RANKS if is_gone or len(self._listed) > 1 else 1
        end_ns, period = float("inf"), "for the rest of the run"
        if self._plan.cooldown_s is not None:
            low, high = self._plan.cooldown_s
            rest_s = min(high, low * 2.0 ** min(self._num_losses[host], 60))
            end_ns, period = self._clock.after_ns(rest_s), f"for {rest_s:g} s"
        self._num_losses[host] += 1
        self._blocked.append(BlockedSlots(host, num_slots, end_ns))
        self._has_lost = True
        notice = f"host {host} is blocked {period}"
        if num_slots > 1 and notice != self._shown.get(host):
            self._shown[host] = notice
            self._notices.append(notice)

    def poll(self) -> tuple[bool, str]:
        """Update `hosts` without blocking; return whether they have changed, and a notice."""
        self._notices.append(self._look())
        now_ns = self._clock.now_ns()
        self._blocked = [blocked for blocked in self._blocked if blocked.end_ns > now_ns]
        blocked: Counter[str] = Counter()
        for host, num_slots, _ in self._blocked:
            blocked[host] += num_slots
        hosts = used_slots(self._listed, blocked, self.hosts, self._plan.limits.max_ranks)
        notices, self._notices = [*filter(None, self._notices)], []
        has_changed = self._has_lost or hosts != self.hosts
        self._has_lost, self.hosts = False, hosts
        number, least = sum(hosts.values()), self._plan.limits.min_ranks
        if has_changed and number < least:
            notices.append(
                f"only {number} slots are available, fewer than --min-np {least}: add hosts"
            )
        return has_changed, "; ".join(notices)

    def _look(self) -> str:
        """Start the script when it is due, or read its output; return a new problem as text."""
        now_ns = self._clock.now_ns()
        if self._run is None and now_ns < self._next_ns:
            return ""
        self._next_ns = self._clock.after_ns(PERIOD_S)
        if not self._plan.script:
            return ""
        try:
            if self._run is None:
                self._run = ScriptRun(self._plan.script, self._clock)
            text = self._run.poll()
            if text is not None:
                hosts = hosts_of_script(text, self._plan.slots_per_host)
                self._listed = (
                    {host.name: host.slots for host in hosts}
                    if self._plan.hosts
                    else {"": local_slots(hosts, is_here)}
                )
                self._close_run()
                self._problem = ""
        except ConfigError as error:
            self._close_run()
            is_new, self._problem = str(error) != self._problem, str(error)
            return f"{error}; the slots stay as they were" if is_new else ""
        return ""

    def _close_run(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.__exit__()

    def __exit__(self, *exc_info: object) -> None:
        self._close_run()


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(MAX_OUTPUT_BYTES).decode(errors="replace")
