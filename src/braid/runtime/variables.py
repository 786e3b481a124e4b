"""Environment variables of braid, in one table, which docs/environment.md prints.

Variables have the same names as torchrun's variables, if those exist: `rendezvous.environment`
reads them.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = [
    "FAULTS",
    "NO_FRAME_MAC",
    "ON_WORKER_LOSS",
    "REPLICAS",
    "RESTARTS",
    "ROLES",
    "SERVERS",
    "SPARES",
    "VARIABLES",
]

SERVERS = "BRAID_SERVERS"
REPLICAS = "BRAID_REPLICAS"
RESTARTS = "BRAID_RESTARTS"
SPARES = "BRAID_SPARES"
ON_WORKER_LOSS = "BRAID_ON_WORKER_LOSS"
ROLES = "BRAID_ROLES"
NO_FRAME_MAC = "BRAID_NO_FRAME_MAC"
FAULTS = "BRAID_FAULTS"
# for users; then variables that braid's launchers set; then variables that only their ranks need
VARIABLES: Mapping[str, str] = {
    "BRAID_PORTABLE": "`1`: ranks use sockets and no shared memory, as on systems without memfd.",
    "BRAID_SECRET_FILE": "File with the job's secret (mode 0600), for several hosts without "
    "`braid run`, or with launchers that you start by hand.",
    "BRAID_INSECURE_NETWORK": "`1`: ranks of several hosts accept any connection, without a "
    "secret (`--insecure-network`).",
    NO_FRAME_MAC: "`1`: frames between hosts have no message authentication codes "
    "(`--no-frame-mac`).",
    "BRAID_LISTEN": "IP address on which a rank listens for ranks of other hosts.",
    "BRAID_RESUME": "Checkpoint to resume from; `auto` for the last complete one (`--resume`).",
    "BRAID_LOG_DIR": "Directory of the run's logs (`--log-dir`).",
    "BRAID_HOROVOD_ALLOW_PICKLE": "`1`: braid's API of Horovod pickles objects that are not plain "
    "data.",
    SERVERS: "Number of servers of a parameter server (`--servers`).",
    REPLICAS: "Number of copies of each shard on other servers (`--replicas`).",
    SPARES: "Number of processes that replace lost workers (`--spares`).",
    ON_WORKER_LOSS: "Policy for workers that die: fail, wait or shrink (`--on-worker-loss`).",
    ROLES: "Names and numbers of the ranks of each role (`--role`).",
    RESTARTS: "Number of processes that replace lost ranks of the roles (`--restarts`).",
    "BRAID_RANK_VARIABLES": "Further variables of ranks: `A=RANK B=WORLD_SIZE` sets A to the value "
    "of RANK and B to the value of WORLD_SIZE.",
    "BRAID_RUN_ID": "Name of the run, the same on all ranks.",
    "BRAID_STORE": "Address of the launcher's store; set if braid started the rank.",
    "BRAID_PLACE": "Rank and number of ranks, to detect a changed `RANK` or `WORLD_SIZE`.",
    "BRAID_SECRET_FD": "Descriptor from which a rank reads the job's secret.",
    "BRAID_EVENTS_FD": "Descriptor of the memory for a rank's events.",
    "BRAID_STACKS_FD": "Descriptor to which a rank dumps its stacks.",
    "BRAID_DEBUGGED": "`1`: a person debugs a rank, and deadlines do not expire (`--stdin`).",
    "BRAID_ELASTIC": "Role in a run with changing members: `founder` or `newcomer` (joined later).",
    "BRAID_PROCESS": "Number of a process that has the `RANK` of a lost process (`--restarts`).",
    FAULTS: "`1` (by `braid chaos`): ranks log digests of weights, and flip bits on SIGUSR2.",
    "BRAID_LAUNCHER_PID": "Process that started a rank, to find orphans of a run.",
    "BRAID_RAY_CALL": "Directory of the function that `braid.launch.ray.run` calls on ranks.",
    "BRAID_NODE": "Number of a pod, in manifests for Kubernetes.",
}
