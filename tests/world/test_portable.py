"""Ranks that share no memory keep every claim that ranks with it keep; connections that break are losses."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from test_hosts import killed_in_mid_collective
from torch import nn

from braid.comm import Group
from braid.comm.channel.control_pages import ControlPages
from braid.errors import BraidError, ConfigError, PeerLostError, RendezvousError
from braid.parallel.data_parallel import DistributedDataParallel
from braid.runtime.events import Recorder
from braid.runtime.store import HashStore
from braid.runtime.transport import Loss, RankContext
from braid.runtime.wire import Identity, Secret
from braid.runtime.wire import connect as dial
from support.claims import possible, reduced, same
from support.group_conformance import GROUP_CLAIMS
from support.pool import RankDiedError
from support.refusal_claims import MISMATCHES, check_mismatch
from support.transport_join import join_all

pytestmark = pytest.mark.procs


def _keep(group: Group, claim) -> str:
    for one in possible([claim], group.engine.capabilities):
        one(group)
    return type(group.engine.transport).__name__


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("claim", GROUP_CLAIMS, ids=lambda claim: claim.__name__)
def test_portable_ranks_keep_the_claims_of_groups(portable, size, claim):
    assert portable(size, _keep, claim) == ["HostsTransport"] * size


@pytest.mark.parametrize("kind", MISMATCHES)
def test_portable_ranks_agree_on_what_differs(portable, kind):
    assert len(set(portable(3, check_mismatch, kind))) == 1


def _what_it_shares(group: Group) -> list[str]:
    group.engine.tune(60.0)
    lines = Path("/proc/self/maps").read_text().splitlines()
    found = [line.split()[-1] for line in lines if "memfd:braid" in line]
    for entry in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):  # the descriptor of this very listing
            found.append(str(entry.readlink()))
    return [what for what in found if "memfd:braid" in what or "pidfd" in what]


def test_portable_ranks_have_no_memory_in_common(portable):
    assert portable(2, _what_it_shares) == [[], []]


def _only_possible_algorithms(group: Group) -> tuple[bool, str]:
    group.engine.tune(60.0)
    chosen = {name for rows in group.engine.selection.record().values() for _, name in rows}
    try:
        group.all_reduce(group.empty((4,)), algorithm="registered")
    except ConfigError as error:
        return chosen <= set(group.engine.capabilities.algorithms), str(error)
    return False, "nothing happened"


def test_portable_ranks_choose_what_is_possible_and_refuse_the_rest(portable):
    for possible_only, text in portable(3, _only_possible_algorithms):
        assert possible_only
        assert "choose one of direct, two_phase, hierarchical, " in text
        assert "registered" not in text.partition(": choose one of")[2]


def _sends_while_the_other_computes(group: Group, directory: str) -> bool:
    """More than sockets hold, both ways, before anyone receives or waits in a group."""
    flag = Path(directory) / str(group.rank)
    peer = 1 - group.rank
    out = [torch.full((60_000,), float(10 * group.rank + i)) for i in range(20)]
    parts = [group.split(0) for _ in range(10)]
    sent = [part.send(x, peer, async_op=True) for part in parts for x in out[:2]]
    flag.touch()
    while not (Path(directory) / str(peer)).exists():
        pass  # neither waits in a group nor lets go of the processor
    for part in parts:
        for i in range(2):
            same(part.recv(torch.empty(60_000), peer), torch.full((60_000,), float(10 * peer + i)))
    for work in sent:
        work.wait()
    return True


def test_who_computes_keeps_nobody_from_sending(portable, tmp_path):
    assert portable(2, _sends_while_the_other_computes, str(tmp_path)) == [True, True]


def _sends_and_meets(group: Group) -> float:
    """A message larger than the sockets must arrive though its sender waits elsewhere, without a group."""
    if group.rank == 0:
        parts = [group.split(0) for _ in range(20)]
        for part in parts:
            part.send(torch.ones(60_000), 1)
        group.context.store.wait(["received"], 60.0)
        return 0.0
    parts = [group.split(0) for _ in range(20)]
    total = sum(part.recv(torch.empty(60_000), 0).sum().item() for part in parts)
    group.context.store.set("received", b"all")
    return total


def test_what_was_sent_arrives_though_its_sender_does_something_else(portable):
    assert portable(2, _sends_and_meets) == [0.0, 20 * 60_000.0]


def test_a_rank_that_is_killed_in_mid_collective_is_named_by_the_survivors(portable):
    with pytest.raises(RankDiedError) as caught:
        portable(3, killed_in_mid_collective, 1)
    assert caught.value.codes == {1: -9}
    for answer in caught.value.answers.values():
        assert answer.error is None
        assert answer.result.startswith("rank 1 (pid ")
        assert "died, while rank" in answer.result


def _leaves_early(group: Group) -> str:
    pair = group.split(0 if group.rank < 2 else 1)
    group.barrier()
    if group.rank == 2:
        group.engine.transport.announce_end(linger_s=0.0)
        group.engine.transport.close()
        os._exit(0)
    pair.all_reduce(torch.ones(1000))  # needs nobody who has left
    try:
        group.all_reduce(torch.ones(1000))
    except PeerLostError as error:
        return str(error)
    return "nothing happened"


def test_a_rank_that_leaves_early_hurts_only_who_needs_it(portable):
    with pytest.raises(RankDiedError) as caught:
        portable(3, _leaves_early)
    assert caught.value.codes == {2: 0}
    for answer in caught.value.answers.values():
        assert answer.result.startswith("rank 2 (pid ")
        assert "has already left, while rank" in answer.result


def _join_all(options: list[dict], store: HashStore | None = None) -> list:
    return join_all(options, store=store, timeout_s=20.0, portable=True)


def _close_all(transports: list) -> None:
    threads = [threading.Thread(target=transport.close) for transport in transports]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _group(transport, store: HashStore) -> Group:
    context = RankContext(
        transport.rank,
        transport.world_size,
        transport.clock,
        Recorder(),
        transport.health,
        store,
    )
    return Group.world(context, transport)


def test_ranks_that_disagree_on_the_mode_all_name_the_odd_one():
    errors = _join_all([{}, {"portable": False}, {}])
    assert [type(error) for error in errors] == [ConfigError] * 3
    (text,) = {str(error) for error in errors}
    lines = text.splitlines()
    assert lines[0] == "not all ranks reach each other in the same way:"
    assert [line.endswith("<-- differs") for line in lines[1:4]] == [False, True, False]
    assert lines[2].split()[:4] == ["rank", "1", "shared", "memory"]
    assert lines[4] == "set BRAID_PORTABLE=1 for all ranks or for none"


class _Remembering(HashStore):
    """A store that remembers every key and value that was ever set."""

    def __init__(self) -> None:
        super().__init__()
        self.set_once: dict[str, bytes] = {}

    def set(self, key, value):
        self.set_once[key] = value
        super().set(key, value)


def test_a_secret_that_went_through_the_store_does_not_stay_there():
    store = _Remembering()
    _close_all(_join_all([{}, {}, {}], store))
    secrets = {key for key, value in store.set_once.items() if "secret" in key and value}
    assert len(secrets) == 1
    assert not any(store.check([key]) for key in secrets)


class _Strangers(HashStore):
    """Lets strangers call a rank as soon as it has said where it listens."""

    def __init__(self, callers) -> None:
        super().__init__()
        self._strangers = callers
        self.done: list[str] = []

    def set(self, key: str, value: bytes) -> None:
        if key == "shm/address/0":
            port = int(value.decode().rpartition(":")[2])
            for caller in self._strangers:
                self.done.append(caller(port))
        super().set(key, value)


def _speaks_http(port: int):
    client = socket.create_connection(("127.0.0.1", port), 10)
    client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(100))
    return client


def _says_nothing(port: int):
    return socket.create_connection(("127.0.0.1", port), 10)


def _speaks_braid_of_another_job(port: int):
    def call() -> None:
        who = Identity("job", "memory", 1)
        with pytest.raises(RendezvousError):
            dial(f"tcp://127.0.0.1:{port}", Secret.generate(), who, timeout_s=10)

    thread = threading.Thread(target=call)
    thread.start()
    return thread


def test_strangers_at_the_port_keep_nobody_from_joining():
    store = _Strangers([_speaks_http, _says_nothing, _speaks_braid_of_another_job])
    secret = Secret.generate()  # of the job: without one, local ranks meet at no port
    found = _join_all([{"secret": secret}, {"secret": secret}], store)
    http, silent, foreign = store.done
    foreign.join()
    http.close()
    silent.close()
    assert [transport.world_size for transport in found] == [2, 2]
    _close_all(found)


def test_a_peer_that_writes_outside_of_its_memory_is_lost():
    zero, one = _join_all([{}, {}])
    try:
        one._links.by_rank[0]._connection.send(b"\x00\x00" + b"\xff" * 16)
        zero.waiter.until(lambda: bool(zero.health.lost), lambda: None)
        loss = zero.health.lost[1]
        assert loss.reason.startswith(f"(pid {os.getpid()}) sent invalid data: 18 bytes are not")
        assert not loss.departed
    finally:
        _close_all([zero, one])


def test_a_rank_that_closes_without_leaving_is_not_called_dead():
    zero, one = _join_all([{}, {}])
    one.close()
    zero.waiter.until(lambda: bool(zero.health.lost), lambda: None)
    expected = Loss(1, f"(pid {os.getpid()}) has closed its connections", departed=True)
    assert zero.health.lost == {1: expected}
    zero.close()


def _aborts(group: Group) -> str:
    if group.rank == 0:
        group.abort("ValueError: no such file")
        group.engine.transport.close()
        os._exit(0)
    try:
        group.all_reduce(torch.ones(1000))
    except BraidError as error:
        return str(error)
    return "nothing happened"


def test_last_words_arrive_before_the_end_of_the_connection(portable):
    with pytest.raises(RankDiedError) as caught:
        portable(3, _aborts)
    for answer in caught.value.answers.values():
        assert answer.result == (
            "stopped because rank 0 abandoned the group: ValueError: no such file"
        )


def test_sums_of_ranks_on_threads_over_sockets_are_in_rank_order():
    store = HashStore()
    transports = _join_all([{}, {}, {}])
    inputs = [torch.randn(100_000, generator=torch.Generator().manual_seed(r)) for r in range(3)]
    sums = [x.clone() for x in inputs]

    def reduce(rank: int) -> None:
        group = _group(transports[rank], store)
        group.all_reduce(sums[rank])
        group.close()
        transports[rank].announce_end()

    threads = [threading.Thread(target=reduce, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for x in sums:
        same(x, reduced(inputs, "sum"))
    _close_all(transports)


TRAINING = """
import sys, torch, braid
from torch import nn
from braid.parallel.data_parallel import DistributedDataParallel
torch.manual_seed(3)
group = braid.init()
model = nn.Sequential(nn.Linear(40, 300), nn.Tanh(), nn.Linear(300, 7))
ddp = DistributedDataParallel(model, process_group=group)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
for step in range(5):
    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(100 * group.rank + step))
    optimizer.zero_grad()
    ddp(x).square().mean().backward()
    optimizer.step()
