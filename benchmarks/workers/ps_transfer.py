"""Bytes, messages, pairs and rows between one server and one worker on one host.

    rank 0   scheduler
    rank 1   server; echoes for the references
    rank 2   worker: measures

Both transports exist at the same time, as two parameter servers in the same three processes. In
every round the worker measures all candidates, in random order.
"""

from __future__ import annotations

import contextlib
import random
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.workers.ps_plan import Measured, Plan
from benchmarks.workers.ps_reference import EchoClient, RemoteEcho, echo_address, serve_echo
from braid import ps
from braid.comm import Group
from braid.ps import kv
from braid.runtime.tensor_buffers import memory_of

__all__ = ["RPC", "SHARED", "SOCKETS", "UNIX", "transfer"]

SOCKETS, SHARED = "sockets", "shared memory"
UNIX, RPC = "plain unix socket", "torch's RPC"
WAYS = {SOCKETS: False, SHARED: True}
REPEATS = {"dense": 8, "push": 1, "pull": 1, "rows": 4}
WARM_UP = 3
PAIR_ROUNDS = 3  # each round sends a gigabyte
DIM = 32
ZIPF = 1.05  # exponent; slightly above 1 as in texts and clicks

Act = Callable[[], object]


def serve_pairs(node: kv.KVNode, num_pairs: int) -> kv.KVServer:
    """Answer requests on a server's node: pushes without values, pulls with preallocated ones."""
    vals = torch.zeros(num_pairs)

    def handle(meta: kv.KVMeta, pairs: kv.KVPairs, server: kv.KVServer) -> None:
        server.response(meta, kv.KVPairs(pairs.keys, vals) if meta.pull else None)

    server = kv.KVServer(node)
    server.set_request_handle(handle)
    return server


class Pairs:
    """A worker's pairs.

    Args:
        node: Node of the worker.
        num_pairs: Number of pairs.
    """

    def __init__(self, node: kv.KVNode, num_pairs: int) -> None:
        self._worker = kv.KVWorker(node)
        self._keys = torch.arange(num_pairs).view(torch.uint64)
        self._vals, self._out = torch.ones(num_pairs), torch.empty(num_pairs)

    def push(self) -> None:
        """Push all pairs without a copy, and wait for the answer."""
        self._worker.wait(self._worker.push(self._keys, self._vals, copy=False))

    def pull(self) -> None:
        """Pull all values into preallocated memory."""
        self._worker.wait(self._worker.pull(self._keys, self._out, copy=False))


def transfer(group: Group, plan: Plan) -> list[Measured] | None:
    """Measure the transfers of a plan; the worker returns the figures."""
    server = group.rank == 1
    address = group.objects.broadcast(echo_address())
    with contextlib.ExitStack() as stack:
        directory = ""
        if group.rank == 0:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="braid-bench-"))
        directory = group.objects.broadcast(directory)
        pair_nodes = {
            way: stack.enter_context(kv.join(group, 1, shared_memory=is_shared))
            for way, is_shared in WAYS.items()
        }
        nodes = {  # closed first: nodes for pairs wait for each other at their end
            way: stack.enter_context(ps.join(group, 1, ps.Options(shared_memory=is_shared)))
            for way, is_shared in WAYS.items()
        }
        tables = {way: _Tables(node, plan) for way, node in nodes.items()}
        if server:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind("\0" + address)
            listener.listen()
            stack.enter_context(_thread(serve_echo, listener, directory))
            for pair_node in pair_nodes.values():
                serve_pairs(pair_node, plan.num_pairs)
        group.barrier()
        if all(node.is_worker for node in nodes.values()):
            client = EchoClient(address)
            stack.callback(client.close)
            pairs = {way: Pairs(node, plan.num_pairs) for way, node in pair_nodes.items()}
            return _measure(plan, tables, pairs, client, directory)
        for node in list(nodes.values())[1:]:
            stack.enter_context(_thread(node.serve))
        next(iter(nodes.values())).serve()
    return None


@contextlib.contextmanager
def _thread(target: Callable[..., object], *args: object) -> Iterator[None]:
    thread = threading.Thread(target=target, args=args, name="braid-bench-ps")
    thread.start()
    try:
        yield
    finally:
        thread.join()


