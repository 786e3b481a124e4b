"""The handshake lets in who knows the secret, and says why it keeps others out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.errors import ConfigError
from braid.runtime.wire import Established, Handshake, Identity, Refused, Secret, SendBytes
from braid.runtime.wire.handshake import FRAME_BYTES, MAGIC

SECRET = Secret(bytes(range(32)))
CLIENT = Identity("run-1", "store", 2, 7)
SERVER = Identity("run-1", "launcher", -1, 7)


def client(secret=SECRET, identity=CLIENT, nonce=b"c" * 32):
    return Handshake("client", secret, identity, nonce)


def server(secret=SECRET, identity=SERVER, nonce=b"s" * 32):
    return Handshake("server", secret, identity, nonce)


def converse(one, other):
    """Carry bytes between both until nobody has anything to say; what each was told at the end."""
    outcomes = {one: None, other: None}
    inbox = [(one, one.start()), (other, other.start())]
    while inbox:
        side, instructions = inbox.pop(0)
        for instruction in instructions:
            if isinstance(instruction, SendBytes):
                peer = other if side is one else one
                if peer.needs:
                    inbox.append((peer, peer.feed(instruction.data)))
            else:
                outcomes[side] = instruction
    return outcomes[one], outcomes[other]


def test_both_ends_learn_who_the_other_is():
    assert converse(client(), server()) == (Established(SERVER), Established(CLIENT))


def test_an_established_handshake_needs_no_more_bytes():
    one, other = client(), server()
    converse(one, other)
    assert (one.needs, other.needs) == (0, 0)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_frames_may_arrive_in_any_pieces(sizes):
    one, other = client(), server()
    [hello] = one.start()
    other.start()
    rest, found = hello.data, []
    for size in [*sizes, FRAME_BYTES]:
        if rest:
            found += other.feed(rest[:size])
            rest = rest[size:]
    assert [type(instruction) for instruction in found] == [SendBytes]


def test_a_wrong_secret_is_refused_by_both():
    one, other = converse(client(Secret(b"x" * 32)), server())
    assert "wrong signature" in one.reason
    assert "has another secret" in other.reason


def test_a_client_without_the_secret_cannot_turn_the_answer_into_a_proof():
    one, other = client(Secret(b"x" * 32)), server()
    [hello] = one.start()
    other.start()
    [answer] = other.feed(hello.data)
    kind, nonce = slice(10, 11), slice(-64, -32)
    forged = bytearray(answer.data)
    forged[kind], forged[nonce] = b"\x03", bytes(32)
    assert "wrong signature" in other.feed(bytes(forged))[-1].reason


def test_a_replayed_exchange_is_refused():
    one, first, second = client(), server(), server(nonce=b"t" * 32)
    [hello] = one.start()
    first.start()
    [answer] = first.feed(hello.data)
    proof, _ = one.feed(answer.data)
    assert first.feed(proof.data) == [Established(CLIENT)]
    second.start()
    second.feed(hello.data)
    assert "replays an old handshake" in second.feed(proof.data)[-1].reason


@pytest.mark.parametrize("field", range(12, FRAME_BYTES - 32, 8))
def test_no_signed_byte_can_be_changed(field):
    one, other = client(), server()
    [hello] = one.start()
    other.start()
    [answer] = other.feed(hello.data)
    bent = bytearray(answer.data)
    bent[field] ^= 1
    assert isinstance(one.feed(bytes(bent))[-1], Refused)


def test_own_bytes_sent_back_are_refused():
    one = client()
    [hello] = one.start()
    assert "reflected" in one.feed(hello.data)[-1].reason


def test_two_clients_refuse_each_other():
    one, other = client(), client(nonce=b"d" * 32)
    [hello] = other.start()
    one.start()
    assert "both ends connected" in one.feed(hello.data)[-1].reason


def test_another_run_is_refused_and_named():
    one, other = converse(client(), server(identity=SERVER._replace(run_id="run-2")))
    assert "belongs to run 'run-1'" in other.reason
    assert "belongs to another run" in one.reason


def test_another_version_is_refused_and_named():
    one, other = client(), server()
    [hello] = one.start()
    other.start()
    newer = hello.data[: len(MAGIC)] + b"\0\x63" + hello.data[len(MAGIC) + 2 :]
    send, refused = other.feed(newer)
    assert "the other side has version 99 of braid's protocol, this one 2" in refused.reason
    assert "another version" in one.feed(send.data)[-1].reason


@pytest.mark.parametrize("start", [b"GET / HTTP/1.1\r\n", b"\x16\x03\x01", b"SSH-2.0-", b"B\0"])
def test_another_protocol_is_refused_at_its_first_bytes_and_gets_no_answer(start):
    other = server()
    other.start()
    [refused] = other.feed(start)
    assert "another program uses this port" in refused.reason


@given(st.binary(max_size=FRAME_BYTES))
def test_any_bytes_are_waited_for_or_refused(data):
    for side in (client(), server()):
        side.start()
        for instruction in side.feed(MAGIC + b"\0\x02" + data[: FRAME_BYTES - 10]):
            assert isinstance(instruction, (SendBytes, Refused))


@pytest.mark.parametrize(
    "identity",
    [CLIENT._replace(run_id="é" * 33), CLIENT._replace(role=""), CLIENT._replace(role="a\0b")],
)
def test_an_identity_that_does_not_fit_is_refused_at_once(identity):
    with pytest.raises(ConfigError, match=r"Identity\..* must have"):
        client(identity=identity)