if group.rank == 0:
    print(type(group.engine.transport).__name__)
    torch.save([p.detach() for p in model.parameters()], sys.argv[1])
"""


def _train(directory: Path, name: str, **environ: str) -> tuple[str, list[torch.Tensor]]:
    job, weights = directory / "training.py", directory / f"{name}.pt"
    job.write_text(TRAINING)
    command = [sys.executable, "-m", "braid", "run", "-n", "3"]
    command += ["--log-dir", str(directory / name), str(job), str(weights)]
    done = subprocess.run(
        command, env={**os.environ, **environ}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    log = (directory / name / "rank0.log").read_text()
    return log.split()[-1], torch.load(weights)


def _trained(group: Group) -> tuple[str, list[torch.Tensor]]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(40, 300), nn.Tanh(), nn.Linear(300, 7))
    ddp = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(100 * group.rank + step))
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        optimizer.step()
    return type(group.engine.transport).__name__, [p.detach() for p in model.parameters()]


def test_training_ends_with_the_same_bits_as_in_shared_memory(procs, portable):
    (way, weights), *_ = procs(3, _trained)
    (portable_way, portable_weights), *_ = portable(3, _trained)
    assert (way, portable_way) == ("MemoryTransport", "HostsTransport")
    for found, expected in zip(portable_weights, weights, strict=True):
        same(found, expected)


@pytest.mark.proof
@pytest.mark.launcher
def test_launched_training_ends_with_the_same_bits_as_in_shared_memory(tmp_path):
    way, weights = _train(tmp_path, "shared", BRAID_PORTABLE="0")
    portable_way, portable_weights = _train(tmp_path, "portable", BRAID_PORTABLE="1")
    assert (way, portable_way) == ("MemoryTransport", "HostsTransport")
    for found, expected in zip(portable_weights, weights, strict=True):
        same(found, expected)


def test_what_is_written_to_a_new_page_of_lines_is_not_sent_with_the_page(monkeypatch):
    transports = _join_all([{}, {}])
    frames: list = []
    try:
        pages = [ControlPages.first_page(transport).address for transport in transports]
        port = ControlPages(transports[0], (0, 1), 0, pages)
        monkeypatch.setattr(
            transports[0]._links, "send", frames.extend
        )  # as to a peer that is stopped
        channel = port.channel(100)
        page = frames.pop()
        channel.own.stage(torch.ones(4))
        channel.publish()
        (data,) = page[2]
        assert bytes(data) == bytes(len(data))
    finally:
        monkeypatch.undo()
        _close_all(transports)
