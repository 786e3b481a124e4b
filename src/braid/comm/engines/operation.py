"""One collective in progress on this rank: its steps, its wait, its deadline and its errors.

An `Operation` holds the generator of an algorithm and its current `Wait`, and converts any failure
into the error that the user sees. `Progress` decides which thread takes the steps. Each start of a
persistent request has a separate operation: a thread may still refer to the previous one, and a
Work reports the result of one start only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator

import torch

from braid.comm.channel.channel import Channel, Disagreement
from braid.comm.channel.control_pages import ABANDONED, CLOSED, DISAGREED, ControlPages, MemberState
from braid.comm.engines.collective import Collective
from braid.comm.engines.diagnostics import (
    asked,
    device_timeout_text,
    mismatch_table,
    timeout_text,
)
from braid.comm.engines.engine import GroupStatistics
from braid.errors import (
    BraidError,
    CommError,
    CommTimeout,
    MismatchError,
    PeerLostError,
    StaleError,
)
from braid.runtime.events import Recorder, Span
from braid.runtime.transport import DeviceWait, Wait, WaitAny

__all__ = ["Operation", "OperationSteps", "call_back", "stop_reason"]

LEFT_GRACE_S = 0.1
STOPPED = "stopped because rank "  # begin of the error of a rank that another member has stopped
MISMATCH_GRACE_S = 2.0  # seconds to wait for missing ranks before the table is made
ENDED = Collective("ended")  # replaces the collective of an operation that has ended
OperationSteps = Generator[Wait | WaitAny | DeviceWait, None, None]
NO_NEWS = 0  # epoch of `Health` before any loss: losses while the group was made count as well


class Operation:
    """A collective in progress on this rank: its steps, its deadline and its errors.

    Args:
        pages: The group's control pages.
        channel: Channel of the steps; its `digest` and `site` are set by the operation.
        events: Recorder of begin, end and waits.
        statistics: Counters of the group.
        collective: Collective to run; described, with a deadline.
        steps: The algorithm.

    Attributes:
        text: Description of the collective.
        submitted: Event that is set at the end, if the progress thread runs it; else None.
    """

    __slots__ = (
        "_advancing",
        "_collective",
        "_deadline_ns",
        "_device_span",
        "_ended",
        "_events",
        "_late",
        "_left_ns",
        "_lock",
        "_span",
        "_steps",
        "_wait",
        "channel",
        "done",
        "error",
        "pages",
        "statistics",
        "submitted",
        "text",
    )

    def __init__(
        self,
        pages: ControlPages,
        channel: Channel,
        events: Recorder,
        statistics: GroupStatistics,
        collective: Collective,
        steps: OperationSteps,
    ) -> None:
        self.pages = pages
        self.channel = channel
        self.statistics = statistics
        self._events = events
        self._lock = threading.RLock()
        self.done = False
        self.error: BaseException | None = None
        self.submitted: threading.Event | None = None
        self.text = collective.text
        self._collective = collective
        self._steps = steps
        self._wait: Wait | WaitAny | DeviceWait | None = None
        self._advancing = False  # a thread is taking steps
        self._span: Span | None = None
        self._device_span: Span | None = None  # span of a wait for a GPU
        self._ended: list[Callable[[], None]] = []
        self._left_ns = 0  # time when a needed rank was first seen to have left
        self._late = bool(pages.end_reason)
        timeout_s = collective.timeout_s or 0.0
        self._deadline_ns = pages.transport.clock.now_ns() + round(timeout_s * 1e9)
        statistics.num_operations += 1
        statistics.nbytes += collective.nbytes

    def advance(self, *, in_turn: bool = False, until_wait: bool = False) -> bool:
        """Advance as far as possible without waiting; return whether the operation has ended.

        Args:
            in_turn: Whether to block while another thread takes steps, rather than to return. A
                thread that waits for the operation blocks, since polling would keep the interpreter
                from the other thread.
            until_wait: Whether to stop at the first wait, even if it is complete.
        """
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # tensors that the steps make are used outside, too
                return self.advance(in_turn=in_turn, until_wait=until_wait)
        if self.done or not self._lock.acquire(blocking=in_turn):
            return self.done  # another thread is taking steps
        self._advancing = True
        try:
            if self._span is None:
                self._begin()
            steps, reached = self._steps, self.pages.reached
            while self._wait is None or (not until_wait and reached(self._wait)):
                self._wait = next(steps)
            if self._device_span is not None or type(self._wait) is DeviceWait:
                self._note_device_wait()
        except StopIteration:
            self._finish()
        except PeerLostError as exc:
            self.fail(self._confirmed(exc))
        except BaseException as exc:
            self.fail(exc)  # raised in the thread that waits
            if not isinstance(exc, Exception):  # such as KeyboardInterrupt
                raise
        finally:
            self._advancing = False
            self._lock.release()
        return self.done

    def ready(self) -> bool:
        """Return whether the operation has ended, or can advance and no thread advances it."""
        if self.done:
            return True
        return not self._advancing and (self._wait is None or self.pages.reached(self._wait))

    def awaited_line(self) -> tuple[memoryview | None, int]:
        """Return the control line (memory) that the operation awaits, and the value it must reach.

        The line is None if the wait is for several lines, or for a line that does not exist yet.
        """
        wait = self._wait
        if type(wait) is not Wait:
            return None, 0
        channel = self.channel if wait.channel == self.channel.index else None
        return (channel or self.pages.channel(wait.channel)).line(wait.peer), wait.value

    def _confirmed(self, exc: PeerLostError) -> PeerLostError:
        """Return the error for a rank whose memory is gone, with the confirmed cause of death."""
        health = self.pages.transport.health
        loss = health.confirm(exc.rank)
        if loss is None:
            return exc
        return PeerLostError(f"rank {health.number(exc.rank)} {loss.reason}", rank=exc.rank)

    def _begin(self) -> None:
        pages, channel, collective = self.pages, self.channel, self._collective
        if pages.end_reason:
            raise self._ended_error(" earlier")
        channel.digest = collective.digest
        channel.site = collective.site
        self._span = self._events.span(
            collective.text,
            group=pages.number,
            channel=channel.index,
            seq=channel.value + 1,
            nbytes=collective.nbytes,
            site=collective.site,
        )

    def check(self) -> None:
        """Raise if waiting longer is useless: the group has failed or the deadline has passed."""
        wait = self._wait
        if wait is None or self.done:
            return
        pages = self.pages
        if pages.end_reason:  # by another operation of this rank
            raise self._ended_error()
        health = pages.transport.health
        awaited = _awaited(wait)
        needed = [peer for peer in awaited if not pages.gone(peer)] or awaited[:1]
        health.check(pages.ranks, NO_NEWS)  # a death explains more than its effects
        for member in self.channel.peers:
            state = pages.state(member)
            if state.code == DISAGREED:
                raise MismatchError(pages.text_of(member, state.reason))
            if state.code == ABANDONED and not (
                self._is_loss_published() and self._may_know_more()
            ):
                raise self._abandoned(member, state)
            # read the state first: steps that it published before closing still count
            if state.code == CLOSED and needed == [member] and not pages.reached(wait):
                rank = pages.ranks[member]
                if self._may_know_more():
                    return
                health.missed.add(rank)
                msg = f"rank {pages.numbers[member]} has already left (it closed the group)"
                raise PeerLostError(msg, rank=rank)
        # after the members' states: a member that abandoned the group may have left since
        if len(needed) == 1:
            rank = pages.ranks[needed[0]]
            loss = health.lost.get(rank)
            if loss is None or not loss.departed or not self._may_know_more():
                health.check(pages.ranks, NO_NEWS, needed=rank)
        if pages.transport.clock.now_ns() > self._deadline_ns and not health.debugged:
            raise self._timeout(wait)

    def _timeout(self, wait: Wait | WaitAny | DeviceWait) -> CommTimeout:
        """Return the error to raise when the deadline has passed."""
        timeout_s = self._collective.timeout_s or 0.0
        if isinstance(wait, DeviceWait):
            text = device_timeout_text(self.pages, self.text, timeout_s, wait.device)
        else:
            text = timeout_text(self.pages, self.channel, self.text, timeout_s, _awaited(wait))
        return CommTimeout(text)

    def _note_device_wait(self) -> None:
        """Record that the operation waits for a GPU, or that this wait has ended.

        Sleeping threads poll during such a wait, since a GPU cannot wake them.
        """
        wait, span = self._wait, self._device_span
        waits = self.pages.transport.bells.device_waits
        if type(wait) is DeviceWait and not self.done:
            if span is None:
                waits.add(id(self))
                self._device_span = self._events.span(f"wait for {wait.device}")
        elif span is not None:
            waits.discard(id(self))
            span.end()
            self._device_span = None

    def _ended_error(self, when: str = "") -> BraidError:
        """Return the error for operations of a group that this rank has stopped."""
        pages = self.pages
        state = pages.state(pages.rank)
        if state.code == DISAGREED and not self._late:  # found during this operation
            return MismatchError(pages.end_reason)
        if state.value and not pages.abort_reason:
            return PeerLostError(pages.end_reason, rank=state.value - 1)
        reason = pages.abort_reason or pages.end_reason
        msg = f"{self.text} cannot run, because its group ended{when}: {reason}"
        return StaleError(msg)

    def _is_loss_published(self) -> bool:
        """Return whether some member has stopped the group after it lost a rank."""
        states = [self.pages.state(member) for member in self.channel.peers]
        return any(state.code == ABANDONED and state.value for state in states)

    def _abandoned(self, member: int, state: MemberState) -> BraidError:
        """Return the error for a member that has stopped the group."""
        for other in self.channel.peers:  # a member that reports a loss explains more
            state_there = self.pages.state(other)
            if state_there.code == ABANDONED and state_there.value:
                member, state = other, state_there
        reason = self.pages.text_of(member, state.reason)
        if state.value:  # it reports a lost rank
            return PeerLostError(reason, rank=state.value - 1)
        if reason.startswith(STOPPED):  # the member was stopped itself: its reason has the cause
            first, reason = reason, reason.partition(": ")[2]
        else:
            first = f"{STOPPED}{self.pages.numbers[member]} abandoned the group: {reason}"
        # any rank's deadline may come first: all that wait for a missing rank raise the same type
        return CommTimeout(first) if reason.startswith("CommTimeout") else CommError(first)

    def _may_know_more(self) -> bool:
        """Return whether to wait briefly before using the report of a rank that left.

        Another rank may have died before, and its death is the better explanation.
        """
        now_ns = self.pages.transport.clock.now_ns()
        if not self._left_ns:
            self._left_ns = now_ns
        return now_ns - self._left_ns < round(LEFT_GRACE_S * 1e9)

    def fail(self, exc: BaseException) -> None:
        """End the operation with an error.

        A `Disagreement` is converted to a MismatchError, with the same table on every rank.
        """
        with self._lock:
            if self.done:
                return
            # a stopped peer may still store into these tensors: they live as long as the group
            self.pages.pinned.append((self._steps, self._collective.outs))
            self.error = self._explain(exc)
            if isinstance(self.error, MismatchError):
                self.pages.stop(DISAGREED, reason=str(self.error))
            elif isinstance(exc, PeerLostError):
                loss = self.pages.transport.health.lost.get(exc.rank)
                departed = loss is not None and loss.departed
                # inside a host every rank detects the loss itself
                if not (self.pages.shares or departed):
                    self.pages.stop(ABANDONED, value=exc.rank + 1, reason=f"{exc}")
            else:
                self.pages.stop(ABANDONED, reason=stop_reason(self.text, exc))
            self._finish()

    def _explain(self, exc: BaseException) -> BaseException:
        if isinstance(exc, Disagreement):
            error: BaseException = MismatchError(self._table(exc))
        elif isinstance(exc, PeerLostError):
            rank = self.pages.numbers[self.pages.rank]
            where = f"{self.text} of the group of ranks {list(self.pages.numbers)}"
            error = PeerLostError(f"{exc}, while rank {rank} was in {where}", rank=exc.rank)
        else:
            return exc
        error.__suppress_context__ = True  # the original exception would not help the user
        return error

    def _table(self, exc: Disagreement) -> str:
        """Wait briefly for missing ranks, then make the table of all members' operations."""
        pages, channel = self.pages, self.channel
        members = range(pages.size) if exc.members is None else exc.members
        clock = pages.transport.clock
        deadline_ns = clock.now_ns() + round(MISMATCH_GRACE_S * 1e9)

        def arrived() -> bool:
            return all(
                channel.counter(m) >= exc.value or pages.state(m).code or pages.ranks[m] in lost
                for m in members
                if m != pages.rank
            )

        lost = pages.transport.health.lost
        while not arrived() and clock.now_ns() < deadline_ns:
            pages.transport.health.collect()
            clock.sleep(0.001)
        answers = []
        digest, site = exc.digests or (self._collective.digest, self._collective.site)
        for member in members:
            answer = asked(pages, member, channel.entry(member, exc.value))
            if member == pages.rank:
                answer = answer._replace(
                    text=pages.text_of(member, digest),
                    site=pages.text_of(member, site) if site else "",
                )
            answers.append(answer)
        return mismatch_table(answers, step=exc.value)

    def on_done(self, call: Callable[[], None]) -> None:
        """Call `call` when the operation has succeeded or failed, in the thread that ends it.

        If the operation has already ended, call it now.
        """
        with self._lock:
            if not self.done:
                self._ended.append(call)
                return
        call_back(call)

    def note_wait(self, waited_ns: int) -> None:
        """Record that a thread has waited `waited_ns` for this operation."""
        if waited_ns:
            self.statistics.waited_ns += waited_ns
            now_ns = self.pages.transport.clock.now_ns()
            self._events.complete(
                "wait",
                now_ns - waited_ns,
                waited_ns,
                group=self.pages.number,
                channel=self.channel.index,
                seq=self.channel.value,
            )

    def _finish(self) -> None:
        self.done = True
        if self._device_span is not None:
            self._note_device_wait()
        self._collective = ENDED  # a Work keeps the result alive, not the inputs
        if self._span is not None:
            self._span.end()
        if self._ended:
            ended, self._ended = self._ended, []  # callbacks refer to results
            for call in ended:
                call_back(call)


def stop_reason(text: str, exc: BaseException) -> str:
    """Return why a rank leaves a group, for the other members, after an error in `text`.

    If another member has stopped the rank, return that member's reason: a third member may receive
    it first, and must name the member that failed first.
    """
    if isinstance(exc, CommError) and str(exc).startswith(STOPPED):
        return str(exc)
    where = "" if text in str(exc) else f" in {text}"
    return f"{type(exc).__name__}{where}: {exc}"


def _awaited(wait: Wait | WaitAny | DeviceWait) -> list[int]:
    """Return the members that an operation waits for; none while it waits for a GPU."""
    if isinstance(wait, DeviceWait):
        return []
    return [one.peer for one in (wait.waits if isinstance(wait, WaitAny) else (wait,))]


def call_back(call: Callable[[], None]) -> None:
    """Call `call`; report an exception to `threading.excepthook`, so that steps can continue."""
    try:
        call()
    except Exception as exc:  # noqa: BLE001 - no caller could handle it
        thread = threading.current_thread()
        threading.excepthook(threading.ExceptHookArgs((type(exc), exc, exc.__traceback__, thread)))
