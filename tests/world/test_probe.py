"""`braid probe` writes a cluster that the other commands read."""

from __future__ import annotations

import pytest

from braid.bench.probe import Probe, as_cluster
from braid.bench.probe_worker import Probed
from braid.cli import main
from braid.errors import ConfigError
from braid.topology import from_toml


def test_what_is_not_latency_is_bandwidth():
    seconds = {1000: 1.05e-4, 1_000_000: 6e-4, 4_000_000: 1.1e-3}
    (host,) = as_cluster(3, Probed(latency_s=1e-4, seconds=seconds)).levels
    assert (host.name, host.size, host.latency_s) == ("host", 3, 1e-4)
    assert [pair for told in host.by_size for pair in told] == pytest.approx([1e6, 2e9, 4e6, 4e9])
    assert host.bytes_per_s == max(rate for _, rate in host.by_size)


def test_messages_that_are_all_latency_still_make_a_cluster():
    (host,) = as_cluster(2, Probed(latency_s=1e-4, seconds={4: 0.9e-4, 8: 1e-4})).levels
    assert host.by_size == ((8.0, pytest.approx(8 / 1e-6)),)


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
        ({"ranks": 1}, "the number of ranks is 1"),
        ({"rounds": 0}, "rounds is 0"),
        ({"sizes": (6,)}, "multiples of 4 bytes"),
    ],
)
def test_probes_that_make_no_sense_are_refused(wrong, words):
    with pytest.raises(ConfigError, match=words):
        Probe(**wrong)
