"""Connections and listeners: frames between threads of this process, over real sockets."""

from __future__ import annotations

import errno
import gc
import os
import resource
import select
import socket
import stat
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from braid.errors import (
    CommError,
    CommTimeout,
    ConfigError,
    PeerLostError,
    RendezvousError,
    StaleError,
)
from braid.runtime.clock import VirtualClock
from braid.runtime.wire import Connection, FrameLimits, Identity, Listener, Secret, connect
from braid.runtime.wire.address import Address
from braid.runtime.wire.listener import MAX_ACCEPTS, MAX_HALF_OPEN, MAX_SILENT
from braid.runtime.wire.unsent import Unsent

SECRET = Secret.generate()
SERVER = Identity("run", "launcher", -1)
WORKER = Identity("run", "control", 3, 1)


@pytest.fixture
def pair():
    one, other = socket.socketpair()
    with Connection(one, SERVER) as left, Connection(other, WORKER) as right:
        yield left, right


@pytest.fixture(params=["tcp", "abstract", "path"])
def listener(request, tmp_path):
    addresses = {
        "tcp": "tcp://127.0.0.1:0",
        "abstract": f"unix:@braid-test-{os.getpid()}-{id(request)}",
        "path": f"unix:{tmp_path}/s",
    }
    with Listener(addresses[request.param], SECRET, SERVER) as found:
        yield found


@pytest.fixture
def tcp_listener():
    with Listener("tcp://127.0.0.1:0", SECRET, SERVER) as found:
        yield found


@contextmanager
def socket_pair(family):
    if family == socket.AF_UNIX:
        one, other = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            one = socket.create_connection(server.getsockname())
            other, _ = server.accept()
    with one, other:
        yield one, other


def send_until_lost(connection):
    for _ in range(100_000):  # the system may take the first ones
        connection.send(b"x")


def no_room(_pieces):
    raise OSError(errno.ENOBUFS, "no room")


def in_thread(fn, *args, **kwargs):
    pool = ThreadPoolExecutor(1)
    future = pool.submit(fn, *args, **kwargs)
    pool.shutdown(wait=False)
    return future


def raw_client(listener):
    where = Address.parse(listener.address)
    return socket.create_connection((where.host, where.port))


def join(listener, identity=WORKER):
    client = in_thread(connect, listener.address, SECRET, identity, timeout_s=10)
    return listener.accept(10), client.result(10)


def plain(frame):
    return frame.meta, [bytes(buffer) for buffer in frame.buffers]


def test_frames_arrive_in_order_with_their_buffers(pair):
    left, right = pair
    left.send(b"one", [b"a", b"", b"bc"])
    left.send(b"two")
    assert [plain(right.recv(5)), plain(right.recv(5))] == [
        (b"one", [b"a", b"", b"bc"]),
        (b"two", []),
    ]


def test_large_frames_arrive_whole_and_in_the_given_memory(pair):
    left, right = pair
    payload, home = os.urandom(3_000_000), bytearray(3_000_000)
    sent = in_thread(left.send, b"", [payload])
    frame = right.recv_into(lambda _meta, _sizes: [memoryview(home)], 10)
    assert (sent.result(10), frame.buffers[0].obj is home, home == payload) == (None, True, True)


def test_many_buffers_leave_in_several_calls(pair):
    left, right = pair
    buffers = [bytes([index % 256]) * 3 for index in range(1000)]
    left.send(b"", buffers)
    assert plain(right.recv(5)) == (b"", buffers)


def test_threads_that_send_at_once_do_not_mix_their_frames(pair):
    left, right = pair
    with ThreadPoolExecutor(4) as pool:
        for worker in range(4):
            pool.submit(
                lambda worker=worker: [
                    left.send(b"%d" % worker, [b"%d" % worker * 9999]) for _ in range(20)
                ]
            )
        frames = [plain(right.recv(10)) for _ in range(80)]
    assert sorted(frames) == sorted(
        (b"%d" % w, [b"%d" % w * 9999]) for w in range(4) for _ in range(20)
    )


