"""`braid probe` writes a cluster that the other commands read."""

from __future__ import annotations

import pytest

from braid.cli import main
from braid.cli.bench.probe import as_cluster
from braid.cli.bench.workers.probe import MeasuredLevel, Probed
from braid.cli.commands.probe import ProbeOptions
from braid.errors import ConfigError
from braid.programs.topology import from_toml


def host(latency_s, seconds):
    level = MeasuredLevel(
        name="host", size=3, latency_s=latency_s, seconds=seconds, both_ways_s=1e-9
    )
    return as_cluster(Probed(levels=[level])).levels[0]


def test_what_is_not_latency_is_bandwidth():
    found = host(1e-4, {1000: 1.05e-4, 1_000_000: 6e-4, 4_000_000: 1.1e-3})
    assert (found.name, found.size, found.latency_s) == ("host", 3, 1e-4)
    assert [pair for told in found.by_size for pair in told] == pytest.approx([1e6, 2e9, 4e6, 4e9])
    assert found.bytes_per_s == max(rate for _, rate in found.by_size)


def test_messages_that_are_all_latency_still_make_a_cluster():
    found = host(1e-4, {4: 0.9e-4, 8: 1e-4})
    assert found.latency_s == 0.9e-4  # no message is quicker than an empty one
    assert found.by_size == ((8.0, pytest.approx(8 / 1e-5)),)


@pytest.mark.launcher
@pytest.mark.procs
def test_the_file_is_read_by_the_other_commands(tmp_path, capsys):
    out = tmp_path / "cluster.toml"
    assert main(["probe", "--rounds", "1", "--out", str(out), "--log-dir", str(tmp_path)]) == 0
    (host,) = from_toml(out.read_text()).levels
    assert (host.size, host.latency_s > 0) == (2, True)
    capsys.readouterr()
    assert main(["schedule", "compare", "--ranks", "2", "--cluster", str(out)]) == 0
    assert "*" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"num_ranks": 1}, "the number of ranks must be at least 2, got 1"),
        ({"rounds": 0}, "rounds must be at least 1, got 0"),
        ({"rsh": "ssh {host}"}, "needs hosts"),
    ],
)
def test_probes_that_make_no_sense_are_refused(wrong, words):
    with pytest.raises(ConfigError, match=words):
        ProbeOptions(**wrong)
