"""The promises of `braid.runtime.message.Van` as one suite, which every van must keep.

Each claim is a function of connected vans; `check_van` runs them all, each on new vans. All calls
come from one thread, so a simulated network passes, too; time passes while a van waits.
"""

from __future__ import annotations

import contextlib
import select
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import msgspec

from braid.errors import CommTimeout, ConfigError, PeerLostError, StaleError
from braid.runtime.message import Delivery, PeerLost, Schema, Van, VanConfig
from braid.runtime.wire import Buffer

__all__ = ["CONFORMANCE_CONFIG", "CONFORMANCE_SCHEMA", "VAN_CLAIMS", "Note", "Text", "check_van"]

_SOON_S = 0.02  # for deadlines that are meant to pass
_LATE_S = 30.0  # for deadlines that are not
_CHUNK_BYTES = 64 << 10
_LARGE_BYTES = 24 << 20  # more than the kernel buffers for a connection
_NUM_IN_ORDER = 200
_MOST_TURNS = 10_000


class Note(msgspec.Struct, tag="note", frozen=True):
    """A small message."""

    number: int


class Text(msgspec.Struct, tag="text", frozen=True):
    """A message that may be large without buffers."""

    text: str


CONFORMANCE_SCHEMA = Schema(Note, Text)
CONFORMANCE_CONFIG = VanConfig(
    chunk_bytes=_CHUNK_BYTES, max_queue_messages=4, max_unread_messages=1, max_message_bytes=1 << 26
)

MakeVans = Callable[[VanConfig], AbstractContextManager[Sequence[Van]]]
Claim = Callable[[Sequence[Van]], None]


def check_van(make_vans: MakeVans) -> None:
    """Check that a kind of van keeps its promises; AssertionError names the broken one.

    Args:
        make_vans: Opens the vans of "worker:0", "worker:1" and "worker:2" with `CONFORMANCE_SCHEMA`
            and the given config, the first connected to the others. A simulated network needs a
            finite bandwidth.
    """
    for claim in VAN_CLAIMS:
        try:
            with make_vans(CONFORMANCE_CONFIG) as vans:
                claim(vans)
        except Exception as exc:
            msg = f"the van breaks the claim {claim.__name__!r}: {type(exc).__name__}: {exc}"
            raise AssertionError(msg) from exc


def messages_arrive_as_what_they_are(vans: Sequence[Van]) -> None:
    """Messages arrive with their type, fields, and all fields of the envelope."""
    sending = vans[0].send("worker:1", Note(7), priority=3, answers=99)
    received = vans[1].recv(_LATE_S)
    expected = Delivery(
        "worker:0", Note(7), [], sending.id, vans[0].incarnation, 0, priority=3, answers=99
    )
    _expect(received, expected)


def both_ends_use_a_link(vans: Sequence[Van]) -> None:
    """A node can answer whoever connected to it, and every node knows its peers."""
    vans[1].wait_for(["worker:0"], _LATE_S)
    vans[2].wait_for(["worker:0"], _LATE_S)
    _expect([van.peers for van in vans], [("worker:1", "worker:2"), ("worker:0",), ("worker:0",)])
    vans[1].send("worker:0", Note(1))
    vans[2].send("worker:0", Note(2))
    received = [vans[0].recv(_LATE_S) for _ in range(2)]
    _expect(
        {(d.sender, d.message) for d in received}, {("worker:1", Note(1)), ("worker:2", Note(2))}
    )


def connecting_twice_changes_nothing(vans: Sequence[Van]) -> None:
    """A second `connect` uses the first link."""
    vans[0].connect("worker:1", vans[1].address, timeout_s=_LATE_S)
    vans[0].send("worker:1", Note(1))
    _expect(vans[1].recv(_LATE_S).message, Note(1))


