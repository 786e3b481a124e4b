"""One rank as the launcher sees it: a process, two pipes, a black box and, if it is a braid program, a connection."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from braid.clock import Clock
from braid.diagnose import ParsedError, RankEnd, parse_error
from braid.errors import BraidError
from braid.launch.black_box import BlackBox
from braid.launch.memory import MemoryWatch
from braid.launch.output import RankOutput
from braid.launch.processes import Change, send_signal
from braid.launch.supervisor_state import RankFacts
from braid.rendezvous import Failed, FromLauncher, FromRank
from braid.rendezvous.control import decode_from_rank, encode
from braid.wire import SocketConnection

__all__ = ["RankProcess"]

SHIM = str(Path(__file__).with_name("exec_shim.py"))
READ_BYTES = 1 << 16
DRAIN_READS = 64  # 4 MiB: more than a pipe holds, less than a grandchild that never stops writing


class RankProcess:
    """A started rank.

    Args:
        rank: Its rank.
        argv: Program and arguments.
        environ: Its environment.
        pass_fds: Descriptors it inherits, besides its black box's.
        box: Its black box; owned and closed by this object.
        output: Where its output goes; owned and closed by this object.
        selector: Where its pipes and its connection are watched; the data of a key is what to call.
        on_message: Called with what it says on its connection.
        clock: Time source.

    Raises:
        OSError: The system cannot start another process.
    """

    def __init__(
        self,
        rank: int,
        argv: Sequence[str],
        *,
        environ: Mapping[str, str],
        pass_fds: Sequence[int],
        box: BlackBox,
        output: RankOutput,
        selector: selectors.BaseSelector,
        on_message: Callable[[RankProcess, FromRank], None],
        clock: Clock,
    ) -> None:
        self.rank = rank
        self.box = box
        self.output = output
        self.has_said_hello = False
        self.said: Failed | None = None
        self.end: RankEnd | None = None
        self._control: SocketConnection | None = None
        self._has_connected = False
        self._untold: list[FromLauncher] = []  # what there was to say before it connected
        self._selector = selector
        self._on_message = on_message
        self._clock = clock
        readers, writers = zip(os.pipe(), os.pipe(), strict=True)
        self._pipes = dict(zip(readers, (1, 2), strict=True))  # descriptor -> stream
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-I", "-S", SHIM, str(os.getpid()), *argv],
                stdin=subprocess.DEVNULL,
                stdout=writers[0],
                stderr=writers[1],
                env=dict(environ),
                pass_fds=[*pass_fds, box.events_fd, box.stacks_fd],
            )
        except OSError:
            for fd in readers:
                os.close(fd)
            raise
        finally:
            for fd in writers:
                os.close(fd)
        for fd in readers:
            os.set_blocking(fd, False)
            selector.register(fd, selectors.EVENT_READ, partial(self._read, fd))

    @property
    def pid(self) -> int:
        """Process id."""
        return self._popen.pid

    @property
    def alive(self) -> bool:
        """Whether it has not been reaped."""
        return self.end is None

    def signal(self, signum: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.alive:
            send_signal(self.pid, signum)

    def wait(self) -> None:
        """Wait until it has ended, and reap it."""
        self._popen.wait()

    def drain(self) -> None:
        """Take all that its pipes hold now."""
        for fd in list(self._pipes):
            for _ in range(DRAIN_READS):
                if not self._read(fd):
                    break

    def adopt(self, connection: SocketConnection) -> None:
        """Take its control connection; a second one is refused."""
        if self._control is not None or not self.alive:
            connection.close()
            return
        self._control = connection
        self._selector.register(connection, selectors.EVENT_READ, self.hear)
        self._has_connected = True
        untold, self._untold = self._untold, []
        for message in untold:
            self.tell(message)
        self.hear()

    def hear(self) -> None:
        """Take all messages that have arrived on its control connection."""
        try:
            while self._control is not None and (frame := self._control.try_recv()) is not None:
                self._on_message(self, decode_from_rank(frame.meta))
        except BraidError:  # it has gone, or talks nonsense: its process tells how it ends
            self._hang_up()

    def tell(self, message: FromLauncher) -> None:
        """Send a message, as soon as there is a connection; never waits."""
        try:
            if self.alive and self._control is not None:
                self._control.post(encode(message))
            elif self.alive and not self._has_connected:
                self._untold.append(message)
        except BraidError:
            self._hang_up()

    def ended(self, change: Change, facts: RankFacts, memory: MemoryWatch) -> RankEnd:
        """Note how it ended, once it has been reaped."""
        self._popen.returncode = change.status if change.what == "exited" else -change.status
        now_ns = self._clock.now_ns()
        exit_code = change.status if change.what == "exited" else None
        signum = change.status if change.what == "killed" else None
        ended_ns = now_ns
        if facts.failed_ns is not None:  # it failed then; how its process was ended is our doing
            ended_ns = facts.failed_ns
            exit_code, signum = (exit_code, signum) if not facts.signalled else (1, None)
        asked = facts.signalled and facts.failed_ns is None
        was_stopped = asked and facts.stopped_ns is not None
        lines = self.output.stderr_tail.splitlines() if exit_code != 0 else []
        self.end = RankEnd(
            rank=self.rank,
            pid=self.pid,
            ended_ns=ended_ns,
            exit_code=exit_code,
            signal=signum,
            asked_to_stop=asked,
            stopped_s=(now_ns - (facts.stopped_ns or 0)) / 1e9 if was_stopped else None,
            stop_signal=facts.stop_signal,
            declared_dead=facts.declared_dead,
            memory_kill=memory.new_kill() if signum == 9 and not facts.signalled else None,
            error=None if exit_code == 0 else self.error(),
            last_words=next((line for line in reversed(lines) if line.strip()), "")[:200],
        )
        return self.end

    def error(self) -> ParsedError | None:
        """What it said of its failure: through its connection if it could, else on stderr."""
        said = self.said
        if said is None:
            return parse_error(self.output.stderr_tail)
        written = parse_error(said.traceback)
        message, *details = said.message.split("\n")
        return ParsedError(
            type=said.type.rpartition(".")[2],
            message=message,
            where=said.where or (written.where if written else ""),
            details=tuple(details),
            chain=written.chain if written else (),
        )

    def close(self) -> None:
        """Close everything; the process must have been reaped. Idempotent."""
        self._hang_up()
        self.drain()
        for fd in list(self._pipes):
            self._close_pipe(fd)
        self.output.close(self._clock.now_ns())
        self.box.close()

    def _read(self, fd: int) -> bool:
        """Take what one of its pipes holds; False when there is nothing, or never will be."""
        if fd not in self._pipes:
            return False
        try:
            chunk = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return False
        if not chunk:
            self._close_pipe(fd)
            return False
        self.output.feed(self._pipes[fd], chunk, self._clock.now_ns())
        return True

    def _close_pipe(self, fd: int) -> None:
        self._selector.unregister(fd)
        del self._pipes[fd]
        os.close(fd)

    def _hang_up(self) -> None:
        connection, self._control = self._control, None
        if connection is not None:
            self._selector.unregister(connection)
            connection.close()
