"""Arena, health, addresses and faults, each alone."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braid.errors import ConfigError, PeerLostError
from braid.runtime.clock import MonotonicClock, VirtualClock
from braid.runtime.transport import Fabric, Health, Loss
from braid.runtime.transport.memory import RootAddress, open_through_proc
from support.faults import Fault, FaultScript

SIZES = st.lists(st.tuples(st.integers(1, 20_000), st.booleans()), max_size=40)


@given(SIZES)
def test_blocks_of_an_arena_never_overlap_and_come_back(requests):
    with Fabric(1) as fabric:
        arena = fabric.transports[0].arena
        held = {}
        for number, (nbytes, drop) in enumerate(requests):
            held[number] = arena.allocate(nbytes)
            if drop:
                arena.free(held.pop(number))
            spans = sorted((b.extent, b.offset, b.offset + b.nbytes) for b in held.values())
            assert all(a[0] != b[0] or a[2] <= b[1] for a, b in pairwise(spans))
        for block in held.values():
            arena.free(block)
        assert arena.statistics()["used_bytes"] == 0


def test_a_tensors_block_is_freed_with_its_last_view():
    with Fabric(1) as fabric:
        arena = fabric.transports[0].arena
        view = arena.empty((1024,)).fill_(1.0)[10:20]
        gc.collect()
        assert arena.statistics()["used_bytes"] == 4096
        assert view.sum().item() == 10.0
        del view
        assert arena.statistics()["used_bytes"] == 0


def test_a_tensor_in_the_arena_is_found_from_another_rank():
    with Fabric(2) as fabric:
        mine, theirs = (t.arena for t in fabric.transports)
        x = mine.empty((3, 5), torch.int64)
        x.copy_(torch.arange(15).view(3, 5))
        word = mine.locate(x)
        assert torch.equal(theirs.view(0, word, 15, torch.int64), torch.arange(15))
        assert mine.locate(torch.ones(4)) == 0
        assert mine.locate(x.view(-1)[1:]) == 0  # not at the begin of a cache line
        assert theirs.origin(theirs.view(0, word, 15, torch.int64).data_ptr())[0] == 0


def test_large_tensors_get_their_own_extent():
    with Fabric(1) as fabric:
        arena = fabric.transports[0].arena
        x = arena.empty((3 << 20,))
        assert arena.statistics()["reserved_bytes"] == x.numel() * 4
        assert arena.empty((0,)).numel() == 0


def test_the_first_verdict_on_a_rank_stands():
    health = Health(0, VirtualClock())
    woken = []
    health.on_loss(lambda: woken.append(True))
    health.report(Loss(2, "was killed by signal 9"))
    health.report(Loss(2, "exited with code 1"))
    health.report(Loss(0, "is this rank itself"))
    assert (health.lost, health.epoch, len(woken)) == ({2: Loss(2, "was killed by signal 9")}, 1, 1)
    with pytest.raises(PeerLostError, match="rank 2 was killed by signal 9") as caught:
        health.check((0, 1, 2), 0)
    assert caught.value.rank == 2
    health.check((0, 1), 0)
    health.check((0, 1, 2), 1)  # no news since the caller looked


def test_a_rank_that_left_hurts_only_who_needs_it():
    health = Health(0, VirtualClock())
    health.report(Loss(1, "has already left", departed=True))
    health.check((0, 1, 2), 0, needed=2)
    with pytest.raises(PeerLostError, match="already left"):
        health.check((0, 1, 2), 0, needed=1)


def test_the_end_of_a_process_is_seen_at_once():
    health = Health(0, MonotonicClock())
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        health.register_process(1, child.pid)
        health.collect()
        assert health.lost == {}
        child.kill()
        import select

        assert select.select(health.fds(), [], [], 10)[0] == health.fds()
        health.collect()
        assert health.lost == {1: Loss(1, f"(pid {child.pid}) died")}
        assert health.fds() == []
    finally:
        health.close()
        child.stdin.close()
        child.wait()


def test_a_process_that_is_gone_already_is_lost():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    health = Health(0, MonotonicClock())
    health.register_process(5, child.pid)
    assert health.lost[5].reason.startswith(f"(pid {child.pid})")


class _Launcher:
    """A witness that knows the cause, a moment later than the pidfd."""

    def __init__(self, losses):
        self._losses = losses
        self._asked = 0

    def fileno(self):
        return -1

    def losses(self):
        self._asked += 1
        return self._losses if self._asked > 2 else []


def test_the_launchers_word_on_the_cause_is_waited_for():
    health = Health(0, MonotonicClock())
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    health.register_process(1, child.pid)
    health.register(_Launcher([Loss(1, "was killed for memory")]))
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    health.collect()
    assert health.lost == {1: Loss(1, "was killed for memory")}
    health.close()
    child.wait()


@given(st.integers(1), st.integers(0), st.integers(0, 1000), st.lists(st.integers(0, 1000)))
def test_a_root_address_survives_its_text(pid, started, fd, bells):
    address = RootAddress(pid, started, fd, tuple(bells))
    assert RootAddress.from_text(address.to_text()) == address


def test_a_fault_script_is_its_own_text():
    script = FaultScript.from_text("kill rank=1 step=3 in=backward; stop rank=0 step=5")
    assert script.faults == (Fault("kill", 1, 3, "backward"), Fault("stop", 0, 5, "step"))
    assert FaultScript.from_text(script.to_text()) == script


@pytest.mark.parametrize(
    "text", ["kill rank=1", "explode rank=1 step=2", "kill rank=1 step=2 at=3"]
)
def test_a_wrong_fault_script_is_refused(text):
    with pytest.raises(ConfigError, match="a fault must be"):
        FaultScript.from_text(text)


def test_a_descriptor_that_is_not_a_root_is_refused():
    from braid.runtime.transport.memory import (
        ROOT_BYTES,
        MappedMemory,
        MemoryFile,
        open_through_proc,
    )

    foreign = MemoryFile.create(ROOT_BYTES, "braid-test-foreign")
    short = MemoryFile.create(4096, "braid-test-short")
    for file in (foreign, short):
        addresses = {0: RootAddress(os.getpid(), 0, file.fd, ())}
        peers = MappedMemory(addresses, open_through_proc(addresses))
        with pytest.raises(PermissionError):
            peers.root(0)
        peers.close()
        file.close()


def test_memory_that_is_not_to_be_had_is_a_clear_error(monkeypatch):
    import errno

    from braid.errors import CommError
    from braid.runtime.transport.memory import MemoryFile

    def full(fd: int, start: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CommError, match="not enough shared memory for 4096 bytes"):
        MemoryFile.create(4096, "braid-test-full")


@pytest.mark.parametrize("alive", [True, False])
def test_a_refused_descriptor_of_a_dead_process_is_a_loss_not_a_refusal(monkeypatch, alive):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        address = RootAddress(child.pid, 0, 0, ())
        if not alive:
            child.kill()
            os.waitid(
                os.P_PID, child.pid, os.WEXITED | os.WNOWAIT
            )  # a zombie, as until the launcher looks

        def refuse(*_args):
            raise PermissionError

        with monkeypatch.context() as patch:
            patch.setattr(os, "open", refuse)
            with pytest.raises(PermissionError if alive else PeerLostError):
                open_through_proc({1: address})(1, 0, os.O_RDONLY)
        child.kill()
