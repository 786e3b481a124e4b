"""Rendezvous by hand: the same exchange through a TCP store, a file store and a hash store.

braid run -n 2 examples/05_rendezvous.py
"""

import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import braid
from braid.context import membership
from braid.runtime.store import (
    FileStore,
    HashStore,
    PrefixStore,
    Store,
    StoreClient,
    StoreServer,
    exchange,
)
from braid.runtime.wire import Identity, Secret, connect

RUN, SETS = "handbook", 200


def meet(store: Store, rank: int, size: int) -> list[object]:
    """Return what a rank learns: the value of each rank, a shared counter, the elected leader."""
    values = exchange(store, "names", rank, range(size), f"rank {rank}".encode(), timeout_s=60)
    store.add("counter", rank + 1)  # atomic: no sum is lost
    store.append("arrived", b"x")
    winner = store.compare_set("leader", b"", values[0])  # the first call decides for all
    store.set(f"done/{rank}", b"")
    store.wait([f"done/{other}" for other in range(size)])
    return [values, store.get("counter"), store.get("arrived"), winner, store.check(["nobody"])]


def microseconds(store: Store, rank: int) -> float:
    start = time.perf_counter()
    for _ in range(SETS):
        store.set(f"time/{rank}", b"x")
    return (time.perf_counter() - start) / SETS * 1e6


group = braid.init()
here = membership().environment
print(
    f"rank {here.rank} of {here.world_size}, host {here.node_rank}, started by {here.launched_by}"
)

# one process: a HashStore, and threads as ranks
with ThreadPoolExecutor(group.size) as threads:
    shared = HashStore()
    alone = list(threads.map(lambda rank: meet(shared, rank, group.size), range(group.size)))

with tempfile.TemporaryDirectory() as folder:
    # a file store needs a path that all ranks know
    path = group.objects.broadcast(str(Path(folder) / "store"))
    with FileStore(path) as file:
        assert meet(PrefixStore("a part", file), group.rank, group.size) == alone[group.rank]
        file_us = microseconds(file, group.rank)
        group.barrier()

# a TCP store needs an address and a secret; `braid run` passes its secret in a file descriptor
key = group.objects.broadcast(os.urandom(32).hex())
secret = Secret(bytes.fromhex(key))
server = StoreServer.listen("tcp://127.0.0.1:0", secret, RUN) if group.rank == 0 else None
address = group.objects.broadcast(server.address if server else None)
connection = connect(address, secret, Identity(RUN, "store", group.rank), timeout_s=60)
with StoreClient(connection) as client:
    assert meet(client, group.rank, group.size) == alone[group.rank]
    tcp_us = microseconds(client, group.rank)
    group.barrier()
if server:
    server.close()
    hash_us = microseconds(HashStore(), 0)
    print(
        f"set takes {hash_us:.0f} us in memory, {file_us:.0f} us in a file, {tcp_us:.0f} us by TCP"
    )
    print("three stores give every rank the values of one process, bit by bit")
