"""The launcher's end of one agent: what it says, how it was started, whether it is still there."""

from __future__ import annotations

import os
import selectors
import shlex
from collections.abc import Callable
from contextlib import suppress

from braid.clock import Clock
from braid.diagnose import signal_name
from braid.launch.agent_messages import (
    Bye,
    FromAgent,
    Here,
    Ping,
    Pong,
    Ready,
    ToAgent,
    decode_from_agent,
)
from braid.launch.channel import Channel, Link
from braid.launch.link import PipeLink
from braid.launch.placement import Placed

__all__ = ["HostAgent"]

PING_NS = 5_000_000_000
SILENCE_NS = 30_000_000_000  # as long as a stopped rank may be silent
ERRORS_BYTES = 4096
STATUS_LIMIT_S = 1.0  # between the end of its stream and the end of the process that carried it
END_LIMIT_S = 5.0

OnMessage = Callable[["HostAgent", FromAgent, list[memoryview]], None]
OnLost = Callable[["HostAgent", str], None]


class HostAgent:
    """One agent.

    Args:
        node: Number of its host.
        name: What to call its host.
        link: To the agent; owned and closed by this object.
        placed: The process that carries it; None for one that has come by itself. Owned likewise.
        clock: Time source.
        on_message: Called with what it says, and the buffers that follow.
        on_lost: Called once when it is gone, with a sentence about why.

    Attributes:
        offset_ns: What to add to its clock to get this one's.
        said: Its first message; None until it came.
    """

    def __init__(
        self,
        node: int,
        name: str,
        link: Link,
        placed: Placed | None,
        *,
        clock: Clock,
        on_message: OnMessage,
        on_lost: OnLost,
    ) -> None:
        self.node = node
        self.name = name
        self.on_message = on_message
        self.on_lost = on_lost
        self.offset_ns = 0
        self.said: Ready | None = None
        self._placed = placed
        self._clock = clock
        self._channel = Channel(link, self._on_frame, self._on_closed)
        self._best_ns: int | None = None  # of all round trips
        self._heard_ns = clock.now_ns()
        self._ping_ns = self._heard_ns
        self._errors = b""
        self._errors_fd = placed.errors if placed is not None else -1
        self._selector: selectors.BaseSelector | None = None

    @property
    def alive(self) -> bool:
        """Whether it can be spoken to."""
        return not self._channel.closed

    @property
    def unread(self) -> bool:
        """Whether there is more to hear."""
        return self._channel.unread

    @property
    def deadline_ns(self) -> int:
        """When `attend` is due."""
        return self._ping_ns

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Be watched by `selector` from now on."""
        self.unwatch()
        self._selector = selector
        self._channel.watch(selector)
        if self._errors_fd >= 0:
            selector.register(self._errors_fd, selectors.EVENT_READ, self._read_errors)

    def unwatch(self) -> None:
        """Be watched no more."""
        self._channel.unwatch()
        if self._selector is not None and self._errors_fd >= 0:
            self._selector.unregister(self._errors_fd)
        self._selector = None

    def send(self, message: ToAgent, *buffers: bytes) -> None:
        """Send a message, if it is there."""
        self._channel.send(message, *buffers)

    def hear(self) -> None:
        """Take what has arrived."""
        self._channel.hear()

    def attend(self) -> None:
        """Ask whether it is there, now and then; one that is silent for too long is lost."""
        now_ns = self._clock.now_ns()
        if self.alive and self.said is not None and now_ns >= self._heard_ns + SILENCE_NS:
            self._channel.close()
            self.on_lost(self, f"has not answered for {SILENCE_NS / 1e9:g} s")
        elif now_ns >= self._ping_ns:
            self._ping_ns = now_ns + PING_NS
            if self.said is not None:
                self.send(Ping(now_ns))

    def end(self, exit_code: int, text: str) -> None:
        """Say good-bye; `close` waits for it to go."""
        self.send(Bye(exit_code, text))
        self._channel.flush()

    def close(self) -> None:
        """Close everything; an agent that is still there ends its ranks. Idempotent."""
        self.unwatch()
        self._channel.close()
        if self._placed is not None:
            self._placed.wait(END_LIMIT_S)
        if self._errors_fd >= 0:
            os.close(self._errors_fd)
            self._errors_fd = -1

    def _on_frame(self, buffers: list[memoryview]) -> None:
        now_ns = self._heard_ns = self._clock.now_ns()
        message = decode_from_agent(buffers[0])
        if isinstance(message, Pong):
            trip_ns = now_ns - message.t_ns
            if self._best_ns is None or trip_ns < self._best_ns:
                self._best_ns = trip_ns
                self.offset_ns = (message.t_ns + now_ns) // 2 - message.now_ns
            return
        if isinstance(message, Ready):
            self.said = message
        elif isinstance(message, Here):
            for _ in range(3):  # the shortest of three tells the time well enough
                self.send(Ping(self._clock.now_ns()))
        self.on_message(self, message, buffers[1:])

    def _on_closed(self, reason: str) -> None:  # noqa: ARG002 - that of a stream, which says little
        self.on_lost(self, self._why())

    def _why(self) -> str:
        """What ended the stream, in words that stand behind the host's name."""
        placed = self._placed
        if placed is None:
            who = f" (pid {self.said.pid})" if self.said is not None else ""
            return f"is gone: its launcher{who} has closed the connection"
        status = placed.status_within(STATUS_LIMIT_S)
        self._read_errors()
        how = "has closed its pipe"
        if status is not None:
            how = f"ended with exit code {status}"
        if status is not None and status < 0:
            how = f"was killed by signal {-status} ({signal_name(-status)})"
        command = shlex.join(placed.argv)
        link = self._channel.link
        noise = link.noise if isinstance(link, PipeLink) else b""
        words = (self._errors + noise).decode(errors="replace").strip().splitlines()
        last = f": {words[-1].strip()}" if words else ""
        if self.said is not None:
            return f"is gone: its agent (pid {self.said.pid}) {how}{last}"
        hint = ""
        if "No module named" in last:
            hint = "; install braid there, or name an interpreter that has it with --remote-python"
        elif status == 127 or "No such file" in last or "not found" in last:
            hint = "; name its interpreter with --remote-python"
        return f"has no agent, `{command}` {how}{last}{hint}"

    def _read_errors(self) -> None:
        with suppress(BlockingIOError):
            while self._errors_fd >= 0:
                chunk = os.read(self._errors_fd, ERRORS_BYTES)
                if not chunk:
                    if self._selector is not None:
                        self._selector.unregister(self._errors_fd)
                    os.close(self._errors_fd)
                    self._errors_fd = -1
                    return
                self._errors = (self._errors + chunk)[-ERRORS_BYTES:]
