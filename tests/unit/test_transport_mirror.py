"""What travels between ranks that share no memory, and where it ends up."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braid.errors import CommError, PeerLostError
from braid.runtime.transport.announced_arena import PrivateArena
from braid.runtime.transport.arena import EXTENT_BYTES
from braid.runtime.transport.memory import ROOT_BYTES, ROOT_WORDS_BYTES, Extent, MemoryFile, Root
from braid.runtime.transport.mirror import (
    MirroredMemory,
    Writes,
    pack_writes,
    unpack_writes,
)

PLACES = st.tuples(st.integers(0, 4095), st.integers(0, (1 << 46) - 1))
WRITES = st.builds(
    lambda large, small: Writes(large, [(*place, data) for place, data in small]),
    st.lists(PLACES, max_size=4),
    st.lists(st.tuples(PLACES, st.binary(max_size=80)), max_size=4),
)


@pytest.fixture
def mirrors():
    """Rank 0's copies of the memory of rank 1."""
    root = Root(MemoryFile.private(ROOT_BYTES, "braid-test"))
    memory = MirroredMemory([1])
    yield memory
    memory.close()
    root.close()


def _announce(memory: MirroredMemory, number: int, nbytes: int) -> None:
    entry = (0).to_bytes(8, "little") + nbytes.to_bytes(8, "little")
    writes = Writes([], [(0, ROOT_WORDS_BYTES + 16 * number, entry)])
    memory.apply(1, pack_writes(writes))


@given(WRITES)
def test_writes_survive_their_bytes(writes):
    assert unpack_writes(pack_writes(writes)) == writes


@given(WRITES, st.integers(1, 200))
def test_cut_writes_are_refused_or_fewer(writes, cut):
    meta = pack_writes(writes)[:-cut]
    try:
        found = unpack_writes(meta)
    except CommError:
        return
    assert found == Writes(writes.large, writes.small[: len(found.small)])


@given(st.binary(max_size=200))
def test_any_bytes_are_writes_or_an_error_of_ours(meta):
    with contextlib.suppress(CommError):
        assert pack_writes(unpack_writes(meta)) == meta


def test_what_is_written_is_found_at_the_same_place(mirrors):
    _announce(mirrors, 3, 8192)
    meta = pack_writes(Writes([(3, 4096)], [(3, 64, b"line")]))
    (target,) = mirrors.targets(1, meta, (5,))
    target[:] = b"large"
    mirrors.apply(1, meta)
    memory = mirrors.extent(1, 3)
    assert (memory[64:68], memory[4096:4101], len(memory)) == (b"line", b"large", 8192)


@pytest.mark.parametrize(
    ("writes", "sizes", "words"),
    [
        (Writes([(7, 0)], []), (4,), "memory with id 7, which it has not announced"),
        (
            Writes([(3, 8190)], []),
            (4,),
            "4 bytes at 8190, outside of its memory with id 3 of 8192 bytes",
        ),
        (Writes([(0, ROOT_BYTES)], []), (1,), "outside of its memory with id 0"),
        (Writes([(3, 0)], []), (1, 1), "rank 1 sent 2 buffers for 1 writes"),
    ],
)
def test_writes_to_nowhere_are_refused(mirrors, writes, sizes, words):
    _announce(mirrors, 3, 8192)
    with pytest.raises(CommError, match=words):
        mirrors.targets(1, pack_writes(writes), sizes)


def test_small_writes_to_nowhere_are_refused(mirrors):
    with pytest.raises(CommError, match="wrote to the memory with id 9"):
        mirrors.apply(1, pack_writes(Writes([], [(9, 0, b"x")])))


def test_an_extent_of_a_rank_that_has_ended_is_not_waited_for(mirrors):
    mirrors.ended(1)
    with pytest.raises(PeerLostError, match="rank 1 has ended before it announced its memory"):
        mirrors.extent(1, 1)


@pytest.fixture
def arena():
    root = Root(MemoryFile.private(ROOT_BYTES, "braid-test"))
    memory = MirroredMemory([])
    announced = []
    arena = PrivateArena(0, root, memory, lambda n: announced.append((n, root.extent(n))))
    arena.announced = announced
    yield arena
    arena.close()
    memory.close()
    root.close()


def test_extents_are_announced_before_anything_in_them_is_given_out(arena):
    block = arena.allocate(100)
    assert (block.extent, arena.announced) == (1, [(1, Extent(0, EXTENT_BYTES))])


def test_fresh_memory_has_never_been_anything_else(arena):
    slots = [arena.allocate(4096) for _ in range(3)]
    for slot in slots:
        arena.free(slot)
    pages = [arena.fresh(4096) for _ in range(EXTENT_BYTES // 4096 + 1)]
    assert len(set(pages)) == len(pages)
    assert {page.extent for page in pages} == {2, 3}
    arena.free(pages[0])
    assert arena.fresh(4096) not in pages
    assert arena.fresh(4096) != arena.allocate(4096)


def test_tensors_in_private_memory_are_never_registered(arena):
    x, y = arena.empty((1000,)), torch.ones(1000)
    arena.adopt(y)
    assert (arena.locate(x), arena.locate(y), y.is_shared()) == (0, 0, False)
