"""Claims of gathering hosts: who reaches whom at which address, and what is said when a job cannot start."""

from __future__ import annotations

import pytest

from braid.launch.cluster.agent_messages import AgentHello, HostAddresses, Prepared
from braid.launch.cluster.host_rendezvous_state import (
    Greet,
    HostRendezvousPhase,
    HostRendezvousState,
    PrepareHost,
    ProbeTargets,
    RunningHost,
)
from braid.launch.cluster.reachability import (
    LAUNCHER,
    Attempt,
    Endpoint,
    decide,
    eligible,
    matrix_text,
    without_unreachable,
)

S = 1_000_000_000
NAMES = {LAUNCHER: "launcher", 0: "a", 1: "b"}


def eth(node, ip, *, interface="eth0", prefix=24):
    return Endpoint(node, interface, ip, prefix, 40_000)


LO = [Endpoint(node, "lo", "127.0.0.1", 8, 40_000 + node) for node in NAMES]
DOCKER = [eth(node, "172.17.0.1", interface="docker0", prefix=16) for node in NAMES]
LAN = [eth(node, f"10.0.0.{node + 2}") for node in NAMES]


def all_reach(endpoints, *, but=(), reason="timed out"):
    """Attempts of all to reach all; `but` are (source, address) that fail."""
    return [
        Attempt(source, e.node, e.ip, reason if (source, e.ip) in but else "")
        for source in NAMES
        for e in endpoints
        if e.node != source
    ]


def test_loopback_counts_only_where_all_are_one_machine():
    apart = eligible([*LO, *LAN], (), one_machine=False)
    together = eligible([*LAN, *LO], (), one_machine=True)
    assert (apart, together) == (LAN, [*LO, *LAN])


@pytest.mark.parametrize("wanted", ["eth0", "10.0.0.0/8"])
def test_interfaces_can_be_chosen_by_name_and_by_network(wanted):
    assert eligible([*DOCKER, *LAN], [wanted], one_machine=False) == LAN


def test_an_address_that_every_host_has_of_its_own_is_not_taken_for_a_shared_one():
    found = all_reach(LAN) + all_reach(DOCKER, but={(s, "172.17.0.1") for s in NAMES}, reason="another host answers at this address")  # fmt: skip
    reach = decide(NAMES, [*DOCKER, *LAN], found)
    assert reach == ({-1: "10.0.0.1", 0: "10.0.0.2", 1: "10.0.0.3"}, dict.fromkeys(NAMES, "eth0"), "")  # fmt: skip


def test_hosts_in_different_networks_listen_where_all_others_reach_them():
    endpoints = [eth(-1, "10.0.1.1"), eth(0, "10.0.2.1"), eth(1, "10.0.3.1")]
    reach = decide(NAMES, endpoints, all_reach(endpoints))
    assert reach.addresses == {-1: "10.0.1.1", 0: "10.0.2.1", 1: "10.0.3.1"}


def test_a_network_that_only_some_share_is_passed_over():
    fast = [eth(node, f"10.9.0.{node + 1}", interface="ib0") for node in (0, 1)]
    blocked = {(LAUNCHER, e.ip) for e in fast}
    reach = decide(NAMES, [*fast, *LAN], all_reach([*fast, *LAN], but=blocked, reason="no route"))
    assert set(reach.interfaces.values()) == {"eth0"}


def test_hosts_that_cannot_see_each_other_are_shown_as_a_table():
    found = all_reach(LAN, but={(0, "10.0.0.3")}, reason="refused")
    problem = decide(NAMES, LAN, found).problem
    assert problem.splitlines()[0] == ("hosts cannot reach each other: b cannot be reached from a")
    assert [line.split() for line in matrix_text(NAMES, LAN, found).splitlines()[1:]] == [
        ["launcher", "-", "ok", "ok"],
        ["a", "ok", "-", "refused"],
        ["b", "ok", "ok", "-"],
    ]


