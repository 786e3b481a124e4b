"""Carrying out a collective: the generator, its deadline, its errors, its events.

`Operation` is one collective under way: steps to take, waits that block it, and the translation of whatever stops it
into the error that the user sees. Who takes the steps is a matter of convenience:

    `Progress.run`      the calling thread, to the end (synchronous calls, `Work.wait` of a request)
    `advance`           anyone, as far as possible without waiting (persistent requests, from hooks)
    `Progress.submit`   one thread, many operations at a time (`async_op=True`)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from braid.comm.channel.channel import Channel, Disagreement
from braid.comm.channel.control_pages import ABANDONED, CLOSED, DISAGREED, Port, State
from braid.comm.engines.diagnostics import asked, mismatch_table, timeout_text
from braid.comm.tensors.arguments import check_seconds
from braid.errors import (
    BraidError,
    CommError,
    CommTimeout,
    MismatchError,
    PeerLostError,
    StaleError,
)
from braid.events import Recorder, Span
from braid.transport import Steps, Wait, WaitAny

__all__ = ["Operation", "Underway", "Work"]

LEFT_GRACE_S = 0.1
MISMATCH_GRACE_S = 2.0  # how long a table waits for the ranks that have not come yet


class Operation:
    """One collective on one channel of one rank.

    Args:
        port: The group's window on memory.
        channel: Its channel; `digest` and `site` are set from here.
        text: What is asked for, in words.
        digest: Of the words that all who take part use for it.
        steps: The algorithm.
        events: Where begin, end and waits are recorded.
        nbytes: For the record.
        site: Digest of the call site.
        timeout_s: Seconds until CommTimeout.
        epoch: Health epoch when the group was made.
        tensors: Where the others may write; steps that raise let go of them.
    """

    __slots__ = (
        "_deadline_ns",
        "_digest",
        "_ended",
        "_epoch",
        "_events",
        "_late",
        "_left_ns",
        "_lock",
        "_nbytes",
        "_site",
        "_span",
        "_steps",
        "_taken",
        "_tensors",
        "_timeout_s",
        "_wait",
        "channel",
        "done",
        "error",
        "port",
        "text",
        "waited_ns",
    )

    def __init__(
        self,
        port: Port,
        channel: Channel,
        text: str,
        digest: int,
        steps: Steps,
        *,
        events: Recorder,
        nbytes: int,
        site: int,
        timeout_s: float,
        epoch: int,
        tensors: Sequence[torch.Tensor] = (),
    ) -> None:
        self.port = port
        self.channel = channel
        self.text = text
        self.done = False
        self.error: BaseException | None = None
        self.waited_ns = 0
        self._ended: list[Callable[[], None]] = []
        self._events = events
        self._steps = steps
        self._timeout_s = timeout_s
        self._epoch = epoch
        self._tensors = tensors
        self._wait: Wait | WaitAny | None = None
        self._lock = threading.RLock()
        self._taken = False
        self._left_ns = 0  # when it was first seen that a rank that is needed has left
        self._late = bool(port.stopped)
        self._digest = digest
        self._site = site
        self._nbytes = nbytes
        self._span: Span | None = None
        self._deadline_ns = port.transport.clock.now_ns() + round(timeout_s * 1e9)

    def advance(self, *, in_turn: bool = False, opening: bool = False) -> bool:
        """Go on as far as possible without waiting; True when it has ended, well or badly.

        Args:
            in_turn: Let another thread that is at it finish first, instead of leaving the steps to it. Whoever waits does:
                a loop that looked again and again would keep the interpreter from the thread that it looks for.
            opening: Go as far as its first wait only, whether or not that is over.
        """
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # what the steps make and keep is used outside, too
                return self.advance(in_turn=in_turn, opening=opening)
        if self.done or not self._lock.acquire(blocking=in_turn):
            return self.done  # another thread is at it
        self._taken = True
        try:
            if self._span is None:
                self._begin()
            while self._wait is None or (not opening and self.port.reached(self._wait)):
                self._wait = next(self._steps)
        except StopIteration:
            self._finish()
        except PeerLostError as exc:
            self.fail(self._confirmed(exc))
        except BaseException as exc:
            self.fail(exc)  # kept for whoever waits for it
            if not isinstance(exc, Exception):  # an interrupt is for the thread, whatever it was at
                raise
        finally:
            self._taken = False
            self._lock.release()
        return self.done

    def _confirmed(self, exc: PeerLostError) -> PeerLostError:
        """What is known of a rank whose memory was found to be gone."""
        loss = self.port.transport.health.confirm(exc.rank)
        if loss is None:
            return exc
        return PeerLostError(f"rank {exc.rank} {loss.reason}", rank=exc.rank)

    def _begin(self) -> None:
        if self.port.stopped:
            raise self._stopped(" earlier")
        channel = self.channel
        channel.digest = self._digest
        channel.site = self._site
        self._span = self._events.span(
            self.text,
            group=self.port.number,
            channel=channel.index,
            seq=channel.value + 1,
            nbytes=self._nbytes,
            site=self._site,
        )

    def ready(self) -> bool:
        """Whether it has ended, or what it waits for has come and no thread is at it."""
        if self.done:
            return True
        return not self._taken and (self._wait is None or self.port.reached(self._wait))

    def check(self) -> None:
        """Raise if there is no point in waiting on."""
        wait = self._wait
        if wait is None or self.done:
            return
        port = self.port
        if port.stopped:  # by another operation of this rank
            raise self._stopped()
        health = port.transport.health
        waits = wait.waits if isinstance(wait, WaitAny) else (wait,)
        needed = [w.peer for w in waits if not port.gone(w.peer)] or [waits[0].peer]
        health.check(port.ranks, self._epoch)  # a death says more than what survivors say of it
        for member in self.channel.others:
            state = port.state(member)
            if state.code == DISAGREED:
                raise MismatchError(port.text_of(member, state.reason))
            if state.code == ABANDONED and not (self._told_of_loss() and self._may_know_more()):
                raise self._abandoned(member, state)
            # its state first: what it published before it closed the group still counts
            if state.code == CLOSED and needed == [member] and not port.reached(wait):
                rank = port.ranks[member]
                if self._may_know_more():
                    return
                msg = f"rank {rank} has already left (it closed the group)"
                raise PeerLostError(msg, rank=rank)
        # after what the members say themselves: one that abandoned the group may have left since
        if len(needed) == 1:
            rank = port.ranks[needed[0]]
            loss = health.lost.get(rank)
            if loss is None or not loss.left or not self._may_know_more():
                health.check(port.ranks, self._epoch, needed=rank)
        if port.transport.clock.now_ns() > self._deadline_ns:
            awaited = [w.peer for w in waits]
            raise CommTimeout(timeout_text(port, self.channel, self.text, self._timeout_s, awaited))

    def _stopped(self, when: str = "") -> BraidError:
        """What to raise in a group that this rank has stopped."""
        port = self.port
        state = port.state(port.rank)
        if state.code == DISAGREED and not self._late:  # found while this one was under way
            return MismatchError(port.stopped)
        if state.value and not port.given_up:
            return PeerLostError(port.stopped, rank=state.value - 1)
        reason = port.given_up or port.stopped
        msg = f"expected a group in use for {self.text}, found that it ended{when}: {reason}"
        return StaleError(msg)

    def _told_of_loss(self) -> bool:
        """Whether some member has stopped the group because it has lost a rank: news here, too, in a moment."""
        states = [self.port.state(member) for member in self.channel.others]
        return any(state.code == ABANDONED and state.value for state in states)

    def _abandoned(self, member: int, state: State) -> BraidError:
        """What to raise when a member has stopped the group."""
        for other in self.channel.others:  # who tells of a loss says more
            said = self.port.state(other)
            if said.code == ABANDONED and said.value:
                member, state = other, said
        reason = self.port.text_of(member, state.reason)
        if state.value:  # it tells whom it has lost
            return PeerLostError(reason, rank=state.value - 1)
        msg = f"stopped because rank {self.port.ranks[member]} abandoned the group: {reason}"
        # whose deadline comes first is chance: all that wait for a missing rank raise the same
        return CommTimeout(msg) if reason.startswith("CommTimeout") else CommError(msg)

    def _may_know_more(self) -> bool:
        """Whether to wait a moment before a rank that has left, or tells of a loss, is believed: another may have died first."""
        now_ns = self.port.transport.clock.now_ns()
        if not self._left_ns:
            self._left_ns = now_ns
        return now_ns - self._left_ns < round(LEFT_GRACE_S * 1e9)

    def fail(self, exc: BaseException) -> None:
        """End with an error; a disagreement becomes the table that every rank raises."""
        with self._lock:
            if self.done:
                return
            # a stopped peer may store into these tensors when it goes on: they live as long as the group
            self.port.held.append((self._steps, self._tensors))
            self.error = self._explain(exc)
            if isinstance(self.error, MismatchError):
                self.port.stop(DISAGREED, reason=str(self.error))
            elif isinstance(exc, PeerLostError):
                loss = self.port.transport.health.lost.get(exc.rank)
                left = loss is not None and loss.left
                if not (self.port.shares or left):  # inside of a host every rank sees it for itself
                    self.port.stop(ABANDONED, value=exc.rank + 1, reason=f"{exc}")
            else:
                where = "" if self.text in str(exc) else f" in {self.text}"
                self.port.stop(ABANDONED, reason=f"{type(exc).__name__}{where}: {exc}")
            self._finish()

    def _explain(self, exc: BaseException) -> BaseException:
        if isinstance(exc, Disagreement):
            error: BaseException = MismatchError(self._table(exc))
        elif isinstance(exc, PeerLostError):
            rank = self.port.ranks[self.port.rank]
            where = f"{self.text} of the group of ranks {list(self.port.ranks)}"
            error = PeerLostError(f"{exc}, while rank {rank} was in {where}", rank=exc.rank)
        else:
            return exc
        error.__suppress_context__ = True  # how it was noticed is no news to the reader
        return error

    def _table(self, exc: Disagreement) -> str:
        """Wait a moment for the ranks that have not come, then read everybody's line."""
        port, channel = self.port, self.channel
        members = range(port.size) if exc.members is None else exc.members
        clock = port.transport.clock
        deadline_ns = clock.now_ns() + round(MISMATCH_GRACE_S * 1e9)

        def arrived() -> bool:
            return all(
                channel.counter(m) >= exc.value or port.state(m).code or port.ranks[m] in lost
                for m in members
                if m != port.rank
            )

        lost = port.transport.health.lost
        while not arrived() and clock.now_ns() < deadline_ns:
            port.transport.health.collect()
            clock.sleep(0.001)
        answers = []
        digest, site = exc.own or (self._digest, self._site)
        for member in members:
            answer = asked(port, member, channel.entry(member, exc.value))
            if member == port.rank:
                answer = answer._replace(
                    text=port.text_of(member, digest),
                    site=port.text_of(member, site) if site else "",
                )
            answers.append(answer)
        return mismatch_table(answers, step=exc.value)

    def on_done(self, call: Callable[[], None]) -> None:
        """Have `call` called when this ends, well or badly, in the thread that ends it; at once if it has ended."""
        with self._lock:
            if not self.done:
                self._ended.append(call)
                return
        _call_back(call)

    def note_wait(self, waited_ns: int) -> None:
        """Record that a thread has waited for this operation."""
        if waited_ns:
            self.waited_ns += waited_ns
            now_ns = self.port.transport.clock.now_ns()
            self._events.complete(
                "wait",
                now_ns - waited_ns,
                waited_ns,
                group=self.port.number,
                channel=self.channel.index,
                seq=self.channel.value,
            )

    def _finish(self) -> None:
        self.done = True
        if self._span is not None:
            self._span.end()
        ended, self._ended = self._ended, []  # they hold what was returned
        for call in ended:
            _call_back(call)


