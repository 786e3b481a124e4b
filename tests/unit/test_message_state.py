"""The van's state machines: what leaves when, what is believed, and what becomes of peers."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.errors import CommError, ConfigError, PeerLostError
from braid.runtime.memory_pool import MemoryPool
from braid.runtime.message import NUM_PRIORITIES, Delivery, PeerLost, Schema, VanConfig, split_node
from braid.runtime.message.protocol.assembly import Arrived, Inflow
from braid.runtime.message.protocol.heads import Beat, Bye, Cancel, Hello, More, Open, pack, unpack
from braid.runtime.message.protocol.send_queue import Outbox, Outgoing
from braid.runtime.message.protocol.van_state import Carry, Close, Read, VanState
from braid.runtime.message.vans.local_van import hand_over

SECOND = 1_000_000_000


class Note(msgspec.Struct, tag="note", frozen=True):
    text: str = ""


SCHEMA = Schema(Note)
HELLO = pack(Hello(5, 0, 1 << 30))


def outgoing(number, text="", buffers=(), priority=0, deadline_ns=None):
    name, body = SCHEMA.encode(Note(text))
    head = Open(number, name, priority, 0, 0, 0, b"", 0, ())
    return Outgoing.make(head, body, buffers, deadline_ns)


def new_outbox(**config):
    return Outbox("worker:1", VanConfig(**config), Counter())


def new_inflow(limit=1 << 20, allocators=None, *, greeted=True):
    inflow = Inflow("worker:1", SCHEMA, limit, allocators or {}, MemoryPool())
    if greeted:
        inflow.received(HELLO, 0)
    return inflow


def frames_of(outbox, now_ns=0):
    while (frame := outbox.next_frame(now_ns)) is not None:
        yield frame
        outbox.frame_sent(now_ns)


def feed(inflow, frame, now_ns=0):
    if frame.pieces:
        sizes = tuple(map(len, frame.pieces))
        targets = inflow.allocate(frame.meta, sizes, now_ns)
        for target, piece in zip(targets, frame.pieces, strict=True):
            target[:] = piece
    return inflow.received(frame.meta, now_ns)


def shape(frame):
    head = unpack(frame.meta, "test")
    return type(head).__name__, getattr(head, "priority", None), sum(map(len, frame.pieces))


class Pair:
    """Two states and the frames between them."""

    def __init__(self, config=None, **second):
        config = config or VanConfig()
        self.a = VanState("worker:0", SCHEMA, config, incarnation=10)
        self.b = VanState("worker:1", SCHEMA, config, incarnation=11, **second)
        self.now_ns = 0
        self.connect(1)

    def connect(self, link):
        self.a.link_up(link, "worker:1", self.now_ns)
        self.b.link_up(link, "worker:0", self.now_ns)
        self.carry()

    def carry(self, *, back=True):
        for source, target in [(self.a, self.b), (self.b, self.a)][: 2 if back else 1]:
            for instruction in source.instructions:
                while (
                    isinstance(instruction, Carry)
                    and target.wants_read(instruction.link)
                    and (frame := source.next_frame(instruction.link, self.now_ns))
                ):
                    hand_over(frame, target, instruction.link, self.now_ns)
                    source.frame_sent(instruction.link, self.now_ns)
            source.instructions.clear()

    def send(self, number, **kwargs):
        assert self.a.submit("worker:1", outgoing(number, **kwargs))
        self.carry(back=False)


def test_nodes_have_roles_and_ranks():
    assert [split_node(name) for name in ("worker:3", "launcher", "server-b:0")] == [
        ("worker", 3),
        ("launcher", -1),
        ("server-b", 0),
    ]


@pytest.mark.parametrize(
    "name", ["", "Worker", "worker:", "worker:-1", "worker:01", "a" * 17, "a:b", "a b"]
)
def test_other_names_are_refused(name):
    with pytest.raises(ConfigError, match="is not the name of a node"):
        split_node(name)


def test_config_names_every_bad_value():
    with pytest.raises(ConfigError, match=r"chunk_bytes = 0 .*lost_after_s = 1 "):
        VanConfig(chunk_bytes=0, lost_after_s=1.0)


def test_urgent_messages_pass_between_the_chunks_of_a_large_one():
    outbox = new_outbox(chunk_bytes=100)
    outbox.put(outgoing(1, buffers=[bytes(250)]))
    found = [shape(outbox.next_frame(0))]
    outbox.frame_sent(0)
    outbox.put(outgoing(2, priority=5))
    outbox.put(outgoing(3, priority=0))
    outbox.send_control(Beat(0))
    found += map(shape, frames_of(outbox))
    assert found == [
        ("Open", 0, 100),
        ("Beat", None, 0),
        ("Open", 5, 0),
        ("More", 0, 100),
        ("More", 0, 50),
        ("Open", 0, 0),
    ]


def test_frames_are_slices_of_the_senders_memory():
    memory = bytearray(300)
    outbox = new_outbox(chunk_bytes=100)
    outbox.put(outgoing(1, buffers=[memory]))
    assert all(piece.obj is memory for frame in frames_of(outbox) for piece in frame.pieces)


def test_queue_is_bounded_in_messages_and_bytes_but_takes_one_of_any_size():
    outbox = new_outbox(max_queue_messages=2, max_queue_bytes=1000)
    assert outbox.has_room(5000)
    outbox.put(outgoing(1, buffers=[bytes(100)]))
    assert (outbox.has_room(800), outbox.has_room(5000)) == (True, False)
    outbox.put(outgoing(2))
    assert not outbox.has_room(1)


def test_deadline_cancels_a_message_under_way_when_its_chunk_has_left():
    outbox = new_outbox(chunk_bytes=100)
    late = outgoing(1, buffers=[bytes(250)], deadline_ns=10)
    outbox.put(late)
    outbox.put(outgoing(2))
    inflow = new_inflow()
    feed(inflow, outbox.next_frame(0))
    outbox.expire(20)
    assert not late.finished  # the network still reads its memory
    outbox.frame_sent(20)
    assert (late.finished, type(late.error).__name__) == (True, "CommTimeout")
    found = [(shape(frame)[0], feed(inflow, frame)) for frame in frames_of(outbox, 20)]
    assert [(kind, event and event.head.id) for kind, event in found] == [
        ("Cancel", None),
        ("Open", 2),
    ]


def test_expired_messages_do_not_leave():
    outbox = new_outbox()
    outbox.put(outgoing(1, deadline_ns=10))
    assert (list(frames_of(outbox, 10)), outbox.next_deadline_ns()) == ([], None)


def test_deadline_goes_on_at_the_receiver_without_comparing_clocks():
    outbox = new_outbox(chunk_bytes=10)
    outbox.put(outgoing(1, buffers=[bytes(20)], deadline_ns=5000))
    first, second = list(frames_of(outbox, 2000))  # 3 us remain
    lates = []
    for arrived_ns in (1_000_003_000, 1_000_003_001):
        inflow = new_inflow()
        feed(inflow, first, 1_000_000_000)
        lates.append(feed(inflow, second, arrived_ns).late)
    assert lates == [False, True]


MESSAGES = st.lists(
    st.tuples(
        st.integers(0, NUM_PRIORITIES - 1),
        st.sampled_from([0, 1, 40_000, 70_000]),
        st.lists(st.sampled_from([0, 1, 3, 99, 100, 101, 350]), max_size=4),
    ),
    max_size=8,
)


@given(
    messages=MESSAGES, chunk=st.sampled_from([64, 100, 5000]), bursts=st.lists(st.integers(1, 5))
)
def test_any_messages_in_any_chunks_arrive_whole_and_in_order(messages, chunk, bursts):
    outbox, inflow = new_outbox(chunk_bytes=chunk), new_inflow()
    sent, arrived = {}, []
    rest = iter(messages)
    plan = iter(bursts)
    number = 0
    while True:
        for priority, text, sizes in (m for _, m in zip(range(next(plan, 9)), rest, strict=False)):
            number += 1
            buffers = [bytes([number]) * size for size in sizes]
            sent[number] = (priority, "x" * text, buffers)
            outbox.put(outgoing(number, "x" * text, buffers, priority))
        frame = outbox.next_frame(0)
        if frame is None:
            break
        assert sum(map(len, frame.pieces)) <= chunk
        event = feed(inflow, frame)
        outbox.frame_sent(0)
        if event is not None:
            arrived.append(event)
    found = {
        event.head.id: (event.head.priority, event.message.text, list(map(bytes, event.buffers)))
        for event in arrived
    }
    assert found == sent
    for lane in range(NUM_PRIORITIES):
        ids = [event.head.id for event in arrived if event.head.priority == lane]
        assert ids == sorted(ids)


@pytest.mark.parametrize(
    ("heads", "words"),
    [
        ([More(0)], "without a byte"),
        ([Cancel(3)], "not open"),
        ([Hello(1, 0, 0)], "Hello twice"),
        ([Open(1, "other", 0, 0, 0, 0, b"\x80", 0, ())], "not registered"),
        ([Open(1, "note", 0, 0, 0, 0, b"\xc1", 0, ())], "fields of its type"),
        ([Open(1, "note", 0, 0, 0, 0, b"", 0, ())], "fields of its type"),
        ([Open(1, "note", 0, 0, 0, 0, b"x", 5, ())], "two bodies"),
        ([Open(1, "note", 0, 0, 0, 0, b"\x80", 0, (4 << 30,))], "limit 1048576"),
        ([Open(1, "note", 0, 0, 0, 0, b"", 4 << 30, ())], "limit 1048576"),
        (
            [Open(1, "note", 0, 0, 0, 0, SCHEMA.encode(Note())[1], 0, (9,))] * 2,
            "second open message",
        ),
    ],
)
def test_broken_sequences_are_refused(heads, words):
    inflow = new_inflow()
    *first, last = map(pack, heads)
    for meta in first:
        inflow.received(meta, 0)
    with pytest.raises(CommError, match=f"worker:1 (does not use|sent a message) .*{words}"):
        inflow.received(last, 0)


def test_nothing_is_believed_before_hello():
    for head in (Beat(0), Bye(), Open(1, "note", 0, 0, 0, 0, b"\x80", 0, ())):
        with pytest.raises(CommError, match="before Hello"):
            new_inflow(greeted=False).received(pack(head), 0)


def test_memory_of_the_wrong_size_or_kind_is_refused():
    body = SCHEMA.encode(Note())[1]
    head = pack(Open(1, "note", 0, 0, 0, 0, body, 0, (4,)))
    for bad in ([bytearray(3)], [bytearray(4)] * 2, [b"1234"]):
        inflow = new_inflow(allocators={Note: lambda *_, bad=bad: list(map(memoryview, bad))})
        with pytest.raises(CommError, match="one memoryview for each size"):
            inflow.allocate(head, (4,), 0)


def test_a_message_for_which_there_is_no_memory_is_refused_by_size():
    inflow = new_inflow(limit=1 << 50)
    head = pack(Open(1, "note", 0, 0, 0, 0, SCHEMA.encode(Note())[1], 0, (1 << 47,)))
    with pytest.raises(
        CommError, match=f"memory for {1 << 47} bytes of message 'note' from worker"
    ):
        inflow.allocate(head, (4,), 0)


def test_whatever_a_type_raises_about_its_fields_is_a_comm_error():
    class Picky(msgspec.Struct, tag="picky"):
        key: str

        def __post_init__(self) -> None:
            {"a": 1}[self.key]

    with pytest.raises(
        CommError, match="worker:1 sent a message 'picky' that does not have the fields"
    ):
        Schema(Picky).decode(
            "picky", msgspec.msgpack.encode({"type": "picky", "key": "b"}), sender="worker:1"
        )


def test_room_that_a_later_epoch_makes_is_used():
    pair = Pair(VanConfig(max_unread_messages=1))
    pair.send(1)
    assert not pair.b.wants_read(1)
    pair.b.instructions.clear()
    pair.b.advance_epoch(1, 0)
    assert (pair.b.wants_read(1), Read(1) in pair.b.instructions) == (True, True)


COUNTS = st.sampled_from([0, 1, 2, 8, 100, 4 << 30, (1 << 63) - 1])
BODY = SCHEMA.encode(Note("fuzz"))[1]
HEADS = st.one_of(
    st.builds(Hello, COUNTS, COUNTS, COUNTS),
    st.builds(
        Open,
        COUNTS,
        st.sampled_from(["note", "other", ""]),
        st.integers(0, 2),
        COUNTS,
        COUNTS,
        COUNTS,
        st.sampled_from([BODY, b"", b"\xff"]),
        st.sampled_from([0, 0, len(BODY), 4 << 30]),
        st.lists(COUNTS, max_size=3).map(tuple),
    ),
    st.builds(More, st.integers(0, 2)),
    st.builds(Cancel, st.integers(0, 2)),
    st.builds(Beat, COUNTS),
    st.just(Bye()),
).map(pack)
METAS = st.one_of(HEADS, st.binary(max_size=40), HEADS.map(lambda meta: meta[:-1]))


@given(
    st.lists(st.tuples(METAS, st.lists(st.sampled_from([1, 2, 8, 100]), max_size=3)), max_size=12)
)
def test_any_frames_give_messages_or_a_comm_error(frames):
    inflow = new_inflow(limit=200)
    for meta, sizes in frames:
        try:
            if sizes:
                targets = inflow.allocate(meta, tuple(sizes), 0)
                assert [len(target) for target in targets] == sizes
            event = inflow.received(meta, 0)
        except CommError:
            return  # the link ends here
        if isinstance(event, Arrived):
            assert event.head.nbytes <= 200
            assert tuple(map(len, event.buffers)) == event.head.sizes


def test_silent_peers_are_lost_at_the_limit_and_not_before():
    pair = Pair(VanConfig(heartbeat_s=1, lost_after_s=5))
    found = []
    while pair.a.peers:
        pair.now_ns = pair.a.next_deadline_ns()
        pair.a.tick(pair.now_ns)
        frame = pair.a.next_frame(1, pair.now_ns)
        found.append((pair.now_ns // SECOND, frame and shape(frame)[0]))
    lost = pair.a.next_delivery(pair.now_ns)
    assert found == [(1, "Beat"), (2, "Beat"), (3, "Beat"), (4, "Beat"), (5, None)]
    assert (lost.sender, lost.incarnation) == ("worker:1", 11)
    assert "nothing came from it for 5.0 s" in lost.message.reason
    assert (lost.message.silent, lost.message.orderly) == (True, False)


def test_heartbeats_keep_both_ends():
    pair = Pair(VanConfig(heartbeat_s=1, lost_after_s=3))
    for second in range(1, 100):
        pair.now_ns = second * SECOND
        pair.a.tick(pair.now_ns)
        pair.b.tick(pair.now_ns)
        pair.carry()
    assert (pair.a.peers, pair.b.peers) == (("worker:1",), ("worker:0",))


def test_a_peer_that_is_not_read_is_not_judged():
    pair = Pair(VanConfig(max_unread_messages=1, heartbeat_s=1, lost_after_s=3))
    pair.send(1)
    assert not pair.b.wants_read(1)
    pair.b.tick(100 * SECOND)
    assert pair.b.peers == ("worker:0",)
    pair.b.instructions.clear()
    pair.b.next_delivery(100 * SECOND)
    assert list(pair.b.instructions) == [Read(1)]
    pair.b.tick(102 * SECOND)
    assert pair.b.peers == ("worker:0",)
    pair.b.tick(103 * SECOND)
    assert pair.b.peers == ()


def test_notice_of_loss_waits_for_the_last_message_and_then_passes_all_others():
    pair = Pair()
    other = VanState("worker:2", SCHEMA, VanConfig(), incarnation=12)
    pair.b.link_up(2, "worker:2", 0)
    other.link_up(2, "worker:1", 0)
    pair.send(1, text="a", priority=0)
    assert other.instructions.popleft() == Carry(2)
    hand_over(other.next_frame(2, 0), pair.b, 2, 0)
    other.frame_sent(2, 0)
    hand_over(pair.b.next_frame(2, 0), other, 2, 0)
    for number in (1, 2):
        other.submit("worker:1", outgoing(number, text="b"))
        hand_over(other.next_frame(2, 0), pair.b, 2, 0)
        other.frame_sent(2, 0)
    pair.b.link_lost(1, "cut")
    found = [pair.b.next_delivery(0) for _ in range(4)]
    assert [(each.sender, each.message) for each in found] == [
        ("worker:0", Note("a")),
        ("worker:0", PeerLost("cut")),
        ("worker:2", Note("b")),
        ("worker:2", Note("b")),
    ]


def test_urgent_arrivals_are_received_first_then_the_oldest():
    pair = Pair()
    for number, priority in enumerate((1, 0, 5, 1), start=1):
        pair.send(number, priority=priority)
    assert [pair.b.next_delivery(0).id for _ in range(4)] == [3, 1, 4, 2]


def test_what_one_life_said_comes_before_the_next_however_urgent():
    pair = Pair()
    pair.send(1, text="old", priority=0)
    pair.b.link_lost(1, "cut")
    pair.a = VanState("worker:0", SCHEMA, VanConfig(), incarnation=20)
    pair.connect(2)
    pair.send(1, text="new", priority=9)
    found = [pair.b.next_delivery(0) for _ in range(3)]
    assert [(each.incarnation, each.message) for each in found] == [
        (10, Note("old")),
        (10, PeerLost("cut")),
        (20, Note("new")),
    ]


def test_another_life_under_the_same_name_replaces_the_first():
    pair = Pair()
    kept = outgoing(1)
    assert pair.a.submit("worker:1", kept)
    pair.a.instructions.clear()
    pair.a.link_up(2, "worker:1", 0)
    pair.a.frame_received(2, pack(Hello(77, 0, 1 << 20)), 0)
    assert Close(1) in pair.a.instructions
    assert (kept.finished, type(kept.error)) == (True, PeerLostError)
    notice = pair.a.next_delivery(0)
    assert (notice.incarnation, "restarted or replaced" in notice.message.reason) == (11, True)
    assert (pair.a.peers, pair.a.statistics().lost) == (("worker:1",), 1)


def test_an_earlier_life_takes_no_name_and_learns_why():
    pair = Pair()
    pair.a.instructions.clear()
    pair.a.link_up(2, "worker:1", 0)
    pair.a.frame_received(2, pack(Hello(7, 0, 1 << 20)), 0)
    assert (pair.a.peers, pair.a.next_delivery(0)) == (("worker:1",), None)
    assert Close(1) not in pair.a.instructions
    earlier = VanState("worker:1", SCHEMA, VanConfig(), incarnation=7)
    earlier.link_up(2, "worker:0", 0)
    while (frame := pair.a.next_frame(2, 0)) is not None:
        hand_over(frame, earlier, 2, 0)
        pair.a.frame_sent(2, 0)
    lost = earlier.next_delivery(0).message
    assert (lost.replaced, earlier.peers) == (True, ())


def test_two_links_of_one_life_count_as_one_peer_and_keep_the_order():
    pair = Pair()
    pair.connect(2)
    for number in range(1, 5):
        pair.send(number, text=str(number))
    found = [pair.b.next_delivery(0).message.text for _ in range(4)]
    assert (pair.a.peers, found) == (("worker:1",), ["1", "2", "3", "4"])
    pair.a.link_lost(1, "cut")
    assert (pair.a.peers, list(pair.a.instructions)) == (("worker:1",), [Close(1)])
    pair.send(5, text="5")
    assert pair.b.next_delivery(0).message == Note("5")
    pair.a.link_lost(2, "cut")
    assert (pair.a.peers, pair.a.next_delivery(0).message) == ((), PeerLost("cut"))


HALF_CLOSED = "it accepts nothing more"


def test_a_peer_that_takes_nothing_more_is_heard_but_not_sent_to():
    pair = Pair()
    chunk = pair.a.config.chunk_bytes
    begun, waiting = outgoing(1, buffers=[bytes(2 * chunk)]), outgoing(2)
    assert pair.a.submit("worker:1", begun)
    assert pair.a.submit("worker:1", waiting)
    assert pair.a.next_frame(1, 0)
    pair.a.link_half_closed(1, HALF_CLOSED, 0)
    for sent in (begun, waiting):
        assert (sent.finished, type(sent.error)) == (True, PeerLostError)
    assert (pair.a.peers, pair.a.is_drained, pair.a.statistics().lost) == ((), True, 2)
    with pytest.raises(PeerLostError, match="lost worker:1: it accepts nothing more"):
        pair.a.submit("worker:1", outgoing(3))
    pair.a.frame_sent(1, 0)
    pair.a.send_bye()
    pair.a.tick(SECOND - 1)
    assert (pair.a.next_frame(1, 0), pair.a.next_delivery(0)) == (None, None)


@pytest.mark.parametrize("says", ["nothing", "heartbeats"])
def test_a_peer_that_takes_nothing_more_is_lost_when_it_has_said_its_last_words(says):
    pair = Pair(VanConfig(heartbeat_s=0.4, lost_after_s=100))
    pair.b.link_half_closed(1, HALF_CLOSED, 0)
    pair.now_ns = SECOND - 1
    pair.send(1, text="last")
    pair.b.instructions.clear()
    for tenths in range(11, 20):
        pair.now_ns = tenths * SECOND // 10
        if says == "heartbeats":
            pair.a.tick(pair.now_ns)
            pair.carry(back=False)
        pair.b.tick(pair.now_ns)
    assert Close(1) not in pair.b.instructions
    assert pair.b.next_deadline_ns() <= 2 * SECOND
    pair.b.tick(2 * SECOND)
    assert Close(1) in pair.b.instructions
    assert [pair.b.next_delivery(0).message for _ in range(2)] == [
        Note("last"),
        PeerLost(HALF_CLOSED),
    ]


def test_a_peer_that_takes_nothing_more_is_kept_while_there_is_no_room_for_its_last_words():
    pair = Pair(VanConfig(max_unread_messages=1))
    pair.send(1, text="first")
    pair.b.link_half_closed(1, HALF_CLOSED, 0)
    pair.b.tick(100 * SECOND)
    assert pair.b.next_delivery(100 * SECOND).message == Note("first")
    pair.b.tick(101 * SECOND - 1)
    pair.send(2, text="last")
    assert pair.b.next_delivery(101 * SECOND).message == Note("last")
    pair.b.tick(102 * SECOND)
    assert pair.b.next_delivery(102 * SECOND).message == PeerLost(HALF_CLOSED)


def test_what_is_said_by_a_peer_that_takes_nothing_more_comes_before_its_loss():
    pair = Pair()
    pair.b.link_half_closed(1, HALF_CLOSED, 0)
    pair.send(1, text="last")
    pair.a.send_bye()
    pair.carry(back=False)
    found = [pair.b.next_delivery(0).message for _ in range(2)]
    assert found == [Note("last"), PeerLost("it closed its van", orderly=True)]


def test_messages_leave_on_the_link_that_the_peer_listens_to():
    pair = Pair()
    pair.connect(2)
    pair.a.link_half_closed(1, HALF_CLOSED, 0)
    assert pair.a.peers == ("worker:1",)
    pair.send(1, text="on the second")
    assert pair.b.next_delivery(0).message == Note("on the second")
    pair.a.link_half_closed(2, HALF_CLOSED, 0)
    assert (pair.a.peers, pair.a.is_ending("worker:1")) == ((), True)


def test_it_is_known_why_nothing_leaves_though_another_link_ended_later():
    pair = Pair()
    pair.connect(2)
    pair.a.link_half_closed(1, HALF_CLOSED, 0)
    pair.a.link_lost(2, "cut")
    with pytest.raises(PeerLostError, match=f"lost worker:1: {HALF_CLOSED}"):
        pair.a.submit("worker:1", outgoing(1))
    assert pair.a.next_delivery(0) is None  # it may still speak
    pair.a.link_lost(1, "it closed the connection")
    assert pair.a.next_delivery(0).message == PeerLost("it closed the connection")


def test_a_peer_that_takes_nothing_from_the_start_is_one_whose_loss_is_told():
    state = VanState("worker:0", SCHEMA, VanConfig(), incarnation=1)
    state.link_up(1, "worker:1", 0)
    state.link_half_closed(1, HALF_CLOSED, 0)
    state.frame_received(1, pack(Hello(2, 0, 1 << 20)), 0)
    with pytest.raises(PeerLostError, match=HALF_CLOSED):
        state.submit("worker:1", outgoing(1))
    state.tick(SECOND)
    assert state.next_delivery(0).message == PeerLost(HALF_CLOSED)


def test_a_known_peer_that_takes_nothing_more_may_come_again():
    state = VanState("launcher", SCHEMA, VanConfig(), incarnation=1)
    state.link_up(1, "agent:0", 0, known=True)
    state.link_half_closed(1, HALF_CLOSED, 0)
    state.link_up(2, "agent:0", 0, known=True)
    assert (state.peers, Close(1) in state.instructions) == (("agent:0",), True)
    assert state.next_delivery(0).message == PeerLost(HALF_CLOSED)
    assert state.submit("agent:0", outgoing(1))


def test_a_known_peer_is_sent_to_before_it_has_spoken():
    here = VanState("launcher", SCHEMA, VanConfig(), incarnation=10)
    there = VanState("agent", SCHEMA, VanConfig(max_message_bytes=100), incarnation=11)
    here.link_up(1, "agent:0", 0, known=True)
    assert here.peers == ("agent:0",)
    assert here.submit("agent:0", outgoing(1, text="first"))
    there.link_up(1, "launcher", 0, known=True)
    for source, target in ((here, there), (there, here)):
        while frame := source.next_frame(1, 0):
            hand_over(frame, target, 1, 0)
            source.frame_sent(1, 0)
    found = there.next_delivery(0)
    assert (found.sender, found.incarnation, found.message) == ("launcher", 10, Note("first"))
    with pytest.raises(ConfigError, match="agent:0 accepts 100"):  # now it is known
        here.submit("agent:0", outgoing(2, buffers=[bytes(200)]))


@pytest.mark.parametrize("how", ["cut", "silence"])
def test_the_loss_of_a_known_peer_is_told_though_it_never_spoke(how):
    state = VanState("launcher", SCHEMA, VanConfig(heartbeat_s=1, lost_after_s=5), incarnation=1)
    state.link_up(1, "agent:0", 0, known=True)
    if how == "cut":
        state.link_lost(1, "cut")
    else:
        state.tick(5 * SECOND)
    lost = state.next_delivery(0)
    assert (lost.sender, lost.incarnation, lost.message.silent) == ("agent:0", 0, how == "silence")
    assert (state.peers, Close(1) in state.instructions) == ((), True)


def test_links_without_greeting_are_given_up():
    state = VanState("worker:0", SCHEMA, VanConfig(heartbeat_s=1, lost_after_s=5), incarnation=1)
    state.link_up(1, "worker:1", 0)
    state.tick(5 * SECOND)
    assert (Close(1) in state.instructions, state.next_delivery(0)) == (True, None)


def test_stale_messages_are_answered_with_the_epoch():
    pair = Pair(epoch=3)
    head = Open(1, "note", 0, 0, 0, 0, BODY, 0, ())
    pair.b.frame_received(1, pack(head), 0)
    reply = pair.b.next_frame(1, 0)
    assert (unpack(reply.meta, ""), pair.b.statistics().stale, pair.b.next_delivery(0)) == (
        Beat(3),
        1,
        None,
    )


def test_schema_says_what_it_knows():
    with pytest.raises(ConfigError, match="another `tag`"):
        Schema(Note, msgspec.defstruct("Other", [], tag="note"))
    with pytest.raises(ConfigError, match="Struct type"):
        Schema(dict)
    with pytest.raises(ConfigError, match="only a van"):
        Schema(PeerLost)
    with pytest.raises(ConfigError, match=r"type Beat are not registered \(registered: note\)"):
        SCHEMA.encode(Beat(0))


@given(st.binary(max_size=64))
def test_any_body_is_a_message_or_a_comm_error_that_names_both(body):
    found = ""
    try:
        SCHEMA.decode("note", body, sender="worker:9")
    except CommError as exc:
        found = str(exc)
    assert not found or found.startswith("worker:9 sent a message 'note' that does not have")


def test_delivery_has_defaults_for_notices():
    assert Delivery("worker:1", Note()) == Delivery("worker:1", Note(), (), 0, 0, 0, 0, 0)
