"""What a stream has not taken yet leaves in order, in whatever portions the system takes it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.runtime.wire import Unsent


class Taking:
    """A stream that takes some bytes of each write, and none when it has no more portions."""

    def __init__(self, portions: list[int]) -> None:
        self.portions = portions
        self.taken = b""

    def write(self, pieces: list[memoryview]) -> int:
        if not self.portions:
            raise BlockingIOError
        taken = b"".join(pieces)[: self.portions.pop(0)]
        self.taken += taken
        return len(taken)


@given(
    st.lists(st.binary(min_size=1, max_size=20), max_size=8),
    st.lists(st.integers(1, 50), max_size=8),
)
def test_bytes_leave_in_order_and_what_waits_is_counted(pieces, portions):
    stream, whole = Taking(portions), b"".join(pieces)
    unsent = Unsent(stream.write)
    drained = unsent.drain([*map(memoryview, pieces)])
    left = unsent.nbytes
    assert (drained, stream.taken) == (not left, whole[: len(whole) - left])
    stream.portions = [1000] * len(whole)
    assert (unsent.drain(), stream.taken, unsent.nbytes) == (True, whole, 0)


def test_nothing_waits_for_a_stream_that_broke():
    def fail(_: list[memoryview]) -> int:
        raise BrokenPipeError

    unsent = Unsent(fail)
    with pytest.raises(BrokenPipeError):
        unsent.drain([memoryview(b"abc")])
    assert (unsent.nbytes, unsent.drain()) == (0, True)
