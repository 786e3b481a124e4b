"""Claims of jobs over several hosts, on network namespaces: hosts find each other, fail by name, and are left as they were."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

JOBS = str(Path(__file__).with_name("host_jobs.py"))
UP_S = 60.0
MEET = "tcp://10.77.0.1:29400"


def clean(lab, hosts: str) -> bool:
    """Whether nothing is left on hosts, within some seconds."""
    deadline_s = time.monotonic() + 10
    while any(lab.processes(host) for host in hosts):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True


def block(text: str) -> str:
    """The error block, without what differs between runs."""
    text = text[text.index("braid: run") :]
    return re.sub(r"pid \d+|after [\d.]+ s|runs/\S+|:\d+ in \w+", "*", text).rstrip()


def up(cwd: Path, ranks: int) -> None:
    """Wait until the ranks of `host_jobs.fail` are there."""
    deadline_s = time.monotonic() + UP_S
    while not all((cwd / f"here-{rank}").exists() for rank in range(ranks)):
        assert time.monotonic() < deadline_s, f"fewer than {ranks} ranks came within {UP_S:g} s"
        time.sleep(0.02)


def test_ranks_find_each_other_at_the_addresses_that_all_hosts_share(lab, tmp_path):
    hosts = lab(3)
    done = hosts.run("-H", "a:2,b:1,c:1", JOBS, "meet", cwd=tmp_path)
    said = "all 10.77.0.1 10.77.0.1 10.77.0.2 10.77.0.3"
    assert done.code == 0, done.text
    assert sorted(done.out.splitlines()) == [f"[rank {rank}] {said}" for rank in range(4)]
    assert clean(hosts, "abc")


def test_programs_for_torch_run_on_several_hosts_unchanged(lab, tmp_path):
    done = lab(2).run("-H", "a:1,b:2", "-n", "2", JOBS, "gloo", cwd=tmp_path)
    said = sorted(line for line in done.out.splitlines() if "[Gloo]" not in line)
    assert said == ["[rank 0] sum 1", "[rank 1] sum 1"], done.text


def test_a_hostfile_and_a_named_network_will_do(lab, tmp_path):
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1  # the other\n")
    done = lab(2).run(
        "--hostfile", "hosts", "--network-interface", "10.77.0.0/16", JOBS, "place", cwd=tmp_path
    )
    assert sorted(done.out.splitlines()) == [
        "[rank 0] 0 0 1 0 2 10.77.0.1 10.77.0.1",
        "[rank 1] 1 0 1 1 2 10.77.0.1 10.77.0.2",
    ], done.text


def test_the_store_listens_where_hosts_reach_it_unless_told_otherwise(lab, tmp_path):
    hosts = lab(2)
    found = [
        hosts.run("-H", "a,b", *told, JOBS, "listening", cwd=tmp_path)
        for told in ([], ["--listen", "0.0.0.0"])
    ]
    assert [sorted(set(done.out.splitlines())) for done in found] == [
        ["[rank 0] tcp://10.77.0.1 at 10.77.0.1"],
        ["[rank 0] tcp://10.77.0.1 at 0.0.0.0"],
    ], found


def test_a_network_that_only_some_hosts_share_is_not_chosen(lab, tmp_path):
    hosts = lab(2)
    for host in "ab":  # the same address on both, as container bridges have it
        name = hosts.prefix + host
        hosts.ip("-n", name, "link", "add", "docker0", "type", "bridge")
        hosts.ip("-n", name, "addr", "add", "172.17.0.1/16", "dev", "docker0")
        hosts.ip("-n", name, "link", "set", "docker0", "up")
    done = hosts.run("-H", "a,b", JOBS, "place", cwd=tmp_path)
    assert "10.77.0.1 10.77.0.2" in done.out, done.text
    refused = hosts.run("-H", "a,b", "--network-interface", "docker0", JOBS, "place", cwd=tmp_path)
    assert re.search(r"^ *b +refused +refused +-$", refused.text, re.MULTILINE), refused.text
    assert refused.code == 2


def test_hosts_that_cannot_see_each_other_are_shown_as_a_table_within_ten_seconds(lab, tmp_path):
    hosts = lab(3)
    for host in "bc":
        hosts.ip("link", "set", hosts.port(host), "type", "bridge_slave", "isolated", "on")
    begin_s = time.monotonic()
    done = hosts.run("-H", "a,b,c", JOBS, "place", cwd=tmp_path)
    lasted_s = time.monotonic() - begin_s
    assert "b cannot be reached from c; c cannot be reached from b" in done.text
    assert re.search(r"^ *c +ok +ok +(timed out|no route) +-$", done.text, re.MULTILINE), done.text
    assert (done.code, lasted_s < 10) == (2, True)


def test_a_host_without_a_network_is_named(lab, tmp_path):
    hosts = lab(2)
    hosts.ip("-n", hosts.prefix + "b", "link", "set", "eth0", "down")
    done = hosts.run("-H", "a,b", JOBS, "place", cwd=tmp_path)
    assert "host b has no address but loopback; it has lo 127.0.0.1" in done.text
    assert done.code == 2


def test_a_host_that_does_not_exist_is_named(lab, tmp_path):
    done = lab(1).run("-H", "a,z", JOBS, "place", cwd=tmp_path)
    assert re.search(
        r"host z has no agent, `ip netns exec \w+z .*Cannot open network namespace", done.text
    )
    assert done.code == 2


def test_the_rank_that_failed_is_named_with_its_host(lab, tmp_path):
    hosts = lab(3)
    done = hosts.run("-H", "a,b,c", "--grace", "0.3", JOBS, "fail", "raise", cwd=tmp_path)
    assert done.code == 1
    assert block(done.text).splitlines()[:3] == [
        "braid: run stopped * (exit 1)",
        "  cause    rank 2 on host c (*): ValueError: dataset file shard-7 is missing      host_jobs.py*",
        "  affected ranks 0,1 ended by braid (SIGTERM)",
    ]
    assert clean(hosts, "abc")


@pytest.mark.parametrize(
    ("how", "words", "code"),
    [
        ("kill", "rank 1 on host b (*): killed by signal 9 (SIGKILL)", 137),
        ("agent", "rank 1 on host b (*): HostLost: host b is gone: its agent (*) was killed by signal 9 (SIGKILL)", 1),
    ],
)  # fmt: skip
def test_nothing_is_left_when_a_worker_or_an_agent_is_killed(lab, tmp_path, how, words, code):
    hosts = lab(2)
    done = hosts.run("-H", "a,b", "--grace", "0.3", JOBS, "fail", how, cwd=tmp_path)
    assert (done.code, words in block(done.text), clean(hosts, "ab")) == (code, True, True)


def test_nothing_is_left_on_any_host_when_the_launcher_is_killed(lab, tmp_path):
    hosts = lab(2)
    with hosts.braid("a", "--rsh", hosts.rsh, "-H", "a,b", JOBS, "fail", "never", cwd=tmp_path) as launcher:  # fmt: skip
        up(tmp_path, 2)
        launcher.kill()
        launcher.communicate()
    assert clean(hosts, "ab")


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "job.secret"
    path.write_bytes(os.urandom(32))
    path.chmod(0o600)
    return {"BRAID_SECRET_FILE": str(path)}


def finish(*launchers):
    """What all of them did."""
    results = []
    for launcher in launchers:
        out, text = launcher.communicate(timeout=200)
        results.append((launcher.returncode, out, text))
    return results


@pytest.mark.parametrize("how", ["tcp", "env", "file"])
def test_launchers_that_are_started_by_hand_meet(lab, tmp_path, secret, how):
    hosts = lab(2)
    told, environ = ["--rdzv", MEET], dict(secret)
    if how == "env":
        told = ["--rdzv", "env://"]
        environ |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29400"}
    if how == "file":
        told = ["--rdzv", f"file://{tmp_path}/meeting"]
    launchers = [
        hosts.braid(
            host, "--nnodes", "2", "--node-rank", str(node), "-n", str(2 - node), *told, JOBS, "meet",
            cwd=tmp_path, **environ,
        )
        for node, host in enumerate("ab")
    ]  # fmt: skip
    (code, out, text), follower = finish(*launchers)
    said = "all 10.77.0.1 10.77.0.1 10.77.0.2"
    assert code == 0, text
    assert sorted(out.splitlines()) == [f"[rank {rank}] {said}" for rank in range(3)]
    assert follower[:2] == (0, ""), follower
    assert not (tmp_path / "meeting").exists()


def node(hosts, host: str, number: int, tmp_path: Path, *words: str, **environ: str):
    told = ["--nnodes", "2", "--node-rank", str(number), "--rdzv", MEET, "--rdzv-timeout", "3"]
    return hosts.braid(host, *told, *words, cwd=tmp_path, **environ)


def test_nodes_that_do_not_come_are_named(lab, tmp_path, secret):
    ((code, _, text),) = finish(node(lab(1), "a", 0, tmp_path, JOBS, "place", **secret))
    assert (code, "node 1 did not join within 3 s" in text) == (2, True)


def test_a_node_with_another_secret_is_turned_away_at_both_ends(lab, tmp_path, secret):
    hosts = lab(2)
    other = tmp_path / "other.secret"
    other.write_bytes(os.urandom(32))
    other.chmod(0o600)
    leader, stranger = finish(
        node(hosts, "a", 0, tmp_path, JOBS, "place", **secret),
        node(hosts, "b", 1, tmp_path, JOBS, "place", BRAID_SECRET_FILE=str(other)),
    )
    assert "refused ('10.77.0.2'" in leader[2]
    assert "node 1 was refused at tcp://10.77.0.1:29400" in stranger[2]
    assert "sent a wrong signature" in stranger[2]
    assert (leader[0], stranger[0]) == (2, 2)


def test_a_node_that_is_there_twice_or_late_or_runs_something_else_is_told_so(
    lab, tmp_path, secret
):
    hosts = lab(3)
    patient = ("--rdzv-timeout", "40")  # three launchers start one after the other
    leader = node(hosts, "a", 0, tmp_path, *patient, JOBS, "fail", "never", **secret)
    ((code, _, text),) = finish(node(hosts, "c", 1, tmp_path, *patient, JOBS, "place", **secret))
    assert (code, "commands differ, use the same on all nodes: " in text) == (2, True)
    ((code, _, text),) = finish(node(hosts, "c", 0, tmp_path, "--rdzv-timeout", "1", JOBS, "fail", "never", **secret))  # fmt: skip
    assert (code, "cannot listen on tcp://10.77.0.1:29400" in text) == (2, True)
    follower = node(hosts, "b", 1, tmp_path, *patient, JOBS, "fail", "never", **secret)
    up(tmp_path, 2)
    ((code, _, text),) = finish(node(hosts, "c", 1, tmp_path, *patient, JOBS, "fail", "never", **secret))  # fmt: skip
    assert (code, "node 1 came too late, as the job already runs" in text) == (2, True)  # fmt: skip
    follower.send_signal(signal.SIGINT)
    ended = finish(leader, follower)
    assert [code for code, _, _ in ended] == [130, 130]
    assert clean(hosts, "abc")


def test_two_nodes_with_one_number_are_both_named(lab, tmp_path, secret):
    hosts = lab(3)
    told = ["--nnodes", "3", "--rdzv", f"file://{tmp_path}/meeting", "--rdzv-timeout", "4"]
    leader = hosts.braid("a", "--node-rank", "0", *told, JOBS, "place", cwd=tmp_path, **secret)
    first = hosts.braid("b", "--node-rank", "1", *told, JOBS, "place", cwd=tmp_path, **secret)
    assert first.stderr is not None
    first.stderr.readline()  # it has joined
    ((code, _, text),) = finish(
        hosts.braid("c", "--node-rank", "1", *told, JOBS, "place", cwd=tmp_path, **secret)
    )
    named = re.findall(r"pid (\d+)", text)
    assert (code, str(first.pid) in named, len(named)) == (2, True, 2)
    assert [result[0] for result in finish(leader, first)] == [2, 2]


@pytest.mark.parametrize("victim", ["leader", "follower"])
def test_nothing_is_left_when_a_launcher_of_several_is_killed(lab, tmp_path, secret, victim):
    hosts = lab(2)
    leader = node(hosts, "a", 0, tmp_path, "--grace", "0.3", JOBS, "fail", "never", **secret)
    follower = node(hosts, "b", 1, tmp_path, JOBS, "fail", "never", **secret)
    up(tmp_path, 2)
    (leader if victim == "leader" else follower).kill()
    (_, _, told), (_, _, heard) = finish(leader, follower)
    assert clean(hosts, "ab")
    if victim == "leader":
        assert "the launcher has closed the connection; its ranks on this host were ended" in heard
    else:
        assert re.search(
            r"cause    rank 1 on host \S+ \(pid \d+\): HostLost: host \S+ is gone", told
        )


def test_a_node_whose_leader_has_no_name_or_is_not_there_says_so(lab, tmp_path, secret):
    hosts = lab(1)
    told = ["--nnodes", "2", "--node-rank", "1", "--rdzv-timeout", "1", "--rdzv"]
    nameless, nobody = finish(
        hosts.braid("a", *told, "tcp://nowhere.invalid:1", JOBS, "place", cwd=tmp_path, **secret),
        hosts.braid("a", *told, "tcp://10.77.0.1:1", JOBS, "place", cwd=tmp_path, **secret),
    )
    assert "the host name 'nowhere.invalid' of node 0 is not resolvable" in nameless[2]
    assert (
        "node 1 cannot reach the launcher yet (tcp://10.77.0.1:1: connection refused)" in nobody[2]
    )
    assert (nameless[0], nobody[0]) == (2, 2)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("cut", "told"),
    [
        ("", r"hosts a and b have received nothing from each other for [\d.]+ s \(last from b: "),
        ("ab", r"host b has received nothing from host a for [\d.]+ s \(last from b: "),
        ("ba", r"host a has received nothing from host b for [\d.]+ s \(last from b: "),
    ],
    ids=["both ways", "a to b", "b to a"],
)
def test_a_link_that_breaks_is_the_cause(lab, tmp_path, cut, told):
    hosts = lab(2)
    words = ("-H", "a,b", "--hang-report", "5", JOBS, "steps")
    run = hosts.braid("a", "--rsh", hosts.rsh, *words, cwd=tmp_path)
    assert run.stdout is not None
    for _ in range(2):
        run.stdout.readline()
    if cut:  # frames go to an address that nobody has
        address = f"10.77.0.{'ab'.index(cut[1]) + 1}"
        where = ("lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent")
        hosts.ip("-n", hosts.prefix + cut[0], "neigh", "replace", address, *where)
    else:
        hosts.ip("link", "set", hosts.port("b"), "down")
    ((code, _, text),) = finish(run)
    assert code == 1
    assert len(re.findall(f"likely   {told}", text)) >= 1, text
    assert re.search(f"cause    {told}", text), text
    assert "affected ranks 0,1" in text or "affected rank 0" in text, text
