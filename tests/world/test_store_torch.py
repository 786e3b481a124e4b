"""Torch's stores where braid's are expected, and the other way round."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch.distributed as dist

from braid.errors import CommTimeout, ConfigError, PeerLostError
from braid.runtime.store import HashStore, StoreServer
from braid.runtime.store.torch_store import TorchStore, as_torch_store
from braid.runtime.wire import Secret
from support.store_conformance import check_store

_names = itertools.count()


@pytest.fixture(scope="module")
def tcp_stores():
    """One server and three clients; torch also makes a process-wide pipe with the first of them."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    clients = [dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False) for _ in range(2)]
    return [server, *clients]


def test_torch_hash_store_conforms():
    check_store(lambda n: [TorchStore(dist.HashStore(), 10)] * n)


def test_torch_tcp_store_conforms(tcp_stores):
    def make_clients(n):
        part = f"claim{next(_names)}"
        return [TorchStore(dist.PrefixStore(part, store), 10) for store in tcp_stores[:n]]

    check_store(make_clients, refuses_bad_add=False)


def test_torch_prefix_store_conforms():
    check_store(lambda n: [TorchStore(dist.PrefixStore("p", dist.HashStore()), 10)] * n)


def test_a_store_survives_the_way_to_torch_and_back():
    check_store(lambda n: [TorchStore(as_torch_store(HashStore(10)), 10)] * n)


def test_torch_prefix_store_reaches_every_operation():
    """Torch's C++ calls the overridden methods, though Python has forgotten the object."""

    def make_clients(n):
        whole = dist.PrefixStore("outer", as_torch_store(HashStore(10)))
        return [TorchStore(dist.PrefixStore("inner", whole), 10)] * n

    check_store(make_clients)


def test_torch_file_store_serves_without_the_extended_operations(tmp_path):
    store = TorchStore(dist.FileStore(str(tmp_path / "f"), 1), 10)
    store.multi_set({"a": b"1", "b": b"2"})
    assert store.multi_get(["b", "a"]) == [b"2", b"1"]
    with pytest.raises(ConfigError, match="cannot append"):
        store.append("a", b"x")


@pytest.mark.usefixtures("tcp_stores")
def test_a_lost_tcp_store_is_a_lost_peer():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TorchStore(dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False))
    del server
    with pytest.raises(PeerLostError, match="lost the process that holds TorchStore"):
        client.add("a", 1)


def test_time_outs_are_caught_by_both_names():
    store = as_torch_store(HashStore())
    store.set_timeout(timedelta(milliseconds=5))
    for error in (CommTimeout, dist.DistStoreError):
        with pytest.raises(error, match="keys 'absent' are missing"):
            store.get("absent")
        with pytest.raises(error, match="keys 'absent' are missing"):
            store.wait(["absent"], timedelta(milliseconds=5))
        with pytest.raises(error, match="keys 'p/absent' are missing"):
            dist.PrefixStore("p", store).get("absent")


def test_texts_are_accepted_where_torch_accepts_them():
    store = as_torch_store(HashStore())
    store.set("a", "text")
    store.append("a", "!")
    store.multi_set(["b"], ["2"])
    assert [store.get("a"), store.get("b"), store.compare_set("c", "", "3")] == [
        b"text!",
        b"2",
        b"3",
    ]


WORKER = """
import os, sys
from datetime import timedelta
import torch, torch.distributed as dist
from braid.runtime.store import PrefixStore, StoreClient
from braid.runtime.store.torch_store import as_torch_store
from braid.runtime.wire import Identity, Secret, connect
rank, address, fd = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
connection = connect(address, Secret.from_fd(fd), Identity("run", "store", rank), timeout_s=30)
with StoreClient(connection) as client:
    dist.init_process_group(
        "gloo", store=as_torch_store(PrefixStore("job", client)), rank=rank, world_size=2,
        timeout=timedelta(seconds=60),
    )
    x = torch.full((4,), float(rank + 1))
    dist.all_reduce(x)
    dist.new_group([0, 1])
    dist.barrier()
    print(x.tolist(), flush=True)
    dist.destroy_process_group()
"""


@pytest.mark.launcher
@pytest.mark.procs
def test_gloo_meets_over_a_braid_store():
    secret = Secret.generate()
    address = f"unix:@braid-torch-{os.getpid()}-{next(_names)}"
    with StoreServer.listen(address, secret, "run"):
        fd = secret.to_fd()
        workers = [
            subprocess.Popen(
                [sys.executable, "-W", "error", "-c", WORKER, str(rank), address, str(fd)],
                pass_fds=[fd],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        os.close(fd)
        ends = [(*worker.communicate(timeout=200), worker.returncode) for worker in workers]
    said = [(out.splitlines()[-1:], code) for out, _, code in ends]  # after the lines of Gloo
    assert said == [(["[3.0, 3.0, 3.0, 3.0]"], 0)] * 2, ends
