"""Vans with shared memory: peers that die or do not read, forked processes, and what is left behind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import pytest

from braid.runtime.message import PeerLost, SocketVan, VanConfig
from braid.runtime.message.vans.ring import RING_BYTES
from braid.runtime.message.vans.shared_memory import has_rings
from braid.runtime.wire import Secret
from support.leaks import belongings, no_leaks
from support.message_conformance import CONFORMANCE_SCHEMA, Note

pytestmark = pytest.mark.skipif(not has_rings(), reason="needs Linux on x86-64")
SECRET = Secret.generate()
LARGE_BYTES = 1 << 20


def open_van(node, config=None, *, kind="unix", listen=False):
    address = f"unix:@braid-shared-{os.getpid()}-{node}" if kind == "unix" else "tcp://127.0.0.1:0"
    return SocketVan(
        node,
        CONFORMANCE_SCHEMA,
        secret=SECRET,
        run_id="run",
        listen=address if listen else "",
        config=config,
    )


@contextlib.contextmanager
def pair(config=None, *, kind="unix"):
    """Two vans that are connected, and have exchanged what makes them use shared memory."""
    with (
        no_leaks(),
        open_van("worker:0", config) as here,
        open_van("worker:1", config, kind=kind, listen=True) as there,
    ):
        here.connect("worker:1", there.address, timeout_s=10)
        there.wait_for(["worker:0"], 10)
        send(here, there, 0)
        send(there, here, 0)
        yield here, there
        here.close(0)
        there.close(0)


def send(sender, receiver, number, nbytes=LARGE_BYTES):
    sender.send(receiver.node, Note(number), buffers=[bytes([number]) * nbytes])
    delivery = receiver.recv(10)
    assert (delivery.message, delivery.buffers[0] == bytes([number]) * nbytes) == (
        Note(number),
        True,
    )


def stream(van):
    (wire,) = van._wires.values()
    return wire.stream


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_large_messages_use_shared_memory_in_both_directions(kind):
    with pair(kind=kind) as (here, there):
        for number in range(1, 4):
            send(here, there, number, 5_000_001)
            send(there, here, number, 5_000_001)
        assert (stream(here).is_shared, stream(there).is_shared) == (True, True)


def test_small_messages_make_no_memory():
    with no_leaks(), open_van("worker:0") as here, open_van("worker:1", listen=True) as there:
        here.connect("worker:1", there.address, timeout_s=10)
        before = belongings()
        for number in range(10):
            send(here, there, number, 10_000)
        assert belongings().shared - before.shared == set()
        here.close(0)


def test_portable_vans_make_no_memory():
    with pair(VanConfig(shared_memory=False)) as (here, there):
        send(here, there, 1)
        assert [name for name in belongings().shared if "braid-van" in name] == []
        assert (stream(here).is_shared, stream(there).is_shared) == (False, False)


def test_a_peer_that_does_not_read_stops_the_sender_and_loses_nobody():
    config = VanConfig(
        heartbeat_s=0.02, lost_after_s=0.3, max_unread_messages=1, max_queue_messages=2
    )
    with pair(config) as (here, there):
        sent = 0
        while True:  # until ring, socket and queue are full, and nothing has moved for a while
            sending = here.try_send("worker:1", Note(sent), buffers=[bytes([sent]) * LARGE_BYTES])
            if sending is None:
                with contextlib.suppress(TimeoutError):
                    here.wait_for(["nobody:0"], 0.05)
                sending = here.try_send(
                    "worker:1", Note(sent), buffers=[bytes([sent]) * LARGE_BYTES]
                )
            if sending is None:
                break
            sent += 1
        (link,) = here._state._links.values()
        start_ns = here.clock.now_ns()
        while link.received_ns - start_ns < 400_000_000:  # heartbeats come, beyond `lost_after_s`
            with contextlib.suppress(TimeoutError):
                here.wait_for(["nobody:0"], 0.01)
        assert (here.peers, there.peers) == (("worker:1",), ("worker:0",))
        received = [there.recv(10) for _ in range(sent)]
        assert [each.message.number for each in received] == list(range(sent))
        assert [each.buffers[0][-1] for each in received] == list(range(sent))
        assert sent > RING_BYTES // LARGE_BYTES


def test_an_urgent_message_passes_a_large_one_in_the_ring():
    with pair(VanConfig(max_unread_messages=1)) as (here, there):
        here.send("worker:1", Note(0))  # the receiver stops reading
        while not there.statistics().unread:
            with contextlib.suppress(TimeoutError):
                there.wait_for(["nobody:0"], 0.002)
        here.send("worker:1", Note(1), buffers=[bytes(40 << 20)])
        here.send("worker:1", Note(2), priority=5)
        assert [there.recv(10).message for _ in range(3)] == [Note(0), Note(2), Note(1)]


CHILD = """
import os, signal, sys
from braid.runtime.message import SocketVan
from support.message_conformance import CONFORMANCE_SCHEMA, Note
from braid.runtime.wire import Secret
van = SocketVan("worker:1", CONFORMANCE_SCHEMA, secret=Secret.from_fd(int(sys.argv[1])), run_id="run")
van.connect("server:0", sys.argv[2], timeout_s=20)
van.send("server:0", Note(1), buffers=[b"a" * 100_000])
van.recv(20)
(wire,) = van._wires.values()
van.send("server:0", Note(2), buffers=[b"b" * 4_000_000]).wait()
written = wire.stream._outgoing._position
van.send("server:0", Note(3 if written == 4_000_000 else -1), buffers=[b"c" * 100_000_000])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_messages_in_the_ring_of_a_killed_process_arrive_whole_or_not_at_all():
    with no_leaks(), open_van("server:0", VanConfig(max_unread_messages=1), listen=True) as van:
        fd = SECRET.to_fd()
        with subprocess.Popen(
            [sys.executable, "-c", CHILD, str(fd), van.address], pass_fds=[fd]
        ) as child:
            os.close(fd)
            assert van.recv(30).message == Note(1)
            van.send("worker:1", Note(0))
            child.wait(30)
            delivery = van.recv(10)
            lost = van.recv(10).message
        assert (delivery.message, delivery.buffers[0] == b"b" * 4_000_000) == (Note(2), True)
        assert (type(lost), lost.orderly) == (PeerLost, False)
        del delivery


def test_forked_process_leaves_rings_to_its_parent():
    with pair() as (here, there):
        child = os.fork()
        if child == 0:
            here.close()
            there.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        for number in range(1, 4):
            send(here, there, number)
            send(there, here, number)
        assert (stream(here).is_shared, stream(there).is_shared) == (True, True)


def test_a_peer_that_connects_again_gets_a_new_ring():
    with no_leaks(), open_van("server:0", listen=True) as van:
        for life in range(3):
            with open_van("worker:1") as client:
                client.connect("server:0", van.address, timeout_s=10)
                for number in range(3):
                    send(client, van, 10 * life + number)
                assert stream(client).is_shared
            assert van.recv(10).message.orderly
