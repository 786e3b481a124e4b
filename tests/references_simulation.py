"""Processes with remote references and a network between them, chosen by a seed, and an oracle.

The network loses, doubles, delays and reorders the messages of the protocol. A call arrives once,
unless a process at its ends dies. The oracle knows which handles exist and which are on their way,
so it judges each decision that lets a value go.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from braid.rpc.protocol.reference_messages import Id, ReferenceMessage
from braid.rpc.protocol.references_state import Drop, Instruction, ReferencesState, Send, Unknown

__all__ = ["Handle", "Packet", "World"]


@dataclass(eq=False)
class Handle:
    """A handle, or a fork on its way to become one.

    Attributes:
        ref: The reference.
        fork: Its fork.
        owner: Process of the value.
        process: Process that holds it, or is to receive it.
        parent: Handle that was passed on; None for the first handle of a value.
        is_confirmed: Whether the owner has registered the fork.
        is_open: Whether it exists, or is on its way.
        is_broken: Whether the process knows that the value is gone.
        is_given_up: Whether the call that makes the value has failed at the caller.
    """

    ref: Id
    fork: Id
    owner: int
    process: int
    parent: Handle | None = None
    is_confirmed: bool = False
    is_open: bool = True
    is_broken: bool = False
    is_given_up: bool = False

    @property
    def is_usable(self) -> bool:
        """Whether a program can pass it on."""
        return not self.is_broken and not self.is_given_up


@dataclass(eq=False)
class Packet:
    """Something that is under way from one process to another."""

    kind: Literal["protocol", "pass", "create", "created", "lost"]
    sender: int
    to: int
    message: ReferenceMessage | None = None
    handle: Handle | None = None
    oldest_open: int = 0


@dataclass
class World:
    """Processes and a network.

    Attributes:
        size: Number of processes.
        seed: Number that chooses all that happens by chance.
        loss: Chance that a message of the protocol is lost, and that it comes twice.
        fifo: Whether each link keeps the order.
    """

    size: int
    seed: int = 0
    loss: float = 0.0
    fifo: bool = False
    states: dict[int, ReferencesState] = field(default_factory=dict)
    packets: list[Packet] = field(default_factory=list)
    handles: list[Handle] = field(default_factory=list)
    known_lost: set[tuple[int, int]] = field(default_factory=set)
    dropped: list[Id] = field(default_factory=list)
    num_unknown: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.states = {number: ReferencesState(number) for number in range(self.size)}

    # -- what programs do

    def usable(self, process: int | None = None) -> list[Handle]:
        """Return handles that a program can use."""
        arriving = {id(each.handle) for each in self.packets if each.kind == "pass"}
        return [
            each
            for each in self.handles
            if each.is_open
            and id(each) not in arriving
            and each.process in self.states
            and process in {None, each.process}
        ]

    def new_owned(self, process: int) -> Handle:
        ref, fork = self.states[process].new_owned()
        return self._add(Handle(ref, fork, process, process, is_confirmed=True))

    def new_remote(self, process: int, owner: int) -> Handle:
        state = self.states[process]
        ref, fork = state.new_remote(owner)
        handle = self._add(Handle(ref, fork, owner, process))
        self._post(Packet("create", process, owner, None, handle, state.oldest_open))
        return handle

    def share(self, handle: Handle, to: int) -> Handle:
        fork = self.states[handle.process].share(handle.ref, handle.fork, to)
        child = self._add(Handle(handle.ref, fork, handle.owner, to, handle))
        child.is_confirmed = handle.ref in self.states[handle.process].owned
        self._post(Packet("pass", handle.process, to, None, child))
        return child

    def release(self, handle: Handle) -> None:
        handle.is_open = False
        self._act(handle.process, self.states[handle.process].release(handle.ref, handle.fork))

    def give_up(self, handle: Handle) -> None:
        """Let the call that makes a value fail at the caller, though it may still arrive."""
        handle.is_given_up = True
        self._act(handle.process, self.states[handle.process].created(handle.fork))

    def crash(self, process: int, kept: float = 0.5) -> None:
        """Let a process die; some of what it has sent still arrives, before its loss is known."""
        del self.states[process]
        for each in self.handles:
            each.is_open &= each.process != process
        self._cut(
            each
            for each in self.packets
            if each.to == process or (each.sender == process and self.random.random() >= kept)
        )
        self.packets += [Packet("lost", process, other) for other in self.states]

    # -- the network

    def deliverable(self) -> list[int]:
        """Return the places of packets that may arrive next; each once."""
        firsts: dict[tuple[int, int], int] = {}
        for place, each in enumerate(self.packets):
            firsts.setdefault((each.sender, each.to), place)
        return list(firsts.values()) if self.fifo else list(range(len(self.packets)))

    def deliver(self, place: int, *, stays: bool = False) -> None:
        """Let a packet arrive; one that stays arrives again later."""
        packet = self.packets[place] if stays else self.packets.pop(place)
        process, handle = packet.to, packet.handle
        state = self.states[process]
        match packet.kind:
            case "protocol":
                assert packet.message is not None
                self._act(process, state.on_message(packet.sender, packet.message))
            case "create":
                assert handle is not None
                done = state.accept(handle.ref, handle.fork, packet.sender, packet.oldest_open)
                self._act(process, done)
                self._post(Packet("created", process, packet.sender, None, handle))
            case "created":
                assert handle is not None
                self._act(process, state.created(handle.fork))
            case "pass":
                assert handle is not None
                self._receive(packet, handle)
            case "lost":
                link = packet.sender, process
                self._cut(each for each in self.packets if (each.sender, each.to) == link)
                self.known_lost.add((process, packet.sender))
                self._act(process, state.lost(packet.sender))
        self._note()

    def deliver_any(self) -> bool:
        """Let a packet arrive, or lose it, or let it arrive twice."""
        places = self.deliverable()
        if not places:
            return False
        place = self.random.choice(places)
        if self.packets[place].kind != "protocol" or self.random.random() >= self.loss:
            self.deliver(place)
        elif self.random.random() < 0.5:
            self.packets.pop(place)
        else:
            self.deliver(place, stays=True)
        return True

    def resend(self, process: int) -> None:
        self._act(process, list(self.states[process].resend()))

    def end(self) -> None:
        """Release all handles while messages arrive, until nothing is under way any more."""
        for _ in range(1000):
            usable = self.usable()
            if usable and self.random.random() < 0.5:
                self.release(self.random.choice(usable))
            elif not self.deliver_any() and not usable:
                if all(not state.resend() for state in self.states.values()):
                    return
                for process in list(self.states):
                    self.resend(process)
        raise AssertionError(f"it does not end: {self.packets}, {self.leaks()}")

    # -- the oracle

    def is_safe(self, handle: Handle) -> bool:
        """Return whether the value of a handle must exist."""
        return not handle.is_given_up and self._is_backed(handle)

    def is_given_up(self, ref: Id) -> bool:
        """Return whether the call that makes a value has failed at the caller."""
        return any(each.ref == ref and each.is_given_up for each in self.handles)

    def _is_backed(self, handle: Handle) -> bool:
        """Return whether living processes lead from the owner to a handle."""
        if handle.owner not in self.states or handle.is_broken:
            return False
        if handle.is_confirmed or handle.parent is None:
            return True
        return handle.parent.process in self.states and self._is_backed(handle.parent)

    def leaks(self) -> list[str]:
        """Return what is left though nobody refers to anything."""
        return [
            f"{process}: {state.owned} {state._forks} {state._unnoted} {state._over}"
            for process, state in self.states.items()
            if state.owned or state._forks or not state.is_quiet or state.num_forks
        ]

    # -- inside

    def _add(self, handle: Handle) -> Handle:
        self.handles.append(handle)
        return handle

    def _cut(self, packets: Iterable[Packet]) -> None:
        """Lose packets, and the forks that they carry."""
        for packet in list(packets):
            self.packets.remove(packet)
            if packet.kind == "pass" and packet.handle is not None:
                packet.handle.is_open = False

    def _post(self, packet: Packet) -> None:
        if packet.to in self.states:
            self.packets.append(packet)
        else:
            if packet.kind == "pass" and packet.handle is not None:
                packet.handle.is_open = False
            if (packet.sender, packet.to) in self.known_lost:
                self._act(packet.sender, self.states[packet.sender].lost(packet.to))

    def _receive(self, packet: Packet, handle: Handle) -> None:
        state = self.states[packet.to]
        was_safe = self.is_safe(handle)
        fork, done = state.receive(handle.ref, handle.fork, handle.owner, packet.sender)
        if fork is None:
            assert not was_safe, f"refused {handle}"
            handle.is_open = False
        else:
            handle.fork = fork
            handle.is_confirmed |= packet.to == handle.owner
        self._act(packet.to, done)

    def _act(self, process: int, instructions: Sequence[Instruction]) -> None:
        for each in instructions:
            match each:
                case Send(to, message):
                    self._post(Packet("protocol", process, to, message))
                case Drop(ref):
                    is_again = ref in self.dropped and not self.is_given_up(ref)
                    assert not is_again, f"dropped {ref} twice"
                    self.dropped.append(ref)
                    for handle in self.handles:
                        is_early = handle.ref == ref and handle.is_open and self.is_safe(handle)
                        assert not is_early, f"dropped {handle}"
                case Unknown(fork):
                    self._unknown(process, fork)
                case _:
                    pass

    def _unknown(self, process: int, fork: Id) -> None:
        self.num_unknown += 1
        for handle in self.handles:
            if handle.process == process and handle.fork == fork:
                assert handle.is_open, f"nobody asks for {handle}"
                assert not self.is_safe(handle), f"unknown {handle}"
                handle.is_broken = True

    def _note(self) -> None:
        for each in self.handles:
            own: Any = self.states.get(each.process)
            fork = None if own is None else own._forks.get(each.fork)
            if fork is not None and fork.state in {"confirmed", "deleting"}:
                each.is_confirmed = True
