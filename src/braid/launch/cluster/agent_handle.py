"""The launcher's handle of one agent: its messages, the process that carries it, and its loss."""

from __future__ import annotations

import os
import selectors
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from signal import SIGKILL

from braid._version import __version__
from braid.launch.cluster.agent_channel import AgentChannel, FirstLine
from braid.launch.cluster.agent_messages import (
    AgentBye,
    AgentHello,
    HostAddresses,
    Ping,
    Pong,
    ToAgent,
)
from braid.launch.cluster.remote_shell import Placed
from braid.runtime.clock import Clock
from braid.runtime.diagnose.verdict import signal_name
from braid.runtime.message import Delivery, Message, PeerLost, PipeStream, PipeVan

__all__ = ["END_LIMIT_S", "SILENCE_S", "AgentHandle", "OnLost", "OnMessage"]

SILENCE_S = 30.0  # as long as a rank may be stopped
NUM_PINGS = 16  # the fastest one compares the clocks, with an error of half its duration
READ_BYTES = 4096
REASON_LIMIT_S = 0.5  # survivors learn the loss within a second
STATUS_LIMIT_S = 1.0  # between the end of the stream and the end of the process that carried it
END_LIMIT_S = 5.0

OnMessage = Callable[["AgentHandle", Message, Sequence[memoryview]], None]
OnLost = Callable[["AgentHandle", str], None]


