"""Contexts of distributed autograd on one node.

`protocol.autograd_state` decides when a local backward runs. This module runs it: from the roots,
or from the tensors of a send when their gradients have arrived. Since gradients are linear, the
gradients of several local backwards sum to the gradients of a single one.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Sequence
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
from braid.rpc.bodies import tensors_of
from braid.rpc.codec import Codec
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
    Release,
    RunBackward,
    Ship,
)
from braid.rpc.protocol.reference_messages import Id
from braid.rpc.protocol.references_state import Send
from braid.rpc.workers import node_of

__all__ = ["Contexts"]

_CURRENT: ContextVar[int] = ContextVar("braid-rpc-autograd", default=-1)
_NO_EDGE = -1
_ID_BITS = 48  # of the number of a context or an edge; the higher bits are a node, as in torch
_NUM_OVER = 1024
_MESSAGES = get_args(AutogradMessage)


@dataclass(eq=False)
class Contexts:
    """All contexts of a node.

    Attributes:
        peers: Object that sends the messages of the protocol.
        pool: Threads that receive messages.
        codec: Codec that packs gradients.
        options: Options of the node.
    """

    peers: Peers
    pool: LeaderFollowers
    codec: Codec
    options: RpcOptions

    def __post_init__(self) -> None:
        """Begin without contexts."""
        self._lock = threading.Lock()
        self._contexts: dict[int, Context] = {}
        self._over: deque[int] = deque(maxlen=_NUM_OVER)  # their calls may still arrive
        # distinct from numbers of an earlier process of this node, which peers may still know
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
        """End the context with a number on all nodes."""
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
            return sum(context.state.is_running for context in self._contexts.values())

    def get(self, number: int) -> Context:
        """Return the context with a number.

        Raises:
            RpcError: The context is over, or has never been on this node.
        """
        context = self._contexts.get(number)
        if context is None:
            msg = (
                f"Could not find autograd context with id: {number}. The context has ended, or "
                f"no call inside it has reached {self.peers.info.name}: use the id within its "
                "`with` block"
            )
            raise RpcError(msg)
        return context

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the contexts with state on this node."""
        with self._lock:
            return tuple(self._contexts)

    def enter(self, call: AutogradEdge) -> None:
        """Make the context of a received call the current one, in this `contextvars` context."""
        _CURRENT.set(call.context)

    def release(self, number: int, sender: int | None = None) -> None:
        """Release the context `number` here, and on all nodes that this node knows to have it.

        `sender` is the node that has released it before; None for no node.
        """
        with self._lock:
            context = self._contexts.pop(number, None)
            self._over.append(number)
        if context is not None:
            self._act(context, context.state.release(sender))

    # -- recording

    def outgoing(
        self, tensors: Sequence[torch.Tensor], to: int, call: AutogradEdge | None = None
    ) -> AutogradEdge | None:
        """Record the tensors of a message to node `to`, and return the message's edge in the graph.

        The message belongs to the context of a received `call` that it answers; of this thread when
        None. Returns None without a context.
        """
        number = _CURRENT.get() if call is None else call.context
        context = None if number < 0 else self._known(number)
        if context is None:
            return None
        is_recording = torch.is_grad_enabled() if call is None else call.is_recording
        places = [n for n, tensor in enumerate(tensors) if tensor.requires_grad and is_recording]
        with context.lock:
            context.state.met(to)
            if not places:
                return AutogradEdge(number, _NO_EDGE, [], is_recording)
            edge = (self.peers.info.id << _ID_BITS) + len(context.sends)
            context.sends[edge] = [tensors[place] for place in places]
            history = context.state.sent(edge, to)
        return AutogradEdge(number, edge, places, is_recording, history)

    def incoming(
        self, edge: AutogradEdge | None, tensors: list[torch.Tensor], sender: int
    ) -> list[torch.Tensor]:
        """Return a received message's tensors as results of `RecvRpc`, so that they have a graph.

        If the context is over, the tensors have no graph.
        """
        if edge is None:
            return tensors
        for tensor in tensors:
            tensor.requires_grad_(False)
        context = self._known(edge.context)
        if context is None:
            return tensors
        with context.lock:
            context.state.met(sender)
            if not edge.tensors:
                return tensors
            context.state.received(edge.number, sender, edge.history)
            receive = context.receives[edge.number] = Receive(edge.number, len(edge.tensors))
        with torch.enable_grad():
            attached = receive.attach([tensors[place] for place in edge.tensors])
        context.functions[edge.number] = attached[0].grad_fn
        results = list(tensors)
        for place, tensor in zip(edge.tensors, attached, strict=True):
            results[place] = tensor
        return results

    def _known(self, number: int) -> Context | None:
        """Return a context, which may be new here; None if it is over."""
        with self._lock:
            context = self._contexts.get(number)
            is_own = number >> _ID_BITS == self.peers.info.id
            if context is None and not is_own and number not in self._over:
                context = self._contexts[number] = Context(self.peers.info.id, number)
            return context

    # -- backward

    def backward(
        self,
        number: int,
        roots: Sequence[torch.Tensor],
        retain_graph: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Run a backward of context `number`, as the node that begins it.

        See `dist_autograd.backward` for the arguments.
        """
        context = self.get(number)
        for place, root in enumerate(roots):
            if not root.requires_grad or root.numel() != 1:
                msg = (
                    f"roots[{place}] has {root.numel()} elements and requires_grad is "
                    f"{root.requires_grad}: pass tensors of one element, such as the loss, that "
                    "were computed in the context"
                )
                raise RpcError(msg)
        if not roots:
            msg = "backward() needs at least one root: pass a list with the loss"
            raise RpcError(msg)
        with context.lock:
            this = Id(self.peers.info.id, next(self._numbers))
            if context.state.failure_of(this):
                msg = f"context {number} has failed: {context.state.failure_of(this)}"
                raise CommError(msg)
            context.begin(roots)
            context.retains = retain_graph
            instructions = context.state.begin(this)
        self._act(context, instructions)
        seconds = self.options.rpc_timeout if timeout_s is None else timeout_s
        is_over = self.pool.wait(
            lambda: context.is_finished or bool(context.state.failure_of(this)),
            seconds or None,
            lambda delivery: isinstance(delivery.message, _MESSAGES),
            is_quick=False,
        )
        if not is_over:
            with context.lock:
                lines = "; ".join(context.state.waiting())
                reason = f"the backward of context {number} did not end in {seconds:g} s: {lines}"
                instructions = context.state.fail(reason, this)
            self._act(context, instructions)
            raise CommTimeout(reason)
        if context.state.failure_of(this):
            context.restore()  # the thread that received the failure may not have restored it yet
            raise CommError(context.state.failure_of(this))

    def on_message(
        self, sender: int, message: AutogradMessage, buffers: Sequence[memoryview]
    ) -> None:
        """Handle a message of the protocol; messages of a released context have no effect here."""
        if isinstance(message, Release):
            self.release(message.context, sender)
            return
        context = self._contexts.get(message.context)
        if context is None:
            if isinstance(message, Gradients):
                reason = f"{self.peers.info.name} has released context {message.context}"
                self.peers.transmit(sender, BackwardFailed(message.context, reason))
            return
        with context.lock:
            match message:
                case Gradients():
                    instructions = context.state.on_gradients(sender, message)
                    if context.state.is_current(message.backward):
                        body = Body(message.packed, message.specs, message.sparse)
                        tensors = tensors_of(body, buffers)
                        context.arrived[message.edge] = self.codec.unpack(
                            body.packed, tensors, node_of(sender)
                        )
                        context.retains = message.retains
                case Acknowledge():
                    instructions = context.state.on_acknowledge(message)
                case BackwardFailed():
                    instructions = context.state.fail(message.reason, message.backward)
        self._act(context, instructions)

    def lost(self, process: int, reason: str) -> None:
        """Fail the contexts in which a lost node takes part."""
        for number in self.numbers:
            context = self._contexts.get(number)
            if context is not None:
                with context.lock:
                    instructions = context.state.lost(process, reason)
                self._act(context, instructions)
                if number >> _ID_BITS == process:  # which cannot release it
                    self.release(number)

    def _act(self, context: Context, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Send(to, message):
                    self.peers.transmit(to, message)
                case RunBackward(edge, backward):
                    self._run(context, edge, backward)
                case Ship():
                    self._ship(context, instruction)
                case BackwardFinished():
                    context.is_finished = True
                    self.pool.notify()
                case FailBackward():
                    context.restore()
                    self.pool.notify()

    def _run(self, context: Context, source: int | None, backward: Id) -> None:
        """Run the local backward of a source."""
        try:
            with context.local(backward, self.options.rpc_timeout or None):
                self._local(context, source, backward)
        except Exception as exc:  # noqa: BLE001 - hooks and functions of users may raise anything
            name = self.peers.info.name
            reason = f"the backward in {name} raised {type(exc).__name__}: {exc}"
            with context.lock:
                instructions = context.state.fail(reason, backward)
        else:
            with context.lock:
                instructions = context.state.finished(source, backward)
        self._act(context, instructions)

    def _local(self, context: Context, source: int | None, backward: Id) -> None:
        with context.lock:
            if not context.state.is_current(backward):
                return
            reached = context.reached(source)
            keeps = context.retains or not context.state.is_last(source)
            if source is None:
                tensors = list(context.roots)
                grads: list[torch.Tensor | None] = [torch.ones_like(root) for root in tensors]
            else:
                tensors, grads = context.sends[source], context.arrived.pop(source)
        # gradients of tensors on a GPU that were mapped to it arrive in main memory
        pairs = [(t, g.to(t.device)) for t, g in zip(tensors, grads, strict=True) if g is not None]
        leaves, anchors = reached.leaves, [receive.anchor for receive in reached.receives]
        if not pairs or not (leaves or anchors):
            return
        if any(map(has_hooks, leaves)):
            context.reach_groups(hook_groups(leaves))
            grads_now = accumulated(
                pairs, leaves, anchors, context.gradients, context.hooked, keeps=keeps
            )
            with context.lock:
                for leaf, now in grads_now.items() if context.state.is_current(backward) else ():
                    context.gradients.pop(leaf, None)  # a hook may have dropped it
                    if now is not None:
                        context.gradients[leaf] = now
            return
        computed = torch.autograd.grad(
            [tensor for tensor, _ in pairs],
            [*leaves, *anchors],
            [grad for _, grad in pairs],
            retain_graph=keeps,
            allow_unused=True,
        )
        with context.lock:
            if not context.state.is_current(backward):
                return
            others = [grad for _, grad in pairs] + list(computed[len(leaves) :])
            own_memory = in_own_memory(computed[: len(leaves)], others)
            for leaf, grad in zip(leaves, own_memory, strict=True):
                if grad is not None:
                    total = add_grads(context.gradients.get(leaf), grad)
                    assert total is not None
                    context.gradients[leaf] = total

    def _ship(self, context: Context, ship: Ship) -> None:
        with context.lock:
            if not context.state.is_current(ship.backward):
                return
            grads = context.receives[ship.edge].take()
        try:
            body, buffers = self.codec.pack(grads, ship.to).as_body()
        except BraidError as exc:
            with context.lock:
                instructions = context.state.fail(
                    f"a gradient cannot be sent: {exc}", ship.backward
                )
            self._act(context, instructions)
            return
        message = Gradients(
            context.number,
            ship.backward,
            ship.edge,
            ship.plan,
            context.retains,
            body.packed,
            body.specs,
            body.sparse,
            ship.answers,
            context.state.failed,
        )
        self.peers.transmit(ship.to, message, buffers)
