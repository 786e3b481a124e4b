"""Views of ranks from outside: the input of a hang report.

The rank need not cooperate. Its spans are in the launcher's memory, the kernel knows the state of
its process, and a signal handler dumps its stacks without the interpreter's lock.
"""

from __future__ import annotations

import re
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from braid.runtime.diagnose.hang_stack import (
    Thread,
    main_thread,
    parse_threads,
    serving_thread,
    waits_for_device,
    waits_for_peers,
)
from braid.runtime.events import OPEN

__all__ = ["LinkView", "Process", "RankView", "SpanView"]

PARTNER = re.compile(r"(?:to|from) rank (\d+)\)")
ASKED = re.compile(r"asked of ranks? ([\d,]+)\)$")  # requests of a parameter server
DEVICE_WAIT = re.compile(r"wait for \w+:\d+$")  # an operation waits for earlier work on the GPU
MIN_GAPS, MAX_GAPS = 3, 8  # a single slow turn means nothing; old turns do not matter


class SpanView(NamedTuple):
    """One record of a rank's event ring, with its names.

    Attributes:
        name: Name: `step`, a phase, or a collective such as `all_reduce(float32[4], sum)`.
        t_ns: Begin of the span.
        dur_ns: Duration; `OPEN` if the span has not ended.
        group: Number of the group; 0 if the span is not a collective.
        channel: Channel of the group.
        seq: Number of the step, or of the collective on its channel.
        site: Call site; may be empty.
    """

    name: str
    t_ns: int
    dur_ns: int = OPEN
    group: int = 0
    channel: int = 0
    seq: int = 0
    site: str = ""

    @property
    def open(self) -> bool:
        """Whether the span has begun and not ended."""
        return self.dur_ns == OPEN

    @property
    def end_ns(self) -> int:
        """End of the span, or its begin if it has not ended: the last sign of life."""
        return self.t_ns if self.open else self.t_ns + self.dur_ns

    @property
    def is_operation(self) -> bool:
        """Whether the span is a collective of a group or a call: other ranks must complete it."""
        return bool(self.group) and "(" in self.name and not self.is_service

    @property
    def is_message(self) -> bool:
        """Whether the span is a send or a receive."""
        return self.name.startswith(("send(", "recv("))

    @property
    def is_call(self) -> bool:
        """Whether the span is a call of a function on another rank, or a request to some ranks."""
        return self.name.startswith("call(") or ASKED.search(self.name) is not None

    @property
    def asked(self) -> frozenset[int]:
        """Ranks that must answer this call or request; empty for other spans."""
        match = ASKED.search(self.name)
        if match is None:
            return frozenset(() if self.partner is None else (self.partner,))
        return frozenset(map(int, match[1].split(",")))

    @property
    def is_device_wait(self) -> bool:
        """Whether the span is a wait of an operation for the rank's own GPU."""
        return DEVICE_WAIT.match(self.name) is not None

    @property
    def is_service(self) -> bool:
        """Whether the span is a call from another rank that runs on this rank."""
        return self.name.startswith("serve(")

    @property
    def partner(self) -> int | None:
        """Rank at the other end of this message or call.

        None for other spans, and for a receive from any rank.
        """
        match = PARTNER.search(self.name) if self.is_message or self.is_call else None
        return int(match[1]) if match else None

    @property
    def label(self) -> str:
        """Short name with number, such as `all_reduce#176` or `step 88`."""
        if self.name == "step":
            return f"step {self.seq}"
        if self.is_service:
            return f"to serve {self.name.partition('(')[2].removesuffix(')')}"
        number = f"#{self.seq}" if self.is_operation and self.seq else ""
        return f"{self.name.partition('(')[0]}{number}"

    @property
    def title(self) -> str:
        """Name with number and arguments, such as `all_reduce#176  float32[4096], sum`."""
        return f"{self.label}  {self.name.partition('(')[2].removesuffix(')')}".rstrip()


class Process(NamedTuple):
    """State of a rank's process, from the kernel.

    Attributes:
        state: Letter of the process state (R, S, D, T, t or Z), as in /proc; empty if unknown.
        cpu_share: Number of cores in use lately; None if unknown.
        swapped_bytes: Number of bytes in swap.
        resident_bytes: Number of bytes in memory.
        major_faults_per_s: Number of pages per second read from disk lately.
        delayed_share: Share of the time in which the main thread waited for a core lately.
    """

    state: str = ""
    cpu_share: float | None = None
    swapped_bytes: int = 0
    resident_bytes: int = 0
    major_faults_per_s: float = 0.0
    delayed_share: float = 0.0

    @property
    def stopped(self) -> bool:
        """Whether a signal or a debugger has stopped the process."""
        return self.state in {"T", "t"}


class LinkView(NamedTuple):
    """Connections of a rank to one other host, as the rank's host sees them.

    Attributes:
        local: Address of the rank's host.
        peer: Address of the other host.
        received_ns: Time of the last packet from the other host.
        num_repeats: Number of repeats or probes without an answer.
    """

    local: str
    peer: str
    received_ns: int
    num_repeats: int


