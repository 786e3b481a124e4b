"""Stores with several clients: conformance of every kind, and what happens when a part of it dies."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import signal
import socket
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from braid.errors import CommTimeout, ConfigError, PeerLostError, StaleError
from braid.runtime.store import FileStore, HashStore, PrefixStore, StoreClient, StoreServer
from braid.runtime.store.file_store import _HEAD
from braid.runtime.wire import Connection, FrameLimits, Identity, Listener, Secret, connect
from support.store_conformance import check_store

SECRET = Secret.generate()
_names = itertools.count()


@pytest.fixture
def stack():
    with contextlib.ExitStack() as opened:
        yield opened


@pytest.fixture(params=["unix", "tcp"])
def address(request):
    if request.param == "tcp":
        return "tcp://127.0.0.1:0"
    return f"unix:@braid-test-{os.getpid()}-{next(_names)}"


def open_client(server, rank=0):
    identity = Identity("run", "store", rank)
    return StoreClient(connect(server.address, SECRET, identity, timeout_s=10), 10)


def socket_pair_client(stack, server, rank=0):
    ours, theirs = socket.socketpair()
    server.serve(Connection(theirs, Identity("run", "store", rank)))
    client = StoreClient(Connection(ours, Identity("run", "launcher", -1)), 10)
    return stack.enter_context(client)


def in_thread(fn, *args):
    pool = ThreadPoolExecutor(1)
    future = pool.submit(fn, *args)
    pool.shutdown(wait=False)
    return future


def test_hash_store_conforms():
    check_store(lambda n: [HashStore(10)] * n)


def test_server_and_clients_conform(stack, address):
    def make_clients(n):
        stack.close()
        server = stack.enter_context(StoreServer.listen(address, SECRET, "run"))
        return [stack.enter_context(open_client(server, rank)) for rank in range(n)]

    check_store(make_clients)


def test_threads_that_share_one_client_conform(stack):
    def make_clients(n):
        stack.close()
        server = stack.enter_context(StoreServer())
        return [socket_pair_client(stack, server)] * n

    check_store(make_clients)


def test_file_store_conforms(stack, tmp_path):
    def make_clients(n):
        path = tmp_path / f"store{next(_names)}"
        return [stack.enter_context(FileStore(path, 10)) for _ in range(n)]

    check_store(make_clients)


def test_prefix_store_conforms():
    check_store(lambda n: [PrefixStore("outer", PrefixStore("inner", HashStore(10)))] * n)


def test_prefixes_keep_keys_apart():
    whole = HashStore()
    PrefixStore("a", whole).set("k", b"1")
    PrefixStore("b", whole).set("k", b"2")
    assert whole.multi_get(["a/k", "b/k"]) == [b"1", b"2"]


def test_connections_of_one_listener_can_be_handed_over(stack):
    server = stack.enter_context(StoreServer())
    launcher = Identity("run", "launcher", -1)
    listener = stack.enter_context(Listener("tcp://127.0.0.1:0", SECRET, launcher))
    identity = Identity("run", "store", 1)
    future = in_thread(lambda: connect(listener.address, SECRET, identity, timeout_s=10))
    server.serve(listener.accept(10))
    with StoreClient(future.result(10)) as client:
        assert client.add("n", 3) == 3


def test_a_lost_server_is_named_in_every_thread(stack):
    server = stack.enter_context(StoreServer())
    client = socket_pair_client(stack, server)
    waiting = [in_thread(client.get, f"never{index}", 60) for index in range(3)]
    while "3 waiting" not in repr(server):
        client.check(["x"])
    server.close()
    for each in waiting:
        with pytest.raises(PeerLostError, match="lost the launcher"):
            each.result(10)
    with pytest.raises(PeerLostError, match="lost the launcher"):
        client.set("a", b"")


def test_a_client_that_dies_is_forgotten_and_its_keys_stay(stack):
    server = stack.enter_context(StoreServer())
    dying, living = socket_pair_client(stack, server), socket_pair_client(stack, server)
    dying.set("left", b"behind")
    waiting = in_thread(dying.get, "never", 60)
    while "1 waiting" not in repr(server):
        living.check(["x"])
    dying.close()
    with pytest.raises(PeerLostError):
        waiting.result(10)
    while "1 clients, 0 waiting" not in repr(server):
        living.check(["x"])
    assert living.get("left") == b"behind"


def test_a_client_that_speaks_nonsense_is_dropped_and_the_others_served(stack):
    server = stack.enter_context(StoreServer())
    ours, theirs = socket.socketpair()
    server.serve(Connection(theirs, Identity("run", "store", 5)))
    with Connection(ours, Identity("run", "launcher", -1)) as nonsense:
        nonsense.send(b"\xc1 is no msgpack")
        with pytest.raises(PeerLostError):
            nonsense.recv(10)
    assert socket_pair_client(stack, server).add("n", 1) == 1


def test_a_client_that_never_reads_does_not_hold_the_others_up(stack):
    server = stack.enter_context(StoreServer())
    busy = socket_pair_client(stack, server)
    busy.set("large", bytes(2_000_000))
    ours, theirs = socket.socketpair()
    with Connection(ours, Identity("run", "launcher", -1)) as deaf:
        server.serve(Connection(theirs, Identity("run", "store", 5)))
        for number in range(3):
            deaf.send(bytes([0x93, number, 0, 0x92, 0xA3]) + b"get" + b"\xa5large")
        assert [busy.add("n", 1) for _ in range(3)] == [1, 2, 3]
        assert [len(deaf.recv(10).buffers[0]) > 2_000_000 for _ in range(3)] == [True] * 3


def test_a_client_with_many_requests_gets_all_answers_in_their_order(stack):
    server = stack.enter_context(StoreServer())
    ours, theirs = socket.socketpair()
    with Connection(ours, Identity("run", "launcher", -1)) as hasty:
        for number in range(100):  # several turns, all read ahead before the first
            hasty.send(bytes([0x93, number, 0, 0x93, 0xA3]) + b"add\xa1n\x01")
        server.serve(Connection(theirs, Identity("run", "store", 0)))
        sums = [hasty.recv(10).meta for _ in range(100)]
    assert sums == [bytes([0x92, n, 0x92, 0xA2]) + b"ok" + bytes([n + 1]) for n in range(100)]


def test_a_value_that_no_frame_can_carry_is_refused_and_the_client_lives(stack):
    server = stack.enter_context(StoreServer())
    ours, theirs = socket.socketpair()
    limits = FrameLimits(max_frame_bytes=100_000)
    server.serve(Connection(theirs, Identity("run", "store", 0), limits=limits))
    launcher = Identity("run", "launcher", -1)
    client = stack.enter_context(StoreClient(Connection(ours, launcher), 10))
    client.append("log", bytes(60_000))
    client.append("log", bytes(60_000))
    with pytest.raises(ConfigError, match=r"too large: 1200\d\d bytes \(limit 100000\)"):
        client.get("log")
    assert client.add("n", 1) == 1


def test_a_closed_server_takes_no_connections(stack):
    server = StoreServer()
    server.close()
    server.close()
    ours, theirs = socket.socketpair()
    with ours, pytest.raises(StaleError, match="closed"):
        server.serve(Connection(theirs, Identity("run", "store", 0)))


def test_wrong_types_are_refused_before_anything_is_sent(stack):
    client = socket_pair_client(stack, stack.enter_context(StoreServer()))
    for operation in (
        lambda: client.set("k", "text"),
        lambda: client.set(5, b""),
        lambda: client.wait("key"),
        lambda: HashStore(0),
    ):
        with pytest.raises(ConfigError, match="must be"):
            operation()
    assert client.num_keys() == 0


@pytest.mark.parametrize(
    "torn",
    [b"\5", _HEAD.pack(3, 0) + b"ab", _HEAD.pack(2, 0) + b"ab", bytes(100)],
    ids=["head", "short", "checksum", "zeros"],
)
def test_a_torn_record_is_ignored_and_cut_off(tmp_path, torn):
    path = tmp_path / "store"
    with FileStore(path) as first, FileStore(path) as second:
        first.set("a", b"1")
        with path.open("ab") as file:
            file.write(torn)
        assert (second.get("a"), second.num_keys()) == (b"1", 1)
        second.set("b", b"2")
        assert (first.multi_get(["a", "b"]), torn in path.read_bytes()) == ([b"1", b"2"], False)


def test_a_file_of_somebody_else_is_refused(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("remember the milk")
    with pytest.raises(
        ConfigError, match="is not a file of a braid store, it begins with b'remember'"
    ):
        FileStore(path)
    with pytest.raises(ConfigError, match="No such file or directory"):
        FileStore(tmp_path / "missing" / "store")


def test_a_held_lock_is_a_timeout_that_says_so(tmp_path):
    path = tmp_path / "store"
    with FileStore(path, 0.01) as store, path.open("rb") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(CommTimeout, match="another process holds its lock"):
            store.set("a", b"")


def test_readers_share_the_lock_and_writers_do_not(tmp_path):
    path = tmp_path / "store"
    with FileStore(path, 0.01) as store, path.open("rb") as holder:
        store.set("a", b"1")
        fcntl.flock(holder, fcntl.LOCK_SH)
        assert store.get("a") == b"1"
        with pytest.raises(CommTimeout, match="cannot lock the store"):
            store.set("a", b"2")


WRITER = """
import sys
from braid.runtime.store import FileStore
store = FileStore(sys.argv[1])
print("ready", flush=True)
n = 0
while True:
    n += 1
    store.multi_set({"x": b"%d" % n * 500, "y": b"%d" % n * 500})
"""


@pytest.mark.procs
@pytest.mark.parametrize("rounds", [2, pytest.param(40, marks=pytest.mark.proof)])
def test_file_store_survives_writers_that_are_killed(tmp_path, rounds):
    path = tmp_path / "store"
    for _ in range(rounds):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
        with writer, FileStore(path, 10) as store:
            writer.stdout.readline()
            before = store.add("rounds", 1)
            store.wait(["x"])
            for _ in range(5):
                store.add("busy", 1)
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            x, y = store.multi_get(["x", "y"])
            assert (x, store.add("rounds", 0)) == (y, before)
    size, checked = path.stat().st_size, 8
    raw = path.read_bytes()
    while checked < size:  # every record that a survivor has built upon is whole
        length = struct.unpack_from("<I", raw, checked)[0]
        checked += 8 + length
    with FileStore(path) as store:
        assert store.add("rounds", 0) == rounds