def buffers_arrive_beside_the_message(vans: Sequence[Van]) -> None:
    """Buffers of any size and type, also empty ones, arrive in writable memory."""
    pattern = bytes(range(256)) * (3 * _CHUNK_BYTES // 256)
    buffers: list[Buffer] = [
        b"",
        pattern,
        bytearray(b"x"),
        array("d", [1.5, 2.5]),
        memoryview(b""),
        pattern[:-1],
    ]
    vans[0].send("worker:1", Note(1), buffers=buffers)
    received = vans[1].recv(_LATE_S).buffers
    _expect([bytes(each) for each in received], [bytes(each) for each in buffers])
    _expect([buffer.readonly for buffer in received if len(buffer)], [False] * 4)


def large_texts_arrive(vans: Sequence[Van]) -> None:
    """A struct may be larger than a frame's description, and have buffers as well."""
    text = "schön" * _CHUNK_BYTES
    vans[0].send("worker:1", Text(text), buffers=[b"beside"])
    delivery = vans[1].recv(_LATE_S)
    _expect((delivery.message == Text(text), bytes(delivery.buffers[0])), (True, b"beside"))


def memory_is_free_once_sent(vans: Sequence[Van]) -> None:
    """After `wait`, the sender may overwrite its buffer; the receiver gets the old bytes."""
    buffer = bytearray(b"a" * (2 * _CHUNK_BYTES))
    sending = vans[0].send("worker:1", Note(1), buffers=[buffer])
    sending.wait(_LATE_S)
    buffer[:] = b"b" * len(buffer)
    received = vans[1].recv(_LATE_S).buffers[0]
    _expect((sending.done, bytes(received) == b"a" * len(buffer)), (True, True))


def receiver_chooses_the_memory(vans: Sequence[Van]) -> None:
    """`receive_into` is called with the message, and the buffers that it returns are filled."""
    target = bytearray(5)
    asked = []

    def allocate(sender: str, message: object, sizes: tuple[int, ...]) -> list[memoryview] | None:
        asked.append((sender, message, sizes))
        return [memoryview(target)] if sizes == (5,) else None

    vans[1].receive_into(Note, allocate)
    for text in (b"hello", b"hi"):
        vans[0].send("worker:1", Note(3), buffers=[text])
    received = [bytes(vans[1].recv(_LATE_S).buffers[0]) for _ in range(2)]
    _expect((received, bytes(target)), ([b"hello", b"hi"], b"hello"))
    _expect(asked, [("worker:0", Note(3), (5,)), ("worker:0", Note(3), (2,))])


def messages_of_one_priority_stay_in_order(vans: Sequence[Van]) -> None:
    """Messages of one priority arrive first in, first out, small and large."""
    received = []
    for number in range(_NUM_IN_ORDER):
        buffers = [bytes(number * 500)] if number % 7 == 0 else []
        while vans[0].try_send("worker:1", Note(number), buffers=buffers, priority=2) is None:
            received.append(vans[1].recv(_LATE_S).message)
    received += [vans[1].recv(_LATE_S).message for _ in range(_NUM_IN_ORDER - len(received))]
    _expect(received, list(map(Note, range(_NUM_IN_ORDER))))


def urgent_messages_pass_large_ones(vans: Sequence[Van]) -> None:
    """A small urgent message arrives before a large one that was sent earlier."""
    _stop_reading(vans)
    vans[0].send("worker:1", Note(1), buffers=[bytes(_LARGE_BYTES)], priority=0)
    vans[0].send("worker:1", Note(2), priority=5)
    received = [vans[1].recv(_LATE_S).message for _ in range(3)]
    _expect(received, [Note(0), Note(2), Note(1)])


def who_does_not_read_stops_the_sender(vans: Sequence[Van]) -> None:
    """The queue to a peer that does not read is bounded.

    The error names the peer, no queued message is lost, and other peers are not affected.
    """
    sent = _fill(vans)
    vans[0].send("worker:2", Note(5))
    _expect(vans[2].recv(_LATE_S).message, Note(5))
    received = [vans[1].recv(_LATE_S).message for _ in range(sent)]
    _expect(received, list(map(Note, range(sent))))
    vans[0].send("worker:1", Note(sent), deadline_s=_LATE_S)
    _expect(vans[1].recv(_LATE_S).message, Note(sent))


def deadlines_end_messages_in_the_queue(vans: Sequence[Van]) -> None:
    """A message that cannot leave in time never leaves, and its sender gets an error."""
    _stop_reading(vans)
    vans[0].send("worker:1", Note(1), buffers=[bytes(_LARGE_BYTES)])
    sending = vans[0].send("worker:1", Note(2), deadline_s=_SOON_S)
    _raises(CommTimeout, sending.wait, "worker:1")
    vans[0].send("worker:1", Note(3))
    received = [vans[1].recv(_LATE_S).message for _ in range(3)]
    _expect((received, sending.done), ([Note(0), Note(1), Note(3)], True))
    _expect(
        (vans[0].statistics("worker:1").expired, vans[0].statistics("worker:2").expired), (1, 0)
    )


def time_outs_name_what_is_missing(vans: Sequence[Van]) -> None:
    """Time-outs of `recv` and `wait_for` name what is missing."""
    _raises(CommTimeout, lambda: vans[0].recv(_SOON_S), "the last frame from worker:2")
    _raises(CommTimeout, lambda: vans[0].wait_for(["worker:9"], _SOON_S), "worker:9")
    _expect(vans[0].try_recv(), None)


def a_roused_recv_ends_early(vans: Sequence[Van]) -> None:
    """`rouse` ends one `recv`, and loses no message."""
    vans[0].rouse()
    _raises(CommTimeout, lambda: vans[0].recv(_LATE_S), "which called rouse")
    vans[0].rouse()
    vans[1].send("worker:0", Note(1))
    with contextlib.suppress(CommTimeout):
        _expect(vans[0].recv(_LATE_S).message, Note(1))
        return
    _expect(vans[0].recv(_LATE_S).message, Note(1))


def unknown_peers_are_named(vans: Sequence[Van]) -> None:
    """Sending to an unknown peer raises an error that lists the known ones."""
    _raises(PeerLostError, lambda: vans[0].send("worker:7", Note(1)), "worker:1, worker:2")


def bad_messages_are_refused_by_the_sender(vans: Sequence[Van]) -> None:
    """A message that the peer could not accept is not sent, and the link remains."""

    class Stranger(msgspec.Struct):
        x: int = 0

    large = bytes(CONFORMANCE_CONFIG.max_message_bytes)
    sparse = memoryview(b"abcd")[::2]
    bad: list[tuple[Callable[[], object], str]] = [
        (lambda: vans[0].send("worker:1", Stranger()), "not registered"),
        (lambda: vans[0].send("worker:1", Note(1), buffers=[large]), "accepts"),
        (lambda: vans[0].send("worker:1", Note(1), buffers=[sparse]), "not contiguous"),
        (lambda: vans[0].send("worker:1", Note(1), priority=16), "priority 16"),
        (lambda: vans[0].send("worker:1", Note(1), buffers=[b"x"] * 1001), "1001 buffers"),
    ]
    for call, text in bad:
        _raises(ConfigError, call, text)
    vans[0].send("worker:1", Note(1))
    _expect(vans[1].recv(_LATE_S).message, Note(1))


def bad_bodies_end_the_link(vans: Sequence[Van]) -> None:
    """A body that does not fit its type never reaches the program; the error names both."""
    vans[0].send("worker:1", Note("no number"))  # type: ignore[arg-type]
    delivery = vans[1].recv(_LATE_S)
    lost = delivery.message
    assert isinstance(lost, PeerLost)
    _expect(
        (delivery.sender, lost.orderly, "'note'" in lost.reason, "worker:0" in lost.reason),
        ("worker:0", False, True, True),
    )
    _expect((vans[1].peers, isinstance(vans[0].recv(_LATE_S).message, PeerLost)), ((), True))


def goodbye_comes_after_the_last_message(vans: Sequence[Van]) -> None:
    """Closing delivers all sent messages, and then a notice that it was on purpose."""
    vans[0].send("worker:2", Note(1))
    vans[0].close(_SOON_S)
    received = [vans[2].recv(_LATE_S).message for _ in range(2)]
    _expect((received[0], type(received[1])), (Note(1), PeerLost))
    notice = vans[1].recv(_LATE_S).message
    assert isinstance(notice, PeerLost)
    _expect((notice.orderly, vans[1].peers), (True, ()))
    _raises(PeerLostError, lambda: vans[2].send("worker:0", Note(1)), "lost worker:0")


def closed_vans_raise(vans: Sequence[Van]) -> None:
    """Every call of a closed van raises StaleError, and closing again does nothing."""
    vans[0].close(0)
    vans[0].close()
    for call in (vans[0].recv, vans[0].try_recv, lambda: vans[0].send("worker:1", Note(1))):
        _raises(StaleError, call, "worker:0 is closed")


def stale_epochs_are_fenced_off(vans: Sequence[Van]) -> None:
    """Messages of a past epoch are dropped and counted, and their sender gets a notice."""
    vans[1].advance_epoch(2)
    num_sent = 0
    with contextlib.suppress(StaleError):
        while num_sent < 1000:
            vans[0].send("worker:1", Note(1)).wait(_LATE_S)
            num_sent += 1
            _pass_time(vans[1])
    _raises(StaleError, lambda: vans[0].send("worker:1", Note(1)), "epoch 2")
    vans[0].advance_epoch(2)
    vans[0].send("worker:1", Note(3))
    delivery = vans[1].recv(_LATE_S)
    _expect((delivery.message, delivery.epoch, delivery.id > num_sent), (Note(3), 2, True))
    _expect(vans[1].statistics("worker:0").stale, num_sent)
    _raises(ConfigError, lambda: vans[1].advance_epoch(1), "pass a larger number")


def unread_messages_end_with_their_epoch(vans: Sequence[Van]) -> None:
    """Advancing the epoch drops unread messages of earlier epochs."""
    vans[0].send("worker:1", Note(1)).wait(_LATE_S)
    while not vans[1].statistics().unread:
        _pass_time(vans[1])
    vans[1].advance_epoch(1)
    _expect(vans[1].try_recv(), None)
    _expect(vans[1].statistics("worker:0").stale, 1)


def queued_messages_end_with_their_epoch(vans: Sequence[Van]) -> None:
    """Advancing the epoch fails queued messages that have not begun to leave."""
    _stop_reading(vans)
    vans[0].send("worker:1", Note(1), buffers=[bytes(_LARGE_BYTES)])
    sending = vans[0].send("worker:1", Note(2))
    vans[0].advance_epoch(1)
    _raises(StaleError, sending.wait, "epoch 1")
    _expect(vans[0].statistics().stale in (1, 2), True)  # the large one may not have begun either


def repetitions_keep_their_id(vans: Sequence[Van]) -> None:
    """A message that is sent again keeps its id, so it can be recognised."""
    number = vans[0].new_id()
    first = vans[0].send("worker:1", Note(1), message_id=number)
    received = [vans[1].recv(_LATE_S).id]
    vans[0].send("worker:1", Note(1), message_id=first.id)
    vans[0].send("worker:1", Note(1))
    received += [vans[1].recv(_LATE_S).id for _ in range(2)]
    _expect((received[:2], received[2] in received[:2]), ([number, number], False))


def fileno_shows_readiness(vans: Sequence[Van]) -> None:
    """`fileno` is readable if and only if there is something to receive."""
    fd = vans[1].fileno()
    received = [bool(select.select([fd], [], [], 0)[0])]
    vans[0].send("worker:1", Note(1))
    _until(vans[1], lambda: bool(vans[1].statistics().unread))
    received.append(bool(select.select([fd], [], [], 0)[0]))
    vans[1].try_recv()
    received.append(bool(select.select([fd], [], [], 0)[0]))
    _expect(received, [False, True, False])


def statistics_count_everything(vans: Sequence[Van]) -> None:
    """The statistics of both ends agree."""
    for _ in range(3):
        vans[0].send("worker:1", Note(1), buffers=[b"12345"]).wait(_LATE_S)
        vans[1].recv(_LATE_S)
    sent, received = vans[0].statistics("worker:1"), vans[1].statistics("worker:0")
    _expect((sent.sent, received.received, sent.queued, received.unread), (3, 3, 0, 0))
    _expect(sent.sent_bytes, received.received_bytes)


VAN_CLAIMS: tuple[Claim, ...] = (
    messages_arrive_as_what_they_are,
    both_ends_use_a_link,
    connecting_twice_changes_nothing,
    buffers_arrive_beside_the_message,
    large_texts_arrive,
    memory_is_free_once_sent,
    receiver_chooses_the_memory,
    messages_of_one_priority_stay_in_order,
    urgent_messages_pass_large_ones,
    who_does_not_read_stops_the_sender,
    deadlines_end_messages_in_the_queue,
    time_outs_name_what_is_missing,
    a_roused_recv_ends_early,
    unknown_peers_are_named,
    bad_messages_are_refused_by_the_sender,
    bad_bodies_end_the_link,
    goodbye_comes_after_the_last_message,
    closed_vans_raise,
    stale_epochs_are_fenced_off,
    unread_messages_end_with_their_epoch,
    queued_messages_end_with_their_epoch,
    repetitions_keep_their_id,
    fileno_shows_readiness,
    statistics_count_everything,
)


def _stop_reading(vans: Sequence[Van]) -> None:
    """Fill the inbox of worker:1, so that its van stops reading until `recv` returns Note(0)."""
    vans[0].send("worker:1", Note(0))
    _until(vans[1], lambda: bool(vans[1].statistics().unread))


def _fill(vans: Sequence[Van]) -> int:
    """Send to worker:1, which does not receive, until nothing more fits; returns the count."""
    _stop_reading(vans)
    sent = 1

    def put() -> bool:
        return bool(vans[0].try_send("worker:1", Note(sent), buffers=[bytes(_CHUNK_BYTES)]))

    idle_turns = 0
    while idle_turns < 3 and sent < 10_000:
        if put():
            sent += 1
            idle_turns = 0
        else:
            _pass_time(vans[0])
            idle_turns += 1
    _raises(CommTimeout, lambda: vans[0].send("worker:1", Note(-1), deadline_s=_SOON_S), "worker:1")
    return sent


def _until(van: Van, condition: Callable[[], bool]) -> None:
    """Let time pass until `condition` holds."""
    for _ in range(_MOST_TURNS):
        if condition():
            return
        _pass_time(van)
    msg = f"the condition does not hold after {_MOST_TURNS} turns"
    raise AssertionError(msg)


def _pass_time(van: Van) -> None:
    """Wait for a message that does not come: a simulated network advances, threads run."""
    with contextlib.suppress(CommTimeout):
        van.wait_for(["nobody:0"], 0.002)


def _raises(kind: type[Exception], call: Callable[[], object], text: str) -> None:
    try:
        call()
    except kind as exc:
        if text not in str(exc):
            msg = f"the error must contain {text!r}, got: {exc}"
            raise AssertionError(msg) from exc
    else:
        _expect("no error", kind.__name__)


def _expect(actual: object, expected: object) -> None:
    if actual != expected:
        msg = f"expected {expected!r}, got {actual!r}"
        raise AssertionError(msg)
