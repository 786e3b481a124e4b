"""The launcher's side of an engine: one process that allocates nodes and starts their agents.

    client -> launcher   {"hosts": [["a", 2], ["b", 2]]}     nodes, with slots for ranks
    launcher -> client   an invitation for agents on these nodes
    client -> launcher   {"lost": 1, "why": "..."}           the engine's reason for a lost node

The client of Ray sends the nodes again when they change in a run with `max_ranks`, and the launcher
sends an invitation for each new one.

The client is a separate program (`slurm_client`, `mpi_client`, `ray_client`), so that no library
of an engine runs in the launcher. It ends when its agents have ended, or when its stdin ends.
"""

from __future__ import annotations

import math
import os
import re
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from signal import SIGCHLD, SIGINT, SIGKILL
from textwrap import shorten

import msgspec

from braid.errors import ConfigError
from braid.launch.cluster.listed_slots import ListedSlots
from braid.launch.cluster.options import EngineHosts
from braid.launch.cluster.rank_assignment import Host
from braid.launch.cluster.several_hosts import HostsSupervisor
from braid.launch.engines.client_words import FromClient
from braid.launch.engines.invitation import Invitation
from braid.launch.engines.options import CLIENTS, EngineOptions
from braid.launch.process.job import JobSpec, Outcome, check_command
from braid.launch.process.processes import SignalInbox
from braid.runtime.closing import Closing
from braid.runtime.diagnose.verdict import signal_name
from braid.runtime.rendezvous.interfaces import machine

__all__ = ["EngineClient", "EngineSupervisor"]

END_LIMIT_S = 10.0
TAIL_BYTES = 8 << 10
CHUNK = 4096
LOG_PREFIX = re.compile(r"^\[[^]]*\] (\S+:\d+: )?")  # time and line of an engine's log
WHY_CHARS = 160
NOTICE_S = 10.0  # until the first notice that nodes are not there yet


class EngineSupervisor(HostsSupervisor):
    """Runs jobs on nodes of an engine (Ray, Slurm or MPI); see `HostsSupervisor`."""

    def run_on(self, job: JobSpec, options: EngineOptions) -> Outcome:
        """Run a job to its end.

        Args:
            job: Job to run; the engine's nodes determine its number of ranks.
            options: Engine, and the nodes to ask it for.

        Returns:
            Outcome of the run; failures of ranks and losses of nodes are outcomes, not exceptions.

        Raises:
            ConfigError: The engine is not installed or does not answer, or does not allocate the
                nodes; no process is left running.
        """
        check_command(job)
        most = job.elastic.max_ranks if job.elastic is not None and options.engine == "ray" else 0
        words = [f"--num-ranks={options.num_ranks or 0}", *options.words]
        words += [f"--max-ranks={most}"] if most else []
        with SignalInbox() as inbox, EngineClient(options.engine, words) as client:
            hosts = client.hosts(options.start_limit_s, self._console.notice, inbox)
            where = EngineHosts(
                hosts=hosts,
                starter=client,
                num_ranks=options.num_ranks,
                interfaces=options.interfaces,
                listen=options.listen,
                environ=options.environ,
                start_limit_s=options.start_limit_s,
            )
            if most:
                num_slots = sum(host.slots for host in hosts)
                slots = ListedSlots(lambda: client.nodes, hosts, num_slots, most, self._clock)
                return self._run_elastic(job, where, slots, inbox)
            with self._rendezvous(job, where, inbox) as rendezvous:
                return self._carry_out(job, inbox, rendezvous)