class AgentHandle:
    """One agent (the process that starts the ranks of a host), as the launcher sees it.

    Args:
        node: Number of the agent's host.
        name: Name of the host for messages.
        van: Van of the launcher; not owned.
        peer: Name of the agent on the van.
        placed: Process that carries the agent; owned. Its pipes are attached to the van after the
            agent's first line. None for a launcher that has joined.
        clock: Time source.
        on_message: Called with each message and its buffers.
        on_lost: Called once when the agent is lost, with the reason.

    Attributes:
        alive: Whether the agent is not known to be lost.
        offset_ns: Difference of the launcher's clock and the agent's clock.
        hello: First message of the agent; None until it arrives.
        explain: Function of the node's number and seconds that asks an engine (a cluster
            manager) why a node is gone; None without an engine.
    """

    def __init__(
        self,
        node: int,
        name: str,
        van: PipeVan,
        peer: str,
        placed: Placed | None = None,
        *,
        clock: Clock,
        on_message: OnMessage,
        on_lost: OnLost,
    ) -> None:
        self.node = node
        self.name = name
        self.on_message = on_message
        self.on_lost = on_lost
        self.alive = True
        self.offset_ns = 0
        self.hello: AgentHello | None = None
        self.explain: Callable[[int, float], str] | None = None
        self._van = van
        self._peer = peer
        self._channel = AgentChannel(van, peer)
        self._clock = clock
        self._trips_ns: list[int] = []  # round-trip times of pings
        self._placed = placed
        self._first_line = FirstLine()
        self._is_attached = placed is None
        self._errors = b""
        self._raw: dict[int, Callable[[], None]] = {}  # descriptors that the van does not read
        if placed is not None:
            self._raw = {placed.reader: self._read_line, placed.errors: self._read_errors}
        self._selector: selectors.BaseSelector | None = None

    @property
    def has_joined(self) -> bool:
        """Whether the agent is a launcher that has joined, not a process of this launcher."""
        return self._placed is None

    def register(self, selector: selectors.BaseSelector) -> None:
        """Register the descriptors that the van does not read with `selector`."""
        self.unregister()
        self._selector = selector
        for fd, read in self._raw.items():
            selector.register(fd, selectors.EVENT_READ, read)

    def unregister(self) -> None:
        """Unregister from the selector. Idempotent."""
        if self._selector is not None:
            for fd in self._raw:
                self._selector.unregister(fd)
            self._selector = None

    def send(self, message: ToAgent, *buffers: bytes) -> None:
        """Send a message; no-op if the agent is lost."""
        self._channel.send(message, *buffers)

    def end(self, exit_code: int, text: str) -> None:
        """Ask the agent to end, with the outcome of the run; `close` waits for its end."""
        self.send(AgentBye(exit_code, text))

    def hang_up(self) -> None:
        """Close pipes that were never attached to the van, so that the agent ends. Idempotent."""
        self.unregister()
        placed = self._placed
        if placed is not None and not self._is_attached:
            os.close(placed.reader)
            os.close(placed.writer)
            self._raw.pop(placed.reader, None)
            self._is_attached = True

    def kill(self) -> None:
        """Kill the process that carries the agent, so that `close` does not wait for it."""
        if self._placed is not None:
            self._placed.signal(SIGKILL)

    def receive(self, delivery: Delivery) -> None:
        """Process a message of the agent, or the news of its loss."""
        message = delivery.message
        if isinstance(message, PeerLost):
            silent = f"has not answered for {SILENCE_S:g} s"
            self._lose(silent if message.silent else self._why())
        elif isinstance(message, Pong):
            self._compare_clocks(message)
        else:
            if isinstance(message, AgentHello):
                self.hello = message
            elif isinstance(message, HostAddresses):
                self.send(Ping(self._clock.now_ns()))
            self.on_message(self, message, delivery.buffers)

    def close(self, deadline_ns: int) -> None:
        """Wait for the agent's end, until a deadline, and close all descriptors. Idempotent.

        Call after the van is closed, which makes the agent end. An agent that lives at the deadline
        is killed.
        """
        self.hang_up()
        if self._placed is not None:
            self._placed.wait(max(0.0, (deadline_ns - self._clock.now_ns()) / 1e9))
        for fd in self._raw:
            os.close(fd)
        self._raw = {}

    def _lose(self, why: str) -> None:
        self.alive = False
        self.on_lost(self, why)

    def _read_line(self) -> None:
        """Read until the agent's first line, then attach the pipes to the van."""
        placed = self._placed
        assert placed is not None
        line = self._first_line
        chunk = os.read(placed.reader, READ_BYTES)
        if chunk and not line.feed(chunk):
            return
        self._forget(placed.reader)
        if not chunk:
            self._lose(self._why())
        elif line.version != __version__:  # its messages may have another meaning
            self.on_message(self, AgentHello(line.version, self.name, 0), ())
        else:
            pipes = (placed.reader, placed.writer)
            stream = PipeStream(*pipes, f"host {self.name}", received=line.rest)
            self._van.attach(self._peer, stream)
            self._is_attached = True

    def _compare_clocks(self, pong: Pong) -> None:
        """Update the clock offset from the fastest ping: the agent answers half-way through."""
        now_ns = self._clock.now_ns()
        trip_ns = now_ns - pong.t_ns
        if trip_ns < min(self._trips_ns, default=trip_ns + 1):
            self.offset_ns = (pong.t_ns + now_ns) // 2 - pong.now_ns
        self._trips_ns.append(trip_ns)
        if len(self._trips_ns) < NUM_PINGS:
            self.send(Ping(now_ns))

    def _forget(self, fd: int) -> None:
        """Stop reading a descriptor."""
        del self._raw[fd]
        if self._selector is not None:
            self._selector.unregister(fd)

    def _why(self) -> str:
        """Return the reason why the stream ended, as a clause to follow the host's name."""
        placed = self._placed
        if placed is None:
            pid = f" (pid {self.hello.pid})" if self.hello is not None else ""
            if self.explain is not None:
                reason = self.explain(self.node, REASON_LIMIT_S) or "has closed the connection"
                return f"is gone: its agent{pid} {reason}"
            return f"is gone: its launcher{pid} has closed the connection"
        status = placed.status_within(STATUS_LIMIT_S)
        self._read_errors()
        how = "has closed its pipe"
        if status is not None:
            how = f"ended with exit code {status}"
        if status is not None and status < 0:
            how = f"was killed by signal {-status} ({signal_name(-status)})"
        command = shlex.join(placed.argv)
        output = (self._errors + self._first_line.noise).decode(errors="replace").strip()
        last = f": {output.splitlines()[-1].strip()}" if output else ""
        if self.hello is not None:
            return f"is gone: its agent (pid {self.hello.pid}) {how}{last}"
        hint = ""
        if "No module named" in last:
            hint = "; install braid there, or name an interpreter that has it with --remote-python"
        elif status == 127 or "No such file" in last or "not found" in last:
            hint = "; name its interpreter with --remote-python"
        return f"has no agent, `{command}` {how}{last}{hint}"

    def _read_errors(self) -> None:
        assert self._placed is not None
        errors = self._placed.errors
        with suppress(BlockingIOError):
            while errors in self._raw:
                chunk = os.read(errors, READ_BYTES)
                self._errors = (self._errors + chunk)[-READ_BYTES:]
                if not chunk:
                    self._forget(errors)
                    os.close(errors)
