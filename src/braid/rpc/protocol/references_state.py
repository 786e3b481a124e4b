"""Remote references, as a state machine: who holds a value alive, and when it may go.

Problem: a value lives in one process, its owner, and others refer to it. The owner must not drop it
while somebody refers to it or a reference is on its way, and must not keep it for ever. Messages
may be lost, come twice or late, and processes die.

Idea: each process that refers to a value holds a fork, which the owner knows. A process that passes
its fork on keeps it until the receiver's fork, its child, is confirmed by the owner. So the owner
hears of every fork before the last one is deleted. Each message is answered, and sent again until
then; each may come twice.

    user                                        owner
    receives a fork of another user     Fork ->          registers it
                                    <- Forked
    Confirmed -> to its parent, which may go now
    its last handle is gone, all children
    are confirmed, so is it           UserDelete ->      the last fork: Drop
                                    <- Deleted
    the owner passes its value on                        registers the child at once
    passes a fork home in a call                         answers the call, which confirms the child
    a process is lost                                    its forks are gone

    a fork comes before the call that makes its value    registers its user, and who makes the value
    that call never comes, for its process is lost       Unmade

A request is open until it is answered. Users say which is their oldest open one, so that the owner
takes no late copy of another for a new request.

Source: P. Moritz et al., Ray, OSDI 2018, for ownership; torch.distributed.rpc's notes on remote
references, for the order of messages. Leases by process: C. Gray, D. Cheriton, SOSP 1989.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import msgspec

__all__ = [
    "Confirmed",
    "Deleted",
    "Drop",
    "Fork",
    "Forked",
    "Id",
    "Instruction",
    "Noted",
    "ReferenceMessage",
    "ReferencesState",
    "Send",
    "Unknown",
    "Unmade",
    "UserDelete",
]


class Id(NamedTuple):
    """Number of a reference or a fork, unique over all processes and their lives.

    Attributes:
        process: Process that has made it.
        number: Count in that process.
    """

    process: int
    number: int


class Fork(msgspec.Struct, tag="rpc.fork", frozen=True):
    """A user asks the owner to register its fork.

    All requests of this user below `oldest_open` are over, so late copies of them mean nothing.
    """

    ref: Id
    fork: Id
    number: int
    oldest_open: int


class Forked(msgspec.Struct, tag="rpc.forked", frozen=True):
    """The owner has registered a fork, or knows no such value."""

    fork: Id
    is_known: bool


class Confirmed(msgspec.Struct, tag="rpc.confirmed", frozen=True):
    """The owner knows a child: its parent may go."""

    fork: Id


class Noted(msgspec.Struct, tag="rpc.noted", frozen=True):
    """The parent has seen that its child is confirmed."""

    fork: Id


class UserDelete(msgspec.Struct, tag="rpc.delete", frozen=True):
    """A user refers to the value no longer; the numbers are as in `Fork`, 0 for no request."""

    ref: Id
    fork: Id
    number: int
    oldest_open: int


class Deleted(msgspec.Struct, tag="rpc.deleted", frozen=True):
    """The owner has forgotten a fork."""

    fork: Id


ReferenceMessage: TypeAlias = Fork | Forked | Confirmed | Noted | UserDelete | Deleted


class Send(NamedTuple):
    """Send a message to a process."""

    to: int
    message: msgspec.Struct


class Drop(NamedTuple):
    """Nobody refers to a value of this process any more."""

    ref: Id


class Unknown(NamedTuple):
    """The value of a fork is gone: its owner died, or does not know it."""

    fork: Id
    reason: str


class Unmade(NamedTuple):
    """A value of this process, to which others refer, is never going to be made."""

    ref: Id
    reason: str


Instruction: TypeAlias = Send | Drop | Unknown | Unmade


@dataclass(slots=True)
class _UserFork:
    """A fork that this process holds of another one's value.

    Attributes:
        ref: The reference.
        owner: Process of the value.
        parent: Process that has passed it on; -1 if nobody waits for its confirmation.
        number: Number of the request that registers it; 0 if its owner has registered it.
        state: Progress.
        is_released: Whether the last handle is gone.
        children: Forks that were passed on and are not confirmed, with their processes.
    """

    ref: Id
    owner: int
    parent: int
    number: int
    state: Literal["creating", "asked", "confirmed", "deleting"]
    is_released: bool = False
    children: dict[Id, int] = field(default_factory=dict)


class ReferencesState:
    """References of one process, as owner and as user.

    Args:
        process: Number of this process.
        first: First number of its references and forks; no earlier life of it may have used it.
    """

    def __init__(self, process: int, first: int = 1) -> None:
        self.process = process
        self._next = first
        self._owned: dict[Id, dict[Id, int]] = {}  # forks of each value, with their processes
        self._forks: dict[Id, _UserFork] = {}
        self._unnoted: dict[Id, int] = {}  # children whose parent has not answered
        self._oldest: dict[int, int] = {}  # oldest open request of each process
        self._over: dict[int, set[int]] = {}  # later ones whose forks are deleted
        self._unmade: set[Id] = set()  # values that were mentioned before the calls that make them
        self._dead: set[int] = set()

    @property
    def owned(self) -> tuple[Id, ...]:
        """References to values of this process."""
        return tuple(self._owned)

    @property
    def num_forks(self) -> int:
        """Number of forks of this process' values, its own handles included."""
        return sum(map(len, self._owned.values()))

    @property
    def num_pending_users(self) -> int:
        """Number of forks held here that the owner has not confirmed."""
        return sum(own.state in {"creating", "asked"} for own in self._forks.values())

    @property
    def num_pending_children(self) -> int:
        """Number of forks that were passed on and are not confirmed."""
        return sum(len(own.children) for own in self._forks.values())

    def counts(self) -> tuple[int, int, int, int]:
        """Return the numbers of shared values, of their forks, and of pending values and forks."""
        shared = [
            sum(user != self.process or fork in self._forks for fork, user in forks.items())
            for forks in self._owned.values()
        ]
        creating = sum(own.state == "creating" for own in self._forks.values())
        pending = self.num_pending_users + self.num_pending_children
        return sum(map(bool, shared)), sum(shared), creating, pending

    @property
    def is_quiet(self) -> bool:
        """Whether nothing waits for an answer."""
        return not self._unnoted and all(
            own.state == "confirmed" and not own.children for own in self._forks.values()
        )

    def is_confirmed(self, fork: Id) -> bool:
        """Whether the owner knows a fork that is held here."""
        own = self._forks.get(fork)
        return own is None or own.state not in {"creating", "asked"}

    def is_held(self, fork: Id) -> bool:
        """Whether a handle of another one's value has this fork."""
        own = self._forks.get(fork)
        return own is not None and not own.is_released

    @property
    def oldest_open(self) -> int:
        """Number below which all requests of this process are over.

        A request with children that are not confirmed is still open, since they mention its value.
        """
        numbers = [
            own.number
            for own in self._forks.values()
            if own.number and (own.state in {"creating", "asked"} or own.children)
        ]
        return min(numbers, default=self._next)

    # -- handles of this process

    def new_owned(self) -> tuple[Id, Id]:
        """Make a reference to a value of this process, and a fork for its first handle."""
        ref, fork = self._new_id(), self._new_id()
        self._owned[ref] = {fork: self.process}
        return ref, fork

    def new_remote(self, owner: int) -> tuple[Id, Id]:
        """Make a reference to a value that another process is about to make.

        The call that makes the value is its request, and has `oldest_open`; report its answer with
        `created`.
        """
        ref, fork = self._new_id(), self._new_id()
        self._forks[fork] = _UserFork(ref, owner, -1, fork.number, "creating")
        return ref, fork

    def created(self, fork: Id) -> list[Instruction]:
        """Learn that the owner has begun to make the value of `new_remote`, or may never do so."""
        own = self._forks.get(fork)
        if own is None or own.state != "creating":
            return []
        own.state = "confirmed"
        return self._try_delete(fork, own)

    def accept(self, ref: Id, fork: Id, user: int, oldest_open: int) -> list[Instruction]:
        """Register the fork of a user that makes a value here, before its call is executed."""
        self._dead.discard(user)
        self._trim(user, oldest_open)
        self._unmade.discard(ref)
        self._register(ref, fork, user, fork.number)
        return [] if ref in self._owned else [Drop(ref)]  # the user has given up

    def handle(self, ref: Id) -> Id:
        """Return a fork for another handle of a value of this process."""
        fork = self._new_id()
        self._owned[ref][fork] = self.process
        return fork

    def share(self, ref: Id, fork: Id, to: int) -> Id:
        """Return the fork to send to another process along with a reference that is held here.

        If the message cannot be sent, since that process is gone, call `lost` again.
        """
        child = self._new_id()
        own = self._forks.get(fork)
        is_mine = own is not None and own.owner == self.process
        if ref in self._owned or (is_mine and self._expect(ref)):
            self._owned[ref][child] = to
        elif own is not None:  # else the value is gone, which the receiver learns, too
            own.children[child] = to
        return child

    def unshare(self, ref: Id, child: Id) -> list[Instruction]:
        """Take a fork back that `share` has made, since no message will carry it."""
        return [*self._forget(ref, child), *self.confirmed(child)]

    def receive(
        self, ref: Id, fork: Id, owner: int, parent: int, *, will_answer: bool = False
    ) -> tuple[Id | None, list[Instruction]]:
        """Take a fork that has arrived with a message of `parent`.

        Args:
            ref: The reference.
            fork: The fork.
            owner: Process of the value.
            parent: Process that has sent the message.
            will_answer: Whether the message is answered, upon which the parent calls `confirmed`
                for the forks that have come home with it.

        Returns:
            The fork of the new handle, None if the value is gone; and instructions.
        """
        if owner == self.process:
            known = ref in self._owned or self._expect(ref)
            handle = self.handle(ref) if known else None
            if parent == owner:  # it has come home: the fork is used up
                return handle, self._forget(ref, fork) if known else []
            if will_answer:
                return handle, []
            self._unnoted[fork] = parent
            return handle, [Send(parent, Confirmed(fork))]
        if fork in self._forks:
            return fork, []
        if parent == owner:
            self._forks[fork] = _UserFork(ref, owner, -1, 0, "confirmed")
            return fork, []
        number = self._new_id().number
        self._forks[fork] = _UserFork(ref, owner, parent, number, "asked")
        return fork, [Send(owner, self._request(fork))]

    def release(self, ref: Id, fork: Id) -> list[Instruction]:
        """Let a handle go."""
        own = self._forks.get(fork)
        if own is None:
            return self._forget(ref, fork)
        own.is_released = True
        return self._try_delete(fork, own)

    # -- messages

    def on_message(self, sender: int, message: ReferenceMessage) -> list[Instruction]:
        """Handle a message; each may come late, twice, or after the end of what it is about."""
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
                own = self._forks.get(fork)
                if own is not None and own.state == "deleting":
                    del self._forks[fork]
                return []

    def confirmed(self, child: Id) -> list[Instruction]:
        """Learn that the owner knows a child, or that nobody has received it."""
        for fork, own in list(self._forks.items()):
            if child in own.children:
                del own.children[child]
                return self._try_delete(fork, own)
        return []

    def lost(self, process: int) -> list[Instruction]:
        """Let go what a process held, which is dead."""
        self._dead.add(process)
        done: list[Instruction] = []
        for ref in [ref for ref in self._unmade if ref.process == process]:
            self._unmade.discard(ref)
            done.append(Unmade(ref, f"process {process}, which was to make it, is lost"))
        for ref in list(self._owned):
            for fork in [fork for fork, user in self._owned[ref].items() if user == process]:
                done += self._forget(ref, fork)
        for fork in [fork for fork, own in self._forks.items() if own.owner == process]:
            if not self._forks.pop(fork).is_released:
                done.append(Unknown(fork, f"process {process}, which had the value, is lost"))
        for fork, own in list(self._forks.items()):
            own.parent = -1 if own.parent == process else own.parent
            own.children = {c: to for c, to in own.children.items() if to != process}
            done += self._try_delete(fork, own)
        self._unnoted = {fork: to for fork, to in self._unnoted.items() if to != process}
        self._over.pop(process, None)
        self._oldest.pop(process, None)
        return [each for each in done if not (isinstance(each, Send) and each.to == process)]

    def resend(self) -> list[Send]:
        """Send everything again that has no answer."""
        done: list[Send] = []
        for fork, own in self._forks.items():
            if own.state == "asked":
                done.append(Send(own.owner, self._request(fork)))
            if own.state == "deleting":
                done.append(Send(own.owner, self._delete(fork)))
        done += [Send(to, Confirmed(fork)) for fork, to in self._unnoted.items()]
        return done

    # -- inside

    def _new_id(self) -> Id:
        self._next += 1
        return Id(self.process, self._next - 1)

    def _request(self, fork: Id) -> Fork:
        own = self._forks[fork]
        return Fork(own.ref, fork, own.number, self.oldest_open)

    def _delete(self, fork: Id) -> UserDelete:
        own = self._forks[fork]
        return UserDelete(own.ref, fork, own.number, self.oldest_open)

    def _is_new(self, user: int, number: int) -> bool:
        return number >= self._oldest.get(user, 0) and number not in self._over.get(user, ())

    def _trim(self, user: int, oldest_open: int) -> None:
        """Forget the requests of a user of which no copy means anything any more."""
        if oldest_open > self._oldest.get(user, 0):
            self._oldest[user] = oldest_open
            over = self._over.get(user, set())
            self._over[user] = {each for each in over if each >= oldest_open}

    def _register(self, ref: Id, fork: Id, user: int, number: int) -> None:
        if self._is_new(user, number):
            self._owned.setdefault(ref, {})[fork] = user

    def _expect(self, ref: Id) -> bool:
        """Register who makes a value, if its call is still to come; its fork follows the ref."""
        creator, number = ref
        first = Id(creator, number + 1)
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
        own = self._forks.get(fork)
        if own is None or own.state != "asked":
            return []
        done: list[Instruction] = []
        if own.parent >= 0:
            self._unnoted[fork] = own.parent
            done.append(Send(own.parent, Confirmed(fork)))
        if not is_known:
            del self._forks[fork]
            if not own.is_released:
                done.append(Unknown(fork, f"process {own.owner} has dropped the value"))
            return done
        own.state = "confirmed"
        return [*done, *self._try_delete(fork, own)]

    def _try_delete(self, fork: Id, own: _UserFork) -> list[Instruction]:
        if own.is_released and own.state == "confirmed" and not own.children:
            own.state = "deleting"
            return [Send(own.owner, self._delete(fork))]
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