def test_try_recv_returns_none_when_nothing_is_here(pair):
    left, right = pair
    assert (right.try_recv(), right.poll()) == (None, False)
    left.send(b"x")
    left.send(b"y")
    assert (right.poll(5), right.try_recv().meta, right.poll(), right.try_recv().meta) == (
        True,
        b"x",
        True,
        b"y",
    )
    assert (right.try_recv(), right.poll()) == (None, False)


def test_a_deadline_names_the_peer_and_loses_nothing(pair):
    left, right = pair
    with pytest.raises(
        CommTimeout, match=r"rank 3 \(control, run run, epoch 1\) sent .*nothing has come"
    ):
        right.recv(0.001)
    left._socket.send(b"BF\0\0\x03\0\0\0m")
    with pytest.raises(CommTimeout, match="a part of one has come"):
        right.recv(0.001)
    left._socket.send(b"et")
    assert right.recv(5).meta == b"met"


def test_the_end_of_the_stream_names_the_peer(pair):
    left, right = pair
    right.close()
    for _ in range(2):
        with pytest.raises(
            PeerLostError, match=r"lost the launcher .*it closed the connection"
        ) as caught:
            left.recv(5)
    with pytest.raises(PeerLostError):
        left.send(b"x")
    assert caught.value.rank == -1


def test_an_end_inside_a_frame_is_told_apart(pair):
    left, right = pair
    left._socket.send(b"BF\0\0\x03\0\0\0m")
    left.close()
    with pytest.raises(PeerLostError, match=r"rank 3 .*in the middle of a frame") as caught:
        right.recv(5)
    assert caught.value.rank == 3


def test_frames_sent_before_the_end_are_received(pair):
    left, right = pair
    left.send(b"last words")
    left.close()
    assert right.recv(5).meta == b"last words"


@pytest.mark.parametrize("unread", [False, True])
@pytest.mark.parametrize("family", [socket.AF_UNIX, socket.AF_INET])
def test_last_words_are_received_after_a_send_that_failed(family, unread):
    with socket_pair(family) as (one, other):
        left, right = Connection(one, SERVER), Connection(other, WORKER)
        if unread:
            right.send(b"nobody reads this")
            assert left.poll(5)
        left.send(b"last words")
        left.close()
        with pytest.raises(PeerLostError, match=r"rank 3 .*the connection failed"):
            send_until_lost(right)
        assert right.post(b"x", [b"y" * 100]) is right.flush() is None
        assert not right.closed
        assert right.recv(5).meta == b"last words"
        for call in (right.recv, right.recv, lambda: right.send(b"x"), lambda: right.post(b"x")):
            with pytest.raises(PeerLostError, match=r"rank 3 .*the connection failed"):
                call()
        assert right.closed


def test_what_is_posted_to_a_peer_that_has_gone_is_dropped_without_a_word(pair):
    left, right = pair
    left.send(b"last words")
    left.close()
    assert right.post(b"x", [b"y" * (1 << 20)]) is None
    assert right.flush() is None
    assert right.recv(5).meta == b"last words"
    with pytest.raises(PeerLostError, match="the connection failed") as caught:
        right.recv(5)
    assert isinstance(caught.value.__cause__, BrokenPipeError)


def test_a_failed_send_keeps_nothing_alive(pair):
    left, right = pair
    left.close()

    class Step:
        """What the caller is doing."""

    def post():
        step = Step()
        try:
            raise ValueError
        except ValueError:
            right.post(b"x")
        return weakref.ref(step)

    gc.disable()
    try:
        assert post()() is None
    finally:
        gc.enable()
    with pytest.raises(PeerLostError) as caught:
        right.recv(5)
    assert caught.value.__cause__.__context__ is None


def test_a_send_that_fails_here_ends_the_connection(pair):
    left, right = pair
    left._outbox = Unsent(no_room)
    for _ in range(2):
        with pytest.raises(PeerLostError, match="no room"):
            left.post(b"x")
    with pytest.raises(PeerLostError, match="closed the connection"):
        right.recv(5)


def test_closing_wakes_a_thread_that_receives(pair):
    left, _ = pair
    waiting = in_thread(left.recv, 30)
    left.close()
    with pytest.raises(PeerLostError, match="this process closed the connection"):
        waiting.result(10)


