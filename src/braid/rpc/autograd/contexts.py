"""Contexts of distributed autograd on one node.

`protocol.autograd_state` decides when which local backward runs. This module runs it: from the
roots, or from the tensors of a send when their gradients have come. Since gradients are linear, the
gradients of several local backwards add up to those of one.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import get_args

import torch

from braid.errors import BraidError, CommError, CommTimeout
from braid.rpc.autograd.accumulation import (
    accumulated,
    has_hooks,
    hook_groups,
    in_own_memory,
)
from braid.rpc.autograd.graph import Receive, add_grads
from braid.rpc.autograd.node_context import Context
from braid.rpc.codec import Codec, tensors_of
from braid.rpc.leader_followers import LeaderFollowers
from braid.rpc.messages import AutogradEdge, Body
from braid.rpc.options import RpcOptions
from braid.rpc.outcomes import RpcError
from braid.rpc.peers import Peers
from braid.rpc.protocol.autograd_state import (
    Acknowledge,
    AutogradMessage,
    BackwardFailed,
    BackwardFinished,
    FailBackward,
    Gradients,
    Instruction,
    Mark,
    Mode,
    Release,
    RunBackward,
    Ship,
)
from braid.rpc.protocol.references_state import Id, Send
from braid.rpc.workers import node_of

__all__ = ["Contexts"]

_CURRENT: ContextVar[int] = ContextVar("braid-rpc-autograd", default=-1)
_NO_EDGE = Id(-1, -1)
_ID_BITS = 48  # of a context's number; those above are its origin, as torch has them
_NUM_OVER = 1024
_MESSAGES = get_args(AutogradMessage)


@dataclass(eq=False)
class Contexts:
    """All contexts of a node.

    Attributes:
        peers: Sends the messages of the protocol.
        pool: Threads that receive.
        codec: Packs gradients.
        options: Choices of the node.
    """

    peers: Peers
    pool: LeaderFollowers
    codec: Codec
    options: RpcOptions

    def __post_init__(self) -> None:
        """Begin without contexts."""
        self._lock = threading.Lock()
        self._contexts: dict[int, Context] = {}
        self._over: deque[int] = deque(maxlen=_NUM_OVER)  # calls of theirs may still come
        # not those of an earlier life of this node, which others may still know
        self._numbers = itertools.count((self.peers.incarnation % (1 << 23) << 24) + 1)

    # -- life of a context

    def open(self) -> int:
        """Begin a context in this thread; see `dist_autograd.context`."""
        if _CURRENT.get() >= 0:
            msg = (
                f"Already have an autograd context id for this thread: {_CURRENT.get()}. "
                "Distributed autograd contexts do not nest: leave that one first"
            )
            raise RpcError(msg)
        number = (self.peers.info.id << _ID_BITS) + next(self._numbers)
        with self._lock:
            self._contexts[number] = Context(self.peers.info.id, number)
        _CURRENT.set(number)
        return number

    def close(self, number: int) -> None:
        """End a context on all nodes."""
        _CURRENT.set(-1)
        self.release(number)

    @property
    def current(self) -> Context | None:
        """The context of this thread."""
        number = _CURRENT.get()
        return None if number < 0 else self._contexts.get(number)

    @property
    def largest_number(self) -> int:
        """Largest number that a context of this node can have."""
        return (self.peers.info.id << _ID_BITS) + (1 << _ID_BITS) - 1

    @property
    def num_backwards(self) -> int:
        """Number of backwards in which this node takes part now."""
        with self._lock:
            return sum(own.state.is_running for own in self._contexts.values())

    def get(self, number: int) -> Context:
        """Return a context.

        Raises:
            RpcError: It is over, or was never here.
        """
        own = self._contexts.get(number)
        if own is None:
            msg = (
                f"Could not find autograd context with id: {number}. It is over, or no call of it "
                f"has come to {self.peers.info.name}"
            )
            raise RpcError(msg)
        return own

    @property
    def numbers(self) -> tuple[int, ...]:
        """Contexts that have something here."""
        with self._lock:
            return tuple(self._contexts)

    @contextlib.contextmanager
    def entered(self, edge: AutogradEdge) -> Iterator[None]:
        """Let the code inside belong to the context of a call."""
        token = _CURRENT.set(edge.context)
        try:
            with torch.set_grad_enabled(edge.is_recording):
                yield
        finally:
            _CURRENT.reset(token)

    def release(self, number: int) -> None:
        """Forget a context, here and where else it is known."""
        with self._lock:
            own = self._contexts.pop(number, None)
            self._over.append(number)
        if own is not None:
            self._act(own, own.state.release())

    # -- recording

    def outgoing(self, tensors: Sequence[torch.Tensor], to: int) -> AutogradEdge | None:
        """Record the tensors of a message that is about to leave; None outside of a context."""
        number = _CURRENT.get()
        own = None if number < 0 else self._known(number)
        if own is None:
            return None
        is_recording = torch.is_grad_enabled()
        places = [n for n, each in enumerate(tensors) if each.requires_grad and is_recording]
        with own.lock:
            own.state.met(to)
            if not places:
                return AutogradEdge(number, _NO_EDGE, [], is_recording)
            edge = Id(self.peers.info.id, next(self._numbers))
            own.state.sent(edge, to)
            own.sends[edge] = [tensors[place] for place in places]
        return AutogradEdge(number, edge, places, is_recording)

    def incoming(
        self, edge: AutogradEdge | None, tensors: list[torch.Tensor], sender: int
    ) -> list[torch.Tensor]:
        """Return the tensors of a message that has arrived, as results of its receive.

        Those of a context that is over are values only.
        """
        if edge is None:
            return tensors
        for tensor in tensors:
            tensor.requires_grad_(False)
        own = self._known(edge.context)
        if own is None:
            return tensors
        with own.lock:
            own.state.met(sender)
            if not edge.tensors:
                return tensors
            own.state.received(edge.number, sender)
            receive = own.receives[edge.number] = Receive(edge.number, len(edge.tensors))
        with torch.enable_grad():
            attached = receive.attach([tensors[place] for place in edge.tensors])
        own.functions[edge.number] = attached[0].grad_fn
        done = list(tensors)
        for place, tensor in zip(edge.tensors, attached, strict=True):
            done[place] = tensor
        return done

    def _known(self, number: int) -> Context | None:
        """Return a context, which may be new here; None if it is over."""
        with self._lock:
            own = self._contexts.get(number)
            is_own = number >> _ID_BITS == self.peers.info.id
            if own is None and not is_own and number not in self._over:
                own = self._contexts[number] = Context(self.peers.info.id, number)
            return own

    # -- backward

    def backward(
        self,
        number: int,
        roots: Sequence[torch.Tensor],
        retain_graph: bool = False,
        *,
        timeout_s: float | None = None,
        mode: Mode = "smart",
    ) -> None:
        """Run a backward as its origin; see `dist_autograd.backward`."""
        own = self.get(number)
        for place, root in enumerate(roots):
            if not root.requires_grad or root.numel() != 1:
                msg = (
                    f"root {place} has {root.numel()} elements and requires_grad is "
                    f"{root.requires_grad}: the backward begins at tensors of one element that "
                    "were computed in the context"
                )
                raise RpcError(msg)
        if not roots:
            msg = "the backward needs at least one root"
            raise RpcError(msg)
        with own.lock:
            this = Id(self.peers.info.id, next(self._numbers))
            if own.state.failure_of(this):
                msg = f"context {number} has failed: {own.state.failure_of(this)}"
                raise CommError(msg)
            own.begin(roots)
            own.retains, own.mode = retain_graph, mode
            done = own.state.begin(this, mode)
        self._act(own, done)
        seconds = self.options.rpc_timeout if timeout_s is None else timeout_s
        is_over = self.pool.wait(
            lambda: own.finished is not None or bool(own.state.failure_of(this)),
            seconds or None,
            lambda each: isinstance(each.message, _MESSAGES),
            is_quick=False,
        )
        if not is_over:
            with own.lock:
                lines = "; ".join(own.state.waiting())
                reason = f"the backward of context {number} did not end in {seconds:g} s: {lines}"
                done = own.state.fail(reason, this)
            self._act(own, done)
            raise CommTimeout(reason)
        if own.state.failure_of(this):
            own.restore()  # the thread that learned of the failure may not have come to it yet
            raise CommError(own.state.failure_of(this))
        assert own.finished is not None
        if own.finished.pending:
            unused = sum(map(len, own.finished.pending.values()))
            nodes = ", ".join(self.peers.directory.find(n).name for n in own.finished.pending)
            msg = (
                f"the backward of context {number} is incomplete: {unused} messages to {nodes} had "
                "results that the roots do not depend on. Use mode='smart'"
            )
            raise CommError(msg)

    def on_message(
        self, sender: int, message: AutogradMessage, buffers: Sequence[memoryview]
    ) -> None:
        """Handle a message of the protocol; one of a context that is over means nothing."""
        if isinstance(message, Release):
            self.release(message.context)
            return
        own = self._contexts.get(message.context)
        if own is None:
            if isinstance(message, Mark | Gradients):
                reason = f"{self.peers.info.name} has released context {message.context}"
                self.peers.transmit(sender, BackwardFailed(message.context, reason))
            return
        with own.lock:
            match message:
                case Mark():
                    done = own.state.on_mark(sender, message)
                case Gradients():
                    done = own.state.on_gradients(
                        sender, message.backward, message.edge, message.mode, message.failed
                    )
                    if own.state.is_current(message.backward):
                        body = Body(message.packed, message.specs, message.sparse)
                        tensors = tensors_of(body, buffers)
                        own.arrived[message.edge] = self.codec.unpack(
                            body.packed, tensors, node_of(sender)
                        )
                        own.retains, own.mode = message.retains, message.mode
                case Acknowledge():
                    done = own.state.on_acknowledge(message)
                case BackwardFailed():
                    done = own.state.fail(message.reason, message.backward)
        self._act(own, done)

    def lost(self, process: int, reason: str) -> None:
        """Let the contexts fail in which a lost node takes part."""
        for number in self.numbers:
            own = self._contexts.get(number)
            if own is not None:
                with own.lock:
                    done = own.state.lost(process, reason)
                self._act(own, done)
                if number >> _ID_BITS == process:  # which cannot release it
                    self.release(number)

    def _act(self, own: Context, instructions: Sequence[Instruction]) -> None:
        for each in instructions:
            match each:
                case Send(to, message):
                    self.peers.transmit(to, message)
                case RunBackward(edge, backward):
                    self._run(own, edge, backward)
                case Ship():
                    self._ship(own, each)
                case BackwardFinished():
                    own.finished = each
                    self.pool.notify()
                case FailBackward():
                    own.restore()
                    self.pool.notify()

    def _run(self, own: Context, source: Id | None, backward: Id) -> None:
        """Run the local backward of a source."""
        try:
            with own.local(backward, self.options.rpc_timeout or None):
                self._local(own, source, backward)
        except Exception as exc:  # noqa: BLE001 - hooks and functions of users may raise anything
            name = self.peers.info.name
            reason = f"the backward in {name} raised {type(exc).__name__}: {exc}"
            with own.lock:
                done = own.state.fail(reason, backward)
        else:
            with own.lock:
                done = own.state.finished(source, backward)
        self._act(own, done)

    def _local(self, own: Context, source: Id | None, backward: Id) -> None:
        with own.lock:
            if not own.state.is_current(backward):
                return
            reached = own.reached(source)
            keeps = own.retains or not own.state.is_last(source)
            if source is None:
                tensors = list(own.roots)
                grads: list[torch.Tensor | None] = [torch.ones_like(each) for each in tensors]
            else:
                tensors, grads = own.sends[source], own.arrived.pop(source)
        # gradients of tensors on a GPU that were mapped to it arrive in main memory
        pairs = [(t, g.to(t.device)) for t, g in zip(tensors, grads, strict=True) if g is not None]
        leaves, anchors = reached.leaves, [each.anchor for each in reached.receives]
        if not pairs or not (leaves or anchors):
            return
        if any(map(has_hooks, leaves)):
            own.reach_groups(hook_groups(leaves))
            grads_now = accumulated(pairs, leaves, anchors, own.gradients, own.hooked, keeps=keeps)
            with own.lock:
                for leaf, now in grads_now.items() if own.state.is_current(backward) else ():
                    own.gradients.pop(leaf, None)  # a hook may have dropped it
                    if now is not None:
                        own.gradients[leaf] = now
            return
        computed = torch.autograd.grad(
            [tensor for tensor, _ in pairs],
            [*leaves, *anchors],
            [grad for _, grad in pairs],
            retain_graph=keeps,
            allow_unused=True,
        )
        with own.lock:
            if not own.state.is_current(backward):
                return
            others = [grad for _, grad in pairs] + list(computed[len(leaves) :])
            own_memory = in_own_memory(computed[: len(leaves)], others)
            for leaf, grad in zip(leaves, own_memory, strict=True):
                if grad is not None:
                    total = add_grads(own.gradients.get(leaf), grad)
                    assert total is not None
                    own.gradients[leaf] = total

    def _ship(self, own: Context, ship: Ship) -> None:
        with own.lock:
            if not own.state.is_current(ship.backward):
                return
            grads = own.receives[ship.edge].take()
        try:
            body, buffers = self.codec.pack(grads, ship.to).as_body()
        except BraidError as exc:
            with own.lock:
                done = own.state.fail(f"a gradient cannot travel: {exc}", ship.backward)
            self._act(own, done)
            return
        message = Gradients(
            own.number,
            ship.backward,
            ship.edge,
            own.mode,
            own.retains,
            body.packed,
            body.specs,
            body.sparse,
            own.state.failed,
        )
        self.peers.transmit(ship.to, message, buffers)
