"""State machine of remote references: which forks keep a value alive, and when it is dropped.

Problem: a value lives in one process, its owner, and others refer to it. The owner must not drop it
while a process refers to it or a reference is in flight, and must drop it afterwards. Messages may
be lost, duplicated or delayed, and processes die.

Idea: each process that refers to a value holds a fork, which the owner registers. A process that
sends a reference on keeps its fork until the receiver's fork, its child, is confirmed by the owner.
So the owner registers every fork before the last one is deleted. Each message is resent until it is
answered; duplicates have no effect.

    user                                        owner
    receives a fork of another user     Fork ->          registers it
                                    <- Forked
    Confirmed -> to its parent, which may be deleted now
    its last handle is collected, it and
    all its children are confirmed    UserDelete ->      the last fork: Drop
                                    <- Deleted
    the owner shares its value                           registers the child immediately
    returns a fork to its owner in a call                answers the call, which confirms the child
    a process is lost                                    deletes its forks

    a fork arrives before the call that makes its value  registers its user and the value's creator
    that call never arrives: its process is lost         Unmade

A request is open until it is answered. Users send the number of their oldest open request, so that
the owner does not take a late copy of an earlier one for a new request.

Source: P. Moritz et al., Ray, OSDI 2018, for ownership; torch.distributed.rpc's notes on remote
references, for the order of messages. Leases by process: C. Gray, D. Cheriton, SOSP 1989.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from braid.rpc.protocol.reference_messages import (
    Confirmed,
    Deleted,
    Fork,
    Forked,
    Id,
    Noted,
    ReferenceMessage,
    UserDelete,
)

__all__ = [
    "Drop",
    "Instruction",
    "ReferencesState",
    "Send",
    "Unknown",
    "Unmade",
]


class Send(NamedTuple):
    """Instruction: send a message to a process."""

    to: int
    message: msgspec.Struct


class Drop(NamedTuple):
    """Instruction: drop a value of this process, since its last fork (reference) is gone."""

    ref: Id


class Unknown(NamedTuple):
    """Instruction: the value of a reference was lost, since its owner died or dropped it."""

    fork: Id
    reason: str


class Unmade(NamedTuple):
    """Instruction: fail a value with remote references, since the call that makes it is lost."""

    ref: Id
    reason: str


Instruction: TypeAlias = Send | Drop | Unknown | Unmade


@dataclass(slots=True)
class _UserFork:
    """A fork that this process holds of another one's value.

    Attributes:
        ref: The reference.
        owner: Process of the value.
        parent: Process that sent it and waits for its confirmation; -1 if none waits.
        number: Number of the request that registers it; 0 if its owner has registered it.
        state: Progress.
        is_released: Whether the last handle was collected.
        children: Unconfirmed forks that were sent to others, with the receiving processes.
    """

    ref: Id
    owner: int
    parent: int
    number: int
    state: Literal["creating", "asked", "confirmed", "deleting"]
    is_released: bool = False
    children: dict[Id, int] = field(default_factory=dict)


class ReferencesState:
    """State machine of one process: references to its values, and to values of others.

    Args:
        process: Number of this process.
        first: First number of its references and forks; not used by an earlier process.
    """

    def __init__(self, process: int, first: int = 1) -> None:
        self.process = process
        self._next = first
        self._owned: dict[Id, dict[Id, int]] = {}  # forks of each value, with their processes
        self._forks: dict[Id, _UserFork] = {}
        self._unnoted: dict[Id, int] = {}  # `Confirmed` messages without an answer, by fork
        self._oldest: dict[int, int] = {}  # oldest open request of each process
        self._over: dict[int, set[int]] = {}  # later requests with a deleted fork
        self._unmade: set[Id] = set()  # values that were mentioned before the calls that make them
        self._dead: set[int] = set()

    @property
    def owned(self) -> tuple[Id, ...]:
        """References to values of this process."""
        return tuple(self._owned)

    @property
    def num_forks(self) -> int:
        """Number of forks (registered references) of this process' values, also in this process."""
        return sum(map(len, self._owned.values()))

    @property
    def num_pending_users(self) -> int:
        """Number of forks (references) of this process that their owners have not confirmed."""
        return sum(entry.state in {"creating", "asked"} for entry in self._forks.values())

    @property
    def num_pending_children(self) -> int:
        """Number of forks (references) that this process passed on and that are not confirmed."""
        return sum(len(entry.children) for entry in self._forks.values())

    def counts(self) -> tuple[int, int, int, int]:
        """Return the numbers of shared values, their forks (uses), awaited values, open forks."""
        shared = [
            sum(user != self.process or fork in self._forks for fork, user in forks.items())
            for forks in self._owned.values()
        ]
        creating = sum(entry.state == "creating" for entry in self._forks.values())
        pending = self.num_pending_users + self.num_pending_children
        return sum(map(bool, shared)), sum(shared), creating, pending

    @property
    def is_quiet(self) -> bool:
        """Whether no message of this process waits for an answer."""
        return not self._unnoted and all(
            entry.state == "confirmed" and not entry.children for entry in self._forks.values()
        )

    def is_confirmed(self, fork: Id) -> bool:
        """Return whether the owner has confirmed a reference of this process."""
        entry = self._forks.get(fork)
        return entry is None or entry.state not in {"creating", "asked"}

    def is_held(self, fork: Id) -> bool:
        """Return whether this process has a handle (an `RRef`) for a fork of another's value."""
        entry = self._forks.get(fork)
        return entry is not None and not entry.is_released

    @property
    def oldest_open(self) -> int:
        """Lowest number of an unfinished request of this process, or fork that it passed on."""
        numbers = [
            entry.number
            for entry in self._forks.values()
            if entry.number and (entry.state in {"creating", "asked"} or entry.children)
        ]
        return min(numbers, default=self._next)

    # -- handles of this process

    def new_owned(self) -> tuple[Id, Id]:
        """Make numbers of a reference to a value of this process, and of the first fork (use)."""
        ref, fork = self._new_id(), self._new_id()
        self._owned[ref] = {fork: self.process}
        return ref, fork

    def new_remote(self, owner: int) -> tuple[Id, Id]:
        """Make a reference to a value that the process `owner` is about to make.

        The call that makes the value also registers the fork, and contains `oldest_open`. Call
        `created` when that call is answered.
        """
        ref, fork = self._new_id(), self._new_id()
        self._forks[fork] = _UserFork(ref, owner, -1, fork.number, "creating")
        return ref, fork

    def created(self, fork: Id) -> list[Instruction]:
        """Record that the call which makes the value of `new_remote` was answered or failed."""
        entry = self._forks.get(fork)
        if entry is None or entry.state != "creating":
            return []
        entry.state = "confirmed"
        return self._try_delete(fork, entry)

    def accept(self, ref: Id, fork: Id, user: int, oldest_open: int) -> list[Instruction]:
        """Register the fork of a user that makes a value in this process, before its call runs."""
        self._dead.discard(user)
        self._trim(user, oldest_open)
        self._unmade.discard(ref)
        self._register(ref, fork, user, fork.number)
        return [] if ref in self._owned else [Drop(ref)]  # the user has released it already

    def handle(self, ref: Id) -> Id:
        """Return the number of a new fork, for one more handle of a value of this process."""
        fork = self._new_id()
        self._owned[ref][fork] = self.process
        return fork

    def share(self, ref: Id, fork: Id, to: int) -> Id:
        """Return the number of a new fork for process `to`, to send with a reference.

        If the send fails because `to` is lost, call `lost` again.
        """
        child = self._new_id()
        entry = self._forks.get(fork)
        is_mine = entry is not None and entry.owner == self.process
        if ref in self._owned or (is_mine and self._expect(ref)):
            self._owned[ref][child] = to
        elif entry is not None:  # else the value is lost; the receiver learns it from the owner
            entry.children[child] = to
        return child

    def unshare(self, ref: Id, child: Id) -> list[Instruction]:
        """Delete a fork made by `share` that will not be sent."""
        return [*self._forget(ref, child), *self.confirmed(child)]

    def receive(
        self, ref: Id, fork: Id, owner: int, parent: int, *, will_answer: bool = False
    ) -> tuple[Id | None, list[Instruction]]:
        """Register a fork that has arrived with a message of `parent`.

        Args:
            ref: The reference.
            fork: The fork.
            owner: Process of the value.
            parent: Process that has sent the message.
            will_answer: Whether the message is answered, upon which the parent calls `confirmed`
                for the forks that the message returned to their owner.

        Returns:
            The fork of the new handle, None if the value was dropped; and instructions.
        """
        if owner == self.process:
            known = ref in self._owned or self._expect(ref)
            handle = self.handle(ref) if known else None
            if parent == owner:  # the owner's own fork has returned, and is not needed
                return handle, self._forget(ref, fork) if known else []
            if will_answer:
                return handle, []
            self._unnoted[fork] = parent
            return handle, [Send(parent, Confirmed(fork))]
        if fork in self._forks:
            return fork, []
        if parent == owner:  # it has registered the fork before it sent it
            self._forks[fork] = _UserFork(ref, owner, -1, 0, "confirmed")
            return fork, []
        number = self._new_id().number
        self._forks[fork] = _UserFork(ref, owner, parent, number, "asked")
        return fork, [Send(owner, self._request(fork))]

    def release(self, ref: Id, fork: Id) -> list[Instruction]:
        """Release the handle (`RRef`) of the fork `fork` of a reference."""
        entry = self._forks.get(fork)
        if entry is None:
            return self._forget(ref, fork)
        entry.is_released = True
        return self._try_delete(fork, entry)

    # -- messages

    def on_message(self, sender: int, message: ReferenceMessage) -> list[Instruction]:
        """Handle a message, which may be late, duplicated, or about a deleted fork."""
        self._dead.discard(sender)
        match message:
            case Fork():
                return self._on_fork(sender, message)
            case Forked(fork, is_known):
                return self._on_forked(fork, is_known)
            case Confirmed(fork):
                return [*self.confirmed(fork), Send(sender, Noted(fork))]
            case Noted(fork):
                self._unnoted.pop(fork, None)
                return []
            case UserDelete(ref, fork, number, oldest_open):
                self._trim(sender, oldest_open)
                if number and self._is_new(sender, number):
                    self._over.setdefault(sender, set()).add(number)
                return [*self._forget(ref, fork), Send(sender, Deleted(fork))]
            case Deleted(fork):
                entry = self._forks.get(fork)
                if entry is not None and entry.state == "deleting":
                    del self._forks[fork]
                return []

    def confirmed(self, child: Id) -> list[Instruction]:
        """Remove a passed-on fork that the owner has registered, or that did not arrive."""
        for fork, entry in list(self._forks.items()):
            if child in entry.children:
                del entry.children[child]
                return self._try_delete(fork, entry)
        return []

    def lost(self, process: int) -> list[Instruction]:
        """Delete the forks of a lost process, and fail references to its values."""
        # What the process would have answered never comes: its forks, its values, and confirmations
        # for which it waited. It may have had the only child of a fork, which can be deleted now.
        self._dead.add(process)
        instructions: list[Instruction] = []
        for ref in [ref for ref in self._unmade if ref.process == process]:
            self._unmade.discard(ref)
            instructions.append(Unmade(ref, f"process {process}, which was to make it, is lost"))
        for ref in list(self._owned):
            for fork in [fork for fork, user in self._owned[ref].items() if user == process]:
                instructions += self._forget(ref, fork)
        for fork in [fork for fork, entry in self._forks.items() if entry.owner == process]:
            if not self._forks.pop(fork).is_released:
                instructions.append(
                    Unknown(fork, f"process {process}, which had the value, is lost")
                )
        for fork, entry in list(self._forks.items()):
            entry.parent = -1 if entry.parent == process else entry.parent
            entry.children = {c: to for c, to in entry.children.items() if to != process}
            instructions += self._try_delete(fork, entry)
        self._unnoted = {fork: to for fork, to in self._unnoted.items() if to != process}
        self._over.pop(process, None)
        self._oldest.pop(process, None)
        return [
            instruction
            for instruction in instructions
            if not (isinstance(instruction, Send) and instruction.to == process)
        ]

    def resend(self) -> list[Send]:
        """Return all messages that have no answer, to be sent again."""
        instructions: list[Send] = []
        for fork, entry in self._forks.items():
            if entry.state == "asked":
                instructions.append(Send(entry.owner, self._request(fork)))
            if entry.state == "deleting":
                instructions.append(Send(entry.owner, self._delete(fork)))
        instructions += [Send(to, Confirmed(fork)) for fork, to in self._unnoted.items()]
        return instructions

    # -- inside

    def _new_id(self) -> Id:
        self._next += 1
        return Id(self.process, self._next - 1)

    def _request(self, fork: Id) -> Fork:
        entry = self._forks[fork]
        return Fork(entry.ref, fork, entry.number, self.oldest_open)

    def _delete(self, fork: Id) -> UserDelete:
        entry = self._forks[fork]
        return UserDelete(entry.ref, fork, entry.number, self.oldest_open)

    def _is_new(self, user: int, number: int) -> bool:
        # A late copy of a request may arrive after its fork was deleted. If it were registered
        # again, no process would delete it, and the value would stay forever. The owner cannot
        # remember all deleted forks. Users say which requests are over, so it remembers deleted
        # forks of open requests only.
        return number >= self._oldest.get(user, 0) and number not in self._over.get(user, ())

    def _trim(self, user: int, oldest_open: int) -> None:
        """Forget the requests of a user that are over, with all their copies."""
        if oldest_open > self._oldest.get(user, 0):
            self._oldest[user] = oldest_open
            over = self._over.get(user, set())
            self._over[user] = {number for number in over if number >= oldest_open}

    def _register(self, ref: Id, fork: Id, user: int, number: int) -> None:
        if self._is_new(user, number):
            self._owned.setdefault(ref, {})[fork] = user

    def _expect(self, ref: Id) -> bool:
        """Register the creator of a value before its call arrives; return whether it is known."""
        # A reference may be faster than the call that makes its value: the creator passes it on at
        # once, and messages of two processes have no order. Without the creator's fork, the value
        # would be dropped as soon as the early fork is deleted.
        creator, number = ref
        first = Id(creator, number + 1)  # the fork made with the reference
        is_mine = creator == self.process
        if creator in self._dead or (is_mine and first not in self._forks):
            return False
        self._register(ref, first, creator, first.number)
        if ref in self._owned:
            self._unmade.add(ref)
        return ref in self._owned

    def _on_fork(self, user: int, ask: Fork) -> list[Instruction]:
        self._trim(user, ask.oldest_open)
        is_known = True
        if self._is_new(user, ask.number):  # else it is a late copy
            is_known = ask.ref in self._owned or self._expect(ask.ref)
            if is_known:
                self._register(ask.ref, ask.fork, user, ask.number)
        return [Send(user, Forked(ask.fork, is_known))]

    def _on_forked(self, fork: Id, is_known: bool) -> list[Instruction]:
        entry = self._forks.get(fork)
        if entry is None or entry.state != "asked":
            return []
        instructions: list[Instruction] = []
        if entry.parent >= 0:
            self._unnoted[fork] = entry.parent
            instructions.append(Send(entry.parent, Confirmed(fork)))
        if not is_known:
            del self._forks[fork]
            if not entry.is_released:
                instructions.append(Unknown(fork, f"process {entry.owner} has dropped the value"))
            return instructions
        entry.state = "confirmed"
        return [*instructions, *self._try_delete(fork, entry)]

    def _try_delete(self, fork: Id, entry: _UserFork) -> list[Instruction]:
        # Only now: while a child is not confirmed, its `Fork` may still be on its way to the owner.
        # A `UserDelete` that came before it could delete the last fork, and the owner would drop a
        # value to which the receiver of the child refers.
        if entry.is_released and entry.state == "confirmed" and not entry.children:
            entry.state = "deleting"
            return [Send(entry.owner, self._delete(fork))]
        return []

    def _forget(self, ref: Id, fork: Id) -> list[Instruction]:
        forks = self._owned.get(ref)
        if forks is None or fork not in forks:
            return []
        del forks[fork]
        if forks:
            return []
        del self._owned[ref]
        self._unmade.discard(ref)
        return [Drop(ref)]