def test_the_most_telling_reason_is_shown():
    ways = [*LAN, *DOCKER]
    found = [Attempt(0, 1, "172.17.0.1", "another host answers at this address"), Attempt(0, 1, "10.0.0.3", "timed out")]  # fmt: skip
    assert "another host answers" in matrix_text(NAMES, ways, found)


def test_a_host_that_each_sees_elsewhere_has_no_address():
    found = [
        *all_reach(LAN, but={(0, "10.0.0.3")}),
        Attempt(0, 1, "10.9.0.1"),
        Attempt(LAUNCHER, 1, "10.9.0.1", "no route"),
    ]
    problem = decide(NAMES, [*LAN, eth(1, "10.9.0.1", interface="ib0")], found).problem
    assert "b has no address that all other hosts can reach: it is reached at" in problem


def state(num_nodes=2, names=None, first_node=0):
    return HostRendezvousState(
        {0: "a", 1: "b"} if names is None else names,
        num_nodes,
        own_addresses=HostAddresses("m", (LAN[0],)),
        version="1",
        first_node=first_node,
        limit_s=30,
        now_ns=0,
    )


def ready(version="1"):
    return AgentHello(version, "h", 7)


def gathered():
    """A state in which all have said where they are, and what it told them then."""
    rendezvous = state()
    told = [i for node in (0, 1) for i in rendezvous.on_hello(node, ready(), 0)]
    told += rendezvous.on_addresses(0, HostAddresses("m0", (LAN[1],)), 0)
    told += rendezvous.on_addresses(1, HostAddresses("m1", (LAN[2],)), 0)
    return rendezvous, told


def test_hosts_are_greeted_then_look_then_prepare():
    rendezvous, told = gathered()
    assert told == [
        Greet(0),
        Greet(1),
        *(ProbeTargets(node, tuple(e for e in LAN if e.node != node)) for node in (-1, 0, 1)),
    ]
    reached = all_reach(LAN)
    told = []
    for node in NAMES:
        told += rendezvous.on_probe_result(node, tuple(a for a in reached if a.source == node), S)
    assert told == [PrepareHost(0, "10.0.0.2"), PrepareHost(1, "10.0.0.3")]
    for node in (0, 1):
        rendezvous.on_prepared(node, Prepared())
    assert rendezvous.phase is HostRendezvousPhase.READY


def test_all_problems_are_said_at_once_and_by_name():
    rendezvous = state(3, {0: "a", 1: "b", 2: "c"})
    rendezvous.on_lost(0, "has no agent, `ssh a` ended with exit code 255", 0)
    rendezvous.on_hello(2, ready(), 0)
    assert (
        rendezvous.phase is HostRendezvousPhase.GATHERING
    )  # the third may have something to say as well
    rendezvous.on_hello(1, ready("2"), 0)
    rendezvous.on_addresses(2, HostAddresses("m2", (LAN[2],)), 0)
    assert rendezvous.problem == (
        "the job cannot start on all of its hosts:\n"
        "host a has no agent, `ssh a` ended with exit code 255\n"
        "host b has braid 2, but the launcher has 1: install the same version\n"
        "nothing is wrong with c"
    )


def test_who_does_not_come_is_named():
    rendezvous = state(3, {})
    rendezvous.on_hello(0, ready(), 0)
    rendezvous.on_addresses(0, HostAddresses("m", (LAN[1],)), 0)
    rendezvous.on_hello(2, ready(), 0)
    rendezvous.tick(30 * S - 1)
    assert (rendezvous.phase, rendezvous.missing) == (HostRendezvousPhase.GATHERING, [1])
    rendezvous.tick(30 * S)
    assert rendezvous.problem.splitlines()[1:] == [
        "node 1 did not join within 30 s",
        "host h did not answer within 30 s",
        "nothing is wrong with h",
    ]


def test_an_agent_that_does_not_say_what_it_reached_has_reached_nobody():
    rendezvous, _ = gathered()
    reached = all_reach(LAN)
    for node in (LAUNCHER, 0):
        rendezvous.on_probe_result(node, tuple(a for a in reached if a.source == node), S)
    rendezvous.tick(9 * S)
    assert "launcher cannot be reached from b; a cannot be reached from b" in rendezvous.problem


