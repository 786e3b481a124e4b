"""The order in which backward reaches the calls of units."""

from __future__ import annotations

from braid.parallel.sharding.unit_calls import ForwardCalls, UnitCall


def nested() -> tuple[ForwardCalls[str], list[UnitCall[str]]]:
    """Return a forward in which `a` contains `b` and `c`, and `b` is called once more after it."""
    forward: ForwardCalls[str] = ForwardCalls()
    for unit, begins in (
        ("a", True),
        ("b", True),
        ("b", False),
        ("c", True),
        ("c", False),
        ("a", False),
        ("b", True),
        ("b", False),
    ):
        if begins:
            forward.begin(unit)
            continue
        call = forward.finish(unit)
        assert call is not None
        call.has_graph = True
    return forward, forward.calls


def test_backward_reaches_outer_calls_first_and_later_ends_before():
    forward, calls = nested()
    assert [(call.unit, call.begin) for call in forward.unreached()] == [
        ("b", 3),
        ("a", 0),
        ("c", 2),
        ("b", 1),
    ]
    assert forward.of("b") == [calls[1], calls[3]]
    assert forward.before(calls[0]) is None
    assert forward.before(calls[2]) is calls[1]


def test_calls_that_are_left_out_are_those_before_the_call_that_is_reached():
    forward, (a, b, c, last) = nested()
    last.is_reached = True
    c.has_graph = False
    assert forward.unreached(b) == [a]
    a.is_reached = True
    assert forward.unreached(b) == []
    forward.reset()
    assert forward.unreached() == [last, a, b]


def test_a_call_that_has_not_begun_does_not_end():
    forward: ForwardCalls[str] = ForwardCalls()
    assert forward.finish("a") is None
