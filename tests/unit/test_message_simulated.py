"""The simulated network: conformance, each fault, and that a seed decides everything."""

from __future__ import annotations

import contextlib

import msgspec
import pytest

from braid.errors import CommTimeout, ConfigError, PeerLostError, RendezvousError, StaleError
from braid.runtime.message import PeerLost, Schema, Service, VanConfig
from support.message_conformance import CONFORMANCE_SCHEMA, Note, check_van
from support.message_faults import Faults
from support.simulated_van import Network


class Add(msgspec.Struct, tag="add", frozen=True):
    amount: int


class Sum(msgspec.Struct, tag="sum", frozen=True):
    total: int


SCHEMA = Schema(Note, Add, Sum)


@contextlib.contextmanager
def simulated_vans(config):
    network = Network(CONFORMANCE_SCHEMA, config=config, bytes_per_s=1e9)
    vans = [network.join(f"worker:{n}") for n in range(3)]
    for van in vans[1:]:
        vans[0].connect(van.node)
    yield vans
    for van in vans:
        van.close(0)


def two_nodes(**kwargs):
    """A network, a van to send from, and the list of what its peer receives."""
    network = Network(SCHEMA, **kwargs)
    found = []
    van = network.join("worker:0")
    network.join("worker:1", lambda _, delivery: found.append(delivery.message))
    van.connect("worker:1")
    return network, van, found


def send_notes(network, van, count, every_s=0.0):
    for number in range(count):
        van.send("worker:1", Note(number))
        network.run_for(every_s)


def test_simulated_van_conforms():
    check_van(simulated_vans)


def test_dropped_messages_never_arrive():
    network, van, found = two_nodes(faults=Faults(drop=1))
    send_notes(network, van, 10)
    network.run_for(1)
    assert (found, network.counts["drops"] >= 10, van.statistics().sent) == ([], True, 10)


def test_duplicated_messages_arrive_twice():
    network, van, found = two_nodes(faults=Faults(duplicate=1))
    send_notes(network, van, 3)
    network.run_for(0.1)
    assert found == [Note(n) for n in (0, 0, 1, 1, 2, 2)]


def test_delayed_messages_keep_their_order():
    network, van, found = two_nodes(faults=Faults(delay=0.5, delay_s=0.1))
    send_notes(network, van, 100, every_s=0.001)
    network.run_for(1)
    assert (found, network.counts["delays"] > 10) == (list(map(Note, range(100))), True)


def test_reordered_messages_arrive_all_but_not_in_order():
    network, van, found = two_nodes(faults=Faults(reorder=0.5, delay_s=0.1))
    send_notes(network, van, 100, every_s=0.001)
    network.run_for(1)
    notes = list(map(Note, range(100)))
    assert (found != notes, sorted(found, key=lambda note: note.number)) == (True, notes)


def test_latency_and_bandwidth_take_virtual_time():
    network = Network(SCHEMA, latency_s=0.25, bytes_per_s=1e6)
    a, b = network.join("worker:0"), network.join("worker:1")
    a.connect("worker:1")
    a.send("worker:1", Note(1), buffers=[bytes(1_000_000)])
    b.recv(10)
    assert 1.25 <= network.clock.now_ns() / 1e9 < 1.26  # the heads take a little, too


def lossy_run(seed):
    network = Network(
        SCHEMA,
        seed=seed,
        faults=Faults(drop=0.1, duplicate=0.1, delay=0.2, reorder=0.2),
        bytes_per_s=1e8,
        record=True,
    )
    vans = [network.join(f"worker:{n}", lambda *_: None) for n in range(4)]
    for van in vans[1:]:
        vans[0].connect(van.node)
    for number in range(100):
        vans[0].send(f"worker:{1 + number % 3}", Note(number), buffers=[bytes(number)])
        network.run_for(0.001)
    network.run_for(5)
    return network.trace


def test_a_seed_decides_everything():
    assert lossy_run(7) == lossy_run(7)
    assert lossy_run(7) != lossy_run(8)


def test_partition_loses_messages_one_way_or_both():
    network, van, found = two_nodes()
    answers = []
    other = network.join("worker:2", lambda _, delivery: answers.append(delivery.message))
    other.connect("worker:0")
    network.partition("worker:0", ["worker:1", "worker:2"], one_way=True)
    van.send("worker:1", Note(1))
    van.send("worker:2", Note(2))
    other.send("worker:0", Note(3))
    assert van.recv(1).message == Note(3)
    network.partition("worker:0", "worker:2")
    other.send("worker:0", Note(4))
    with pytest.raises(CommTimeout):
        van.recv(1)
    network.heal()
    van.send("worker:1", Note(5))
    network.run_for(0.1)
    assert (found, answers) == ([Note(5)], [])


def test_partitioned_peers_lose_each_other_within_the_bound_and_meet_again():
    network, van, found = two_nodes(config=VanConfig(heartbeat_s=1, lost_after_s=5))
    network.run_for(60)
    assert van.peers == ("worker:1",)
    began_ns = network.clock.now_ns()
    network.partition("worker:0", "worker:1")
    assert isinstance(van.recv(10).message, PeerLost)
    silence_s = (network.clock.now_ns() - began_ns) / 1e9
    assert 4 <= silence_s <= 5.001  # the limit, less than a heartbeat after the last sign of life
    network.run_for(5)
    assert [type(message) for message in found] == [PeerLost]
    with pytest.raises(RendezvousError, match="partition"):
        van.connect("worker:1")
    network.heal()
    van.connect("worker:1")
    van.send("worker:1", Note(1))
    network.run_for(1)
    assert found[1:] == [Note(1)]


