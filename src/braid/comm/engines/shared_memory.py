"""Collectives in shared memory: which channel a call takes, which algorithm, who takes its steps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from statistics import median

import torch

from braid.comm.algorithms import broadcast_gather as move
from braid.comm.algorithms import reduce_scatter, relays
from braid.comm.algorithms import send as message
from braid.comm.algorithms.all_reduce import all_reduce, offers_first
from braid.comm.algorithms.hierarchical import Residuals, hierarchical, left_out
from braid.comm.algorithms.programs import PROGRAMS, Programs
from braid.comm.algorithms.receive import Mailbox, Receipt
from braid.comm.channel.channel import Channel
from braid.comm.channel.control_pages import ABANDONED, CLOSED, Port
from braid.comm.engines.by_program import by_program
from braid.comm.engines.engine import Call, Capabilities, Statistics
from braid.comm.engines.progress import Progress
from braid.comm.engines.selection import (
    DEFAULT_COSTS,
    DEFAULT_FAR_COSTS,
    NUM_SYNCS,
    Costs,
    Selection,
    measure,
)
from braid.comm.engines.work import Operation, Work
from braid.comm.formats import by_name
from braid.comm.tensors.node_map import Hosting
from braid.events import Recorder
from braid.transport import Block, MemoryTransport, Steps
from braid.types import text_digest

__all__ = ["MemoryEngine"]


class MemoryEngine:
    """Collectives in shared memory.

    Args:
        transport: This rank's end of it.
        port: The group's control lines.
        progress: The rank's progress thread.
        events: Recorder of the rank.
        costs: What has been measured so far, where all ranks share memory and where they do not; shared by all groups.
        in_order: Sum in the order of ranks whatever it costs, over several hosts, too.
        owns_progress: Whether closing this engine ends the progress thread.
    """

    device_types = frozenset({"cpu"})

    def __init__(
        self,
        transport: MemoryTransport,
        port: Port,
        progress: Progress,
        events: Recorder,
        *,
        costs: dict[bool, Costs] | None = None,
        in_order: bool = False,
        owns_progress: bool = False,
    ) -> None:
        self.transport = transport
        self.port = port
        self.progress = progress
        self.shares = transport.shares_with(port.ranks)
        self.hosting = Hosting.of([transport.hosts[rank] for rank in port.ranks])
        self.in_order = in_order
        self._costs = {} if costs is None else costs
        self.selection = self._select()
        self.statistics = Statistics()
        self._events = events
        self._owns_progress = owns_progress
        self._collectives = port.channel(0)
        self._mailbox = Mailbox(port)
        self._views: deque[Channel] = (
            deque()
        )  # of what is sent here, one for each receive under way
        self._ordering = threading.Lock()  # threads take their places on a channel one by one
        self._first_pages: dict[int, Block] = {}
        self._programs = Programs(port.rank, port.size)
        self._residuals: dict[int, Residuals] = {}  # of requests with a wire format

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that made it."""
        return self.transport.forked

    @property
    def capabilities(self) -> Capabilities:
        """Everything; algorithms that read peers' tensors where they lie only where the host permits it."""
        shares = self.shares
        near = ("registered",) if shares else ("hierarchical",)
        pulled = ("pulled",) if shares and self.transport.may_pull else ()
        algorithms = ("direct", "two_phase", *near, "staged", *pulled, *PROGRAMS)
        alone = len(self.hosting.hosts) == self.port.size
        ordered = shares or alone or self.in_order
        return Capabilities(algorithms=algorithms, adopts=shares, rank_order=ordered)

    def tune(self, timeout_s: float) -> None:
        """Measure what the choice of algorithms depends on. All members call it; cost: some 50 ms, once a job."""
        if self.port.size == 1:
            return
        found: list[Costs] = []
        steps = measure(
            self._collectives,
            self.transport.clock,
            may_pull=self.selection.may_pull,
            hosting=self.hosting,
            found=found,
        )
        text = "init(measuring costs)"
        digest = self.transport.names.add(text)
        operation = Operation(
            self.port,
            self._collectives,
            text,
            digest,
            steps,
            events=self._events,
            nbytes=0,
            site=0,
            timeout_s=timeout_s,
            epoch=0,
        )
        self.progress.enlist(operation)
        self._timed(self.progress.run, operation)
        self._costs[self.shares] = found[0]._replace(call_s=self._call_s(found[0].sync_s))
        self.selection = self._select()

    def _call_s(self, sync_s: float) -> float:
        """What a call takes beside its steps, of which a barrier has one; each rank's own figure, since nothing is chosen by it."""
        text = "init(measuring costs)"
        call = Call("barrier", text, self.transport.names.add(text))
        now_ns, spent_ns = self.transport.clock.now_ns, []
        for _ in range(NUM_SYNCS):
            start_ns = now_ns()
            self.run(call)
            spent_ns.append(now_ns() - start_ns)
        return max(0.0, median(spent_ns) * 1e-9 - sync_s)

    def explain(self) -> str:
        """Which algorithm is chosen when, and why."""
        return self.selection.explain()

    def record(self) -> dict[str, list[tuple[int, str]]]:
        """The same as plain data."""
        return self.selection.record()

    def run(self, call: Call) -> None:
        """Carry `call` out in this thread, behind what is queued on the same channel."""
        self.progress.refuse_own_thread(call.text)
        operation = self._operation(call, None)
        ended = None
        with self._ordering:
            if self.progress.busy(operation.channel):
                ended = self.progress.submit(operation)
            else:
                self.progress.enlist(operation)
        if ended is None:
            self._timed(self.progress.run, operation)
        else:
            self.progress.join(ended, operation)
        self._count(call, operation)

    def start(self, call: Call) -> Work:
        """Hand `call` to the progress thread, or leave it to the thread behind what was started on its channel."""
        operation = self._operation(call, None)
        with self._ordering:
            if self.progress.pending(operation.channel):
                self.progress.enlist(operation)
                ended = None
            else:
                ended = self.progress.submit(operation)
        work = self._work(operation, ended)
        if ended is None and not operation.done:
            self.progress.leave(operation)
        self._count(call, operation)
        return work

    def launch(self, calls: Sequence[Call], *, lazily: bool = False) -> list[Work]:
        """Take the steps of `calls` that are possible now, or `lazily` none; later ones are taken by whoever waits."""
        works = []
        for call in calls:
            operation = self._operation(call, None)
            with self._ordering:
                if self.progress.busy(operation.channel):
                    ended = self.progress.submit(operation)
                else:
                    self.progress.enlist(operation)
                    ended = None
            works.append(self._work(operation, ended, lazily=lazily))
            self._count(call, operation)
        return works

    def begin(self, call: Call, number: int, scale: float | None, *, lazily: bool = False) -> Work:
        """Publish this rank's part of a persistent request and take the steps that are possible now; `lazily` only the former.

        Where publishing means no more than to say where a tensor lies: then the others need not wait until this rank takes steps.
        """
        channel = self.port.channel(self.port.request_index(number))
        if scale is not None:  # ranks must agree on it, too
            text = f"{call.text} scaled by {scale!r}"
            self.transport.names.add(text)
            call = call._replace(text=text, digest=text_digest(text))
        kept = self._residuals.setdefault(number, {}) if call.wire else None
        operation = self._operation(call, channel, scale, kept)
        operation.on_done(lambda: self._count(call, operation))
        self.progress.enlist(operation)
        return self._work(operation, None, lazily=lazily, opening=self._opens(call, channel))

    def residual(self, call: Call, number: int) -> torch.Tensor | None:
        """What a wire format has left out of request `number` on this rank."""
        kept = self._residuals.get(number)
        if not kept or call.wire is None:
            return None
        numel, form = call.outs[0].numel(), by_name(call.wire)
        return left_out(kept, numel, call.op, self.port.rank, hosting=self.hosting, form=form)

    def reset_residual(self, number: int) -> None:
        """Forget it."""
        self._residuals.get(number, {}).clear()

    def advance(self) -> bool:
        """Take the steps that are possible now, of everything that this rank has started in any of its groups."""
        self.progress.refuse_fork()
        return self.progress.advance_started()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Tensor in the arena: collectives on it need no copies."""
        return self.transport.arena.empty(shape, dtype)

    def adopt(self, x: torch.Tensor) -> None:
        """Move the storage of `x` into the arena, in place."""
        self.transport.arena.adopt(x)

    def token(self) -> int:
        """Place of the first page of control lines for a new group."""
        page = Port.first_page(self.transport)
        self._first_pages[page.word] = page
        return page.word

    def forget(self, token: int) -> None:
        """Free that page."""
        self.transport.arena.free(self._first_pages.pop(token))

    def subset(self, order: Sequence[int], tokens: Sequence[int]) -> MemoryEngine:
        """Engine of a new group of the members `order`, with lines of its own in the same arena."""
        ranks = tuple(self.port.ranks[member] for member in order)
        own = list(order).index(self.port.rank)
        self._first_pages.pop(tokens[own], None)
        port = Port(self.transport, ranks, own, list(tokens), retired=self.port.retired)
        return MemoryEngine(
            self.transport,
            port,
            self.progress,
            self._events,
            costs=self._costs,
            in_order=self.in_order,
        )

    def bequeath(self, heir: MemoryEngine) -> None:
        """Leave the progress thread to `heir`."""
        self.progress.abandon(self.port)  # what is under way here must not be taken for the heir's
        heir._owns_progress, self._owns_progress = self._owns_progress, False

    def stop(self, reason: str) -> None:
        """Tell the members that this rank takes no further part."""
        self.port.given_up = reason
        self.port.stop(ABANDONED, reason=reason)

    def close(self) -> None:
        """Free the group's lines and slots."""
        if self._owns_progress:
            self.progress.close()
        self.progress.abandon(self.port)
        if (
            self._owns_progress
        ):  # the group of all ranks ends with the transport, and its memory then
            self.port.stop(CLOSED)
        else:
            self.port.close()

    def _select(self) -> Selection:
        costs = self._costs.get(self.shares, DEFAULT_COSTS if self.shares else DEFAULT_FAR_COSTS)
        return Selection(
            costs,
            self.port.size,
            may_pull=self.shares and self.transport.may_pull,
            hosting=None if self.shares else self.hosting,
            in_order=self.in_order,
        )

    def _work(
        self,
        operation: Operation,
        ended: threading.Event | None,
        *,
        lazily: bool = False,
        opening: bool = False,
    ) -> Work:
        """Of one that has been submitted, or, without `ended`, enlisted."""
        look = self.progress.look
        if ended is not None:
            return Work(operation, partial(self.progress.join, ended), look)
        self._timed(partial(self.progress.start, lazily=lazily, opening=opening), operation)
        return Work(operation, partial(self._timed, self.progress.run), look)

    def _algorithm(self, call: Call) -> str:
        """What was asked for or is fastest; other formats are for what crosses a network."""
        if call.kind == "all_reduce" and call.wire and not self.shares:
            return "hierarchical"
        return call.algorithm or self.selection.choose(call.kind, call.nbytes)

    def _opens(self, call: Call, channel: Channel) -> bool:
        """Whether the first step of a call only says where its tensor lies."""
        if call.kind != "all_reduce" or call.copies is not None or call.algorithm in PROGRAMS:
            return False
        algorithm, forced = self._algorithm(call), call.algorithm is not None
        if algorithm == "hierarchical":
            return False
        return offers_first(channel, call.outs[0], algorithm, forced=forced)

    def _operation(
        self,
        call: Call,
        channel: Channel | None,
        scale: float | None = None,
        residuals: Residuals | None = None,
    ) -> Operation:
        channel = channel or self._channel(call)
        receipt = None
        if call.kind == "recv":
            receipt = self._post(call)
            steps = self._mailbox.steps(receipt)
        else:
            steps = self._steps(call, channel, scale, residuals)
        if call.copies is not None:
            steps = call.copies.around(steps)
        operation = Operation(
            self.port,
            channel,
            call.text,
            call.digest,
            steps,
            events=self._events,
            nbytes=call.nbytes,
            site=call.site,
            timeout_s=call.timeout_s,
            epoch=0,  # a member may have been lost while the group was made: that is news, too
            tensors=call.outs,
        )
        if receipt is not None:
            operation.on_done(partial(self._received, call, receipt, channel))
        return operation

    def _channel(self, call: Call) -> Channel:
        if call.kind == "send":
            return self.port.channel(self.port.sending_index(call.peer))
        if call.kind == "recv":  # none waits for another one
            return self._view(call.peer)
        return self._collectives

    def _view(self, source: int) -> Channel:
        try:
            view = self._views.popleft()
        except IndexError:
            view = self.port.incoming()
        if self.progress.busy(view):
            self._views.append(view)
            view = self.port.incoming()
        view.value = self._mailbox.position(source if source >= 0 else None)
        return view

    def _steps(
        self, call: Call, channel: Channel, scale: float | None, residuals: Residuals | None
    ) -> Steps:
        """The algorithm's generator; nothing happens before its first step."""
        kind = call.kind
        if kind == "barrier":
            return move.barrier(channel)
        if kind == "send":
            return self._send(call, channel)
        if call.algorithm in PROGRAMS:
            return by_program(channel, self._programs, call, scale)
        algorithm = self._algorithm(call)
        if kind == "all_reduce":
            forced = call.algorithm is not None
            x = call.outs[0]
            if algorithm == "hierarchical":
                return hierarchical(
                    channel,
                    x,
                    call.op,
                    scale,
                    hosting=self.hosting,
                    form=by_name(call.wire) if call.wire else None,
                    residuals=residuals,
                )
            return all_reduce(channel, x, call.op, scale, algorithm=algorithm, forced=forced)
        if algorithm == "hierarchical":
            return self._by_relays(call, channel, scale)
        return self._parts(call, channel, scale, private=algorithm == "pulled")

    def _by_relays(self, call: Call, channel: Channel, scale: float | None) -> Steps:
        outs, hosting = call.outs, self.hosting
        if call.kind == "broadcast":
            return relays.broadcast(channel, outs[0], call.peer, hosting)
        x = call.ins[0]
        if call.kind == "all_gather":
            return relays.all_gather(channel, outs, x, hosting)
        assert call.kind == "reduce_scatter", call.kind
        offsets = _offsets(call, channel.size)
        return relays.reduce_scatter(channel, outs[0], x, offsets, call.op, scale, hosting=hosting)

    def _parts(self, call: Call, channel: Channel, scale: float | None, *, private: bool) -> Steps:
        kind, outs = call.kind, call.outs
        if kind == "broadcast":
            return move.broadcast(channel, outs[0], call.peer, private=private)
        x = call.ins[0]
        if kind == "all_gather":
            return move.all_gather(channel, outs, x, private=private)
        if kind == "all_to_all":
            return move.all_to_all(channel, outs, x, call.widths, private=private)
        if kind == "gather":
            return move.gather(channel, outs, x, call.peer, private=private)
        if kind == "scatter":
            widths = call.widths or ()
            return move.scatter(channel, outs[0], x, widths, call.peer, private=private)
        if kind == "reduce":
            return reduce_scatter.reduce(channel, outs[0], x, call.op, call.peer, private=private)
        if kind == "scan":
            return reduce_scatter.scan(channel, outs[0], x, call.op, exclusive=call.exclusive)
        assert kind == "reduce_scatter", kind
        offsets = _offsets(call, channel.size)
        return reduce_scatter.reduce_scatter(
            channel, outs[0], x, offsets, call.op, scale, private=private
        )

    def _send(self, call: Call, channel: Channel) -> Steps:
        port = self.port
        acks = port.channel(port.acknowledging_index(port.rank))
        private = self.selection.choose("send", call.nbytes) == "pulled"
        x = call.ins[0].view(torch.uint8)
        return message.send(channel, acks, x, call.peer, call.tag, private=private)

    def _post(self, call: Call) -> Receipt:
        x = call.outs[0].view(torch.uint8)
        source = call.peer if call.peer >= 0 else None
        return self._mailbox.post(x, call.tag, source, digest=call.digest, site=call.site)

    def _received(self, call: Call, receipt: Receipt, view: Channel) -> None:
        if call.source is not None:
            call.source.append(receipt.source)
        self._mailbox.withdraw(receipt)
        self._views.append(view)

    def _timed(
        self, act: Callable[..., None], operation: Operation, *timeout_s: float | None
    ) -> None:
        now_ns = self.transport.clock.now_ns
        start_ns = now_ns()
        try:
            act(operation, *timeout_s)
        finally:
            self.statistics.spent_ns += now_ns() - start_ns

    def _count(self, call: Call, operation: Operation) -> None:
        statistics = self.statistics
        statistics.num_operations += 1
        statistics.nbytes += call.nbytes
        statistics.waited_ns += operation.waited_ns


def _offsets(call: Call, size: int) -> list[int]:
    """First element of each part of a reduce_scatter, and the end."""
    return [0, *accumulate(call.widths or [call.ins[0].numel() // size] * size)]
