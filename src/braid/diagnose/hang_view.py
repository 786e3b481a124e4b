"""What can be seen of a rank from outside, and what follows from it: the input of a hang report.

Nothing here asks the rank to cooperate. Its spans lie in memory of the launcher's, its process is
the kernel's knowledge, and its stacks come by a signal handler that needs neither the interpreter's
lock nor a living loop.
"""

from __future__ import annotations

import re
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from braid.diagnose.hang_stack import Thread, main_thread, parse_threads, waits_for_others
from braid.events import OPEN

__all__ = ["Process", "RankView", "SpanView"]

PARTNER = re.compile(r"(?:to|from) rank (\d+)\)")
MIN_GAPS, MAX_GAPS = 3, 8  # one slow turn is an accident; what was long ago is past


class SpanView(NamedTuple):
    """One record of a rank's ring, in words.

    Attributes:
        name: Kind: `step`, a phase, or a collective such as `all_reduce(float32[4], sum)`.
        t_ns: Begin.
        dur_ns: Duration; `OPEN` while it lasts.
        group: Number of the group; 0 for what is no collective.
        channel: Channel of the group.
        seq: Number of the step, or of the collective on its channel.
        site: Call site, may be empty.
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
        """Whether it has begun and not ended."""
        return self.dur_ns == OPEN

    @property
    def end_ns(self) -> int:
        """When it ended, or began if it has not ended: when the rank gave a sign of life."""
        return self.t_ns if self.open else self.t_ns + self.dur_ns

    @property
    def is_operation(self) -> bool:
        """Whether it is a collective of a group."""
        return bool(self.group) and "(" in self.name

    @property
    def is_message(self) -> bool:
        """Whether it concerns two members only."""
        return self.name.startswith(("send(", "recv("))

    @property
    def partner(self) -> int | None:
        """Rank at the other end of a message; None for a collective, or a receive from whoever sends first."""
        found = PARTNER.search(self.name) if self.is_message else None
        return int(found[1]) if found else None

    @property
    def label(self) -> str:
        """`all_reduce#176`, and `step 88`."""
        if self.name == "step":
            return f"step {self.seq}"
        number = f"#{self.seq}" if self.is_operation and self.seq else ""
        return f"{self.name.partition('(')[0]}{number}"

    @property
    def title(self) -> str:
        """`all_reduce#176  float32[4096], sum`."""
        return f"{self.label}  {self.name.partition('(')[2].removesuffix(')')}".rstrip()


class Process(NamedTuple):
    """What the kernel says of a rank's process.

    Attributes:
        state: R S D T t Z, as in /proc; empty where nothing is known.
        cpu_share: Cores in use lately; None when unknown.
        swapped_bytes: Of its memory, what is in swap.
        resident_bytes: What is not.
        major_faults_per_s: Pages that it had to wait for lately.
    """

    state: str = ""
    cpu_share: float | None = None
    swapped_bytes: int = 0
    resident_bytes: int = 0
    major_faults_per_s: float = 0.0

    @property
    def stopped(self) -> bool:
        """Whether a signal or a debugger holds it."""
        return self.state in {"T", "t"}


class RankView(NamedTuple):
    """One rank as seen from outside.

    Attributes:
        rank: Global rank.
        pid: Process id.
        spans: What it recorded lately and everything it is inside of, by begin.
        process: What the kernel says.
        stack: Its latest dump by `faulthandler`; empty when it gave none.
        ended: How it ended, in words; empty while it lives.
    """

    rank: int
    pid: int = 0
    spans: tuple[SpanView, ...] = ()
    process: Process = Process()
    stack: str = ""
    ended: str = ""

    @property
    def threads(self) -> tuple[Thread, ...]:
        """Its stack, parsed."""
        return parse_threads(self.stack)

    @property
    def thread(self) -> Thread:
        """Its main thread; one without frames when it gave no stack."""
        return main_thread(self.threads)

    @property
    def operations(self) -> list[SpanView]:
        """Collectives that it has begun and not ended, by begin."""
        return [span for span in self.spans if span.open and span.is_operation]

    @property
    def waits(self) -> bool:
        """Whether it can do nothing but wait for others.

        Its stack decides. Without one, its spans do: a rank that recorded anything after it had
        begun the collective went on to something else.
        """
        operations = self.operations
        if self.ended or self.process.stopped or not operations:
            return False
        threads = self.threads
        if threads:
            return waits_for_others(threads)
        last_ns = max(span.end_ns for span in self.spans if span.name != "wait")
        return last_ns <= operations[-1].t_ns

    @property
    def phases(self) -> list[str]:
        """Names of the phases that it is inside of, outermost first."""
        step_ns = self.step.t_ns if self.step is not None else 0
        return [
            span.name
            for span in self.spans
            # a span that outlived its step was abandoned
            if span.open and not span.is_operation and span.t_ns >= step_ns
            if span.name not in {"step", "wait"}
        ]

    @property
    def step(self) -> SpanView | None:
        """The last step that it began; None when it recorded none."""
        return next((span for span in reversed(self.spans) if span.name == "step"), None)

    @property
    def in_step(self) -> bool:
        """Whether it is inside of a step."""
        return self.step is not None and self.step.open

    @property
    def last(self) -> SpanView | None:
        """What it last began or ended; None when it recorded nothing."""
        return max(self.spans, key=lambda span: span.end_ns, default=None)

    def has_reached(self, operation: SpanView) -> bool:
        """Whether it has begun `operation`, or a later one of the same channel."""
        return any(
            (span.group, span.channel) == (operation.group, operation.channel)
            and span.is_operation
            and span.seq >= operation.seq
            for span in self.spans
        )

    def is_known_in(self, group: int) -> bool:
        """Whether it has used the group lately, and so is one of its members."""
        return any(span.group == group for span in self.spans)

    def exchanges(self, message: SpanView, rank: int) -> bool:
        """Whether it is at the other end of a message of `rank`: a message travels on the channel of its receiver."""
        key = (message.group, message.channel)
        return any(
            (other.group, other.channel) == key and other.partner in {None, rank}
            for other in self.operations
        )

    def own_work_ns(self, operation: SpanView) -> float:
        """Median time between the latest collectives of that channel, less waits; 0 with fewer than three."""
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
