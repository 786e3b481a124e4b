"""Vans over sockets and inside a process: the promises of all vans, and what the network can do to them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import signal
import socket
import struct
import subprocess
import sys
import threading

import pytest

from braid.errors import CommTimeout, ConfigError, PeerLostError, RendezvousError, StaleError
from braid.runtime.message import (
    LocalNetwork,
    PeerLost,
    PipeStream,
    PipeVan,
    Service,
    SocketVan,
    VanConfig,
)
from braid.runtime.message.protocol.heads import Beat, Bye, Hello, Open, pack, unpack
from braid.runtime.wire import Address, Identity, Secret, connect, encode
from support.message_conformance import (
    CONFORMANCE_CONFIG,
    CONFORMANCE_SCHEMA,
    VAN_CLAIMS,
    Note,
    check_van,
)

SECRET = Secret.generate()
_names = itertools.count()


def socket_address(kind):
    if kind == "tcp":
        return "tcp://127.0.0.1:0"
    return f"unix:@braid-message-{os.getpid()}-{next(_names)}"


def open_van(node, config=None, *, kind="unix", listen=True, **kwargs):
    kwargs = {"secret": SECRET, "run_id": "run", **kwargs}
    address = socket_address(kind) if listen else ""
    return SocketVan(node, CONFORMANCE_SCHEMA, listen=address, config=config, **kwargs)


def socket_vans(kind):
    @contextlib.contextmanager
    def make(config):
        with contextlib.ExitStack() as stack:
            vans = [
                stack.enter_context(open_van(f"worker:{n}", config, kind=kind)) for n in range(3)
            ]
            for van in vans[1:]:
                vans[0].connect(van.node, van.address, timeout_s=10)
                van.wait_for(["worker:0"], 10)
            yield vans
            for van in vans:
                van.close(0)

    return make


def pipes(here, there):
    """Both ends of a pair of pipes."""
    (a, b), (c, d) = os.pipe(), os.pipe()
    return PipeStream(a, d, there), PipeStream(c, b, here)


def in_pipe(meta):
    """A frame as its bytes."""
    return b"".join(encode(meta))


def test_what_a_peer_said_last_is_read_after_a_frame_that_it_did_not_take():
    here, there = pipes("launcher", "agent")
    there.post(b"last words")
    there.close()
    assert here.post(b"are you there?") is None
    assert here.try_recv().meta == b"last words"
    with pytest.raises(PeerLostError, match="lost agent: it closed its pipe"):
        here.try_recv()
    here.close()


@contextlib.contextmanager
def pipe_vans(config):
    with contextlib.ExitStack() as stack:
        vans = [
            stack.enter_context(PipeVan(f"worker:{n}", CONFORMANCE_SCHEMA, config=config))
            for n in range(3)
        ]
        for van in vans[1:]:
            here, there = pipes("worker:0", van.node)
            vans[0].attach(van.node, here)
            van.attach("worker:0", there)
        yield vans
        for van in vans:
            van.close(0)


@contextlib.contextmanager
def local_vans(config):
    network = LocalNetwork(CONFORMANCE_SCHEMA, config=config)
    with contextlib.ExitStack() as stack:
        vans = [network.join(f"worker:{n}") for n in range(3)]
        for van in vans[1:]:
            vans[0].connect(van.node)
        yield vans
        for van in vans:
            stack.callback(van.close, 0)


@pytest.mark.parametrize("claim", VAN_CLAIMS, ids=lambda claim: claim.__name__)
@pytest.mark.parametrize("kind", ["unix", "tcp", "shared"])
def test_socket_van_keeps_its_promises(kind, claim):
    config = dataclasses.replace(CONFORMANCE_CONFIG, shared_memory=kind == "shared")
    with socket_vans(kind)(config) as vans:
        claim(vans)


@pytest.mark.parametrize("claim", VAN_CLAIMS, ids=lambda claim: claim.__name__)
def test_pipe_van_keeps_its_promises(claim):
    with pipe_vans(CONFORMANCE_CONFIG) as vans:
        claim(vans)


def test_local_van_conforms():
    check_van(local_vans)


# what holds for pipes only


@pytest.fixture
def launcher():
    with PipeVan("launcher", CONFORMANCE_SCHEMA) as van:
        yield van


def test_messages_queue_up_for_one_that_has_not_spoken(launcher):
    here, there = pipes("launcher", "agent:0")
    launcher.attach("agent:0", here)
    launcher.send("agent:0", Note(1))
    with PipeVan("agent", CONFORMANCE_SCHEMA) as agent:
        agent.attach("launcher", there)
        found = agent.recv(10)
    lost = launcher.recv(10)
    assert (found.sender, found.message) == ("launcher", Note(1))
    assert (lost.sender, lost.message.orderly) == ("agent:0", True)


def test_the_end_of_a_pipe_is_told_though_nobody_has_spoken(launcher):
    here, there = pipes("launcher", "agent:0")
    launcher.attach("agent:0", here)
    there.close()
    lost = launcher.recv(10)
    assert lost.sender == "agent:0"
    assert "its pipe" in lost.message.reason  # closed or broken: whether a read or a write noticed
    again, there = pipes("launcher", "agent:0")
    launcher.attach("agent:0", again)
    assert launcher.peers == ("agent:0",)
    there.close()


def test_one_that_takes_nothing_more_is_heard_to_its_end(launcher):
    (a, b), (c, d) = os.pipe(), os.pipe()
    launcher.attach("agent:0", PipeStream(a, d, "agent:0"))
    os.write(b, in_pipe(pack(Hello(5, 0, 1 << 20))))
    os.close(c)
    with pytest.raises(PeerLostError, match="lost agent:0: it accepts nothing more"):
        send_until_lost(launcher, "agent:0")
    os.write(b, in_pipe(note_of(1)) + in_pipe(pack(Bye())))
    found = [launcher.recv(10).message for _ in range(2)]
    assert found == [Note(1), PeerLost("it closed its van", orderly=True)]
    os.close(b)


@pytest.mark.parametrize("held", [False, True])
def test_the_successor_of_one_that_takes_nothing_more_comes_after_its_last_words(launcher, held):
    (a, b), (c, d) = os.pipe(), os.pipe()
    launcher.attach("agent:0", PipeStream(a, d, "agent:0"))
    os.write(
        b, in_pipe(pack(Hello(5, 0, 1 << 20))) + b"".join(map(in_pipe, map(note_of, range(40))))
    )
    os.close(c)
    holder = os.dup(b) if held else -1  # such as a process that has inherited it
    os.close(b)
    with pytest.raises(PeerLostError):
        send_until_lost(launcher, "agent:0")
    here, there = pipes("launcher", "agent:0")
    launcher.attach("agent:0", here)
    assert [launcher.recv(10).message for _ in range(40)] == [Note(n) for n in range(40)]
    lost = launcher.recv(10).message
    assert (type(lost), lost.silent) == (PeerLost, False)
    with PipeVan("agent:0", CONFORMANCE_SCHEMA) as agent:
        agent.attach("launcher", there)
        launcher.send("agent:0", Note(1)).wait(10)
        assert agent.recv(10).message == Note(1)
    if held:
        os.close(holder)


def test_a_call_of_one_that_takes_nothing_more_ends_with_its_loss(launcher):
    (a, b), (c, d) = os.pipe(), os.pipe()
    launcher.attach("agent:0", PipeStream(a, d, "agent:0"))
    os.close(c)
    with Service(launcher) as service, pytest.raises(PeerLostError, match="lost agent:0"):
        service.call("agent:0", Note(1), timeout_s=100)
    os.close(b)


def test_bytes_that_were_read_with_another_protocol_are_not_lost(launcher):
    there_reader, our_writer = os.pipe()
    our_reader, there_writer = os.pipe()
    with PipeVan("agent", CONFORMANCE_SCHEMA) as agent:
        agent.attach("launcher", PipeStream(there_reader, there_writer, "launcher"))
        for number in range(3):
            agent.send("launcher", Note(number)).wait(10)
        early = os.read(our_reader, 30)
        launcher.attach("agent:0", PipeStream(our_reader, our_writer, "agent:0", received=early))
        assert [launcher.recv(10).message for _ in range(3)] == [Note(0), Note(1), Note(2)]


def test_a_name_that_is_taken_is_refused(launcher):
    here, there = pipes("launcher", "agent:0")
    more, other = pipes("launcher", "agent:0")
    launcher.attach("agent:0", here)
    with pytest.raises(ConfigError, match="launcher already has a link to agent:0"):
        launcher.attach("agent:0", more)
    with pytest.raises(RendezvousError, match=r"agent:7 is not attached to launcher .attached: agent:0"):  # fmt: skip
        launcher.connect("agent:7")
    for stream in (there, more, other):
        stream.close()


def test_what_is_no_frame_ends_the_link(launcher):
    here, there = pipes("launcher", "agent:0")
    launcher.attach("agent:0", here)
    os.write(there.write_fileno(), b"Last login: Monday\n")
    assert "the head of a frame" in launcher.recv(10).message.reason
    there.close()


# what the network can do


def raw_socket(address):
    family, where = Address.parse(address).resolve()
    sock = socket.socket(family)
    sock.settimeout(10)
    sock.connect(where)
    return sock


def raw_peer(van, *, greet=True):
    """A peer that knows the secret and writes its own frames."""
    connection = connect(van.address, SECRET, Identity("run", "worker", 7), timeout_s=10)
    if greet:
        connection.send(pack(Hello(1, 0, 1 << 25)))
        van.wait_for(["worker:7"], 10)
    return connection


def still_works(van):
    with open_van("worker:8", listen=False) as other:
        other.connect(van.node, van.address, timeout_s=10)
        other.send(van.node, Note(8))
        delivery = van.recv(10)
        assert (delivery.sender, delivery.message) == ("worker:8", Note(8))
        other.close()
        assert isinstance(van.recv(10).message, PeerLost)
    return True


def read_to_end(sock):
    with contextlib.suppress(ConnectionError):
        while sock.recv(4096):
            pass


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_another_protocol_on_the_port_is_refused_and_reported(kind):
    with open_van("server:0", kind=kind) as van, raw_socket(van.address) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 20)
        read_to_end(sock)
        assert (still_works(van), len(van.refusals), van.peers) == (True, 1, ())


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        pytest.param(struct.pack("<HHIQ", 0x4642, 1, 0, 4 << 30), "too large", id="4 GiB"),
        pytest.param(b"no frame at all", "the head of a frame", id="no frame"),
    ],
)
def test_bytes_that_are_no_frame_end_the_connection(raw, words):
    with open_van("server:0") as van:
        with raw_peer(van) as peer:
            os.write(peer.fileno(), raw)
            lost = van.recv(10)
        assert (lost.sender, lost.message.orderly) == ("worker:7", False)
        assert words in lost.message.reason
        assert still_works(van)


def test_message_of_4_gib_is_refused_before_it_is_allocated():
    with open_van("server:0") as van:
        asked = []
        van.receive_into(Note, lambda *args: asked.append(args))
        body = CONFORMANCE_SCHEMA.encode(Note(1))[1]
        with raw_peer(van) as peer:
            peer.send(pack(Open(1, "note", 0, 0, 0, 0, body, 0, (4 << 30,))), [b"x"])
            lost = van.recv(10)
        assert (f"of {(4 << 30) + len(body)} bytes (limit" in lost.message.reason, asked) == (
            True,
            [],
        )
        assert still_works(van)


def test_unknown_type_is_refused_with_sender_and_name():
    with open_van("server:0") as van:
        with raw_peer(van) as peer:
            peer.send(pack(Open(1, "os.system", 0, 0, 0, 0, b"\x80", 0, ())))
            reason = van.recv(10).message.reason
        assert "worker:7 sent a message 'os.system', which is not registered" in reason


def test_peer_of_another_name_than_expected_is_refused():
    with open_van("server:0") as van, open_van("worker:1", listen=False) as client:
        with pytest.raises(RendezvousError, match=r"server:0 answered at .*, not server:1"):
            client.connect("server:1", van.address, timeout_s=10)
        assert still_works(van)


def test_role_that_is_no_node_is_turned_away():
    with open_van("server:0") as van:
        identity = Identity("run", "Bad role", 1)
        with (
            connect(van.address, SECRET, identity, timeout_s=10) as stranger,
            pytest.raises(PeerLostError),
        ):
            stranger.recv(10)
        assert still_works(van)


IMPATIENT = VanConfig(heartbeat_s=0.02, lost_after_s=0.2)


@pytest.mark.parametrize("greet", [True, False], ids=["half-open", "silent from the start"])
def test_silent_peer_is_lost_though_its_connection_stands(greet):
    with open_van("server:0", IMPATIENT) as van, raw_peer(van, greet=greet) as peer:
        if greet:
            lost = van.recv(10)
            assert (lost.sender, "nothing came from it" in lost.message.reason) == (
                "worker:7",
                True,
            )
        kinds = []
        with contextlib.suppress(PeerLostError):
            while True:
                kinds.append(type(unpack(peer.recv(10).meta, "van")))
        assert (kinds[0], set(kinds[1:])) == (Hello, {Beat})


PATIENT = VanConfig(heartbeat_s=100, lost_after_s=1000, max_unread_messages=1)


def note_of(number):
    body = CONFORMANCE_SCHEMA.encode(Note(number))[1]
    return pack(Open(number, "note", 0, 0, 0, 0, body, 0, ()))


def send_until_lost(van, to="worker:7"):
    for _ in range(1000):  # the system may take the first ones
        van.send(to, Note(1)).wait(10)


def test_a_message_that_has_not_left_when_its_peer_goes_was_not_sent():
    with open_van("server:0", PATIENT) as van:
        with raw_peer(van):
            sending = van.send("worker:7", Note(1), buffers=[bytes(16 << 20)])
        with pytest.raises(PeerLostError):
            sending.wait(10)
        assert van.statistics().sent == 0


def test_a_peer_that_goes_is_noticed_though_there_is_no_room_for_its_messages():
    with open_van("server:0", PATIENT) as van:
        with raw_peer(van) as peer:
            for number in range(1, 4):
                peer.send(note_of(number))
        with pytest.raises(PeerLostError, match="worker:7"):
            send_until_lost(van)
        assert van.peers == ()
        found = [van.recv(10).message for _ in range(4)]
        assert (found[:3], type(found[3])) == ([Note(1), Note(2), Note(3)], PeerLost)


def test_what_a_peer_said_last_is_delivered_before_its_loss():
    with open_van("server:0", VanConfig(heartbeat_s=100, lost_after_s=1000)) as van:
        with raw_peer(van) as peer, van._guard:  # its thread cannot read meanwhile
            for number in range(1, 4):
                peer.send(note_of(number))
            peer.close()
            for link in van._wires:
                for _ in range(3):
                    van._wires[link].stream.post(b"x")
        found = [van.recv(10).message for _ in range(4)]
        assert (found[:3], type(found[3])) == ([Note(1), Note(2), Note(3)], PeerLost)


def test_sender_that_stops_in_the_middle_of_a_message_is_lost():
    with open_van("server:0", IMPATIENT) as van, raw_peer(van) as peer:
        body = CONFORMANCE_SCHEMA.encode(Note(1))[1]
        peer.send(pack(Open(1, "note", 0, 0, 0, 0, body, 0, (1000,))), [b"x" * 10])
        assert "nothing came from it" in van.recv(10).message.reason


CHILD = """
import sys
from braid.runtime.message import SocketVan
from support.message_conformance import CONFORMANCE_SCHEMA, Note
from braid.runtime.wire import Secret
van = SocketVan("worker:1", CONFORMANCE_SCHEMA, secret=Secret.from_fd(int(sys.argv[1])), run_id="run")
van.connect("server:0", sys.argv[2], timeout_s=20)
van.send("server:0", Note(1)).wait()
van.recv()
"""


ECHO = """
import sys
from braid.runtime.message import SocketVan, VanConfig
from support.message_conformance import CONFORMANCE_SCHEMA
from braid.runtime.wire import Secret
config = VanConfig(heartbeat_s=0.02, lost_after_s=1)
secret = Secret.from_fd(int(sys.argv[1]))
with SocketVan("worker:1", CONFORMANCE_SCHEMA, secret=secret, run_id="run", config=config) as van:
    van.connect("server:0", sys.argv[2], timeout_s=20)
    while not van.send("server:0", van.recv().message).wait():
        pass
