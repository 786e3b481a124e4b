"""Observes a rank from outside: its open spans, its stack, and the state of its process."""

from __future__ import annotations

import os
from pathlib import Path
from signal import SIGUSR1
from typing import NamedTuple

from braid.launch.process.black_box import BlackBox
from braid.launch.process.hang_state import OpenWait
from braid.launch.process.links import LinkObserver
from braid.launch.process.process_facts import Sample, catches, process_between, sample
from braid.launch.process.processes import send_signal, send_signal_to_thread
from braid.runtime.clock import Clock
from braid.runtime.diagnose.hang_view import RankView, SpanView
from braid.runtime.events import Event, EventRing
from braid.runtime.rendezvous.stack_thread import ASK

__all__ = ["RankObserver"]

HISTORY = 4096  # number of a rank's last records that a report reads, in some 4 ms


NUM_CALLS = 256  # last records of a rank; they include a call if it takes part in any
LINKS_NS = 1_000_000_000  # between two looks at connections, while a rank waits as long


class _StackRequested(NamedTuple):
    """State of the rank when its stack was requested."""

    stacks_from: int
    sample: Sample
    now_ns: int


class RankObserver:
    """Observes one rank on this host.

    Args:
        rank: Rank to observe.
        pid: Process id of the rank.
        box: Black box of the rank, with its events and stacks; not owned.
        clock: Clock of the rank's events.
        with_links: Whether to observe the rank's connections to other hosts, too.
    """

    def __init__(
        self, rank: int, pid: int, box: BlackBox, clock: Clock, *, with_links: bool = False
    ) -> None:
        self._links = LinkObserver(pid) if with_links else None
        self._links_ns = 0
        self._rank = rank
        self._pid = pid
        self._box = box
        self._clock = clock
        self._requested: _StackRequested | None = None
        self._is_asked = False  # whether the last request went to the rank's own thread
        self._asked_from = 0

    def waits(self) -> list[OpenWait]:
        """Return the open collectives of the rank; cheap enough to poll every second."""
        if not self._box.has_events:
            return []
        ring = self._box.ring
        waits = [
            OpenWait(self._rank, event.site or event.kind, event.seq, event.t_ns)
            for event in self._box.open_spans()
            if event.group and "(" in ring.name(event.kind)
        ]
        now_ns = self._clock.now_ns()
        lasts = any(now_ns - wait.t_ns >= LINKS_NS for wait in waits)
        if self._links is not None and lasts and now_ns - self._links_ns >= LINKS_NS:
            self._links_ns = now_ns
            self._links.look(now_ns)  # what comes in between two looks is a sign of life
        return waits

    def request_stack(self, *, alive: bool, answers: bool) -> None:
        """Request a stack dump from the rank and sample the resource use of its process.

        Args:
            alive: Whether the process has not ended.
            answers: Whether the rank has joined the job; without a handler the signal would end it.
        """
        before = sample(self._pid) if alive else Sample()
        self._requested = _StackRequested(self._box.stacks_size, before, self._clock.now_ns())
        if not (answers and alive and catches(before, SIGUSR1)):  # it may have left the job since
            return
        if self._takes_part_in_calls() and self._ask():
            return
        thread = self._box.ring.stack_thread
        # a main thread that sleeps, but not in a collective, may do so in a call that a signal
        # ends; one that runs, or waits in braid, has consistent frames only while it handles one
        if thread and before.state in {"S", "D"} and not self.waits():
            send_signal_to_thread(self._pid, thread, SIGUSR1)
        else:
            send_signal(self._pid, SIGUSR1)

    def _takes_part_in_calls(self) -> bool:
        """Return whether threads of the rank other than the main one execute remote calls."""
        ring = self._box.ring
        events = (*self._box.open_spans(), *ring.tail(NUM_CALLS))
        return any(ring.name(event.kind).startswith(("call(", "serve(")) for event in events)

    def _ask(self) -> bool:
        """Ask the rank's own thread for stacks; False if it cannot be asked, or did not answer.

        It cannot answer while another thread keeps the interpreter's lock. A signal does no harm
        then: nothing moves.
        """
        if self._is_asked and self._box.stacks_size == self._asked_from:
            self._is_asked = False
            return False
        pipe = Path(f"/proc/{self._pid}/fd/{self._box.ring.stack_pipe}")
        try:
            if not str(pipe.readlink()).startswith("pipe:"):
                return False
            descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            return False
        try:
            os.write(descriptor, ASK)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        self._is_asked, self._asked_from = True, self._box.stacks_size
        return True

    def view(self, *, alive: bool, ended: str = "") -> RankView:
        """Return the rank's recent spans, its process state, and the stack that was requested.

        Args:
            alive: Whether the process has not ended.
            ended: Description of the process's end; empty while it lives.
        """
        ring, requested = self._box.ring, self._requested
        # a span that ends between the two reads appears once, as ended
        events = {e._replace(dur_ns=0): e for e in self._box.open_spans()}
        events.update((e._replace(dur_ns=0), e) for e in ring.tail(HISTORY))
        spans = tuple(_span_view(event, ring) for event in sorted(events.values()))
        view = RankView(self._rank, self._pid, spans, ended=ended)
        if requested is None or not alive:
            return view
        elapsed_ns = self._clock.now_ns() - requested.now_ns
        return view._replace(
            process=process_between(requested.sample, sample(self._pid), elapsed_ns),
            stack=self._box.stacks(requested.stacks_from),
            links=self._links.look(self._clock.now_ns()) if self._links is not None else (),
        )

    def lasted_ns(self, wait: OpenWait) -> int | None:
        """Return the duration of a wait; None if it is not over or no longer recorded."""
        events = self._box.ring.tail(HISTORY)
        return next((e.dur_ns for e in events if e.t_ns == wait.t_ns and not e.open), None)


def _span_view(event: Event, ring: EventRing) -> SpanView:
    name, site = ring.name(event.kind), ring.name(event.site)
    return SpanView(name, event.t_ns, event.dur_ns, event.group, event.channel, event.seq, site)