class EngineClient(Closing):
    """A process that starts agents through an engine; a context manager that ends it.

    Args:
        engine: Name of the engine, one of `CLIENTS`.
        words: Arguments of its client.

    Attributes:
        nodes: Nodes that the job may use now, with slots for ranks; empty until they are allocated.

    Raises:
        ConfigError: The client cannot be started.
    """

    def __init__(self, engine: str, words: Sequence[str] = ()) -> None:
        self.engine = engine
        argv = [sys.executable, "-m", CLIENTS[engine], *words]
        try:
            self._popen = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,  # the launcher forwards Ctrl-C
            )
        except OSError as exc:
            msg = f"cannot start the program that asks {engine} for nodes: {exc.strerror}"
            raise ConfigError(msg) from exc
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        self._out, self._err = self._popen.stdout.fileno(), self._popen.stderr.fileno()
        os.set_blocking(self._out, False)
        os.set_blocking(self._err, False)
        self._lines = b""
        self._tail = b""
        self._reasons: dict[int, str] = {}
        self.nodes: tuple[Host, ...] = ()
        self._selector: selectors.BaseSelector | None = None
        self._open = {self._out, self._err}

    def register(self, selector: selectors.BaseSelector) -> None:
        """Register with a selector; the data of a key is the function to call."""
        self.unregister()
        self._selector = selector
        for fd in self._open:
            selector.register(fd, selectors.EVENT_READ, self.read)

    def unregister(self) -> None:
        """Unregister from the selector. Idempotent."""
        if self._selector is not None:
            for fd in self._open:
                self._selector.unregister(fd)
            self._selector = None

    def hosts(
        self, limit_s: float, notice: Callable[[str], None], inbox: SignalInbox
    ) -> tuple[Host, ...]:
        """Wait for the nodes of the job.

        Args:
            limit_s: Seconds to wait.
            notice: Shows a text to the user.
            inbox: Signals of this process, which end the wait.

        Raises:
            ConfigError: The engine cannot allocate the nodes, or not in time, or this process was
                asked to end.
            KeyboardInterrupt: The user has pressed Ctrl-C.
        """
        deadline_s, notice_s = time.monotonic() + limit_s, time.monotonic() + NOTICE_S
        with self._selecting() as selector:
            selector.register(inbox, selectors.EVENT_READ)
            while time.monotonic() < deadline_s:
                selector.select(min(1.0, max(0.0, deadline_s - time.monotonic())))
                for signum in inbox.drain():
                    if signum == SIGINT:
                        raise KeyboardInterrupt
                    if signum != SIGCHLD:
                        msg = f"{signal_name(signum)} received before {self.engine} gave nodes"
                        raise ConfigError(msg)
                self.read()
                if self.nodes:
                    return self.nodes
                if self._out not in self._open or self._popen.poll() is not None:
                    raise ConfigError(self._problem())
                if time.monotonic() >= notice_s:
                    notice_s = math.inf
                    notice(f"waiting for nodes of {self.engine}: {self.last_line or 'no answer'}")
        msg = (
            f"{self.engine} has provided no nodes within {limit_s:g} s: "
            f"{self.last_line or 'no answer'}. Ask for fewer ranks or resources, or wait longer "
            "with --rdzv-timeout (horovodrun: --start-timeout)"
        )
        raise ConfigError(msg)

    def invite(
        self, addresses: Sequence[str], nodes: Mapping[int, str], key: bytes, limit_s: float
    ) -> None:
        """Send the client an invitation to start an agent on each node; see `AgentStarter`."""
        invitation = Invitation(
            addresses=tuple(addresses),
            machine=machine(),
            nodes=nodes,
            secret=key.hex(),
            limit_s=limit_s,
        )
        assert self._popen.stdin is not None
        with suppress(BrokenPipeError):  # `why_missing` has the reason
            self._popen.stdin.write(invitation.to_line())

    def read(self) -> None:
        """Read the client's messages to the launcher, and its output for the user."""
        for fd in tuple(self._open):
            with suppress(BlockingIOError):
                while fd in self._open:
                    chunk = os.read(fd, CHUNK)
                    if not chunk:
                        self._open.discard(fd)
                        if self._selector is not None:
                            self._selector.unregister(fd)
                    elif fd == self._out:
                        self._lines += chunk
                    else:
                        self._tail = (self._tail + chunk)[-TAIL_BYTES:]
        *lines, self._lines = self._lines.split(b"\n")
        for line in lines:
            try:
                message = msgspec.json.decode(line, type=FromClient)
            except msgspec.MsgspecError:  # a line that the engine printed
                self._tail = (self._tail + line + b"\n")[-TAIL_BYTES:]
                continue
            self.nodes = tuple(Host(*host) for host in message.hosts) or self.nodes
            if message.why:
                self._reasons[message.lost] = message.why

    @property
    def last_line(self) -> str:
        """Last line that the engine has printed for people."""
        lines = [line.strip() for line in self._tail.decode(errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line), "")

    def why_missing(self, node: int) -> str:
        """Return why no agent can join from a node any more; empty while one may join."""
        has_ended = self._popen.poll() is not None
        return self._problem() if has_ended else self._reasons.get(node, "")

    def why_lost(self, node: int, limit_s: float) -> str:
        """Return the engine's reason for the loss of a node; empty if it gives none in time.

        If the client itself has ended, the lost connection to the engine is the reason.
        """
        deadline_s = time.monotonic() + limit_s
        with self._selecting() as selector:
            while node not in self._reasons and time.monotonic() < deadline_s and self._open:
                selector.select(max(0.0, deadline_s - time.monotonic()))
                self.read()
        if node not in self._reasons and self._out not in self._open:
            what = LOG_PREFIX.sub("", self._problem())
            return f"is lost with {self.engine}: {shorten(what, WHY_CHARS)}"
        return self._reasons.get(node, "")

    def close(self) -> None:
        """End the client, which gives its nodes back. Idempotent."""
        self.unregister()
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        if not self.nodes:  # nothing has started, and an engine may still be waiting for nodes
            self._popen.terminate()
        deadline_s = time.monotonic() + END_LIMIT_S
        while self._wait(0.05) is None and time.monotonic() < deadline_s:
            self.read()  # so that its output does not block it
        if self._popen.poll() is None:
            self._popen.terminate()
            if self._wait(END_LIMIT_S) is None:
                self._popen.kill()
                self._popen.wait()
        with suppress(ProcessLookupError):  # its children, in its session
            os.killpg(self._popen.pid, SIGKILL)
        for pipe in (self._popen.stdout, self._popen.stderr):
            assert pipe is not None
            pipe.close()
        self._open.clear()

    @contextmanager
    def _selecting(self) -> Iterator[selectors.BaseSelector]:
        """Poll the descriptors with a selector of our own for a while."""
        outer = self._selector
        with selectors.DefaultSelector() as selector:
            self.register(selector)
            try:
                yield selector
            finally:
                self.unregister()
                if outer is not None:
                    self.register(outer)

    def _problem(self) -> str:
        """Return why the client has ended, in the engine's words."""
        status = self._wait(1.0)
        self.read()
        return self.last_line or f"the client of {self.engine} ended with exit code {status}"

    def _wait(self, limit_s: float) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self._popen.wait(limit_s)
        return None
