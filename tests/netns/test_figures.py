"""The benchmarks `net` and `model`, and `braid probe` over several hosts, on namespaces of their own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec
import pytest

from benchmarks import __main__ as benchmarks
from benchmarks.model import ModelReport
from benchmarks.net import NetReport
from braid.cli import main
from braid.programs.topology import from_toml


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in listed.stdout.splitlines()}


@pytest.mark.proof
def test_hosts_are_made_measured_and_removed(tmp_path, capsys):
    before = namespaces()
    options = (
        "--rates-gbit 1 --ranks-per-host 1 --sizes 1KiB 4MiB --wires bf16 --turns 1 --budget 0"
    )
    assert benchmarks.main(["net", *options.split(), "--out", str(tmp_path)]) == 0
    report = msgspec.json.decode((tmp_path / "net.json").read_bytes(), type=NetReport)
    assert [(str(case), [row.nbytes for row in case.rows]) for case in report.cases] == [
        ("2 hosts x 1 at 1 Gbit/s", [1024, 4 << 20])
    ]
    assert set(report.cases[0].rows[0].ratio) == {"braid", "bf16"}
    said = capsys.readouterr().out
    assert [word in said for word in ("up to 64 KiB", "of the link", "net.json")] == [True] * 3
    assert namespaces() <= before | {name for name in namespaces() if not name.startswith("bn")}


@pytest.mark.proof
def test_every_algorithm_is_predicted_and_measured(tmp_path, capsys):
    assert benchmarks.main(["model", "--turns", "1", "--out", str(tmp_path)]) == 0
    report = msgspec.json.decode((tmp_path / "model.json").read_bytes(), type=ModelReport)
    names = {(one.time.operation, one.time.algorithm) for one in report.over_network}
    assert (len(names), len(report.over_network)) == (9, 45)
    assert all(
        one.predicted_s > 0 < one.time.seconds for one in [*report.over_network, *report.in_memory]
    )
    assert "median error at most 15%" in capsys.readouterr().out


@pytest.mark.proof
def test_hosts_and_network_are_levels_of_the_cluster(lab, tmp_path, capsys, monkeypatch):
    hosts = lab(2)
    bridge = f"{hosts.prefix}br"
    hosts.ip("addr", "add", "10.77.0.200/24", "dev", bridge)  # the launcher is on neither host
    out = tmp_path / "cluster.toml"
    monkeypatch.chdir(tmp_path)
    words = ["probe", "-H", "a:2,b:2", "--rsh", hosts.rsh, "--rounds", "1", "--out", str(out)]
    assert main(words) == 0
    found = from_toml(Path(out).read_text())
    assert [(level.name, level.size) for level in found.levels] == [("host", 2), ("network", 2)]
    assert "network of 2: latency" in capsys.readouterr().out
