"""Joins the cluster of a parameter server, from TF_CONFIG or as a rank of `braid run`.

    TF_CONFIG                     braid run --servers 2 --workers 2     node
    chief (or ps 0, without)      rank 0                                scheduler
    ps                            ranks 1 and 2                         servers
    worker                        ranks 3 and 4                         workers
    spare                         the last ranks, with --spares         spares, or lost workers

Addresses of TF_CONFIG stay the same, so a task that is started again finds the others: a worker
takes its own place again, a server joins with a new number, and the chief reads its journal.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from braid.context import init
from braid.errors import ConfigError, RendezvousError
from braid.ps import Node, Options, join, join_running
from braid.ps.protocol.directory import SCHEDULER, Role
from braid.ps.rendezvous import wait_for_call
from braid.runtime.rendezvous.network import network_of_program
from braid.runtime.wire import Secret
from braid.strategies.cluster import ClusterResolver

__all__ = ["join_cluster"]

LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
MEET_S = 300  # in which the task that schedules must begin to listen
LOOK_S = 10  # after which a task logs that it waits
LOG = logging.getLogger(__name__)


def join_cluster(
    resolver: ClusterResolver | None, options: Options | None
) -> tuple[Node, Node | None]:
    """Return this process's node, and the scheduler's node if this process also runs it.

    Args:
        resolver: Resolver for the tasks; None for ranks of `braid run --servers N --workers M`.
        options: Choices of the parameter server, the same in all tasks.

    Raises:
        ConfigError: The cluster has no servers or no workers, or its secret is missing.
        RendezvousError: The scheduler cannot be reached.
    """
    if resolver is None:
        return join(init(), options=options), None
    jobs = resolver.cluster_spec()
    place = _place_of(jobs)
    options = options or Options()
    if options.on_worker_loss is None:
        options = replace(options, on_worker_loss="wait")
    counts = len(jobs["ps"]), len(jobs["worker"])
    kind, index = resolver.task_type, resolver.task_id
    scheduler = None
    if kind in {"chief", "master"} or (
        kind == "ps" and index == 0 and jobs.keys().isdisjoint({"chief", "master"})
    ):
        scheduler = join_running(
            "",
            place.secret,
            place.run_id,
            "scheduler",
            0,
            counts,
            options=options,
            address=place.scheduler,
        )
        if kind != "ps":
            return scheduler, None
    if kind == "spare":
        spare = join_running(
            place.scheduler, place.secret, place.run_id, "spare", index, counts, options=options
        )
        _reach(spare, place.scheduler)
        called = wait_for_call(spare)
        if called is None:
            return spare, scheduler
        spare.postoffice.close(0.0)  # nothing is under way
        kind, index = "worker", called
    role: Role = "server" if kind == "ps" else "worker"
    listen = "" if place.is_local or role == "worker" else f"tcp://{jobs[kind][index]}"
    node = join_running(
        place.scheduler,
        place.secret,
        place.run_id,
        role,
        index,
        counts,
        options=options,
        address=listen,
    )
    _reach(node, place.scheduler)
    return node, scheduler


def _reach(node: Node, scheduler: str) -> None:
    """Connect to the task that schedules, and warn while it does not listen.

    Raises:
        RendezvousError: It does not listen for 300 s.
    """
    for waited_s in range(0, MEET_S, LOOK_S):
        try:
            node.postoffice.van.connect(SCHEDULER, scheduler, timeout_s=LOOK_S)
        except RendezvousError:
            if waited_s + LOOK_S >= MEET_S:
                raise
            LOG.warning(
                "braid: %s has waited %d s for the chief (or ps 0, without one) to start: check "
                "that it runs, with the same cluster in TF_CONFIG",
                node.name,
                waited_s + LOOK_S,
            )
        else:
            return


class _ClusterPlace(NamedTuple):
    """Place at which the tasks of a cluster meet."""

    scheduler: str
    secret: Secret
    run_id: str
    is_local: bool


def _place_of(jobs: Mapping[str, Sequence[str]]) -> _ClusterPlace:
    """Return the place at which all tasks meet; the same in each.

    Inside a host it is a unix socket of the user. Over several hosts it is the address of the task
    that schedules, and all tasks need the same BRAID_SECRET_FILE.
    """
    missing = [job for job in ("ps", "worker") if not jobs.get(job)]
    if missing:
        msg = (
            f"the cluster has no {' and no '.join(missing)} task: a parameter server strategy "
            "needs at least one ps and one worker"
        )
        raise ConfigError(msg)
    text = ";".join(f"{job}={','.join(jobs[job])}" for job in sorted(jobs))
    key = hashlib.sha256(f"braid parameter server {text}".encode()).digest()
    hosts = {address.rpartition(":")[0] for tasks in jobs.values() for address in tasks}
    run_id = key.hex()[:16]
    if hosts <= LOOPBACK and sys.platform == "linux":
        scheduler = f"unix:@braid-{os.getuid()}-{run_id}"
        return _ClusterPlace(scheduler, Secret(key, for_one_user=True), run_id, is_local=True)
    secret, _ = network_of_program()
    if secret is None:
        msg = (
            "the tasks of this cluster are on several hosts: set BRAID_SECRET_FILE to a file (mode "
            "0600) with the same 32 bytes on each, made with `head -c 32 /dev/urandom`"
        )
        raise ConfigError(msg)
    chief = next(jobs[job][0] for job in ("chief", "master", "ps") if job in jobs)
    return _ClusterPlace(f"tcp://{chief}", secret, run_id, is_local=False)
