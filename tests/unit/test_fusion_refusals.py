"""Refusals: a rank that cannot take part in an operation says so, and calls of its name are counted."""

from __future__ import annotations

import pytest
from test_fusion_state import World, errors, reduce

from braid.compat.horovod.fusion import Request, StateOptions
from braid.errors import ConfigError

REFUSED = "rank 0 cannot carry out 'a': wrong splits"


def refuse(world: World, name: str = "a", rank: int = 0, **fields: object) -> None:
    request = Request(name, "all_reduce", refusal="wrong splits", **fields)  # type: ignore[arg-type]
    world.machines[rank].refuse(request, world.now_s)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("cached", [False, True])
def test_requests_of_a_refused_name_end_with_its_reason_and_later_ones_are_carried_out(
    size: int, cached: bool
):
    world = World(size)
    if cached:
        world.submit(reduce("a"))
        assert world.settle() == [["a"]]
    refuse(world)
    world.submit(reduce("a"), range(1, size))
    assert errors(world.cycle()) == [REFUSED]
    world.submit(reduce("a"))
    assert errors(world.cycle()) == []


def test_calls_behind_a_refusal_wait_until_it_has_met_the_others_call():
    world = World(2)
    refuse(world)
    world.submit(reduce("a"), [0])
    refuse(world)
    world.submit(reduce("b"))
    assert world.settle() == [["b"]]
    world.submit(reduce("a"), [1])
    assert errors(world.cycle()) == [REFUSED]
    world.submit(reduce("a"), [1])
    assert errors(world.cycle()) == []
    world.submit(reduce("a"), [1])
    assert [errors(world.cycle()) for _ in range(2)] == [[REFUSED], []]


def test_a_refusal_stands_for_a_whole_group_of_any_size():
    world = World(3)
    refuse(world, "g.0", group="g", group_size=1)
    for number in range(3):
        world.submit(reduce(f"g.{number}", group="g", group_size=3), [1, 2])
    outcome = world.cycle()
    assert len(errors(outcome)) == 3
    assert all("rank 0 cannot carry out 'g.0': wrong splits" in error for error in errors(outcome))
    for number in range(3):
        world.submit(reduce(f"g.{number}", group="g", group_size=3))
    assert errors(world.cycle()) == []


def test_a_refusal_that_nobody_meets_is_no_stall_and_is_gone_when_all_have_joined():
    world = World(2, StateOptions(stall_check_s=1.0, stall_shutdown_s=2.0))
    refuse(world)
    world.cycle()
    world.now_s = 10.0
    outcome = world.cycle()
    assert (outcome.stalls, outcome.stop) == ((), "")
    for machine in world.machines:
        machine.join()
    while world.cycle().last_joined < 0:
        pass
    world.submit(reduce("a"))
    assert errors(world.cycle()) == []


@pytest.mark.parametrize("request_", [reduce("a", ("x",)), reduce(["a"]), reduce("a", (1 << 70,))])  # type: ignore[arg-type]
def test_a_request_that_others_cannot_read_is_an_error_where_it_was_made(request_: Request):
    world = World(2)
    with pytest.raises(ConfigError, match="cannot be sent to the other ranks"):
        world.submit(request_, [0])
    world.submit(reduce("a"))
    assert world.settle() == [["a"]]
