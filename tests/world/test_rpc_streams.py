"""Streams of results: their order, their window, their ends."""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Iterator

import pytest
import torch

from braid import rpc
from braid.errors import CommTimeout, ConfigError, PeerLostError
from rpc_nodes import first_of

OPTIONS = {"allowed_modules": ["test_rpc_streams"]}
MADE: list[int] = []
ENDED = threading.Event()
GOES_ON = threading.Event()


def count_to(limit: int) -> Iterator[int]:
    try:
        for number in range(limit):
            MADE.append(number)
            yield number
    finally:
        ENDED.set()


def tensors(limit: int) -> list[torch.Tensor]:
    return [torch.full((3,), float(n)) for n in range(limit)]


def fail_at(number: int) -> Iterator[int]:
    yield from range(number)
    msg = "the file ends here"
    raise EOFError(msg)


class Colour(enum.Enum):
    RED = 1


def colours() -> list[Colour]:
    return [Colour.RED]


def yields_a_lock() -> Iterator[object]:
    yield 1
    yield threading.Lock()


def wait_to_go_on() -> Iterator[int]:
    yield 0
    GOES_ON.wait(30)
    yield 1


def the_next_of(results: rpc.Stream) -> int:
    """Return the next result, however often it is late."""
    for _ in range(100):
        with contextlib.suppress(CommTimeout):
            return next(results)
    raise AssertionError


@pytest.fixture(autouse=True)
def _anew():
    MADE.clear()
    ENDED.clear()
    GOES_ON.clear()
    yield
    GOES_ON.set()


@pytest.mark.parametrize("window", [1, 3, 50])
def test_results_come_in_their_order(window):
    with first_of(2, **OPTIONS):
        assert list(rpc.stream("w1", count_to, (20,), window=window)) == list(range(20))
        got = list(rpc.stream("w1", tensors, kwargs={"limit": 4}, window=window))
        assert [each.tolist() for each in got] == [[float(n)] * 3 for n in range(4)]
        assert list(rpc.stream("w1", tensors, (0,))) == []


def test_the_function_is_ahead_by_its_window_only():
    with first_of(2, **OPTIONS):
        with rpc.stream("w1", count_to, (1000,), window=4) as results:
            assert [next(results) for _ in range(3)] == [0, 1, 2]
        assert ENDED.wait(30)  # a loop that is left early ends the function
        assert len(MADE) <= 3 + 4 + 1
        assert list(results) == []


def test_a_forgotten_stream_ends_its_function():
    with first_of(2, **OPTIONS):
        assert next(rpc.stream("w1", count_to, (1000,), window=2)) == 0
        assert ENDED.wait(30)


def test_an_exception_comes_after_the_results_before_it():
    with first_of(2, **OPTIONS):
        results = rpc.stream("w1", fail_at, (5,), window=3)
        assert [next(results) for _ in range(5)] == list(range(5))
        with pytest.raises(EOFError, match="the file ends here"):
            next(results)
        assert list(results) == []
        results = rpc.stream("w1", yields_a_lock)
        assert next(results) == 1
        with pytest.raises(Exception, match="lock"):
            next(results)


def test_as_many_streams_as_threads_run():
    with first_of(2, num_worker_threads=2, **OPTIONS):
        streams = [rpc.stream("w1", count_to, (20,), window=2, timeout=20) for _ in range(2)]
        assert [next(each) for each in streams] == [0, 0]
        assert [list(each) for each in streams] == [list(range(1, 20))] * 2


def test_a_last_result_that_does_not_arrive_is_an_error():
    with first_of(2, **OPTIONS) as agents:
        agents[0].codec.names._known["test_rpc_streams:Colour"] = enum.Enum("Colour", ["BLUE"])
        with pytest.raises(Exception, match="RED"):
            list(rpc.stream("w1", colours, timeout=20))


def test_a_late_result_and_a_lost_node_are_errors():
    with first_of(3, **OPTIONS) as agents:
        results = rpc.stream("w1", wait_to_go_on, timeout=0.2)
        assert next(results) == 0
        with pytest.raises(CommTimeout, match=r"result 1 of wait_to_go_on .* within 0\.2 s"):
            next(results)
        GOES_ON.set()
        assert the_next_of(results) == 1  # a late result is not lost
        results = rpc.stream("w2", count_to, (1000,), window=2)
        assert next(results) == 0
        agents[2].close()
        with pytest.raises(PeerLostError):
            list(results)
        with pytest.raises(ConfigError, match="must be at least 1 result, got 0"):
            rpc.stream("w1", count_to, window=0)
