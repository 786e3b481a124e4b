"""PS-Lite's own test programs, one after the other in one run: connection, notes, keys, customers, benchmark."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import torch

from braid.compat import pslite as ps

REPEAT = int(os.environ.get("REPEAT", "50"))
NUM = 10_000


def simple_app() -> None:
    """test_simple_app.cc: notes from the scheduler to all others."""
    app, seen = ps.SimpleApp(1, 0), []
    app.set_request_handle(
        lambda req, app: (seen.append((req.head, req.body)), app.Response(req, f"{ps.MyRank()}"))
    )
    app.set_response_handle(lambda res, app: seen.append(res.sender))  # noqa: ARG005
    ps.Postoffice.Get().Barrier(0, ps.kAll)
    if ps.IsScheduler():
        group = ps.kServerGroup + ps.kWorkerGroup
        for ts in [app.Request(n, "test", group) for n in range(20)]:
            app.Wait(ts)
        assert sorted(seen) == sorted(20 * ps.Postoffice.Get().GetNodeIDs(group))
    ps.Postoffice.Get().Barrier(0, ps.kAll)
    if not ps.IsScheduler():
        assert sorted(seen) == [(n, "test") for n in range(20)]


def kv_app() -> None:
    """test_kv_app.cc: keys over the whole range, many pushes, and a pull that is compared."""
    kv = ps.KVWorker(0, 0)
    keys = np.arange(NUM, dtype=np.uint64) * np.uint64(ps.kMaxKey // NUM) + np.uint64(ps.MyRank())
    vals = torch.randint(
        0, 1000, (NUM,), generator=torch.Generator().manual_seed(ps.MyRank())
    ).float()
    stamps: list[int] = []
    for i in range(REPEAT):
        stamps.append(kv.Push(keys, vals))
        if i > 10:  # not more than that under way
            kv.Wait(stamps[-10])
    for ts in stamps:
        kv.Wait(ts)
    rets = torch.empty(0)
    kv.Wait(kv.Pull(keys, rets))
    assert torch.equal(rets, vals * REPEAT)
    outs = np.empty(NUM, dtype=np.float32)
    kv.Wait(kv.PushPull(keys, vals, outs))
    assert np.array_equal(outs, (vals * (REPEAT + 1)).numpy())


def multi_workers() -> None:
    """test_kv_app_multi_workers.cc: several customers, each in a thread of its own."""
    threads = [threading.Thread(target=run_worker, args=(customer,)) for customer in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def run_worker(customer: int) -> None:
    ps.Start(customer)
    kv = ps.KVWorker(2, customer)
    keys = [10 * customer + ps.MyRank(), ps.kMaxKey]
    for _ in range(5):
        kv.Wait(kv.Push(keys, [1.0, 1.0]))
    rets = torch.empty(2)
    kv.Wait(kv.Pull(keys, rets))
    assert rets[0] == 5
    ps.Finalize(customer)


def benchmark() -> None:
    """test_kv_app_benchmark.cc, of small sizes."""
    kv, finished = ps.KVWorker(3, 0), []
    for size in (1, 1 << 10, 1 << 16):
        keys, vals, outs = [ps.MyRank()], torch.ones(size), torch.empty(size)
        begin = time.perf_counter()
        for _ in range(10):
            kv.Wait(kv.ZPush(keys, vals, cmd=size, cb=lambda: finished.append(1), priority=-1))
            kv.Wait(kv.ZPull(keys, outs, cmd=size))
        micros = (time.perf_counter() - begin) / 20 * 1e6
        print(f"{4 * size} bytes: {micros:.0f} us")
        assert torch.equal(outs, 10 * vals)
    assert len(finished) == 30


class BySize:
    """A handle that has a store for each `cmd`."""

    def __init__(self) -> None:
        self.handles: dict[int, ps.KVServerDefaultHandle] = {}

    def __call__(self, meta: ps.KVMeta, pairs: ps.KVPairs, server: ps.KVServer) -> None:
        handle = self.handles.setdefault(meta.cmd, ps.KVServerDefaultHandle())
        handle(meta, pairs, server)


def main() -> None:
    ps.Start(0)
    ps.RegisterExitCallback(lambda: print("ended", flush=True))
    if ps.IsServer():
        for app in (0, 2, 3):
            server = ps.KVServer(app)
            server.set_request_handle(BySize() if app == 3 else ps.KVServerDefaultHandle())
    simple_app()
    if ps.IsWorker():
        kv_app()
        multi_workers()
        benchmark()
    office = ps.Postoffice.Get()
    print(
        "rank",
        ps.MyRank(),
        office.GetNodeIDs(ps.kAll),
        office.GetServerKeyRanges()[-1].end() == 1 << 64,
    )
    ps.Finalize(0)


if __name__ == "__main__":
    main()
