"""Collectives over several hosts: shared memory inside, sockets between; what is wrong with the network is said on every rank."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from netlab import Lab, done

JOBS = str(Path(__file__).with_name("data_jobs.py"))
MASTER = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29455"}


def _by_hand(
    lab: Lab, hosts: str, per_host: int, *words: str, cwd: Path, **environ: str
) -> list[subprocess.Popen[str]]:
    """Ranks started without a launcher, by the variables that every launcher sets."""
    size = len(hosts) * per_host
    return [
        lab.popen(
            host,
            sys.executable,
            JOBS,
            *words,
            cwd=cwd,
            **MASTER,
            RANK=str(number * per_host + local),
            WORLD_SIZE=str(size),
            LOCAL_RANK=str(local),
            LOCAL_WORLD_SIZE=str(per_host),
            **environ,
        )
        for number, host in enumerate(hosts)
        for local in range(per_host)
    ]


def test_a_launched_job_reduces_over_hosts_in_every_way(lab, tmp_path):
    found = lab(2).run("-H", "a:2,b:1", JOBS, "everything", cwd=tmp_path)
    assert sorted(found.out.splitlines()) == [
        f"[rank {rank}] (0, 0, 1) True True True True" for rank in range(3)
    ], found.text


def test_frames_between_hosts_carry_codes_unless_an_option_says_so(lab, tmp_path):
    hosts = lab(2)
    usual = hosts.run("-H", "a:2,b:1", JOBS, "codes", cwd=tmp_path)
    without = hosts.run("--no-frame-mac", "-H", "a:2,b:1", JOBS, "codes", cwd=tmp_path)
    for done_run, codes in ((usual, True), (without, False)):
        assert sorted(done_run.out.splitlines()) == [
            f"[rank {rank}] {[codes] * number} 3000000" for rank, number in enumerate((1, 1, 2))
        ], done_run.text
    word = "--no-frame-mac: anyone on the way between the hosts"
    assert (word in usual.text, word in without.text) == (False, True)


def test_ranks_that_were_started_by_hand_trust_each_other_by_a_file(lab, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(range(32)))
    secret.chmod(0o600)
    ranks = _by_hand(lab(2), "ab", 1, "everything", cwd=tmp_path, BRAID_SECRET_FILE=str(secret))
    assert [done(rank).out for rank in ranks] == ["(0, 1) True True True True\n"] * 2


def test_ranks_that_were_started_by_hand_without_a_secret_are_refused(lab, tmp_path):
    outs = [done(rank).out for rank in _by_hand(lab(2), "ab", 1, "alone", cwd=tmp_path)]
    assert len(set(outs)) == 1
    assert outs[0].startswith("ConfigError: ranks have no secret for connections between hosts")


def test_hosts_that_cannot_see_each_other_are_shown_as_a_matrix_on_every_rank(lab, tmp_path):
    """Both reach the store, but the second one's address for ranks is of a network that it does not share."""
    hosts = lab(3)
    for host in "bc":  # a is where the store is; b and c must not see each other
        other = {"b": "3", "c": "2"}[host]
        hosts.ip("-n", hosts.prefix + host, "route", "add", "blackhole", f"10.77.0.{other}/32")
    begun = time.monotonic()
    ranks = _by_hand(hosts, "abc", 1, "alone", cwd=tmp_path, BRAID_INSECURE_NETWORK="1")
    outs = [done(rank).out for rank in ranks]
    assert len(set(outs)) == 1, outs
    lines = outs[0].splitlines()
    assert lines[0] == "RendezvousError: some of the 3 hosts cannot reach each other:"
    cells = [[word in line for word in ("ok", "timed out", "no route")] for line in lines[2:5]]
    assert [row[0] for row in cells] == [True, True, True]
    assert [
        row[1] or row[2] or "invalid" in line for row, line in zip(cells, lines[2:5], strict=True)
    ] == [
        False,
        True,
        True,
    ]
    assert time.monotonic() - begun < 60


@pytest.mark.proof
def test_a_network_that_breaks_in_mid_collective_is_reported_on_every_rank(lab, tmp_path):
    """Within the 30 s after which a silent host is given up, and something for a busy machine."""
    hosts = lab(2)
    ranks = _by_hand(
        hosts, "ab", 2, "losing", str(tmp_path), cwd=tmp_path, BRAID_INSECURE_NETWORK="1"
    )
    while not all((tmp_path / f"here-{rank}").exists() for rank in range(4)):
        time.sleep(0.02)
    hosts.ip("link", "set", hosts.port("b"), "down")
    assert [done(rank).out for rank in ranks] == ["lost True\n"] * 4
