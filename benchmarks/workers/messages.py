"""Messages between two ranks by every path of braid, and what each path does, for `messages`.

    rank 0   sends, waits for the echo, measures
    rank 1   echoes; with parameter servers the server, and rank 2 is the worker

Times are taken without the profiler. Its figures are used as shares of such a time: it makes a
Python call look dearer than a copy.
"""

from __future__ import annotations

import cProfile
import os
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from unittest import mock

import msgspec
import torch
import torch.distributed as dist

import braid
from braid import ps, rpc
from braid.comm import Group
from braid.parallel.pipeline.messages import Messages
from braid.runtime.transport import wait

__all__ = ["BYTES", "PARTS", "PATHS", "Plan", "Row", "calls", "exchange", "pushes"]

PATHS = ("group", "torch", "edge", "call", "push")
BYTES = {"64 B": 64, "1 KiB": 1 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20}
SYSTEM_CALLS = ("poll", "sched_yield", "sendmsg", "recv_into", "send", "recv", "write", "read")
_PACKAGE = f"{Path(braid.__file__).parent}{os.sep}"
PARTS = {  # part of a message's path -> beginnings of the files, and names of built-in functions
    "copy": (
        "copy_", "copyto", "frombuffer", "numpy", "join", "runtime/message/vans/ring",
    ),
    "wake-up": (
        "poll", "sched_yield", "acquire", "runtime/transport/wait", "runtime/message/vans/poll",
        "rpc/leader_followers", "runtime/message/guard",
    ),
    "socket": ("sendmsg", "recv_into", "runtime/wire"),
    "encode": (
        "encode", "decode", "comm/engines/collective", "comm/tensors", "rpc/codec", "rpc/bodies",
        "rpc/names", "runtime/tensor_buffers", "runtime/message/protocol/schema",
        "runtime/message/protocol/heads", "parallel/pipeline",
    ),
    "record": ("pack_into", "runtime/events", "rpc/scope"),
    "queue": ("comm/engines", "comm/channel", "runtime/message", "ps/protocol"),
    "dispatch": ("comm/algorithms/receive", "rpc/agent", "rpc/caller", "rpc/pending", "rpc/peers"),
    "face": ("comm/api", "comm/torch_backend", "rpc/api", "ps/"),
}  # fmt: skip


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Messages to measure.

    Attributes:
        paths: Names out of `PATHS`.
        sizes: Names out of `BYTES`.
        rounds: Number of rounds; times are medians over them.
    """

    paths: tuple[str, ...] = PATHS
    sizes: tuple[str, ...] = tuple(BYTES)
    rounds: int = 5

    def count(self, size: str) -> int:
        """Return the number of messages of a round: 300, or 128 MiB of large ones."""
        return min(300, (128 << 20) // BYTES[size])


class Row(msgspec.Struct, kw_only=True):
    """One path and size, as the measuring rank sees it.

    Attributes:
        path: Name out of `PATHS`.
        size: Name out of `BYTES`.
        seconds: Seconds from a send to its echo or answer.
        shares: Fraction of the thread's profiled time in each part.
        calls: Number of Python calls in braid.
        system_calls: Number of calls of each system function.
    """

    path: str
    size: str
    seconds: float
    shares: dict[str, float]
    calls: float
    system_calls: dict[str, float]


def exchange(plan: Plan) -> list[Row] | None:
    """Measure send and recv of a group, of torch, and between pipeline stages; 2 ranks."""
    group = braid.init()
    torch.set_num_threads(1)
    dist.init_process_group("braid")
    rows = []
    for path in (path for path in plan.paths if path in {"group", "torch", "edge"}):
        for size in plan.sizes:
            send, recv = _ends(path, group, torch.ones(BYTES[size], dtype=torch.uint8))
            turns = (send, recv) if group.rank == 0 else (recv, send)
            rows.append(_measure(path, size, plan, partial(_in_order, *turns)))
    dist.destroy_process_group()
    return rows if group.rank == 0 else None


def _in_order(*acts: Callable[[], object]) -> None:
    for act in acts:
        act()


def _ends(
    path: str, group: Group, x: torch.Tensor
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return functions that send `x` to the other rank, and receive from it."""
    peer, out = 1 - group.rank, torch.empty_like(x)
    if path == "torch":
        return lambda: dist.send(x, peer), lambda: dist.recv(out, peer)
    if path == "group":
        return lambda: group.send(x, peer), lambda: group.recv(out, peer)
    edge = Messages(group)

    def recv() -> None:
        edge.recv_value(peer)
        edge.finish()

    return lambda: edge.send_value(x, peer), recv