def test_bytes_that_are_no_frame_close_the_connection(pair):
    left, right = pair
    left._socket.send(b"GET / HTTP/1.1\r\n")
    with pytest.raises(CommError, match="frame boundaries are lost"):
        right.recv(5)
    with pytest.raises(PeerLostError, match="it violated the frame format"):
        right.recv(5)


def test_a_peer_that_never_reads_times_the_sender_out():
    one, other = socket.socketpair()
    with other, Connection(one, WORKER, send_timeout_s=0.01) as left:
        with pytest.raises(CommTimeout, match=r"rank 3 .* did not read for 0\.01 s"):
            left.send(b"", [bytes(40_000_000)])
        assert left.closed


def test_posting_never_waits_and_flushing_finishes_it(pair):
    left, right = pair
    payload = os.urandom(20_000_000)
    queued = left.post(b"", [payload])
    assert queued > 0
    received = in_thread(right.recv, 10)
    while left.flush():
        pass
    assert plain(received.result(10)) == (b"", [payload])


def test_both_ends_know_each_other(listener):
    server_end, client_end = join(listener)
    with server_end, client_end:
        client_end.send(b"hello")
        server_end.send(b"welcome", [b"!"])
        assert (server_end.peer, client_end.peer) == (WORKER, SERVER)
        assert (server_end.recv(5).meta, plain(client_end.recv(5))) == (
            b"hello",
            (b"welcome", [b"!"]),
        )


def test_frames_sent_right_after_the_proof_belong_to_the_connection(tcp_listener):
    def connect_and_speak():
        connection = connect(tcp_listener.address, SECRET, WORKER, timeout_s=10)
        connection.send(b"early")
        return connection

    client = in_thread(connect_and_speak)
    with tcp_listener.accept(10) as server_end:
        assert server_end.recv(5).meta == b"early"
    client.result(10).close()


def test_a_client_with_another_secret_is_refused_at_both_ends(tcp_listener):
    stranger = in_thread(connect, tcp_listener.address, Secret.generate(), WORKER, timeout_s=10)
    while not tcp_listener.refusals:
        assert tcp_listener.accept_ready() == []
    assert "has another secret" in tcp_listener.refusals[-1]
    with pytest.raises(RendezvousError, match="wrong signature"):
        stranger.result(10)


def test_silent_and_foreign_clients_hold_nobody_up(tcp_listener):
    silent = [raw_client(tcp_listener) for _ in range(5)]
    silent[0].send(b"BRA")
    silent[1].send(b"GET / HTTP/1.1\r\n\r\n")
    server_end, client_end = join(tcp_listener)
    assert server_end.peer == WORKER
    assert any("another program uses" in reason for reason in tcp_listener.refusals)
    for each in (*silent, server_end, client_end):
        each.close()


def test_waiting_for_nobody_ends_at_the_deadline(tcp_listener):
    with pytest.raises(
        CommTimeout, match=r"no client connected to .* .no client was refused; 0 in their handshake"
    ):
        tcp_listener.accept(0.001)


def test_silent_clients_are_dropped_after_five_seconds():
    clock = VirtualClock()
    with Listener("tcp://127.0.0.1:0", SECRET, SERVER, clock=clock) as listener:
        with raw_client(listener) as silent:
            assert listener.accept_ready() == []
            assert listener.next_deadline_ns() == 5 * 10**9
            clock.advance(5 * 10**9)
            assert listener.accept_ready() == []
            assert (listener.next_deadline_ns(), silent.recv(1)) == (None, b"")
        assert "it was silent during the handshake (limit 5 s)" in listener.refusals[-1]


@contextmanager
def no_more_descriptors():
    """This process can open none; those it has stay usable."""
    lowest = os.dup(0)
    os.close(lowest)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def is_readable(listener: Listener) -> bool:
    return bool(select.select([listener], [], [], 0)[0])