def test_link_that_only_one_end_has_given_up_does_not_harm_the_next():
    config = VanConfig(heartbeat_s=1, lost_after_s=5)
    network, van, found = two_nodes(config=config)
    other = network.join("worker:2")
    van.connect("worker:2")
    network.partition("worker:2", "worker:0", one_way=True)  # worker:0 hears nothing, and is heard
    assert isinstance(van.recv(10).message, PeerLost)
    network.heal()
    van.connect("worker:2")
    network.run_for(2 * config.heartbeat_s)
    assert other.peers == ("worker:0",)
    other.send("worker:0", Note(1))
    assert van.recv(1).message == Note(1)
    network.run_for(2 * config.lost_after_s)
    assert (van.peers, other.peers, other.try_recv()) == (
        ("worker:1", "worker:2"),
        ("worker:0",),
        None,
    )
    assert found == []


@pytest.mark.parametrize(("silent", "least_s", "most_s"), [(False, 0, 0.01), (True, 4, 5.1)])
def test_crash_is_noticed_at_once_or_by_silence(silent, least_s, most_s):
    network, van, found = two_nodes(config=VanConfig(heartbeat_s=1, lost_after_s=5))
    van.send("worker:1", Note(1))
    network.run_for(1)
    sending = van.send("worker:1", Note(2), buffers=[bytes(10)])
    began_ns = network.clock.now_ns()
    network.crash("worker:1", silent=silent)
    delivery = van.recv(60)
    assert isinstance(delivery.message, PeerLost)
    assert least_s <= (network.clock.now_ns() - began_ns) / 1e9 <= most_s
    with pytest.raises(PeerLostError, match="lost worker:1"):
        van.send("worker:1", Note(3))
    assert (found, sending.done) == ([Note(1)], True)


def test_crashed_node_can_do_nothing_and_restarts_as_another_life():
    network, van, _ = two_nodes()
    network.crash("worker:0")
    with pytest.raises(StaleError, match="worker:0 has crashed"):
        van.send("worker:1", Note(1))
    again = network.join("worker:0")
    again.connect("worker:1")
    again.send("worker:1", Note(1)).wait(1)
    assert (again.incarnation != van.incarnation, again.peers) == (True, ("worker:1",))


def test_handlers_must_not_wait():
    network = Network(SCHEMA)
    van = network.join("worker:0")
    network.join("worker:1", lambda van, _: van.recv(1))
    van.connect("worker:1")
    van.send("worker:1", Note(1))
    with pytest.raises(ConfigError, match="the handler of worker:1 waits"):
        network.run_for(1)


def test_handlers_may_close_their_van_and_connect():
    network, van, found = two_nodes()

    def answer_once(here, delivery):
        if isinstance(delivery.message, Note):
            here.connect("worker:1")
            here.send("worker:1", delivery.message)
            here.send("worker:0", delivery.message)
            here.close()

    network.join("worker:2", answer_once)
    van.connect("worker:2")
    van.send("worker:2", Note(7))
    heard = [van.recv(10).message for _ in range(2)]
    network.run_for(1)
    assert heard == [Note(7), PeerLost("it closed its van", orderly=True)]
    assert found == heard


def test_run_until_says_when_it_does_not_come():
    network, van, found = two_nodes()
    network.call_later(2, lambda: van.send("worker:1", Note(1)))
    network.run_until(lambda: bool(found), timeout_s=3)
    with pytest.raises(CommTimeout, match="virtual seconds"):
        network.run_until(lambda: len(found) > 1, timeout_s=3)


def test_faults_are_probabilities():
    with pytest.raises(ConfigError, match=r"drop = 2, delay = -1"):
        Faults(drop=2, delay=-1)


def run_counter(seed, num_requests=30):
    """A counter that is asked over a network which loses, repeats and reorders; what it added, and the answers."""
    faults = Faults(drop=0.3, duplicate=0.3, reorder=0.3, delay_s=0.3)
    network = Network(SCHEMA, seed=seed, faults=faults)
    applied = []

    def add(delivery):
        applied.append(delivery.message.amount)
        return Sum(sum(applied))

    service = Service(
        network.join("server:0", lambda _, delivery: service.handle(delivery)), {Add: add}
    )
    asker = Service(network.join("worker:0"))
    asker.van.connect("server:0")
    answers = [
        asker.call("server:0", Add(n), timeout_s=60, retry_s=0.1).message.total
        for n in range(num_requests)
    ]
    return applied, answers


def expected_counter(num_requests=30):
    numbers = list(range(num_requests))
    return numbers, [sum(numbers[: n + 1]) for n in numbers]


@pytest.mark.parametrize("seed", range(3))
def test_requests_over_a_lossy_network_are_applied_once(seed):
    assert run_counter(seed) == expected_counter()


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(100))
def test_requests_over_a_lossy_network_are_applied_once_for_every_seed(seed):
    assert run_counter(seed) == expected_counter()


def test_request_that_is_repeated_over_a_new_link_is_applied_once():
    network = Network(SCHEMA, config=VanConfig(heartbeat_s=0.1, lost_after_s=0.5))
    applied = []
    service = Service(
        network.join("server:0", lambda _, delivery: service.handle(delivery)),
        {Add: lambda _: applied.append(1) or Sum(len(applied))},
    )
    asker = Service(network.join("worker:0"))
    asker.van.connect("server:0")
    network.partition("server:0", "worker:0", one_way=True)  # the answer is lost, not the request
    number = asker.van.new_id()
    with pytest.raises(PeerLostError, match="before it answered"):
        asker.call("server:0", Add(1), timeout_s=10, message_id=number)
    network.heal()
    network.run_for(1)
    asker.van.connect("server:0")
    answer = asker.call("server:0", Add(1), timeout_s=10, message_id=number)
    assert (applied, answer.message) == ([1], Sum(1))