"""


@pytest.mark.proof
def test_a_process_that_was_stopped_does_not_blame_the_others():
    with open_van("server:0", VanConfig(heartbeat_s=0.02)) as van:
        fd = SECRET.to_fd()
        command = [sys.executable, "-c", ECHO, str(fd), van.address]
        with subprocess.Popen(command, pass_fds=[fd], stderr=subprocess.DEVNULL) as child:
            os.close(fd)
            van.wait_for(["worker:1"], 30)
            found = []
            for number in range(3):
                child.send_signal(signal.SIGSTOP)
                with pytest.raises(CommTimeout):
                    van.recv(1.5)  # longer than the child lets others be silent
                child.send_signal(signal.SIGCONT)
                with contextlib.suppress(PeerLostError):
                    van.send("worker:1", Note(number))
                found.append(van.recv(10).message)
            child.kill()
        assert found == [Note(0), Note(1), Note(2)]


def test_killed_process_is_noticed_at_once_and_named():
    with open_van("server:0") as van:
        fd = SECRET.to_fd()
        command = [sys.executable, "-c", CHILD, str(fd), van.address]
        with subprocess.Popen(command, pass_fds=[fd]) as child:
            os.close(fd)
            assert van.recv(30).message == Note(1)
            child.send_signal(signal.SIGKILL)
            lost = van.recv(VanConfig().lost_after_s / 2)  # long before silence would tell
        assert (lost.sender, lost.message.orderly) == ("worker:1", False)
        with pytest.raises(PeerLostError, match="lost worker:1: ") as caught:
            van.send("worker:1", Note(2))
        assert caught.value.rank == 1


def test_deadline_ends_a_message_though_nothing_else_wakes_the_van():
    config = VanConfig(heartbeat_s=100, lost_after_s=1000, max_unread_messages=1)
    with socket_vans("unix")(config) as vans:
        vans[0].send("worker:1", Note(0))
        vans[0].send("worker:1", Note(1), buffers=[bytes(24 << 20)])
        sending = vans[0].send("worker:1", Note(2), deadline_s=0.02)
        for _ in range(1000):
            if sending.done:
                break
            with contextlib.suppress(CommTimeout):
                vans[0].wait_for(["nobody:0"], 0.01)
        assert (sending.done, vans[0].statistics().expired) == (True, 1)


def test_peer_can_connect_again_after_a_loss():
    with open_van("server:0") as van:
        for number in range(3):
            with open_van("worker:1", listen=False) as client:
                client.connect("server:0", van.address, timeout_s=10)
                client.send("server:0", Note(number))
                assert van.recv(10).message == Note(number)
                van.send("worker:1", Note(-number))
                assert client.recv(10).message == Note(-number)
            assert van.recv(10).message.orderly


def test_both_may_connect_at_the_same_time():
    for _ in range(5):
        with open_van("worker:0") as a, open_van("worker:1") as b:
            calls = [
                threading.Thread(target=one.connect, args=(other.node, other.address))
                for one, other in ((a, b), (b, a))
            ]
            for call in calls:
                call.start()
            for call in calls:
                call.join()
            for number in range(20):
                a.send("worker:1", Note(number))
                b.send("worker:0", Note(number))
            found = [[van.recv(10).message for _ in range(20)] for van in (a, b)]
            assert found == [list(map(Note, range(20)))] * 2


@pytest.mark.parametrize("make", [socket_vans("unix"), local_vans], ids=["sockets", "local"])
def test_many_threads_may_send_and_receive(make):
    with make(VanConfig()) as vans:
        found = []
        lock = threading.Lock()

        def send(base):
            for number in range(50):
                vans[0].send("worker:1", Note(base + number), buffers=[bytes(number)])

        def receive():
            for _ in range(100):
                delivery = vans[1].recv(10)
                with lock:
                    found.append(delivery.message.number)

        threads = [threading.Thread(target=send, args=(1000 * n,)) for n in range(4)]
        threads += [threading.Thread(target=receive) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(found) == [1000 * n + number for n in range(4) for number in range(50)]


def test_connect_says_what_it_waited_for():
    with open_van("worker:0", listen=False) as van:
        with pytest.raises(
            RendezvousError, match="no braid process answered at unix:@braid-nobody"
        ):
            van.connect("server:0", "unix:@braid-nobody", timeout_s=0.02)
        with pytest.raises(ConfigError, match="name of a node"):
            van.connect("Server", "unix:@braid-nobody", timeout_s=0.02)


def test_closing_wakes_who_waits():
    van = open_van("server:0")
    errors = []

    def wait():
        try:
            van.recv()
        except StaleError as exc:
            errors.append(str(exc))

    thread = threading.Thread(target=wait)
    thread.start()
    van.close()
    thread.join()
    assert errors == ["the van of server:0 is closed: open a new one"]
