"""Requests and answers over vans: who asks, who answers, and what each learns when it goes wrong."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading

import msgspec
import pytest

from braid.errors import CommError, CommTimeout, ConfigError, PeerLostError
from braid.runtime.message import (
    LocalNetwork,
    PeerLost,
    Reply,
    Schema,
    Service,
    SocketVan,
    VanConfig,
)
from braid.runtime.wire import Secret

SECRET = Secret.generate()
_names = itertools.count()


class Ask(msgspec.Struct, tag="ask", frozen=True):
    number: int


class Answer(msgspec.Struct, tag="answer", frozen=True):
    number: int


class Tell(msgspec.Struct, tag="tell", frozen=True):
    """Asks for no answer."""


SCHEMA = Schema(Ask, Answer, Tell)


@pytest.fixture(params=["sockets", "local"])
def vans(request):
    """Makes connected vans: the first is connected to the others."""
    network = LocalNetwork(SCHEMA)
    with contextlib.ExitStack() as stack:

        def make(*nodes, config=None):
            network.config = config or VanConfig()
            found = []
            for node in nodes:
                if request.param == "local":
                    van = network.join(node)
                else:
                    address = f"unix:@braid-services-{os.getpid()}-{next(_names)}"
                    van = SocketVan(
                        node, SCHEMA, secret=SECRET, run_id="run", listen=address, config=config
                    )
                found.append(stack.enter_context(van))
            for van in found[1:]:
                found[0].connect(van.node, van.address, timeout_s=10)
                van.wait_for([found[0].node], 10)
            return found

        yield make


def double(delivery):
    return Answer(2 * delivery.message.number)


def serving(van, handlers):
    service = Service(van, handlers)
    service.start()
    return service


def test_answer_comes_to_who_asked(vans):
    asker, server = vans("worker:0", "driver")
    with serving(server, {Ask: double}), Service(asker) as caller:
        found = [caller.call("driver", Ask(n), 10).message for n in range(5)]
    assert found == [Answer(2 * n) for n in range(5)]


def test_buffers_go_there_and_come_back(vans):
    asker, server = vans("worker:0", "driver")

    def upper(delivery):
        return Reply(Answer(0), [bytes(each).upper() for each in delivery.buffers])

    with serving(server, {Ask: upper}), Service(asker) as caller:
        found = caller.call("driver", Ask(0), 10, buffers=[b"a", b"", bytearray(b"xyz")]).buffers
    assert list(map(bytes, found)) == [b"A", b"", b"XYZ"]


def test_many_threads_may_ask_at_once(vans):
    asker, server = vans("worker:0", "driver")
    found = {}
    with serving(server, {Ask: double}), Service(asker) as caller:

        def ask(base):
            found[base] = [
                caller.call("driver", Ask(base + n), 10).message.number for n in range(30)
            ]

        threads = [threading.Thread(target=ask, args=(1000 * n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {base: [2 * (base + n) for n in range(30)] for base in range(0, 4000, 1000)}


def test_handlers_may_ask_others_even_the_one_who_asks(vans):
    asker, server, third = vans("worker:0", "driver", "worker:2")
    third.connect("driver", server.address, timeout_s=10)
    server.wait_for(["worker:2"], 10)

    def forward(delivery):
        if delivery.message.number:
            back = driver.call(delivery.sender, Ask(0), 10).message.number
            return Answer(driver.call("worker:2", delivery.message, 10).message.number + back)
        return Answer(1)

    driver = Service(server, {Ask: forward})
    driver.start()
    with (
        driver,
        serving(third, {Ask: double}),
        Service(asker, {Ask: lambda _: Answer(100)}) as caller,
    ):
        assert caller.call("driver", Ask(21), 10).message == Answer(142)


def test_exception_of_the_handler_reaches_who_asked_as_text(vans):
    asker, server = vans("worker:0", "driver")

    def fail(delivery):
        raise KeyError(f"no rank {delivery.message.number}")

    with serving(server, {Ask: fail}), Service(asker) as caller:
        with pytest.raises(CommError, match=r"driver failed in Ask #\d+: KeyError: 'no rank 3'"):
            caller.call("driver", Ask(3), 10)
        with pytest.raises(CommError, match=r"driver has no handler for Tell, only for: Ask"):
            caller.call("driver", Tell(), 10)


def test_answer_that_cannot_be_sent_is_an_error_of_who_asked(vans):
    asker, server = vans("worker:0", "driver", config=VanConfig(max_message_bytes=1000))
    with (
        serving(server, {Ask: lambda _: Reply(Answer(0), [bytes(2000)])}),
        Service(asker) as caller,
        pytest.raises(CommError, match=r"the answer cannot be sent: .* accepts 1000"),
    ):
        caller.call("driver", Ask(3), 10)


def test_time_out_names_who_did_not_answer(vans):
    asker, server = vans("worker:0", "driver")
    with (
        serving(server, {Ask: lambda _: None}),
        Service(asker) as caller,
        pytest.raises(CommTimeout, match=r"driver did not answer request Ask #\d+ within 0.02 s"),
    ):
        caller.call("driver", Ask(3), 0.02)


def test_peer_that_ends_before_it_answers_is_named(vans):
    asker, server = vans("worker:0", "server:3")
    service = Service(server, {Ask: lambda _: None})
    with Service(asker) as caller:
        caller.start()
        asked = threading.Thread(target=lambda: (service.serve(10), service.close()))
        asked.start()
        with pytest.raises(PeerLostError, match="lost server:3 before it answered") as caught:
            caller.call("server:3", Ask(3), 10)
        asked.join()
    assert caught.value.rank == 3


def test_a_call_to_the_next_life_is_not_ended_by_the_notice_of_the_last():
    network = LocalNetwork(SCHEMA)
    with Service(network.join("worker:0")) as asker:
        for life in range(2):
            with serving(network.join("driver"), {Ask: lambda _, life=life: Answer(life)}):
                asker.van.connect("driver")
                assert asker.call("driver", Ask(1), 10).message == Answer(life)


def test_a_request_is_done_once_though_an_earlier_life_asked_less_urgently():
    network = LocalNetwork(SCHEMA)
    handled = []
    with Service(network.join("driver"), {Tell: lambda found: handled.append(found.id)}) as driver:
        with network.join("worker:0") as old:
            old.connect("driver")
            old.send("driver", Tell(), message_id=7)
            old.close(0)
        with network.join("worker:0") as new:
            new.connect("driver")
            for _ in range(2):
                new.send("driver", Tell(), priority=5, message_id=8)
                while driver.serve(0):
                    pass
    assert handled == [7, 8]


def test_loss_of_a_peer_is_routed_like_a_message(vans):
    asker, server = vans("worker:0", "driver")
    found = []
    with Service(server, {PeerLost: lambda notice: found.append(notice.sender)}) as service:
        asker.close()
        assert service.serve(10)
    assert found == ["worker:0"]


def test_repetitions_are_answered_again_but_handled_once(vans):
    asker, server = vans("worker:0", "driver")
    handled = []

    def handle(delivery):
        handled.append(delivery.message)
        return Answer(len(handled))

    with serving(server, {Ask: handle}):
        number = asker.new_id()
        for _ in range(3):
            asker.send("driver", Ask(1), message_id=number)
        asker.send("driver", Ask(2))
        found = [asker.recv(10) for _ in range(4)]
    assert handled == [Ask(1), Ask(2)]
    assert [(each.message.number, each.answers == number) for each in found] == [
        (1, True),
        (1, True),
        (1, True),
        (2, False),
    ]


def test_oldest_requests_are_forgotten_at_the_limit(vans):
    asker, server = vans("worker:0", "driver")
    handled = []
    service = Service(server, {Tell: lambda each: handled.append(each.id)}, num_remembered=2)
    with service:
        for number in (1, 2, 3, 3, 1):
            asker.send("driver", Tell(), message_id=number)
            service.serve(10)
    assert handled == [1, 2, 3, 1]


def test_service_never_waits_for_an_asker_that_does_not_read(vans):
    config = VanConfig(max_queue_messages=2, max_unread_messages=1)
    asker, server, other = vans("worker:0", "driver", "worker:1", config=config)
    other.connect("driver", server.address, timeout_s=10)
    server.wait_for(["worker:1"], 10)
    with (
        serving(server, {Ask: lambda _: Reply(Answer(1), [bytes(1 << 20)])}),
        Service(other) as caller,
    ):
        for number in range(20):
            asker.send("driver", Ask(number), deadline_s=10)
        assert caller.call("driver", Ask(1), 10).message == Answer(1)
        asker.close(0)


def test_serve_says_when_nothing_came(vans):
    (van,) = vans("driver")
    assert Service(van).serve(0.01) is False


def test_memory_of_no_request_is_refused(vans):
    (van,) = vans("driver")
    with pytest.raises(ConfigError, match="num_remembered must be at least 1, got 0"):
        Service(van, num_remembered=0)
