"""A parameter server over several hosts of which one is cut off: no bit changes, whoever comes back.

Processes live on while their host has no network. Each worker compares all that it pulls with the
training of one process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

SILENT_S = 3.0
TRAIN = """
import os, signal, sys, time
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock
import torch
import braid
from braid import ps
from braid.ps.rendezvous import VAN

here, silent_s, alone_s, *plan = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), *sys.argv[4:]
SIZE, WORKERS, STEPS = 100_000, 2, 60  # the table has several shards, of both servers
make = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
quick = replace(VAN, lost_after_s=silent_s)


def gradient(values, worker, step):
    return 0.5 * values + torch.arange(SIZE) % (5 + worker) - 0.1 * step


def stage(name):
    (here / name).write_text("")
    while not (here / f"{name} done").exists():
        time.sleep(0.01)


def is_whole(directory):
    return len(directory.servers) == 2 and all(map(len, directory.chains)) and not any(directory.joining)


group = braid.init()
with mock.patch("braid.ps.rendezvous.VAN", quick), mock.patch("braid.ps.service.ALONE_S", alone_s):
    with ps.join(group) as node:
        table = node.dense("weights", torch.zeros(SIZE), make)
        if not node.is_worker:
            (here / f"pid{node.number}").write_text(str(os.getpid()))
            node.serve()
            print(node.role, node.number, "has served", flush=True)
        else:
            own = torch.nn.Parameter(torch.zeros(SIZE))
            optimizer = make([own])
            for step in range(STEPS):
                values = table.pull()
                assert torch.equal(values, own.detach()), step
                if node.number == 0 and step == 20 and "cut" in plan:
                    stage("cut")
                if node.number == 0 and step == 40 and "mend" in plan:
                    stage("mend")
                    office = node.postoffice
                    office.wait_until(lambda: is_whole(office.directory), 30.0)
                    print("whole again", sorted(office.directory.heads()), flush=True)
                if node.number == 0 and step == 40 and "kill" in plan:
                    os.kill(int((here / "pid1").read_text()), signal.SIGKILL)
                table.push(gradient(values, node.number, step))
                grads = [gradient(values, worker, step) for worker in range(WORKERS)]
                if node.number == 0 and step == 20 and "heal" in plan:
                    office = node.postoffice
                    office.wait_until(lambda: "server:0" in office.links.losses, 30.0)
                    stage("heal")
                own.grad = (grads[0] + grads[1]) * (1 / WORKERS)
                optimizer.step()
            assert torch.equal(table.pull(), own.detach())
            print("same bits", flush=True)
"""


def trained(
    hosts, tmp_path: Path, *stages: str, alone_s: float = 300.0, **faults: Callable[[], None]
) -> tuple[str, str]:
    """Train on hosts a (scheduler), b and c (servers), d and e (workers); return what it wrote.

    Args:
        hosts: The hosts.
        tmp_path: Directory of the run.
        stages: What happens on the way, in this order: cut, heal, mend, kill.
        alone_s: Seconds after which a server that is alone ends.
        faults: What to do when the training has come to a stage.
    """
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    is_over = threading.Event()
    thread = threading.Thread(target=_strike, args=(tmp_path, faults, is_over))
    thread.start()
    roles = ("--servers", "2", "--workers", "2", "--replicas", "1")
    ranks = ("-H", "a:1,b:1,c:1,d:1,e:1", *roles)
    words = (str(tmp_path), str(SILENT_S), str(alone_s), *stages)
    try:
        done = hosts.run(*ranks, str(script), *words, cwd=tmp_path)
    finally:
        is_over.set()
        thread.join()
    assert done.code == 0, done.text
    assert done.out.count("same bits") == 2
    return done.out, done.text


def _strike(
    where: Path, faults: Mapping[str, Callable[[], None]], is_over: threading.Event
) -> None:
    """Do what each stage asks for, once the training has come to it."""
    for name, fault in faults.items():
        while not (where / name).exists():
            if is_over.wait(0.01):
                return
        fault()
        (where / f"{name} done").write_text("")


def link(hosts, host: str, state: str) -> Callable[[], None]:
    return lambda: hosts.ip("link", "set", hosts.port(host), state)


@pytest.mark.proof
def test_a_server_that_was_cut_off_joins_again_and_its_copies_decide_when_the_other_dies(
    lab, tmp_path
):
    hosts = lab(5)
    out, text = trained(
        hosts,
        tmp_path,
        *("cut", "mend", "kill"),
        cut=link(hosts, "b", "down"),
        mend=link(hosts, "b", "up"),
    )
    assert "whole again [1]" in out  # it came back without a say
    assert "server 0 has served" in out
    assert "killed by signal 9 (SIGKILL); the others go on without it" in text


@pytest.mark.proof
def test_a_server_that_stays_cut_off_says_so_and_the_others_end_well(lab, tmp_path):
    hosts = lab(5)
    out, text = trained(hosts, tmp_path, "cut", alone_s=4.0, cut=link(hosts, "b", "down"))
    assert "server 1 has served" in out
    assert "braid: server 0 has had no link to any other node for 4 s (the scheduler: " in text
    assert "the others go on with its copies" in text


@pytest.mark.proof
def test_a_worker_and_a_server_that_do_not_hear_each_other_for_a_while_lose_no_push(lab, tmp_path):
    hosts = lab(5)
    pair = ("d", "10.77.0.2"), ("b", "10.77.0.4")

    def cut() -> None:
        for host, address in pair:  # frames go to an address that nobody has
            where = ("lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent")
            hosts.ip("-n", hosts.prefix + host, "neigh", "replace", address, *where)

    def heal() -> None:
        for host, address in pair:
            hosts.ip("-n", hosts.prefix + host, "neigh", "del", address, "dev", "eth0")

    out, _ = trained(hosts, tmp_path, "cut", "heal", cut=cut, heal=heal)
    assert "server 0 has served" in out
