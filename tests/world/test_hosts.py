"""Ranks of several hosts keep every claim of groups: some peers share memory with them, some are reached by sockets."""

from __future__ import annotations

import os
import signal
import threading
import time
from importlib import import_module

import pytest
import torch

from braid.comm import Group
from braid.errors import ConfigError, PeerLostError, RendezvousError
from braid.runtime.clock import MonotonicClock
from braid.runtime.transport import Network, meeting
from braid.runtime.transport.reachability import own_address_towards, probe
from braid.runtime.wire import Listener, Secret
from support.claims import of_rank, possible, reduced, same
from support.group_conformance import GROUP_CLAIMS
from support.pool import RankDiedError
from support.refusal_claims import MISMATCHES, check_mismatch
from support.transport_join import join_all

pytestmark = pytest.mark.procs


def _keep(group: Group, claim) -> tuple[int, ...]:
    for one in possible([claim], group.engine.capabilities):
        one(group)
    return group.engine.transport.hosts


@pytest.mark.parametrize("claim", GROUP_CLAIMS, ids=lambda claim: claim.__name__)
@pytest.mark.parametrize(
    "size", [3, pytest.param(4, marks=pytest.mark.proof), pytest.param(5, marks=pytest.mark.proof)]
)
def test_ranks_of_several_hosts_keep_the_claims_of_groups(hosts, claim, size):
    assert hosts(size, _keep, claim) == [tuple(r // 2 for r in range(size))] * size


@pytest.mark.parametrize("kind", MISMATCHES)
def test_ranks_of_several_hosts_agree_on_what_differs(hosts, kind):
    assert len(set(hosts(3, check_mismatch, kind))) == 1


def _groups_inside(group: Group) -> list[tuple[bool, bool]]:
    """Capabilities of: everybody, the own host, the first of each host."""
    here = group.split(group.engine.transport.hosts[group.rank])
    across = group.split(group.rank % 2)
    found = []
    for one in (group, here, across):
        x = one.empty((50_000,)).fill_(float(group.rank))
        same(one.all_reduce(x), torch.full((50_000,), float(sum(one.ranks))))
        found.append((one.engine.capabilities.adopts, one.engine.capabilities.rank_order))
    return found


def test_groups_inside_of_a_host_share_memory_and_all_others_do_not(hosts):
    inside, alone = (True, True), (False, True)
    assert hosts(4, _groups_inside) == [[(False, False), inside, alone]] * 4


def _used_after_each(group: Group) -> list[int]:
    """Memory for what is on its way is that of what is under way, not of all requests."""
    tensors = [torch.full((300_001,), float(group.rank)) for _ in range(6)]
    requests = [group.persistent("all_reduce", x) for x in tensors]
    total = float(sum(range(group.size)))
    used = []
    for x, request in zip(tensors, requests, strict=True):
        request.start().wait()
        same(x, torch.full_like(x, total))
        group.barrier()  # all have ended it, so its window may be lent again
        used.append(group.engine.transport.arena.statistics()["used_bytes"])
    return used


def test_requests_that_follow_each_other_share_their_windows(hosts):
    for used in hosts(4, _used_after_each):
        assert used[-1] - used[1] < 1 << 20


def _sums_in_order(group: Group) -> bool:
    """Whether sums are bitwise those in the order of ranks, whatever the size."""
    if "hierarchical" in {name for _, name in group.engine.record()["all_reduce"]}:
        return False
    for numel in (5, 300_001):
        inputs = [of_rank(r, numel, torch.float32) for r in range(group.size)]
        same(group.all_reduce(inputs[group.rank].clone()), reduced(inputs, "sum"))
    return True


@pytest.mark.parametrize("sum_order", ["rank", "any"])
def test_sums_are_taken_in_the_order_of_ranks_if_that_is_asked_for(hosts, sum_order):
    assert hosts(4, _sums_in_order, sum_order=sum_order) == [sum_order == "rank"] * 4


def killed_in_mid_collective(group: Group, victim: int, wire: str | None = None) -> str:
    x = torch.ones(4_000_000)
    group.barrier()
    if group.rank == victim:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        while True:
            group.all_reduce(x, wire=wire)
    except PeerLostError as error:
        return str(error)


@pytest.mark.parametrize(("victim", "wire"), [(1, None), (2, None), (3, "bf16")])
def test_a_rank_that_is_killed_is_named_on_its_own_host_and_on_the_others(hosts, victim, wire):
    with pytest.raises(RankDiedError) as caught:
        hosts(4, killed_in_mid_collective, victim, wire)
    assert caught.value.codes == {victim: -9}
    for answer in caught.value.answers.values():
        assert answer.error is None
        assert answer.result.startswith(f"rank {victim} (pid ")
        assert "died" in answer.result or "killed" in answer.result or "ended" in answer.result


def _join_all(options: list[dict]) -> list:
    return join_all(options, timeout_s=5.0)


def test_hosts_without_a_secret_in_common_are_refused_and_told_what_to_do():
    network = Network(towards="127.0.0.1")
    errors = _join_all([{"host": "a", "network": network}, {"host": "b", "network": network}])
    assert [type(error) for error in errors] == [ConfigError] * 2
    for words in ("braid run", "BRAID_SECRET_FILE", "BRAID_INSECURE_NETWORK"):
        assert words in str(errors[0])


def test_ranks_that_trust_in_different_ways_are_told_so_on_all():
    options = [
        {"host": str(r), "network": Network(towards="127.0.0.1", insecure=r == 0)} for r in range(2)
    ]
    (text,) = {str(error) for error in _join_all(options)}
    assert text.splitlines()[1:3] == ["  rank 0 trusts the store", "  rank 1 has no secret"]


def test_a_rank_that_cannot_listen_is_named_on_all():
    options = [
        {
            "host": str(r),
            "secret": Secret(bytes(32)),
            "network": Network("203.0.113.7" if r else ""),
        }
        for r in range(3)
    ]
    errors = _join_all(options)
    assert [type(error) for error in errors] == [ConfigError] * 3
    (text,) = {str(error) for error in errors}
    assert text.splitlines()[0].startswith("not every rank can listen")
    assert [line.partition(":")[0] for line in text.splitlines()[1:]] == ["  rank 1", "  rank 2"]


def test_a_host_that_takes_its_own_name_for_loopback_is_told_on_all():
    address = own_address_towards("192.0.2.1")
    options = [
        {
            "host": str(r),
            "secret": Secret(bytes(32)),
            "network": Network(address if r else "127.0.1.1"),
        }
        for r in range(2)
    ]
    errors = _join_all(options)
    assert [type(error) for error in errors] == [ConfigError] * 2
    assert "set BRAID_LISTEN to a reachable address on ranks [0]" in str(errors[0])


def test_a_host_with_another_secret_is_refused():
    options = [{"host": str(r), "secret": Secret.generate(), "timeout_s": 1.0} for r in range(2)]
    zero, one = _join_all(options)
    assert isinstance(zero, RendezvousError)
    assert "ranks [1] did not connect to rank 0" in str(zero)
    assert "has another secret" in str(zero)
    assert isinstance(one, RendezvousError)


def test_ranks_of_a_job_have_one_name_and_another_job_with_their_secret_has_another(monkeypatch):
    jobs: list[str] = []

    def listen(address, secret, identity, **options):
        jobs.append(identity.run_id)
        return Listener(address, secret, identity, **options)

    monkeypatch.setattr(
        import_module("braid.runtime.transport.peer_connections"), "Listener", listen
    )
    for _ in range(2):
        for transport in _join_all([{"host": h, "secret": Secret(bytes(32))} for h in "ab"]):
            transport.close()
    assert (jobs[0] == jobs[1], jobs[2] == jobs[3], len(set(jobs))) == (True, True, 2)


def test_a_host_with_another_version_is_named_on_all(monkeypatch):
    versions = iter(["1.0", "1.0", "2.0"])

    class Versions:
        def __format__(self, spec: str) -> str:
            return next(versions)

    monkeypatch.setattr(meeting, "__version__", Versions())
    errors = _join_all([{"host": "a"}, {"host": "a"}, {"host": "b"}])
    assert [type(error) for error in errors] == [ConfigError] * 3
    assert len({str(error) for error in errors}) == 1
    assert str(errors[0]).splitlines()[0] == ("not all ranks have the same version of braid:")
    assert sum("2.0  <-- differs" in line for line in str(errors[0]).splitlines()) == 1


def test_what_cannot_be_reached_is_known_within_the_time(tmp_path):
    clock = MonotonicClock()
    with_nobody = {1: "tcp://127.0.0.1:9", 2: "tcp://no-such-host.invalid:1"}
    begun = time.monotonic()
    assert probe(with_nobody, clock, timeout_s=2.0) == {1: "refused", 2: "name unknown"}
    assert (
        time.monotonic() - begun < 60
    )  # of no use but to end: an unknown name may take a resolver's time


def test_the_own_address_is_the_one_that_leads_there():
    assert own_address_towards("127.0.0.1") == "127.0.0.1"