def same(x: torch.Tensor) -> torch.Tensor:
    """Return the argument; runs in the callee."""
    return x


def calls(plan: Plan) -> list[Row] | None:
    """Measure remote calls with a tensor, there and back; 2 ranks."""
    torch.set_num_threads(1)
    is_caller = os.environ["RANK"] == "0"
    options = rpc.RpcOptions(allowed_modules=[__name__])
    rpc.init_rpc("caller" if is_caller else "callee", rpc_backend_options=options)
    rows = []
    for size in plan.sizes if is_caller else ():
        x = torch.ones(BYTES[size], dtype=torch.uint8)
        rows.append(_measure("call", size, plan, partial(rpc.rpc_sync, "callee", same, (x,))))
    rpc.shutdown()
    return rows if is_caller else None


def pushes(plan: Plan) -> list[Row] | None:
    """Measure pushes until they are accepted; 3 ranks."""
    group = braid.init()
    torch.set_num_threads(1)
    with ps.join(group, 1, ps.Options(shared_memory=True)) as node:
        tables = {s: node.dense(s, torch.zeros(BYTES[s] // 4), None) for s in plan.sizes}
        if not node.is_worker:
            node.serve()
            return None
        rows = []
        for size, table in tables.items():
            x = torch.ones(BYTES[size] // 4)
            rows.append(_measure("push", size, plan, partial(_push, table, x)))
        return rows


def _push(table: ps.DenseTable, x: torch.Tensor) -> None:
    table.wait(table.push_async(x))


def _measure(path: str, size: str, plan: Plan, act: Callable[[], object]) -> Row:
    """Time and profile an act, which the other rank runs equally often."""
    count, seconds = plan.count(size), []
    for _ in range(plan.rounds + 1):  # the first round warms up
        begin = time.perf_counter()
        for _ in range(count):
            act()
        seconds.append((time.perf_counter() - begin) / count)
    profile, yields = cProfile.Profile(), CountedYield()
    with mock.patch.object(wait, "yield_core", yields), profile:
        for _ in range(count):
            act()
    own_s, num_calls = dict.fromkeys((*PARTS, "other"), 0.0), 0
    system_calls = Counter({"sched_yield": yields.count} if yields.count else {})
    for entry in profile.getstats():
        code = entry.code
        if isinstance(code, str):  # a built-in function
            words = code.rstrip(">").replace("'", " ").replace(".", " ").split()
            name = words[1] if code.startswith("<method") else words[-1]
            own_s[_part(name)] += entry.inlinetime
            if name in SYSTEM_CALLS:
                system_calls[name] += entry.callcount
            continue
        file = code.co_filename.removeprefix(_PACKAGE)
        own_s[_part(file)] += entry.inlinetime
        num_calls += entry.callcount if file != code.co_filename else 0
    total_s = sum(own_s.values())
    return Row(
        path=path,
        size=size,
        seconds=median(seconds[1:]),
        shares={part: part_s / total_s for part, part_s in own_s.items()},
        calls=num_calls / count,
        system_calls={name: number / count for name, number in system_calls.items()},
    )


class CountedYield:
    """Counter of the calls of `sched_yield` through ctypes, which a profiler does not see."""

    def __init__(self) -> None:
        self.yield_core, self.count = wait.yield_core, 0

    def __call__(self) -> None:
        self.count += 1
        self.yield_core()


def _part(name: str) -> str:
    """Return the part of a file of the package, or of a built-in function."""
    return next(
        (part for part, beginnings in PARTS.items() if name.startswith(beginnings)), "other"
    )
