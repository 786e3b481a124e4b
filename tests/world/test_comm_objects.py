"""No rank waits for an object that another cannot send: it is told whose it is, and what is wrong with it."""

from __future__ import annotations

import re

import pytest

from braid.comm import Group
from braid.errors import CommError, ConfigError

BAD = {"model": [1 + 2j]}
WRONG = "complex at ['model'][0]"


def _told(call) -> str:
    """What a rank learns, in short."""
    try:
        return f"got {call()!r}"
    except (ConfigError, CommError) as exc:
        whose = "mine" if isinstance(exc, ConfigError) else str(exc).split(" could")[0]
        found = re.search(r"((?:complex|a str) .*) is not plain|root passed (.*)", str(exc))
        assert found is not None
        return f"{whose}: {found[1] or found[2]}"


def _one_cannot_send(group: Group, kind: str) -> tuple[str, list[int]]:
    """Member 1 has something that cannot be sent; then all go on."""
    objects, me = group.objects, group.rank
    mine = BAD if me == 1 else me

    def message() -> object:
        if me == 1:
            return objects.send(BAD, 0)
        return objects.recv(1) if me == 0 else None

    calls = {
        "all_gather": lambda: objects.all_gather(mine),
        "broadcast": lambda: objects.broadcast(mine, 1),
        "gather": lambda: objects.gather(mine, 0),
        "scatter": lambda: objects.scatter([1, 2, BAD] if me == 1 else None, 1),
        "count": lambda: objects.scatter([1, 2] if me == 1 else None, 1),
        "nothing": lambda: objects.scatter(None, 1),
        "message": message,
    }
    return _told(calls[kind]), objects.all_gather(me)


@pytest.mark.parametrize(
    ("kind", "mine", "others"),
    [
        ("all_gather", WRONG, [0, 2]),
        ("broadcast", WRONG, [0, 2]),
        ("gather", WRONG, [0]),
        ("scatter", "complex at objs[2]['model'][0]", [0, 2]),
        ("count", "2", [0, 2]),
        ("nothing", "NoneType", [0, 2]),
        ("message", WRONG, [0]),
    ],
)
def test_an_object_that_cannot_be_sent_stops_everybody_who_was_to_get_it(world, kind, mine, others):
    found = world(3, _one_cannot_send, kind)
    told = [f"stopped because rank 1: {mine}" if r in others else "got None" for r in range(3)]
    told[1] = f"mine: {mine}"
    assert found == [(text, [0, 1, 2]) for text in told]


def _half_a_pair(group: Group) -> str:
    return _told(lambda: group.objects.broadcast("\ud800" if group.rank == 0 else None))


def test_what_cannot_be_written_at_all_can_be_told_of(world):
    wrong = "a str with a lone surrogate ('\\ud800', character 0)"
    assert world(2, _half_a_pair) == [f"mine: {wrong}", f"stopped because rank 0: {wrong}"]
