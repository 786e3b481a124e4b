"""Remote references: no value goes early, none stays, whatever the network and processes do."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from braid.rpc.protocol.reference_messages import (
    Confirmed,
    Deleted,
    Fork,
    Forked,
    Id,
    Noted,
    UserDelete,
)
from braid.rpc.protocol.references_state import Drop, ReferencesState, Send, Unknown, Unmade
from references_simulation import World


def seeds(fast: int, proof: int) -> object:
    """Run a test with blocks of 100 seeds, since a test of its own for each would cost more."""
    blocks = [range(first, first + 100) for first in range(0, proof, 100)]
    marks = [pytest.mark.proof if block.start >= fast else () for block in blocks]
    return pytest.mark.parametrize(
        "block", [pytest.param(block, marks=own) for block, own in zip(blocks, marks, strict=True)]
    )


def step(world: World, crashes: int) -> None:
    """Let something happen."""
    chance = world.random
    process = chance.choice(list(world.states))
    anybody = range(world.size)
    usable = [each for each in world.usable(process) if each.is_usable]
    match chance.choices(
        ["own", "remote", "share", "release", "deliver", "resend", "give up", "crash"],
        [2, 3, 10, 6, 30, 2, 1, 0.5],
    )[0]:
        case "own":
            world.new_owned(process)
        case "remote":
            world.new_remote(process, chance.choice(anybody))
        case "share" if usable:
            world.share(chance.choice(usable), chance.choice(anybody))
        case "release" if world.usable(process):
            world.release(chance.choice(world.usable(process)))
        case "resend":
            world.resend(process)
        case "give up":
            made = [
                each
                for each in usable
                if each.fork in world.states[process]._forks and each.parent is None
            ]
            if made:
                world.give_up(chance.choice(made))
        case "crash" if world.size - len(world.states) < crashes:
            world.crash(process)
        case _:
            world.deliver_any()


def run(seed: int, crashes: int) -> World:
    world = World(3 + seed % 2, seed, loss=(seed % 3) * 0.2, fifo=seed % 5 == 0)
    for _ in range(80):
        step(world, crashes)
    world.end()
    assert world.leaks() == []
    return world


@seeds(200, 6000)
@pytest.mark.parametrize("crashes", [0, 2])
def test_values_live_as_long_as_handles_and_no_longer(block, crashes):
    for seed in block:
        world = run(seed, crashes)
        if not crashes:
            assert world.num_unknown == 0
            assert set(world.dropped) == {each.ref for each in world.handles}
            for owner in world.states.values():
                for user, state in world.states.items():
                    owner._trim(user, state.oldest_open)  # as the next message does
                assert not any(owner._over.values())


# -- all interleavings of short programs

PASSED_ON = [("remote", 1, 0), ("share", 1, 2), ("release", 1, 0), ("release", 2, 0)]
CHAIN = [
    *[("own", 0, 0), ("share", 0, 1), ("release", 0, 0)],
    *[("share", 1, 2), ("release", 1, 0), ("release", 2, 0)],
]
HOME = [("remote", 1, 0), ("share", 1, 0), ("release", 1, 0), ("release", 0, 0)]
ROUND = [
    *[("remote", 1, 0), ("share", 1, 2), ("release", 1, 0)],
    *[("share", 2, 0), ("release", 2, 0), ("release", 0, 0)],
]
TWICE = [("remote", 1, 0), ("share", 1, 0), ("give up", 1, 0), ("release", 1, 0), ("release", 0, 0)]


class Place(NamedTuple):
    """A world, what is left of its program, and the faults that may still happen."""

    world: World
    program: tuple[tuple[str, int, int], ...]
    copies: int
    losses: int
    crashes: int


def key(place: Place) -> int:
    world = place.world
    states = [(process, repr(vars(state))) for process, state in world.states.items()]
    packets = sorted(map(repr, world.packets))
    handles = repr(world.handles)
    return hash((repr(states), *packets, handles, sorted(world.known_lost).__repr__(), place[1:]))


def following(place: Place) -> Iterator[Place]:
    """Return all places to which one event leads."""
    frozen = pickle.dumps(place.world)
    acting = [process for _, process, _ in place.program]
    for number, action in enumerate(place.program):
        world = pickle.loads(frozen)
        if acting.index(action[1]) == number and act(world, *action):
            program = place.program[:number] + place.program[number + 1 :]
            yield place._replace(world=world, program=program)
    for number, packet in enumerate(place.world.packets):
        world = pickle.loads(frozen)
        world.deliver(number)
        yield place._replace(world=world)
        if packet.kind == "protocol" and place.copies:
            world = pickle.loads(frozen)
            world.deliver(number, stays=True)
            yield place._replace(world=world, copies=place.copies - 1)
        if packet.kind == "protocol" and place.losses:
            world = pickle.loads(frozen)
            world.packets.pop(number)
            yield place._replace(world=world, losses=place.losses - 1)
    for process in place.world.states if place.crashes else ():
        for kept in (0.0, 1.0):
            world = pickle.loads(frozen)
            world.crash(process, kept)
            yield place._replace(world=world, crashes=place.crashes - 1)


def act(world: World, kind: str, process: int, to: int) -> bool:
    """Let a program act, with its first handle; return whether it can."""
    usable = world.usable(process) if process in world.states else []
    match kind:
        case _ if process not in world.states:
            return False
        case "own":
            world.new_owned(process)
        case "remote":
            world.new_remote(process, to)
        case "share" if usable and usable[0].is_usable:
            world.share(usable[0], to)
        case "give up" if usable:
            world.give_up(usable[0])
        case "release" if usable:
            world.release(usable[0])
        case _:
            return False
    return True


def explore(
    program: list[tuple[str, int, int]], copies: int = 0, losses: int = 0, crashes: int = 0
) -> int:
    """Check all interleavings; return the number of places."""
    size = 1 + max(max(process, to) for _, process, to in program)
    stack = [Place(World(size), tuple(program), copies, losses, crashes)]
    seen = {key(stack[0])}
    while stack:
        place = stack.pop()
        is_end = True
        for each in following(place):
            is_end = False
            own = key(each)
            if own not in seen:
                seen.add(own)
                stack.append(each)
        if is_end or not place.world.packets:
            place.world.end()
            assert place.world.leaks() == []
    return len(seen)


@pytest.mark.parametrize("program", [PASSED_ON, CHAIN, HOME, TWICE])
def test_no_interleaving_loses_or_leaks_a_value(program):
    assert explore(program) > 20


@pytest.mark.proof
@pytest.mark.parametrize("faults", [(2, 0, 0), (1, 1, 0), (0, 2, 0), (1, 0, 1), (0, 1, 1)])
@pytest.mark.parametrize("program", [PASSED_ON, CHAIN, HOME, TWICE])
def test_no_interleaving_with_faults_loses_or_leaks_a_value(program, faults):
    assert explore(program, *faults) > 50


# -- the table of the module

REF, FIRST = Id(1, 1), Id(1, 2)  # of process 1, whose value process 0 makes


def test_a_user_registers_its_fork_and_then_frees_its_parent():
    user = ReferencesState(2)
    child = Id(1, 3)
    assert user.receive(REF, child, 0, 1) == (child, [Send(0, Fork(REF, child, 1, 1))])
    assert user.resend() == [Send(0, Fork(REF, child, 1, 1))]
    assert user.release(REF, child) == []
    assert user.on_message(0, Forked(child, True)) == [
        Send(1, Confirmed(child)),
        Send(0, UserDelete(REF, child, 1, 2)),
    ]
    assert user.resend() == [Send(0, UserDelete(REF, child, 1, 2)), Send(1, Confirmed(child))]
    assert user.on_message(0, Deleted(child)) == user.on_message(1, Noted(child)) == []
    assert user.is_quiet
    assert not user.resend()


def test_a_parent_waits_for_its_child():
    parent = ReferencesState(1)
    assert parent.new_remote(0) == (REF, FIRST)
    child = parent.share(REF, FIRST, 2)
    assert parent.created(FIRST) == parent.release(REF, FIRST) == []
    assert parent.oldest_open == 2
    assert parent.on_message(2, Confirmed(child)) == [
        Send(0, UserDelete(REF, FIRST, 2, 4)),
        Send(2, Noted(child)),
    ]
    assert parent.on_message(2, Confirmed(child)) == [Send(2, Noted(child))]


def test_the_last_fork_drops_the_value():
    owner = ReferencesState(0)
    assert owner.accept(REF, FIRST, 1, 2) == []
    child = Id(1, 3)
    assert owner.on_message(2, Fork(REF, child, 1, 1)) == [Send(2, Forked(child, True))]
    assert owner.on_message(1, UserDelete(REF, FIRST, 2, 4)) == [Send(1, Deleted(FIRST))]
    delete = UserDelete(REF, child, 1, 2)
    assert owner.on_message(2, delete) == [Drop(REF), Send(2, Deleted(child))]
    assert owner.on_message(2, delete) == [Send(2, Deleted(child))]


def test_a_late_copy_of_a_request_registers_nothing():
    owner = ReferencesState(0)
    owner.accept(REF, FIRST, 1, 2)
    fork = Fork(REF, Id(1, 3), 1, 1)
    owner.on_message(2, fork)
    owner.on_message(2, UserDelete(REF, fork.fork, 1, 2))
    assert owner.on_message(2, fork) == [Send(2, Forked(fork.fork, True))]
    assert owner.num_forks == 1


def test_requests_that_are_over_are_forgotten_while_an_old_fork_is_held():
    user, owner = ReferencesState(1), ReferencesState(0)
    for number in range(100):
        ref, fork = user.new_remote(0)
        owner.accept(ref, fork, 1, user.oldest_open)
        user.created(fork)
        if number:
            [(_, delete)] = user.release(ref, fork)
            owner.on_message(1, delete)
            user.on_message(0, Deleted(fork))
    assert owner.owned == (REF,)
    assert owner._over == {1: set()}


def test_a_value_that_comes_home_before_it_is_made_has_a_handle():
    owner = ReferencesState(0)
    handle, done = owner.receive(REF, Id(1, 3), 0, 1)
    assert handle is not None
    assert done == [Send(1, Confirmed(Id(1, 3)))]
    assert owner.release(REF, handle) == [], "its maker has a fork"
    assert owner.accept(REF, FIRST, 1, 2) == []
    assert owner.num_forks == 1


def test_the_answer_to_a_call_confirms_the_fork_that_the_call_has_brought_home():
    owner, user = ReferencesState(0), ReferencesState(1)
    ref, fork = user.new_remote(0)
    owner.accept(ref, fork, 1, user.oldest_open)
    user.created(fork)
    child = user.share(ref, fork, 0)
    handle, done = owner.receive(ref, child, 0, 1, will_answer=True)
    assert (done, owner.is_quiet) == ([], True), "the answer is the message"
    assert user.release(ref, fork) == [], "the call is under way"
    [(to, delete)] = user.confirmed(child)
    assert (to, delete.fork, user.confirmed(child)) == (0, fork, [])
    owner.on_message(1, delete)
    assert (owner.owned, owner.release(ref, handle)) == ((ref,), [Drop(ref)])


def test_the_value_of_a_process_that_dies_before_its_call_comes_is_never_made():
    owner = ReferencesState(0)
    child = Id(1, 3)
    owner.on_message(2, Fork(REF, child, 1, 1))
    assert owner.lost(1) == [Unmade(REF, "process 1, which was to make it, is lost")]
    assert owner.on_message(2, UserDelete(REF, child, 1, 2)) == [Drop(REF), Send(2, Deleted(child))]
    late = Fork(REF, Id(1, 4), 1, 1)
    assert owner.on_message(3, late) == [Send(3, Forked(Id(1, 4), False))]


def test_a_call_that_its_caller_has_given_up_makes_nothing_that_stays():
    owner = ReferencesState(0)
    assert owner.on_message(1, UserDelete(REF, FIRST, 2, 3)) == [Send(1, Deleted(FIRST))]
    assert owner.accept(REF, FIRST, 1, 2) == [Drop(REF)]
    assert owner.owned == ()


def test_the_forks_of_a_lost_process_go():
    owner = ReferencesState(0)
    ref, fork = owner.new_owned()
    owner.share(ref, fork, 1)
    assert owner.release(ref, fork) == []
    assert owner.lost(1) == [Drop(ref)]


def test_a_user_learns_that_the_value_is_lost_with_its_owner():
    user = ReferencesState(2)
    user.receive(REF, Id(1, 3), 0, 1)
    reason = "process 0, which had the value, is lost"
    assert user.lost(0) == [Unknown(Id(1, 3), reason)]
    assert user.is_quiet


def test_a_fork_that_arrives_after_its_owner_was_lost_does_not_wait_for_ever():
    user = ReferencesState(2)
    user.lost(0)
    _, [(to, _)] = user.receive(REF, Id(1, 3), 0, 1)
    assert user.lost(to) == [Unknown(Id(1, 3), "process 0, which had the value, is lost")]


def test_a_handle_whose_value_is_lost_can_be_passed_on():
    user = ReferencesState(2)
    user.receive(REF, Id(1, 3), 0, 1)
    user.lost(0)
    assert user.share(REF, Id(1, 3), 3) == Id(2, 2)
    assert user.is_quiet


def test_a_value_that_a_process_makes_in_itself_leaves_nothing():
    own = ReferencesState(0)
    ref, fork = own.new_remote(0)
    child = own.share(ref, fork, 1)
    assert own.num_forks == 2, "though its own call has not come"
    own.accept(ref, fork, 0, own.oldest_open)
    own.created(fork)
    [(to, delete)] = own.release(ref, fork)
    assert to == 0
    [(_, deleted)] = own.on_message(0, delete)
    assert own.on_message(0, deleted) == []
    assert own._forks == {}
    assert own.lost(1) == [Drop(ref)]
    assert child not in own._owned