def test_a_listener_without_descriptors_pauses_and_loses_no_client():
    clock = VirtualClock()
    with (
        Listener("tcp://127.0.0.1:0", SECRET, SERVER, clock=clock) as listener,
        raw_client(listener),
    ):
        assert is_readable(listener)
        with no_more_descriptors():
            assert listener.accept_ready() == []
        assert listener.refusals == ("accept failed: Too many open files",)
        assert (is_readable(listener), listener.next_deadline_ns()) == (False, 10**8)
        listener.accept_ready()  # too early
        assert "0 half open" in repr(listener)
        clock.advance(10**8)
        listener.accept_ready()
        assert "1 half open" in repr(listener)


def test_more_hosts_than_a_small_backlog_can_knock_before_anybody_looks():
    most = Path("/proc/sys/net/core/somaxconn")
    if not most.exists() or int(most.read_text()) < 200:
        pytest.skip("the system keeps fewer clients waiting")
    with Listener("tcp://127.0.0.1:0", SECRET, SERVER) as listener:
        crowd = [raw_client(listener) for _ in range(200)]
        for each in crowd:
            each.close()
        for _ in range(0, 200, MAX_ACCEPTS):
            assert listener.accept_ready() == []
        assert (listener.refusals, listener.next_deadline_ns()) == ((), None)


def ended(client: socket.socket) -> bool:
    """Whether the listener has closed the connection."""
    client.setblocking(False)
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False


def test_silent_clients_of_one_address_have_a_small_share_and_the_oldest_goes():
    with Listener("tcp://127.0.0.1:0", SECRET, SERVER) as listener:
        crowd = []
        for _ in range(MAX_HALF_OPEN):
            crowd.append(raw_client(listener))
            listener.accept_ready()
        num_dropped = MAX_HALF_OPEN - MAX_SILENT
        assert [ended(each) for each in crowd] == [True] * num_dropped + [False] * MAX_SILENT
        assert f"{MAX_SILENT} later clients of 127.0.0.1 were silent" in listener.refusals[-1]
        server_end, client_end = join(listener)  # at once
        for each in (*crowd, server_end, client_end):
            each.close()


def test_without_room_the_oldest_client_goes():
    with Listener("tcp://127.0.0.1:0", SECRET, SERVER) as listener:
        crowd = []
        for _ in range(MAX_HALF_OPEN + 1):
            crowd.append(raw_client(listener))
            crowd[-1].send(b"B")
            listener.accept_ready()
            listener.accept_ready()
        assert [ended(each) for each in crowd] == [True] + [False] * MAX_HALF_OPEN
        assert f"{MAX_HALF_OPEN} clients were in their handshake" in listener.refusals[-1]
        for each in crowd:
            each.close()


def test_a_turn_accepts_a_bounded_number_of_clients(monkeypatch):
    """Clients that come faster than they are refused keep nobody's event loop busy for ever."""
    with Listener("tcp://127.0.0.1:0", SECRET, SERVER) as listener:
        crowd = [raw_client(listener) for _ in range(MAX_ACCEPTS + 1)]
        monkeypatch.setattr("braid.runtime.wire.listener.same_user_problem", lambda _: "a stranger")
        listener.accept_ready()
        assert [ended(each) for each in crowd] == [True] * MAX_ACCEPTS + [False]
        assert is_readable(listener)
        listener.accept_ready()
        assert ended(crowd[-1])
        for each in crowd:
            each.close()


def test_connecting_tries_again_until_somebody_listens(tmp_path):
    address = f"unix:{tmp_path}/late"
    tried = threading.Event()

    class Clock(VirtualClock):
        def sleep(self, duration_s):
            assert duration_s > 0
            tried.set()  # and time stands still, so it tries for ever

    client = in_thread(connect, address, SECRET, WORKER, timeout_s=10, clock=Clock())
    assert tried.wait(10)
    with Listener(address, SECRET, SERVER) as listener, listener.accept(10) as server_end:
        assert server_end.peer == WORKER
        client.result(10).close()


def test_connecting_to_nobody_says_where_and_why():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(
            RendezvousError, match=rf"127.0.0.1:{port} within 3 s: Connection refused"
        ):
            connect(f"tcp://127.0.0.1:{port}", SECRET, WORKER, timeout_s=3, clock=VirtualClock())


