"""Values that a node owns and references that it has; `protocol.references_state` decides.

A released reference, such as of a handle that Python has collected, is put into a queue; `collect`
deletes it later in another thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from braid.errors import CommError
from braid.rpc.outcomes import AnswerFuture
from braid.rpc.peers import Peers
from braid.rpc.protocol.reference_messages import Id, ReferenceMessage
from braid.rpc.protocol.references_state import (
    Drop,
    Instruction,
    ReferencesState,
    Send,
    Unknown,
    Unmade,
)
from braid.rpc.workers import WorkerInfo

__all__ = ["References"]


class Counts(NamedTuple):
    """Numbers of remote references and values of a node, to find leaks.

    Attributes:
        shared: Values of this node that others refer to, or that a call has made.
        forks: References to these values.
        creating: Values that other nodes are about to make.
        pending: References held or passed on here that their owners have not confirmed.
    """

    shared: int
    forks: int
    creating: int
    pending: int


class References:
    """Values that this node owns, and references that it has to values of others.

    Args:
        peers: Sends the messages of the protocol.

    Attributes:
        state: State machine that decides; public for introspection.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._lock = threading.RLock()
        first = (peers.incarnation % (1 << 30) << 32) + 1
        self.state = ReferencesState(peers.info.id, first)
        self._values: dict[Id, AnswerFuture] = {}
        self._errors: dict[Id, BaseException] = {}  # of forks with a lost value
        self.released: deque[tuple[Id, Id]] = deque()  # handles that Python has collected

    def counts(self) -> Counts:
        """Return the numbers of references and values; see `Counts`."""
        with self._lock:
            return Counts(*self.state.counts())

    @property
    def oldest_open(self) -> int:
        """Lowest number of an unfinished request of this node."""
        with self._lock:
            return self.state.oldest_open

    def new_owned(self, value: Any) -> tuple[Id, Id]:
        """Register a value of this node; return numbers of its reference and first fork (use)."""
        future = AnswerFuture()
        future.set_result(value)
        with self._lock:
            ref, fork = self.state.new_owned()
            self._values[ref] = future
        return ref, fork

    def new_remote(self, owner: int) -> tuple[Id, Id]:
        """Return the numbers of a reference and a fork for a value that node `owner` will make."""
        with self._lock:
            if owner != self._peers.info.id:
                return self.state.new_remote(owner)
            ref, fork = self.state.new_owned()
            self._values[ref] = AnswerFuture()
            return ref, fork

    def created(self, fork: Id, error: BaseException | None = None) -> None:
        """Record that the owner makes the value of `new_remote`, or that the call has failed."""
        with self._lock:
            if error is not None and self.state.is_held(fork):
                self._errors[fork] = error.with_traceback(None)  # its frames hold arguments
            instructions = self.state.created(fork)
        self._act(instructions)

    def accept(self, ref: Id, fork: Id, user: int, oldest_open: int) -> None:
        """Register a value of this node that the call of a peer is about to make."""
        with self._lock:
            self._values.setdefault(ref, AnswerFuture())
            instructions = self.state.accept(ref, fork, user, oldest_open)
        self._act(instructions)

    def set_value(self, ref: Id, value: Any, error: BaseException | None) -> None:
        """Complete a value with a result or an error, unless it was dropped."""
        with self._lock:
            future = self._values.get(ref)
        if future is not None and not future.done():
            future.finish(value, error)

    def share(self, ref: Id, fork: Id, receiver: int) -> Id:
        """Return the number of a new fork, to send with the reference to node `receiver`."""
        self.check(fork)
        with self._lock:
            return self.state.share(ref, fork, receiver)

    def unshare(self, data: Sequence[Any]) -> None:
        """Withdraw a reference that was shared for a message which is not sent."""
        with self._lock:
            instructions = self.state.unshare(Id(*data[0]), Id(*data[1]))
        self._act(instructions)

    def confirmed(self, children: Sequence[Id]) -> None:
        """Release forks that a call returned to their owner, once it is answered or not sent."""
        with self._lock:
            instructions = [
                instruction for child in children for instruction in self.state.confirmed(child)
            ]
        self._act(instructions)

    def receive(
        self, ref: Id, fork: Id, owner: WorkerInfo, sender: int, *, will_answer: bool
    ) -> Id:
        """Register a received reference; return the number of this node's fork of it.

        Raises:
            CommError: The value was dropped, or its owner is lost.
        """
        with self._lock:
            held, instructions = self.state.receive(
                ref, fork, owner.id, sender, will_answer=will_answer
            )
            if held is not None and owner.id == self._peers.info.id:  # it may still be to come
                self._values.setdefault(ref, AnswerFuture())
        self._act(instructions)
        if held is None:
            msg = f"the value of a reference owned by {owner.name} was lost"
            raise CommError(msg)
        return held

    def future_of(self, ref: Id) -> torch.futures.Future[Any]:
        """Return the future of a value of this node.

        Raises:
            CommError: The value was dropped.
        """
        with self._lock:
            future = self._values.get(ref)
        if future is None:
            msg = f"{self._peers.info.name} no longer has the value of reference {tuple(ref)}"
            raise CommError(msg)
        return future

    def check(self, fork: Id) -> None:
        """Raise if the value to which `fork` refers could not be made, or is known to be lost."""
        error = self._errors.get(fork)
        if error is not None:
            raise error

    def is_confirmed(self, fork: Id) -> bool:
        """Return whether the value's owner has registered a fork (reference) of this node."""
        with self._lock:
            return self.state.is_confirmed(fork)

    def on_message(self, sender: int, message: ReferenceMessage) -> None:
        """Handle a message of the protocol."""
        with self._lock:
            instructions = self.state.on_message(sender, message)
        self._act(instructions)

    def lost(self, process: int) -> None:
        """Release the forks of a lost node, and fail references to its values."""
        with self._lock:
            instructions = self.state.lost(process)
        self._act(instructions)

    def collect(self) -> None:
        """Release the handles (RRefs) that Python has garbage-collected."""
        while self.released:
            ref, fork = self.released.popleft()
            with self._lock:
                self._errors.pop(fork, None)
                instructions = self.state.release(ref, fork)
            self._act(instructions)

    def close(self) -> None:
        """Drop all values; a value with a handle would otherwise keep this object alive."""
        with self._lock:
            self._values.clear()
            self._errors.clear()

    def _act(self, instructions: Sequence[Instruction]) -> None:
        """Execute instructions, without the lock: a send may wait, and may come in any order."""
        for instruction in instructions:
            match instruction:
                case Send(to, message):
                    self._peers.transmit(to, message)
                case Drop(ref):
                    self._values.pop(ref, None)
                case Unknown(fork, reason):
                    self._errors[fork] = CommError(f"the value of a reference was lost: {reason}")
                case Unmade(ref, reason):
                    error = CommError(f"the value of a reference was lost: {reason}")
                    self.set_value(ref, None, error)
