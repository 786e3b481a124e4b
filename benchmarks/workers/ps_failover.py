"""Servers that are killed repeatedly while workers count their pushes.

Each worker adds 1 to all elements in each step, and waits until the push is acknowledged. So the
pulled values are exactly the number of acknowledged pushes.

    kill -9 the head of the first shard ──> chains continue ──> a new server joins, copies are made
                      └── the slowest step from here to the next kill is measured

Servers and workers are forked from a process that has imported torch already, so that a new server
does not spend a second on imports.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch

from benchmarks.workers.ps_plan import Failover, Plan
from braid import ps
from braid.errors import CommTimeout
from braid.ps.protocol.directory import Directory, virtual_shard
from braid.runtime.wire import Secret

__all__ = ["fail_over"]

COUNTS = 3, 2  # servers and workers
REPLICAS = 1
OPTIONS = ps.Options(replicas=REPLICAS)
NAME = "counts"
RUN = "bench"
ADD = ps.SGD(lr=1.0)  # a class of torch.optim would import torch._dynamo in each new server
SUM = ps.Consistency(aggregate="sum")
REPAIR_S = 60.0  # deadline for new copies
PRELOAD = ["benchmarks.workers.ps"]  # with torch
REST_S = (0.1, 0.3)  # between a repair and the next kill, at random
LAST_STEPS = 30


class _Job(NamedTuple):
    """Data that a node needs to join the job."""

    address: str
    secret: bytes
    numel: int

    def node(self, role: Any, number: int) -> ps.Node:
        return ps.join_running(
            self.address, Secret(self.secret), RUN, role, number, COUNTS, options=OPTIONS
        )

    def table(self, node: ps.Node) -> ps.DenseTable:
        return node.dense(NAME, torch.zeros(self.numel), ADD, SUM)


def fail_over(plan: Plan) -> Failover:
    """Kill servers, and return the figures of the workers."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    job = _Job("", os.urandom(32), plan.count_bytes // 4)
    scheduler = job.node("scheduler", 0)
    job = job._replace(address=scheduler.address)
    job.table(scheduler)
    thread = threading.Thread(target=scheduler.serve, name="braid-bench-scheduler")
    thread.start()
    processes: dict[int, BaseProcess] = {}
    stop, reached = context.Value("q", 0), context.Array("q", COUNTS[1])
    answers = context.Queue()
    workers = []
    try:
        for number in range(COUNTS[0]):
            processes[number] = _start(context, _serve, job, number)
        workers = [
            _start(context, _count, job, number, stop, reached, answers)
            for number in range(COUNTS[1])
        ]
        kills, repairs = _kill(
            plan, scheduler, processes, lambda n: _start(context, _serve, job, n)
        )
        time.sleep(REST_S[1])
        stop.value = max(reached) + LAST_STEPS
        seen = [answers.get(timeout=REPAIR_S) for _ in workers]
        for process in [*workers, *processes.values()]:
            process.join(REPAIR_S)
        thread.join()
    finally:
        for process in [*workers, *processes.values()]:
            process.kill()
        scheduler.close()
    return _figures(kills, repairs, seen)


def _start(context: Any, target: Callable[..., None], *args: object) -> BaseProcess:
    process: BaseProcess = context.Process(target=target, args=args, daemon=True)
    process.start()
    return process


def _serve(job: _Job, number: int) -> None:
    """Run a server."""
    torch.set_num_threads(1)
    with job.node("server", number) as node:
        job.table(node)
        node.serve()


def _count(job: _Job, number: int, stop: Any, reached: Any, answers: Any) -> None:
    """Run a worker: push, and compare each pull with the number of pushes, until `stop`."""
    torch.set_num_threads(1)
    with job.node("worker", number) as node:
        table = job.table(node)
        grad, out = torch.full([job.numel], -1.0), torch.empty(job.numel)
        times, wrong, step = [], 0, 0
        while not stop.value or step < stop.value:
            begin = time.perf_counter()
            table.pull(out=out)
            wrong += not bool((out == COUNTS[1] * step).all())
            table.wait(table.push_async(grad))
            times.append((begin, time.perf_counter()))
            step += 1
            reached[number] = step
        table.pull(out=out)
        lost = float((COUNTS[1] * step - out).abs().max())
        answers.put((times, wrong, lost))


def _kill(
    plan: Plan,
    scheduler: ps.Node,
    processes: dict[int, BaseProcess],
    start: Callable[[int], BaseProcess],
) -> tuple[list[float], list[float]]:
    """Kill the head of the first shard repeatedly; return the times of kills, and repair times."""
    generator = random.Random(0)
    kills, repairs = [], []
    _wait_for(scheduler, COUNTS[0])
    for number in range(plan.kills):
        time.sleep(generator.uniform(*REST_S))
        directory = scheduler.postoffice.directory
        assert directory is not None, "all nodes have joined"
        head = directory.head(virtual_shard(NAME, 0))
        assert head is not None, "a shard with copies has a head"
        process = processes.pop(head)
        assert process.pid is not None, "the process has been started"
        kills.append(time.perf_counter())
        os.kill(process.pid, signal.SIGKILL)
        processes[COUNTS[0] + number] = start(COUNTS[0] + number)
        process.join()
        _wait_for(scheduler, COUNTS[0], without=head)
        repairs.append(time.perf_counter() - kills[-1])
    return kills, repairs


def _wait_for(scheduler: ps.Node, servers: int, without: int = -1) -> None:
    """Wait until `servers` servers are alive, and every shard has its copies."""
    deadline = time.perf_counter() + REPAIR_S
    while not _is_whole(scheduler.postoffice.directory, servers, without):
        if scheduler.postoffice.failure or time.perf_counter() > deadline:
            msg = (
                f"no {servers} servers with copies of all shards after {REPAIR_S:g} s: "
                f"{scheduler.postoffice.directory}"
            )
            raise CommTimeout(msg)
        time.sleep(0.005)


def _is_whole(directory: Directory | None, servers: int, without: int) -> bool:
    return (
        directory is not None
        and len(directory.servers) == servers
        and without not in directory.servers
        and not any(directory.joining)
        and all(len(chain) == REPLICAS + 1 for chain in directory.chains)
    )


def _figures(
    kills: list[float],
    repairs: list[float],
    seen: list[tuple[list[tuple[float, float]], int, float]],
) -> Failover:
    steps = [step for times, _, _ in seen for step in times]
    slowest = [
        max(end - begin for begin, end in steps if end > kill and begin < later)
        for kill, later in zip(kills, [*kills[1:], float("inf")], strict=True)
    ]
    return Failover(
        slowest_s=slowest,
        repaired_s=repairs,
        step_s=statistics.median(end - begin for begin, end in steps),
        steps=min(len(times) for times, _, _ in seen),
        lost=round(max(lost for _, _, lost in seen)),
        wrong=sum(wrong for _, wrong, _ in seen),
    )