def test_a_host_without_the_chosen_interface_is_named_with_what_it_has():
    rendezvous = HostRendezvousState({0: "a"}, 1, own_addresses=HostAddresses("m", (LAN[0],)), version="1", wanted=["eth0"], limit_s=1, now_ns=0)  # fmt: skip
    rendezvous.on_hello(0, ready(), 0)
    rendezvous.on_addresses(0, HostAddresses("m0", (DOCKER[1],)), 0)
    assert "host a has no address on eth0; it has docker0 172.17.0.1" in rendezvous.problem


def test_what_a_host_cannot_run_is_said_for_all_hosts():
    rendezvous, _ = gathered()
    for node in NAMES:
        rendezvous.on_probe_result(node, tuple(a for a in all_reach(LAN) if a.source == node), S)
    rendezvous.on_prepared(1, Prepared(problem="cannot run this: no script"))
    rendezvous.on_prepared(0, Prepared())
    assert "host b cannot run this: no script\nnothing is wrong with a" in rendezvous.problem


def test_names_of_one_machine_are_found():
    rendezvous = state(3, {0: "a", 1: "b", 2: "a.example"})
    for node, machine in enumerate(["m0", "m1", "m0"]):
        rendezvous.on_hello(node, ready(), 0)
        rendezvous.on_addresses(node, HostAddresses(machine, (LAN[1],)), 0)
    assert rendezvous.shared_machines == [["a", "a.example"]]


def test_a_node_that_left_may_come_again():
    rendezvous = state(names={})
    rendezvous.on_hello(1, ready(), 0)
    rendezvous.on_addresses(1, HostAddresses("m1", (LAN[2],)), 0)
    rendezvous.forget(1)
    assert (rendezvous.missing, rendezvous.on_hello(1, ready(), 0)) == ([0, 1], [Greet(1)])


def test_the_fewest_hosts_are_left_out_and_never_the_launcher():
    names = {**NAMES, 2: "c"}
    lan = [*LAN, eth(2, "10.0.0.4")]

    def left_out(*pairs):
        """Return the hosts to leave out if these pairs do not reach each other."""
        failed = {*pairs, *((b, a) for a, b in pairs)}
        attempts = [
            Attempt(source, e.node, e.ip, "no route" if (source, e.node) in failed else "")
            for source in names
            for e in lan
            if e.node != source
        ]
        return without_unreachable(names, lan, attempts)

    assert left_out() == {}
    assert left_out((0, 2)) == {2: "has no connection with a"}
    assert left_out((0, 2), (0, 1)) == {0: "has no connection with b, c"}
    assert left_out((LAUNCHER, 0)) == {0: "has no connection with launcher"}
    assert left_out((LAUNCHER, 0), (1, 2)) == {
        2: "has no connection with b",
        0: "has no connection with launcher",
    }


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_host_that_comes_later_must_reach_the_hosts_that_run(is_gone):
    rendezvous = state(1, {1: "b"}, first_node=1)
    rendezvous.peers = {0: RunningHost("a", LAN[1])}
    rendezvous.on_hello(1, ready(), 0)
    probes = rendezvous.on_addresses(1, HostAddresses("m1", (LAN[2],)), 0)
    assert probes == [ProbeTargets(LAUNCHER, (LAN[2],)), ProbeTargets(1, (LAN[0], LAN[1]))]
    rendezvous.on_probe_result(LAUNCHER, (Attempt(LAUNCHER, 1, LAN[2].ip),), 1)
    if is_gone:
        rendezvous.peers = {}
    attempts = (Attempt(1, LAUNCHER, LAN[0].ip), Attempt(1, 0, LAN[1].ip, "no route"))
    told = rendezvous.on_probe_result(1, attempts, 1)
    if is_gone:
        assert told == [PrepareHost(1, LAN[2].ip)]
    else:
        assert rendezvous.problems == {1: f"cannot reach a at {LAN[1].ip} (no route)"}