class _Tables:
    """Tables of one transport, and the measured operations of a worker."""

    def __init__(self, node: ps.Node, plan: Plan) -> None:
        numel = plan.dense_bytes // 4
        self.dense = node.dense("dense", torch.zeros(numel), None)
        self.small = node.dense("small", torch.zeros(16), None)
        self.rows = node.sparse("rows", DIM, ps.Adagrad(lr=0.1))
        self._grad, self._out = torch.ones(numel), torch.empty(numel)
        self._grad16 = torch.ones(16)
        generator = torch.Generator().manual_seed(0)
        self._ids = [_zipf(plan, generator) for _ in range(4)]
        self._grads = torch.ones(plan.batch, DIM)

    @property
    def num_distinct(self) -> float:
        """Mean number of distinct ids of a batch."""
        return statistics.mean(len(torch.unique(ids)) for ids in self._ids)

    def push_pull(self) -> None:
        """Push the dense table, and pull it into preallocated memory."""
        self.dense.push_async(self._grad)
        self.dense.pull(out=self._out)

    def push_small(self) -> None:
        """Push 16 numbers, and wait until the push is accepted."""
        self.small.wait(self.small.push_async(self._grad16))

    def train_rows(self) -> None:
        """Pull the rows of a batch, push their gradients, and wait until they are applied."""
        ids = self._ids[self.rows.clock % len(self._ids)]
        self.rows.pull(ids)
        self.rows.wait(self.rows.push(ids, self._grads))


def _zipf(plan: Plan, generator: torch.Generator) -> torch.Tensor:
    """Return ids; the probability of the k-th most frequent one is proportional to k ** -ZIPF."""
    weights = torch.arange(1, plan.vocabulary + 1, dtype=torch.float64).pow(-ZIPF).cumsum(0)
    drawn = torch.rand(plan.batch, generator=generator, dtype=torch.float64) * weights[-1]
    ranks = torch.searchsorted(weights, drawn).clamp_(max=plan.vocabulary - 1)
    return ranks * 0x9E3779B97F4A7C1 + 1  # frequent ids are not adjacent numbers


def _measure(
    plan: Plan,
    tables: dict[str, _Tables],
    pairs: dict[str, Pairs],
    client: EchoClient,
    directory: str,
) -> list[Measured]:
    numel = plan.dense_bytes // 4
    large, back = torch.ones(numel), torch.empty(numel)
    acts: dict[str, dict[str, Act]] = {}
    if "dense" in plan.parts:
        acts["dense"] = {way: table.push_pull for way, table in tables.items()}
        acts["dense"][UNIX] = lambda: client.echo(memory_of(large), memory_of(back))
    if "small" in plan.parts:
        acts["small"] = {way: table.push_small for way, table in tables.items()}
        tiny, answer = memoryview(bytearray(64)), memoryview(bytearray(64))
        acts["small"][UNIX] = lambda: client.echo(tiny, answer)
    if "pairs" in plan.parts:
        acts["push"] = {way: pair.push for way, pair in pairs.items()}
        acts["pull"] = {way: pair.pull for way, pair in pairs.items()}
    if "rows" in plan.parts:
        acts["rows"] = {way: table.train_rows for way, table in tables.items()}
    remote = {"dense": large, "small": torch.ones(16)}
    seconds: dict[str, dict[str, list[float]]] = {
        name: {w: [] for w in acts[name]} for name in acts
    }
    repeats = {**REPEATS, "small": plan.num_small}
    order = [(name, way) for name in acts for way in acts[name]]
    shuffler = random.Random(0)
    for name, way in order:
        _median_s(acts[name][way], WARM_UP)
    for number in range(plan.rounds):
        shuffler.shuffle(order)
        for name, way in order:
            if name not in {"push", "pull"} or number < PAIR_ROUNDS:
                seconds[name][way].append(_median_s(acts[name][way], repeats[name]))
        if plan.with_rpc and remote.keys() & acts.keys():
            with RemoteEcho(client, directory, number) as session:
                for name in remote.keys() & acts.keys():
                    act = partial(session.echo, remote[name])
                    act()
                    seconds[name].setdefault(RPC, []).append(_median_s(act, repeats[name]))
    rows = next(iter(tables.values()))
    amounts = {
        "dense": 2 * plan.dense_bytes,
        "small": 1,
        "push": plan.num_pairs,
        "pull": plan.num_pairs,
        "rows": 2 * plan.batch,
    }
    notes = {"rows": f"{rows.num_distinct / plan.batch:.0%} of a batch are distinct ids"}
    return [
        Measured(name=n, amount=amounts[n], seconds=by_way, note=notes.get(n, ""))
        for n, by_way in seconds.items()
    ]


def _median_s(act: Act, count: int) -> float:
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        act()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
