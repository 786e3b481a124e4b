"""Claims of the pure parts of jobs over several hosts: lists of hosts, places of ranks, meeting points, options."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.cli.commands.host_options import HostOptions
from braid.cli.commands.several_hosts import choose_where
from braid.errors import ConfigError
from braid.launch import Host, Hosts, Nodes, parse_hostfile, parse_hosts
from braid.launch.cluster.options import forwarded
from braid.launch.cluster.rank_assignment import RankPlace, assign
from braid.launch.cluster.remote_shell import DEFAULT_RSH, LocalPlacement, RshPlacement, is_here
from braid.runtime.rendezvous.meeting import MeetingPoint

SLOTS = st.lists(st.integers(1, 4), min_size=1, max_size=5)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a:2,b:2", (Host("a", 2), Host("b", 2))),
        ("a, b:3", (Host("a"), Host("b", 3))),
        ("me@10.0.0.1:2,[fd00::1]:4,[fd00::2]", (Host("me@10.0.0.1", 2), Host("[fd00::1]", 4), Host("[fd00::2]"))),
    ],
)  # fmt: skip
def test_hosts_are_read(text, hosts):
    assert parse_hosts(text) == hosts


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a:2,,b", "-H a:2,,b has an empty entry"),
        ("a:0", "slots of a must be a number from 1 to 9999, got '0'"),
        ("a:x", "slots of a must be a number from 1 to 9999, got 'x'"),
        ("a:2,b,a:1", "a is named 2 times: give its slots once"),
        ("-oProxyCommand=x:1", "'-oProxyCommand=x' is not the name of a host"),
        ("a b:1", "'a b' is not the name of a host"),
        ("fd00::1:2", "'fd00::1' is not the name of a host"),
    ],
)
def test_a_slip_in_a_list_of_hosts_is_named(text, words):
    with pytest.raises(ConfigError) as caught:
        parse_hosts(text)
    assert words in str(caught.value)


def test_a_hostfile_has_comments_slots_and_the_short_form():
    text = "# ours\na slots=2  # fast\n\nb:3\nc\n"
    assert parse_hostfile(text) == (Host("a", 2), Host("b", 3), Host("c"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("# nothing\n", "hosts names no host: write lines such as `a slots=2`"),
        (
            "a slots=2\nb slots=2 max-slots=4\n",
            "hosts:2: 'b slots=2 max-slots=4' is not a line such as `a slots=2`",
        ),
        ("a slots=\n", "hosts:1: 'a slots=' is not a line such as `a slots=2`"),
        ("a\na\n", "a is named 2 times"),
    ],
)
def test_a_slip_in_a_hostfile_is_named_with_its_line(text, words):
    with pytest.raises(ConfigError) as caught:
        parse_hostfile(text, "hosts")
    assert words in str(caught.value)


@given(st.text(max_size=30))
def test_any_text_is_a_list_of_hosts_or_refused(text):
    for parse in (parse_hosts, parse_hostfile):
        with contextlib.suppress(ConfigError):
            assert all(host.slots >= 1 and not host.name.startswith("-") for host in parse(text))


def test_ranks_fill_one_host_after_the_other():
    hosts = parse_hosts("a:2,b:2,c:2")
    assert assign(hosts, 3) == (RankPlace(0, 0, 0, 2), RankPlace(1, 0, 1, 2), RankPlace(2, 1, 0, 1))


@given(SLOTS, st.data())
def test_ranks_have_no_gaps_and_no_host_has_more_than_its_slots(slots, data):
    hosts = [Host(f"h{i}", n) for i, n in enumerate(slots)]
    places = assign(hosts, data.draw(st.integers(1, sum(slots))))
    per_host = [[p for p in places if p.node == node] for node in range(len(hosts))]
    assert [p.rank for p in places] == list(range(len(places)))
    assert all(len(found) <= host.slots for host, found in zip(hosts, per_host, strict=True))
    assert all([p.local_rank for p in found] == list(range(len(found))) for found in per_host)
    assert all(p.local_world_size == len(found) for found in per_host for p in found)


@pytest.mark.parametrize("wanted", [0, 5])
def test_more_ranks_than_slots_are_refused(wanted):
    with pytest.raises(
        ConfigError, match=f"-n {wanted} does not match a:2,b:2, with slots for 1 to 4 ranks"
    ):
        assign(parse_hosts("a:2,b:2"), wanted)


def test_ssh_gets_quoted_words_and_others_get_them_as_they_are():
    ssh = RshPlacement("b", DEFAULT_RSH, "'/opt/my python/bin/python'").argv
    ip = RshPlacement("b", "ip netns exec x{host}", "env A=1 python3").argv
    assert ssh == ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=8", "-o", "ServerAliveInterval=10", "b",
                   "'/opt/my python/bin/python'", "-m", "braid.launch.cluster.agent_main"]  # fmt: skip
    assert ip == ["ip", "netns", "exec", "xb", "env", "A=1", "python3", "-m", "braid.launch.cluster.agent_main"]  # fmt: skip


@pytest.mark.parametrize(
    ("rsh", "words"),
    [
        ("ssh", "--rsh must contain {host}, got 'ssh'"),
        ("ssh '{host}", "cannot be split into words"),
    ],
)
def test_a_command_that_cannot_reach_a_host_is_refused(rsh, words):
    with pytest.raises(ConfigError) as caught:
        RshPlacement("b", rsh)
    assert words in str(caught.value)


def test_this_host_needs_no_command_unless_one_is_given():
    hosts = Hosts(hosts=parse_hosts("localhost,elsewhere.invalid"))
    other = Hosts(hosts=hosts.hosts, rsh="ip netns exec {host}")
    found = [type(hosts.placement(host)) for host in hosts.hosts]
    assert found == [LocalPlacement, RshPlacement]
    assert isinstance(other.placement(hosts.hosts[0]), RshPlacement)
    assert (is_here("127.0.0.1"), is_here("elsewhere.invalid")) == (True, False)


def test_ranks_elsewhere_get_what_makes_them_alike_and_what_is_named():
    environ = {"PYTHONPATH": "/x", "OMP_PROC_BIND": "1", "HOME": "/me", "TOKEN": "t", "BRAID_SECRET_FILE": "/s"}  # fmt: skip
    assert forwarded(environ, ("TOKEN",)) == {"PYTHONPATH": "/x", "OMP_PROC_BIND": "1", "TOKEN": "t"}  # fmt: skip
    with pytest.raises(ConfigError, match="--env names variables that are not set: NOWHERE"):
        forwarded(environ, ("NOWHERE",))


def meeting(text, num_nodes=2, node_rank=1, **environ):
    return MeetingPoint.parse(text, num_nodes=num_nodes, node_rank=node_rank, environ=environ)


def test_the_three_meeting_points_are_read():
    env = {"MASTER_ADDR": "a", "MASTER_PORT": "29400", "NNODES": "3", "NODE_RANK": "2"}
    assert [
        meeting("tcp://10.0.0.1:29400"),
        meeting("file:///shared/job", node_rank=None),
        meeting("env://", None, None, **env),
    ] == [
        MeetingPoint(2, 1, "10.0.0.1", 29400),
        MeetingPoint(2, None, path="/shared/job"),
        MeetingPoint(3, 2, "a", 29400),
    ]


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (("tcp://a:0",), "port 0, but all nodes must know the port"),
        (("tcp://a:29400", 2, 2), "--node-rank must be 0 to 1 (--nnodes 2), got 2"),
        (("tcp://a:29400", 2, None), "--node-rank is not given"),
        (("tcp://a:29400", None, 0), "--nnodes is not given"),
        (("tcp://a:29400", 0, 0), "--nnodes must be at least 1, got 0"),
        (("etcd://a:29400",), "--rdzv is 'etcd://a:29400': write tcp://host:port"),
        (("file://relative",), "--rdzv is 'file://relative'"),
    ],
)
def test_a_meeting_point_that_cannot_be_is_refused(told, words):
    with pytest.raises(ConfigError) as caught:
        meeting(*told)
    assert words in str(caught.value)


def test_everything_that_is_missing_in_the_environment_is_one_message():
    with pytest.raises(ConfigError) as caught:
        meeting("env://", None, None, MASTER_PORT="x")
    expected = ("MASTER_PORT must be a number, got 'x'", "MASTER_ADDR is not set", "NODE_RANK is not set", "NNODES is not set")  # fmt: skip
    assert [words for words in expected if words not in str(caught.value)] == []


def choose(environ=None, *, num_ranks=None, **options):
    return choose_where(HostOptions(**options), num_ranks, environ or {})


def test_no_option_means_this_host():
    assert choose() == choose(num_ranks=4) == (None, ())


def test_options_are_said_again_for_the_line_that_resumes():
    _, reached = choose(hosts="a:2,b:2", num_ranks=3, rsh="ip netns exec {host}")
    _, met = choose(nnodes=2, node_rank=0, rdzv="tcp://a:29400", num_ranks=2, insecure_network=True)
    _, fast = choose(hosts="a:2,b:2", no_frame_mac=True)
    assert fast == ("-H", "a:2,b:2", "--no-frame-mac")
    with pytest.raises(ConfigError, match="--no-frame-mac has no effect on one host"):
        choose(no_frame_mac=True)
    assert reached == ("-n", "3", "-H", "a:2,b:2", "--rsh", "ip netns exec {host}")
    assert met == ("--nnodes", "2", "--node-rank", "0", "--rdzv", "tcp://a:29400", "-n", "2", "--insecure-network")  # fmt: skip


def test_nodes_are_trusted_by_a_file_or_by_an_explicit_word():
    told = {"nnodes": 2, "node_rank": 0, "rdzv": "tcp://a:29400"}
    by_file, _ = choose({"BRAID_SECRET_FILE": "/s"}, **told)
    by_word, _ = choose({"BRAID_INSECURE_NETWORK": "1"}, **told)
    assert isinstance(by_file, Nodes)
    assert isinstance(by_word, Nodes)
    assert (by_file.secret_file, by_word.insecure_network) == ("/s", True)
    with pytest.raises(ConfigError, match="set BRAID_SECRET_FILE to a file"):
        choose(**told)
    with pytest.raises(ConfigError, match="BRAID_SECRET_FILE and --insecure-network exclude"):
        choose({"BRAID_SECRET_FILE": "/s"}, **told, insecure_network=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hosts": "a", "nnodes": 2}, "-H a starts braid on the hosts, --nnodes means that you start"),
        ({"hosts": "a", "hostfile": "f"}, "-H and --hostfile both name the hosts"),
        ({"rsh": "ssh {host}"}, "--rsh ssh {host} needs hosts: name them with -H"),
        ({"network_interface": "eth0"}, "--network-interface needs several hosts"),
        ({"listen": "0.0.0.0"}, "--listen needs several hosts"),
        ({"hosts": "a", "listen": "eth0"}, "--listen must be an IP address, got 'eth0'"),
        ({"hostfile": "/nowhere/hosts"}, "/nowhere/hosts, cannot be read: No such file"),
    ],
)  # fmt: skip
def test_options_that_exclude_or_need_each_other_are_refused(options, words):
    with pytest.raises(ConfigError) as caught:
        choose(**options)
    assert words in str(caught.value)
