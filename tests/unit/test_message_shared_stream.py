"""Shared memory beside a socket: what goes where, and what a damaged or hostile peer can do."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
import struct
from collections import deque

import pytest

from braid.errors import CommError, PeerLostError
from braid.runtime.message.vans import ring, shared_memory
from braid.runtime.message.vans.ring import RING_BYTES, ReceiveRing, SendRing
from braid.runtime.message.vans.shared_memory import LEAST_BYTES, SharedStream
from braid.runtime.wire import Connection, Identity
from support.leaks import no_leaks

pytestmark = pytest.mark.skipif(not shared_memory.has_rings(), reason="needs Linux on x86-64")
HEAD = b"\x91"  # as heads of vans begin
LARGE = os.urandom(LEAST_BYTES)


def connections():
    ends = socket.socketpair()
    return [Connection(end, Identity("run", "worker", n)) for n, end in enumerate(ends)]


@contextlib.contextmanager
def streams(*, enabled=(True, True)):
    with no_leaks():
        pair = [SharedStream(c, enabled=e) for c, e in zip(connections(), enabled, strict=True)]
        try:
            yield pair
        finally:
            for stream in pair:
                stream.close()


def exchange(sender, receiver, *payloads):
    """What arrives when payloads are posted, each as one frame of one buffer."""
    received = []
    for payload in payloads:
        sender.post(HEAD, [payload])
        while sender.flush():
            receiver.try_recv()
        received.append(bytes(receiver.try_recv().buffers[0]))
    return received


def opened(sender, receiver):
    exchange(sender, receiver, LARGE)
    assert sender.is_shared
    return sender, receiver


def test_the_first_large_frame_offers_the_ring_and_later_ones_use_it():
    with streams() as (sender, receiver):
        assert exchange(sender, receiver, b"small") == [b"small"]
        assert (sender._outgoing, sender.is_shared) == (None, False)
        assert exchange(sender, receiver, LARGE, LARGE[::-1]) == [LARGE, LARGE[::-1]]
        assert (sender.is_shared, receiver.is_shared) == (True, False)
        assert sender._outgoing._position == LEAST_BYTES


def test_frames_of_all_sizes_keep_their_bytes_and_order():
    with streams() as (sender, receiver):
        opened(sender, receiver)
        sizes = [1, 3_000_001, LEAST_BYTES - 1, 4 << 20, 77, 1_500_000, 4 << 20, 2_999_999, 4 << 20]
        payloads = [os.urandom(16) * (size // 16) + b"x" * (size % 16) for size in sizes]
        assert exchange(sender, receiver, *payloads) == payloads


@pytest.mark.parametrize("seed", range(5))
def test_frames_keep_their_bytes_however_far_their_reader_is_behind(seed):
    rng, unread = random.Random(seed), deque()
    with streams() as (sender, receiver):
        opened(sender, receiver)
        for _ in range(150):
            if rng.random() < 0.45:
                payload = rng.randbytes(16) * rng.randint(LEAST_BYTES // 16, 1 << 17)
                sender.post(HEAD, [payload])
                unread.append(payload)
            elif (frame := receiver.try_recv()) is not None:
                assert bytes(frame.buffers[0]) == unread.popleft()
            sender.flush()
        while unread:
            sender.flush()
            if (frame := receiver.try_recv()) is not None:
                assert bytes(frame.buffers[0]) == unread.popleft()


def test_buffers_go_into_the_memory_that_the_receiver_chooses():
    with streams() as (sender, receiver):
        opened(sender, receiver)
        target = bytearray(LEAST_BYTES + 3)
        views = [memoryview(target)[:3], memoryview(b""), memoryview(target)[3:]]
        asked = []
        sender.post(HEAD, [b"abc", b"", LARGE])
        frame = receiver.try_recv(lambda *args: asked.append(args) or views)
        assert (asked, frame.meta, bytes(target)) == (
            [(HEAD, (3, 0, LEAST_BYTES))],
            HEAD,
            b"abc" + LARGE,
        )


def test_a_full_ring_leaves_the_rest_to_the_socket():
    with streams() as (sender, receiver):
        opened(sender, receiver)
        payloads = [bytes([number]) * (1 << 20) for number in range(5)]
        queued = [sender.post(HEAD, [payload]) for payload in payloads]
        assert (queued[:4], sender._outgoing._position) == ([0] * 4, RING_BYTES)
        received = []
        while len(received) < 5:
            sender.flush()
            if (frame := receiver.try_recv()) is not None:
                received.append(bytes(frame.buffers[0]))
        assert received == payloads
        assert exchange(sender, receiver, LARGE) == [LARGE]
        assert sender._outgoing._position == 4 * (1 << 20) + LEAST_BYTES


@pytest.mark.parametrize("enabled", [(False, True), (True, False), (False, False)])
def test_one_end_that_does_not_want_it_is_enough(enabled):
    with streams(enabled=enabled) as (sender, receiver):
        for _ in range(2):
            assert exchange(sender, receiver, LARGE) == exchange(receiver, sender, LARGE) == [LARGE]
        assert (sender.is_shared, receiver.is_shared) == (False, False)
        assert (sender._incoming, receiver._incoming) == (None, None)


@pytest.mark.parametrize("function", ["memfd_create", "posix_fallocate"])
def test_without_memory_everything_uses_the_socket(monkeypatch, function):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    with streams() as (sender, receiver):
        monkeypatch.setattr(os, function, refuse)
        assert exchange(sender, receiver, *[LARGE] * 3) == [LARGE] * 3
        assert sender._outgoing is None


def test_memory_that_the_peer_cannot_open_is_given_back(monkeypatch):
    with streams() as (sender, receiver):
        with monkeypatch.context() as other_host:
            other_host.setattr(os, "readlink", lambda _: "/somewhere/else")
            assert exchange(sender, receiver, LARGE) == [LARGE]
        assert sender._outgoing is not None
        for _ in range(shared_memory._MOST_UNANSWERED):
            assert exchange(sender, receiver, LARGE) == [LARGE]
        assert (sender._outgoing, sender.is_shared) == (None, False)


def test_a_frame_with_a_large_description_uses_the_socket():
    with streams() as (sender, receiver):
        opened(sender, receiver)
        meta = HEAD + bytes((64 << 10) - 1)
        sender.post(meta, [LARGE])
        frame = receiver.try_recv()
        assert (frame.meta, bytes(frame.buffers[0])) == (meta, LARGE)


def test_frames_in_the_ring_outlive_their_sender():
    with streams() as (sender, receiver):
        opened(sender, receiver)
        sender.post(HEAD, [LARGE])
        sender.close()
        assert bytes(receiver.try_recv().buffers[0]) == LARGE
        with pytest.raises(PeerLostError):
            receiver.try_recv()


def in_ring(*sizes, count=None):
    count = len(sizes) if count is None else count
    return shared_memory._IN_RING + struct.pack(f"<H{len(sizes)}Q", count, *sizes) + HEAD


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        pytest.param(in_ring(RING_BYTES + 1), "a frame of 4194305 bytes in a ring", id="too large"),
        pytest.param(in_ring(1 << 63, 1 << 63), "a frame of 18446744073709551616", id="overflow"),
        pytest.param(in_ring(0), "a frame of 0 bytes", id="empty"),
        pytest.param(in_ring(), "a frame of 0 bytes", id="no sizes"),
        pytest.param(in_ring(1, count=60000), "without its sizes", id="sizes that are not there"),
        pytest.param(shared_memory._OFFER + b"x", "a second ring", id="second ring"),
    ],
)
def test_wrong_sizes_are_refused_before_anything_is_read_or_allocated(meta, words):
    with streams() as (sender, receiver):
        opened(sender, receiver)
        sender._connection.post(meta)
        asked = []
        with pytest.raises(CommError, match=words):
            receiver.try_recv(lambda *args: asked.append(args))
        assert asked == []


def test_a_frame_in_a_ring_that_nobody_has_opened_is_refused():
    with streams() as (sender, receiver):
        sender._connection.post(in_ring(5))
        with pytest.raises(CommError, match="that this process has not opened"):
            receiver.try_recv()


def test_bytes_that_were_never_written_are_only_the_peers_own():
    with streams() as (sender, receiver):
        opened(sender, receiver)
        for _ in range(20):  # more than the ring has
            sender._connection.post(in_ring(3 << 20))
            assert len(receiver.try_recv().buffers[0]) == 3 << 20


@pytest.mark.parametrize("read", [1, RING_BYTES, (1 << 64) - 1])
def test_a_reader_that_claims_to_have_read_more_is_refused(read):
    with streams() as (sender, receiver):
        opened(sender, receiver)
        receiver._incoming._words[ring._CONSUMED] = read
        with pytest.raises(CommError, match=f"up to byte {read}"):
            sender.post(HEAD, [LARGE])


@contextlib.contextmanager
def closing(*fds):
    yield
    for fd in fds:
        os.close(fd)


def offer(fd, token=bytes(16), pid=None):
    return struct.pack("<qq16s", os.getpid() if pid is None else pid, fd, token)


def test_only_the_ring_of_the_offer_is_opened():
    null = os.open("/dev/null", os.O_RDWR)
    plain = os.memfd_create("braid-van")
    os.ftruncate(plain, 4096 + RING_BYTES)  # could be shrunk later: no seals
    sparse = os.memfd_create("braid-van", os.MFD_ALLOW_SEALING)
    os.ftruncate(sparse, 4096 + RING_BYTES)  # memory may be missing later
    fcntl.fcntl(sparse, fcntl.F_ADD_SEALS, ring._seals())
    good = SendRing()
    number = good._fd
    with closing(null, plain, sparse):
        for wrong in (
            offer(null),
            offer(sparse),
            offer(plain),
            offer(number),  # another token
            good.offer[:-1],
            good.offer + b"x",
            offer(number, good._token, pid=-1),
            offer(10**6, good._token),
        ):
            with pytest.raises((OSError, ValueError)):
                ReceiveRing(wrong)
        assert not good.is_opened
        ReceiveRing(good.offer).close()
        assert good.is_opened
    good.close()


def test_the_size_of_a_ring_cannot_change():
    made = SendRing()
    for size in (0, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(made._fd, size)
    made.close()
    made.close()
