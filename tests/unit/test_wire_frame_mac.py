"""Frames between hosts carry codes: what is changed, repeated, moved or dropped on the way ends."""

from __future__ import annotations

import hashlib
import hmac
import socket
import threading
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.errors import CommError, PeerLostError
from braid.runtime.wire import (
    Established,
    FrameDecoder,
    FrameLimits,
    Handshake,
    Identity,
    Listener,
    Secret,
    connect,
    encode,
)
from braid.runtime.wire.frame_mac import CODE_BYTES, FrameMac
from braid.runtime.wire.handshake import FRAME_BYTES

KEY = bytes(range(32))
SECRET = Secret.generate()
WITHOUT = SECRET.sealing(False)
SERVER, WORKER = Identity("run", "memory", 0), Identity("run", "memory", 1)
ELSEWHERE = "tcp://127.0.0.2:0"  # who connects there has another address, as between two hosts

messages = st.lists(
    st.tuples(st.binary(max_size=40), st.lists(st.binary(max_size=40), max_size=3)),
    min_size=1,
    max_size=4,
)


def sealed(frames):
    """Return the bytes of each frame."""
    mac = FrameMac(KEY)
    return [
        b"".join(
            bytes(piece)
            for part in mac.sealed(encode(meta, buffers), has_buffers=bool(buffers))
            for piece in part
        )
        for meta, buffers in frames
    ]


def received(stream):
    """Return the frames of a stream, and whether it was refused."""
    decoder, found = FrameDecoder(mac=FrameMac(KEY)), []
    try:
        for byte in range(0, len(stream), 7):
            found += decoder.feed(stream[byte : byte + 7])
    except CommError:
        return found, True
    return found, False


def plain(frames):
    return [(frame.meta, [bytes(buffer) for buffer in frame.buffers]) for frame in frames]


def test_codes_are_hmac_sha256_of_number_head_and_buffers():
    [first, second] = sealed([(b"meta", []), (b"m", [b"data"])])
    [head], [other, _] = encode(b"meta"), encode(b"m", [b"data"])
    other = bytes(other)

    def code(number, *parts):
        text = number.to_bytes(8, "little") + b"".join(parts)
        return hmac.digest(KEY, text, hashlib.sha256)[:CODE_BYTES]

    assert first == bytes(head) + code(0, head)
    assert second == other + code(1, other) + b"data" + code(1, other, b"data")


@given(messages, st.lists(st.integers(1, 300), max_size=30))
def test_frames_with_codes_survive_any_split(frames, cuts):
    stream, decoder, found = b"".join(sealed(frames)), FrameDecoder(mac=FrameMac(KEY)), []
    for cut in [*cuts, len(stream)]:
        found += decoder.feed(stream[:cut])
        stream = stream[cut:]
    assert plain(found) == frames
    assert not decoder.in_frame