def test_a_port_that_connects_to_itself_is_nobody(monkeypatch):
    """Linux may choose the wanted port as the client's own, and then connects the two."""

    class SelfBound(socket.socket):
        def connect(self, where):
            self.bind(where)
            super().connect(where)

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
    monkeypatch.setattr("socket.socket", SelfBound)
    with pytest.raises(RendezvousError, match="within 0 s: Connection refused"):
        connect(address, SECRET, WORKER, timeout_s=0)


@pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="the system names no peer")
def test_other_users_are_refused_at_unix_sockets_by_both_ends(tmp_path, monkeypatch):
    with Listener(f"unix:{tmp_path}/s", SECRET, SERVER) as listener:
        me = os.geteuid()
        monkeypatch.setattr("os.geteuid", lambda: me + 1)
        with pytest.raises(RendezvousError, match=f"of user {me}, this one of user {me + 1}"):
            connect(listener.address, SECRET, WORKER, timeout_s=10)
        assert listener.accept_ready() == []
        assert f"of user {me}, this one of user {me + 1}" in listener.refusals[-1]


def test_a_port_in_use_is_named(tcp_listener):
    port = Address.parse(tcp_listener.address).port
    with pytest.raises(ConfigError, match=f":{port}: Address already in use; end the process"):
        Listener(tcp_listener.address, SECRET, SERVER)


def test_a_socket_file_is_private_and_removed(tmp_path):
    path = tmp_path / "s"
    with Listener(f"unix:{path}", SECRET, SERVER):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(ConfigError, match="use another name"):
            Listener(f"unix:{path}", SECRET, SERVER)
    assert not path.exists()


def test_a_socket_file_of_a_killed_listener_is_replaced(tmp_path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    with Listener(f"unix:{path}", SECRET, SERVER) as listener:
        server_end, client_end = join(listener)
        server_end.close()
        client_end.close()


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:0", "tcp://[::]:0", "tcp://example.org:0"])
def test_addresses_that_others_reach_need_permission(address):
    with pytest.raises(ConfigError, match="listen_anywhere=True"):
        Listener(address, SECRET, SERVER)


def test_anywhere_is_allowed_on_request():
    with Listener("tcp://0.0.0.0:0", SECRET, SERVER, listen_anywhere=True) as listener:
        assert Address.parse(listener.address).port > 0


def test_a_closed_listener_says_so(tcp_listener):
    tcp_listener.close()
    with pytest.raises(StaleError, match="is closed"):
        tcp_listener.accept(1)


def test_limits_hold_for_accepted_connections():
    with Listener(
        "tcp://127.0.0.1:0", SECRET, SERVER, limits=FrameLimits(max_frame_bytes=10)
    ) as listener:
        server_end, client_end = join(listener)
        with server_end, client_end:
            client_end.send(b"eleven bytes")
            with pytest.raises(CommError, match=r"too large: 12 bytes \(limit 10\)"):
                server_end.recv(5)


@pytest.mark.parametrize(
    "text", ["unix:@name", "unix:/run/s", "tcp://127.0.0.1:80", "tcp://[::1]:0", "tcp://host:65535"]
)
def test_addresses_read_back_as_written(text):
    assert str(Address.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "unix:",
        "unix:@",
        "unix:relative",
        "tcp://",
        "tcp://host",
        "tcp://:80",
        "tcp://h:99999",
        "tcp://h:x",
        "tcp://u@h:1",
        "tcp://h:1/path",
        "127.0.0.1:80",
        "tcp://[::1:80",
    ],
)
def test_other_texts_are_no_addresses(text):
    with pytest.raises(ConfigError, match="is not an address"):
        Address.parse(text)


def test_a_connection_knows_whether_its_other_end_is_on_this_host(pair):
    left, right = pair
    assert (left.is_local, right.is_local) == (True, True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = Connection(socket.create_connection(server.getsockname()), SERVER)
        with client, Connection(server.accept()[0], WORKER) as served:
            assert (client.is_local, served.is_local) == (True, True)
        assert client.is_local is False  # closed: nobody knows