class RankView(NamedTuple):
    """One rank, as observed from outside.

    Attributes:
        rank: Global rank.
        pid: Process id.
        spans: Recent spans and all open spans, in the order of their begin.
        process: State of the process.
        stack: Latest stack dump of `faulthandler`; empty if there is none.
        ended: Description of the rank's end; empty while it is alive.
        links: Connections to other hosts, one view for each host.
    """

    rank: int
    pid: int = 0
    spans: tuple[SpanView, ...] = ()
    process: Process = Process()
    stack: str = ""
    ended: str = ""
    links: tuple[LinkView, ...] = ()

    @property
    def threads(self) -> tuple[Thread, ...]:
        """Threads of the rank, parsed from `stack`."""
        return parse_threads(self.stack)

    @property
    def thread(self) -> Thread:
        """Thread that other ranks wait for: one that serves a remote call, else the main thread.

        Without a stack dump, the thread has no frames.
        """
        threads = self.threads
        return (serving_thread(threads) if self.services else None) or main_thread(threads)

    @property
    def operations(self) -> list[SpanView]:
        """Open collectives of the rank, in the order of their begin."""
        return [span for span in self.spans if span.open and span.is_operation]

    @property
    def services(self) -> list[SpanView]:
        """Calls from other ranks that run on this rank, in the order of their begin."""
        return [span for span in self.spans if span.open and span.is_service]

    @property
    def waits_for_device(self) -> bool:
        """Whether an operation of the rank waits for earlier work on the rank's own GPU."""
        spans = (span for span in self.spans if span.open and span.is_device_wait)
        return bool(self.operations) and (any(spans) or waits_for_device(self.threads))

    @property
    def waits(self) -> bool:
        """Whether the rank only waits for other ranks.

        A rank that waits for its own GPU does not wait for other ranks. Otherwise the stack
        decides. Without a stack, a rank that has recorded an event after the begin of the
        collective is presumed to do something else.
        """
        operations = self.operations
        if self.ended or self.process.stopped or not operations or self.waits_for_device:
            return False
        threads = self.threads
        if threads:
            return waits_for_peers(threads)
        last_ns = max(span.end_ns for span in self.spans if span.name != "wait")
        return last_ns <= operations[-1].t_ns

    @property
    def phases(self) -> list[str]:
        """Names of the open phases, outermost first."""
        step_ns = self.step.t_ns if self.step is not None else 0
        return [
            span.name
            for span in self.spans
            # a span that outlives its step was abandoned
            if span.open and not span.is_operation and not span.is_service
            if not span.is_device_wait
            if span.t_ns >= step_ns
            if span.name not in {"step", "wait"}
        ]

    @property
    def step(self) -> SpanView | None:
        """Last step that the rank began; None if there was none."""
        return next((span for span in reversed(self.spans) if span.name == "step"), None)

    @property
    def in_step(self) -> bool:
        """Whether the rank is inside a step."""
        return self.step is not None and self.step.open

    @property
    def last(self) -> SpanView | None:
        """Span that the rank began or ended last; None if there is none."""
        return max(self.spans, key=lambda span: span.end_ns, default=None)

    def has_reached(self, operation: SpanView) -> bool:
        """Return whether the rank has begun `operation`, or a later one on the same channel."""
        return any(
            (span.group, span.channel) == (operation.group, operation.channel)
            and span.is_operation
            and span.seq >= operation.seq
            for span in self.spans
        )

    def is_known_in(self, group: int) -> bool:
        """Return whether the rank has used the group recently, so that it must be a member."""
        return any(span.group == group for span in self.spans)

    def exchanges(self, message: SpanView, rank: int) -> bool:
        """Return whether this rank has begun the counterpart of a send or receive of `rank`.

        Both operations are on the channel of the receiver.
        """
        key = (message.group, message.channel)
        return any(
            (other.group, other.channel) == key and other.partner in {None, rank}
            for other in self.operations
        )

    def own_work_ns(self, operation: SpanView) -> float:
        """Return the median time between recent collectives on the channel of `operation`.

        Waits in these intervals are subtracted. The result is 0 with fewer than three intervals.
        """
        key = (operation.group, operation.channel)
        row = [s for s in self.spans if s.is_operation and (s.group, s.channel) == key]
        row = row[-MAX_GAPS - 1 :]
        gaps = [
            after.t_ns - before.end_ns - self._waited_ns(before.end_ns, after.t_ns)
            for before, after in pairwise(row)
            if not before.open
        ]
        return median(gaps) if len(gaps) >= MIN_GAPS else 0.0

    def _waited_ns(self, begin_ns: int, end_ns: int) -> int:
        waits = (s for s in self.spans if s.name == "wait" and not s.open)
        return sum(s.dur_ns for s in waits if begin_ns <= s.t_ns < end_ns)