@given(messages, st.data())
def test_a_changed_bit_is_refused_with_its_frame(frames, data):
    texts = sealed(frames)
    stream = bytearray(b"".join(texts))
    bit = data.draw(st.integers(0, 8 * len(stream) - 1))
    stream[bit // 8] ^= 1 << bit % 8
    found, refused = received(bytes(stream))
    number = next(i for i in range(len(texts)) if bit // 8 < sum(map(len, texts[: i + 1])))
    assert plain(found) == frames[:number]
    # a longer length waits for bytes that do not come
    assert refused or bit // 8 - sum(map(len, texts[:number])) < 8 + 8 * len(frames[number][1])


@given(messages, st.data())
def test_frames_cannot_be_repeated_moved_or_dropped(frames, data):
    texts = sealed([*frames, (b"last", [])])
    order = data.draw(
        st.lists(st.integers(0, len(frames)), min_size=1, max_size=6).filter(
            lambda order: order != list(range(len(order)))
        )
    )
    right = next(i for i, number in enumerate(order) if number != i)
    found, refused = received(b"".join(texts[number] for number in order))
    assert (plain(found), refused) == ([*frames, (b"last", [])][:right], True)


def test_no_memory_is_chosen_before_the_head_is_proven():
    [text] = sealed([(b"where", [b"1234"])])
    asked = []
    for forged in (text.replace(b"where", b"there"), text[:8] + b"\x08" + text[9:]):
        with pytest.raises(CommError, match="wrong authentication code"):
            FrameDecoder(FrameLimits(), mac=FrameMac(KEY)).feed(
                forged, lambda _, sizes: asked.append(sizes)
            )
    assert asked == []


@pytest.mark.parametrize(("one", "other"), [(True, True), (True, False), (False, True)])
def test_one_end_that_wants_codes_is_enough_and_keys_differ_by_direction(one, other):
    client = Handshake("client", SECRET, WORKER, b"c" * 32, seals_frames=one)
    server = Handshake("server", SECRET, SERVER, b"s" * 32, seals_frames=other)
    [hello], _ = client.start(), server.start()
    [answer] = server.feed(hello.data)
    proof, here = client.feed(answer.data)
    [there] = server.feed(proof.data)
    assert isinstance(here, Established)
    assert here.keys == there.keys[::-1]
    assert len({*here.keys, SECRET.sign(b"")}) == 3


@pytest.mark.parametrize("at", ["hello", "answer"])
def test_nobody_on_the_way_can_switch_codes_off(at):
    client = Handshake("client", SECRET, WORKER, b"c" * 32, seals_frames=at == "hello")
    server = Handshake("server", SECRET, SERVER, b"s" * 32, seals_frames=at == "answer")
    [hello], _ = client.start(), server.start()

    def changed(frame):
        assert (frame[11], len(frame)) == (1, FRAME_BYTES)
        return frame[:11] + b"\0" + frame[12:]

    [answer] = server.feed(changed(hello.data) if at == "hello" else hello.data)
    text = changed(answer.data) if at == "answer" else answer.data
    assert not any(isinstance(one, Established) for one in client.feed(text))


def connected(stack, address, ours, theirs):
    listener = stack.enter_context(Listener(address, theirs, SERVER, listen_anywhere=True))
    here = []
    thread = threading.Thread(
        target=lambda: here.append(connect(listener.address, ours, WORKER, timeout_s=10.0))
    )
    thread.start()
    there = stack.enter_context(listener.accept(10.0))
    thread.join()
    return stack.enter_context(here[0]), there


@pytest.mark.parametrize(
    ("address", "ours", "theirs", "expected"),
    [
        (ELSEWHERE, SECRET, SECRET, True),
        (ELSEWHERE, WITHOUT, SECRET, True),
        (ELSEWHERE, WITHOUT, WITHOUT, False),
        ("tcp://127.0.0.1:0", SECRET, SECRET, False),
    ],
)
def test_connections_between_hosts_have_codes(address, ours, theirs, expected):
    with ExitStack() as stack:
        here, there = connected(stack, address, ours, theirs)
        assert (here.has_codes, there.has_codes) == (expected, expected)
        for size in (0, 1, 1 << 20):
            here.post(b"meta", [bytes(size), b"x"])
            frame = there.recv(10.0)
            while here.flush():
                pass
            assert (frame.meta, [*map(len, frame.buffers)]) == (b"meta", [size, 1])
        there.send(b"back")
        assert here.recv(10.0).meta == b"back"


def test_who_stands_between_two_hosts_changes_nothing_unseen():
    with ExitStack() as stack:
        listener = stack.enter_context(Listener(ELSEWHERE, SECRET, SERVER, listen_anywhere=True))
        middle = stack.enter_context(socket.create_server(("127.0.0.2", 0)))
        host, port = listener.address.removeprefix("tcp://").split(":")
        relayed = []

        def relay():
            near, _ = middle.accept()
            with near, socket.create_connection((host, int(port))) as far:
                far.sendall(_exactly(near, FRAME_BYTES))
                near.sendall(_exactly(far, FRAME_BYTES))
                far.sendall(_exactly(near, FRAME_BYTES))
                [text] = encode(b"step 12")
                frame = _exactly(near, len(text) + CODE_BYTES)
                relayed.append(frame)
                far.sendall(frame.replace(b"12", b"13"))
                near.recv(1)

        thread = threading.Thread(target=relay)
        thread.start()
        address = "tcp://{}:{}".format(*middle.getsockname())
        results = []
        client = threading.Thread(
            target=lambda: results.append(connect(address, SECRET, WORKER, timeout_s=10.0))
        )
        client.start()
        there = stack.enter_context(listener.accept(10.0))
        client.join()
        here = stack.enter_context(results[0])
        here.send(b"step 12")
        with pytest.raises(CommError, match="its bytes changed"):
            there.recv(10.0)
        with pytest.raises(PeerLostError):
            there.recv(10.0)
        here.close()
        thread.join()
        assert b"step 12" in relayed[0]


def _exactly(sock, nbytes):
    data = b""
    while len(data) < nbytes:
        data += sock.recv(nbytes - len(data))
    return data