def _call_back(call: Callable[[], None]) -> None:
    """Whoever takes the steps goes on, whatever the program's callback raises: that goes the way of a thread's errors."""
    try:
        call()
    except Exception as exc:  # noqa: BLE001 - nobody is there to catch it
        thread = threading.current_thread()
        threading.excepthook(threading.ExceptHookArgs((type(exc), exc, exc.__traceback__, thread)))


class Underway(Protocol):
    """What a Work stands for: an `Operation`, or something like it in a foreign backend."""

    text: str
    done: bool
    error: BaseException | None

    def advance(self) -> bool:
        """Go on as far as possible without waiting; whether it has ended."""
        ...

    def on_done(self, call: Callable[[], None]) -> None:
        """Have `call` called when it ends."""
        ...


class Work:
    """A collective that has been started and may not have ended.

    Keeps its tensors alive until it has ended, by way of the algorithm that holds them. Waiting twice is allowed.

    Attributes:
        result: What the synchronous call would have returned; complete when it has ended.

    Args:
        operation: What has been started.
        join: How to wait for it, (operation, seconds or None).
        look: Takes the steps that are possible now, of everything that has been started.
    """

    def __init__(
        self,
        operation: Underway,
        join: Callable[[Any, float | None], None],
        look: Callable[[Any], object],
    ) -> None:
        self._operation = operation
        self._join = join
        self._look = look
        self.result: Any = None
        self._source: list[int] = []

    @property
    def source(self) -> int:
        """Group rank of the sender of a receive from any member, when it has ended; else -1."""
        return self._source[0] if self._source else -1

    def returns(self, result: object, source: list[int] | None = None) -> Work:
        """Set what the operation's result will be found in."""
        self.result = result
        self._source = [] if source is None else source
        return self

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the tensors hold the result.

        Args:
            timeout_s: Seconds; None waits until the operation's own deadline.

        Raises:
            CommTimeout: `timeout_s` passed; the operation goes on.
            CommError: The operation failed.
            ConfigError: `timeout_s` is no number of seconds.
        """
        self._join(self._operation, check_seconds(timeout_s, zero=True))

    def done(self) -> bool:
        """Whether it has ended, well or badly; takes the steps that are possible now."""
        if not self._operation.done:
            self._look(self._operation)
        return self._operation.done

    @property
    def succeeded(self) -> bool:
        """Whether it has ended well; takes no steps."""
        return self._operation.done and self._operation.error is None

    def exception(self) -> BaseException | None:
        """What stopped it; None while it is under way or when it succeeded."""
        return self._operation.error

    def add_done_callback(self, call: Callable[[Work], None]) -> None:
        """Have `call(self)` called once when it has ended, in the thread that ends it; at once if it has."""
        self._operation.on_done(lambda: call(self))

    def __repr__(self) -> str:
        state = "failed" if self._operation.error else "done" if self._operation.done else "started"
        return f"Work({self._operation.text}, {state})"
