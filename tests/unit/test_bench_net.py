"""Networks on one machine, and what is said of figures over them."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from benchmarks import lab, model, net
from benchmarks.workers.model import AlgorithmTime
from benchmarks.workers.net import Row, row_of
from braid.cli.bench.harness import ranks
from braid.cli.bench.probe import level_of
from braid.cli.bench.workers.probe import MeasuredLevel
from braid.errors import ConfigError

MIB = 1 << 20


def row(nbytes, **ratio):
    times = {name: 1.0 / found for name, found in ratio.items()}
    seconds = {"gloo": 1.0, **times}
    return Row(nbytes=nbytes, seconds=seconds, ratio=ratio, spread=dict.fromkeys(ratio, (1.0, 1.0)))


def case(hosts, ranks, gbit, *rows):
    return net.Case(
        hosts="", num_hosts=hosts, ranks_per_host=ranks, gbit_per_s=gbit, rows=list(rows)
    )


def report(*cases):
    return net.NetReport(braid="0", torch="2", machine="2 cores", load=0.5, cases=list(cases))


def shown(table):
    out = io.StringIO()
    Console(file=out, width=140).print(table)
    return out.getvalue()


def test_a_lab_is_undone_by_what_is_known_before_it_is_made():
    made = lab.cabling("bn7", "ab", 1e9)
    undone = [" ".join(undo) for _, undo in made if undo]
    assert undone == [
        "ip link del bn7",
        "ip netns del bn7a",
        "ip link del bn7pa",
        "ip netns del bn7b",
        "ip link del bn7pb",
    ]
    assert [" ".join(do) for do, _ in made if "tbf" in do] == [
        f"tc {place} root tbf rate 1000000000bit burst 125000b latency 20ms"
        for host in "ab"
        for place in (f"-n bn7{host} qdisc add dev eth0", f"qdisc add dev bn7p{host}")
    ]


def test_all_hosts_of_a_lab_send_as_fast_as_the_link_takes_it():
    made = [" ".join(do) for do, _ in lab.cabling("bn7", "ab", 0.0)]
    for host in "ab":
        assert f"ip netns exec bn7{host} sysctl -qw net.ipv4.tcp_congestion_control=reno" in made


def test_links_without_a_rate_have_no_bucket():
    assert not any("tbf" in make for make, _ in lab.cabling("bn7", "a", 0.0))


def test_what_killed_processes_have_left_is_removed_and_nothing_else():
    listed = "bn12a (id: 3)\nbn12b\nbn99a\nother\nxbn12a\n"
    found = lab.abandoned(listed, {99}.__contains__)
    assert [" ".join(words) for words in found] == [
        "ip netns del bn12a",
        "ip link del bn12pa",
        "ip link del bn12",
        "ip netns del bn12b",
        "ip link del bn12pb",
    ]


def test_labs_are_for_root(monkeypatch):
    monkeypatch.setattr(lab.os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match=r"only root may .*this is user 1000.*--hosts"):
        lab.Lab(2, 1e9).__enter__()


def test_missing_commands_are_named(monkeypatch):
    monkeypatch.setattr(lab.os, "geteuid", lambda: 0)
    monkeypatch.setattr(lab.shutil, "which", lambda name: None if name == "tc" else name)
    assert "there is no tc: install iproute2 and procps" in lab.what_is_missing()


def test_only_the_first_rank_is_heard():
    lines = ['[rank 0] {"a": 1}\n', '[rank 1] {"a": 2}\n', "[rank 0] words\n", "braid: 2 ranks\n"]
    assert [ranks.figures_in(line) for line in lines] == ['{"a": 1}', "", "", ""]


def test_ranks_are_started_where_they_are_wanted(tmp_path):
    where = ranks.Where(hosts="a:2", rsh="go {host}", inside=("at", "a"))
    words = where.command(("some.module", "{}"), tmp_path)
    assert words[:2] == ["at", "a"]
    assert " ".join(words).endswith(
        f"-m braid run -H a:2 --rsh go {{host}} --threads 1 --hang-report 0 --log-dir {tmp_path} -m some.module {{}}"
    )


def test_ratios_are_taken_turn_by_turn():
    found = row_of(4, {"gloo": [2.0, 8.0, 6.0], "braid": [1.0, 2.0, 2.0]})
    assert (found.seconds, found.ratio) == ({"gloo": 6.0, "braid": 2.0}, {"braid": 3.0})
    assert found.spread == {"braid": (2.5, 3.5)}


def test_the_share_of_a_link_counts_what_each_host_must_send():
    one = row(125 * 10**6, braid=1.0)
    assert case(2, 1, 1.0, one).share(one, "braid") == pytest.approx(1.0)
    assert case(4, 1, 1.0, one).share(one, "braid") == pytest.approx(1.5)


def test_every_target_is_held_against_its_worst_figure():
    alone = case(2, 1, 1.0, row(1024, braid=3.0), row(65536, braid=1.9), row(4 * MIB, braid=1.0))
    pairs = case(2, 2, 1.0, row(MIB, braid=1.5, bf16=2.5), row(4 * MIB, braid=1.1, bf16=2.3))
    found = [
        (target.claim.split(": at least ")[1], target.figure.split(" at ")[1], target.held)
        for target in net.targets(report(alone, pairs))
    ]
    assert found == [
        ("2.00 x Gloo", "64 KiB", False),
        ("95.0% of the link", "4 MiB", False),
        ("1.40 x Gloo", "1 MiB", True),
        ("1.20 x Gloo", "4 MiB", False),
        ("2.20 x Gloo", "4 MiB", True),
    ]


def test_networks_of_which_nothing_was_promised_have_no_targets():
    assert net.targets(report(case(3, 2, 5.0, row(1024, braid=0.1)))) == []


def test_targets_say_what_was_found_and_where():
    (target,) = net.targets(report(case(2, 1, 1.0, row(1024, braid=1.5))))
    assert str(target) == (
        "missed  2 hosts x 1 at 1 Gbit/s, all digits, up to 64 KiB: at least 2.00 x Gloo, measured 1.50 x Gloo at 1 KiB"
    )


def test_the_table_has_a_row_per_size_and_shares_of_large_tensors_only():
    text = shown(
        net.net_table(
            report(case(2, 1, 1.0, row(1024, braid=2.0), row(8 * MIB, braid=1.0, bf16=2.0)))
        )
    )
    lines = [" ".join(line.split()) for line in text.splitlines() if "iB" in line]
    assert lines == [
        "2 hosts x 1 at 1 Gbit/s 1 KiB 1,000,000 500,000 2.00",
        "8 MiB 1,000,000 6.7 1,000,000 1.00 6.7 2.00",
    ]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"num_hosts": 1}, "number of hosts must be at least 2, got 1"),
        ({"rates_gbit": (0.0,)}, "a rate must be more than 0 Gbit/s, got 0"),
        ({"sizes_bytes": (6,)}, "a size must be a multiple of 4 bytes, got 6"),
        ({"rsh": "ssh {host}"}, "--rsh .* needs hosts"),
        (
            {"turns": 0, "ranks_per_host": (0,)},
            "turns must be at least 1, got 0.*ranks of a host must be at least 1, got 0",
        ),
    ],
)
def test_benches_that_make_no_sense_are_refused(wrong, words):
    with pytest.raises(ConfigError, match=words):
        net.NetBench(**wrong)


def test_real_hosts_make_one_case():
    (found,) = net.places(net.NetBench(hosts="a:2,b:3", link_gbit=25.0))
    assert (str(found), found.hosts) == ("2 hosts x 3 at 25 Gbit/s", "a:2,b:3")


def measured(name, latency_s, seconds, both_ways_s=1.0):
    return MeasuredLevel(
        name=name, size=2, latency_s=latency_s, seconds=seconds, both_ways_s=both_ways_s
    )


def test_a_network_has_the_rate_of_its_longest_message():
    seconds = {1000: 1.9, 4000: 5.0, 100_000: 101.0}
    level = level_of(measured("network", 1.0, seconds, both_ways_s=110.0))
    assert (level.latency_s, level.bytes_per_s, level.full_duplex) == (1.0, 1000.0, True)
    assert (level.burst_bytes, level.by_size) == (
        0.0,
        ((1000.0, 1000.0), (4000.0, 1000.0), (100_000.0, 1000.0)),
    )


def test_what_a_link_lets_through_after_a_rest_is_told_by_long_messages():
    seconds = {100: 1.0, 4000: 1.5, 20_000: 16.0, 100_000: 96.0}  # 5000 bytes come out of a bucket
    level = level_of(measured("network", 1.0, seconds, both_ways_s=110.0))
    assert (level.bytes_per_s, level.burst_bytes) == (1000.0, 5000.0)
    assert level.by_size == ((4000.0, 8000.0),)


def test_ways_that_are_in_each_others_way_share_a_link():
    assert not level_of(measured("host", 1.0, {1000: 10.0}, both_ways_s=19.0)).full_duplex


def test_errors_of_the_model_are_medians_and_held_against_what_was_promised():
    def held(predicted_s):
        time = AlgorithmTime(
            operation="all_reduce", algorithm="ring", nbytes=MIB, seconds=1.0, spread=(1.0, 1.0)
        )
        return model.Held(time=time, predicted_s=predicted_s)

    found = model.ModelReport(
        braid="0", torch="2", machine="2 cores", load=0.5, network="4 hosts", memory="2 ranks",
        over_network=[held(1.1), held(0.9), held(9.0)], in_memory=[held(0.5)],
    )  # fmt: skip
    assert list(map(str, model.verdicts(found))) == [
        "held    4 hosts: median error at most 15%, measured 10.0% of 3",
        "missed  2 ranks: median error at most 25%, measured 50.0% of 1",
    ]
    assert "9000 / 1000 +800%" in shown(model.model_table(found))
