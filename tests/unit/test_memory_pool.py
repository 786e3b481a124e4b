"""Memory for arriving buffers: who has it, and when it is free again."""

from __future__ import annotations

import pytest
import torch

from braid.runtime.memory_pool import KEPT_BYTES, LEAST_BYTES, MemoryPool


def block_sizes(pool):
    return [len(block) for block in pool.free]


def test_memory_is_used_again_when_the_last_view_is_gone():
    pool = MemoryPool()
    view = pool.lend(LEAST_BYTES)
    view[:5] = b"hello"
    part = view[1:4]
    del view
    assert (bytes(part), block_sizes(pool)) == (b"ell", [])
    del part
    assert block_sizes(pool) == [LEAST_BYTES]
    again = pool.lend(LEAST_BYTES)
    assert (bytes(again[:5]), block_sizes(pool)) == (b"hello", [])


def test_tensors_keep_their_memory():
    pool = MemoryPool()
    tensor = torch.frombuffer(pool.lend(4 * LEAST_BYTES), dtype=torch.float32).view(2, -1)[1]
    assert block_sizes(pool) == []
    del tensor
    assert block_sizes(pool) == [4 * LEAST_BYTES]


@pytest.mark.parametrize("size", [0, 1, LEAST_BYTES - 1, LEAST_BYTES, LEAST_BYTES + 1, 3 << 20])
def test_memory_has_the_size_that_was_asked_for_and_is_writable(size):
    view = MemoryPool().lend(size)
    view[:] = bytes(size)
    assert (len(view), view.format, view.readonly) == (size, "B", False)


def test_two_messages_never_share_memory():
    pool = MemoryPool()
    for _ in range(3):
        views = [pool.lend(LEAST_BYTES) for _ in range(4)]
        for number, view in enumerate(views):
            view[:] = bytes([number]) * LEAST_BYTES
        assert [view[0] == view[-1] == number for number, view in enumerate(views)] == [True] * 4
        del views, view
    assert block_sizes(pool) == [LEAST_BYTES] * 4


def test_a_block_is_not_wasted_on_a_much_smaller_message():
    pool = MemoryPool()
    pool.lend(4 * LEAST_BYTES)
    small, larger = pool.lend(LEAST_BYTES), pool.lend(3 * LEAST_BYTES)
    assert (len(small), len(larger), block_sizes(pool)) == (LEAST_BYTES, 3 * LEAST_BYTES, [])


def test_few_bytes_are_kept():
    pool = MemoryPool()
    views = [pool.lend(KEPT_BYTES // 4) for _ in range(6)]
    del views
    assert block_sizes(pool) == [KEPT_BYTES // 4] * 4
    pool.lend(KEPT_BYTES + 1)
    assert block_sizes(pool) == [KEPT_BYTES // 4] * 4
