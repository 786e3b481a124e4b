"""Reads the options of `braid run` that choose the hosts of a job."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import replace

from braid.cli.commands.host_options import HostOptions
from braid.errors import ConfigError
from braid.launch import Console, Hosts, JobSpec, Nodes, parse_hosts
from braid.launch.cluster.listed_slots import read_hostfile
from braid.launch.cluster.remote_shell import DEFAULT_RSH
from braid.launch.engines.options import EngineOptions
from braid.runtime.rendezvous.meeting import MeetingPoint
from braid.runtime.variables import NO_FRAME_MAC

__all__ = ["choose_where", "run_on"]

HOSTS_LIMIT_S = 60.0  # a cold start of the interpreter from a shared file system
NODES_LIMIT_S = 300.0  # time for a person or a batch system to start other nodes
NO_FRAME_MAC_WARNING = (
    "--no-frame-mac: anyone on the way between the hosts of this job can change what its ranks "
    "send each other. Use it only on a private network"
)


def choose_where(
    options: HostOptions, num_ranks: int | None, environ: Mapping[str, str] | None = None
) -> tuple[Hosts | Nodes | EngineOptions | None, tuple[str, ...]]:
    """Return the hosts to run on (None for this host), and words that repeat the options.

    Args:
        options: Options as typed.
        num_ranks: Value of -n.
        environ: Environment variables; `os.environ` if None.

    Raises:
        ConfigError: Options exclude each other, or an option needs another one.
    """
    if options.no_frame_mac:
        where, repeated = choose_where(replace(options, no_frame_mac=False), num_ranks, environ)
        if where is None:
            msg = (
                "--no-frame-mac has no effect on one host, where frames have no authentication "
                "codes: leave it out"
            )
            raise ConfigError(msg)
        return where, (*repeated, "--no-frame-mac")
    o = options
    reached = {"-H": o.hosts, "--hostfile": o.hostfile}
    how = {"--rsh": o.rsh, "--remote-python": o.remote_python, "--env": o.env}
    ways = {"--network-interface": o.network_interface, "--listen": o.listen}
    by_hand = {
        "--nnodes": o.nnodes is not None,
        "--node-rank": o.node_rank is not None,
        "--rdzv": o.rdzv,
        "--insecure-network": o.insecure_network,
    }
    if o.on or o.engine_options:
        started = [name for name, value in by_hand.items() if value]
        return _engine(o, num_ranks, [*started, *(["--rsh"] if o.rsh else [])])
    _refuse_contradictions(reached, how, ways, [name for name, value in by_hand.items() if value])
    if any(reached.values()):
        again = {"-n": str(num_ranks or ""), **reached, **how, **ways}
        repeated = tuple(part for name, value in again.items() if value for part in (name, value))
        return _hosts(o, num_ranks), repeated
    if any(by_hand.values()):
        return _nodes(
            o, 1 if num_ranks is None else num_ranks, os.environ if environ is None else environ
        )
    return None, ()


def run_on(where: Hosts | Nodes | EngineOptions, job: JobSpec, console: Console) -> tuple[int, str]:
    """Run a job on the hosts of `choose_where`; return the exit code and the error block."""
    from braid.launch.cluster.several_hosts import HostsSupervisor
    from braid.launch.engines.client import EngineSupervisor

    if job.stdin_rank is not None:
        msg = (
            f"--stdin {job.stdin_rank} needs a job on this host: the standard input of ranks on "
            "several hosts is empty; leave it out, or run with -n alone"
        )
        raise ConfigError(msg)
    if job.environ.get(NO_FRAME_MAC) == "1":
        console.notice(NO_FRAME_MAC_WARNING)
    if isinstance(where, EngineOptions):
        outcome = EngineSupervisor(console).run_on(job, where)
        return outcome.exit_code, str(outcome)
    supervisor = HostsSupervisor(console)
    if isinstance(where, Nodes):
        return supervisor.meet(job, where)
    outcome = supervisor.run(job, where)
    return outcome.exit_code, str(outcome)


def _refuse_contradictions(
    reached: Mapping[str, str], how: Mapping[str, str], ways: Mapping[str, str], by_hand: list[str]
) -> None:
    typed = [f"{name} {value}" for name, value in {**reached, **how}.items() if value]
    is_reached = any(reached.values())
    problems = []
    if is_reached and by_hand:
        problems.append(
            f"{typed[0]} starts braid on the hosts, {by_hand[0]} means that you start it there"
        )
    if all(reached.values()):
        problems.append("-H and --hostfile both name the hosts")
    if any(how.values()) and not is_reached:
        problems.append(f"{typed[0]} needs hosts: name them with -H or --hostfile")
    if any(ways.values()) and not is_reached and not by_hand:
        named = " and ".join(name for name, value in ways.items() if value)
        problems.append(f"{named} needs several hosts")
    if problems:
        msg = f"some options exclude each other, leave one of them out: {'; '.join(problems)}"
        raise ConfigError(msg)


def _hosts(options: HostOptions, num_ranks: int | None) -> Hosts:
    limit_s = options.rdzv_timeout
    return Hosts(
        hosts=parse_hosts(options.hosts) if options.hosts else read_hostfile(options.hostfile),
        hostfile=options.hostfile,
        num_ranks=num_ranks,
        rsh=options.rsh or DEFAULT_RSH,
        remote_python=options.remote_python,
        interfaces=_listed(options.network_interface),
        listen=options.listen,
        environ=_listed(options.env),
        start_limit_s=HOSTS_LIMIT_S if limit_s is None else limit_s,
    )


def _nodes(
    options: HostOptions, slots: int, environ: Mapping[str, str]
) -> tuple[Nodes, tuple[str, ...]]:
    rdzv, limit_s = options.rdzv or "env://", options.rdzv_timeout
    point = MeetingPoint.parse(
        rdzv, num_nodes=options.nnodes, node_rank=options.node_rank, environ=environ
    )
    trusting = environ.get("BRAID_INSECURE_NETWORK") == "1"
    nodes = Nodes(
        meeting=point,
        slots=slots,
        secret_file=environ.get("BRAID_SECRET_FILE", ""),
        insecure_network=options.insecure_network or trusting,
        interfaces=_listed(options.network_interface),
        listen=options.listen,
        join_limit_s=NODES_LIMIT_S if limit_s is None else limit_s,
    )
    again = ["--nnodes", str(point.num_nodes)]
    again += [] if point.node_rank is None else ["--node-rank", str(point.node_rank)]
    again += ["--rdzv", rdzv, "-n", str(slots)]
    again += ["--insecure-network"] if options.insecure_network else []
    return nodes, tuple(again)


def _engine(
    options: HostOptions, num_ranks: int | None, refused: list[str]
) -> tuple[EngineOptions, tuple[str, ...]]:
    """Return the options of `--on`, and words that repeat them."""
    o = options
    if not o.on:
        msg = f"--engine-options {o.engine_options!r} needs an engine: add --on ray, slurm or mpi"
        raise ConfigError(msg)
    if refused:
        msg = f"--on {o.on} starts braid on all nodes: leave {', '.join(refused)} out"
        raise ConfigError(msg)
    if (o.hosts or o.hostfile) and o.on != "mpi":
        msg = f"--on {o.on} chooses the nodes itself: leave -H and --hostfile out"
        raise ConfigError(msg)
    hosts = read_hostfile(o.hostfile) if o.hostfile else ()
    hosts = parse_hosts(o.hosts) if o.hosts else hosts
    try:
        words = tuple(shlex.split(o.engine_options))
    except ValueError as exc:
        msg = f"--engine-options cannot be split into words: {exc}, got {o.engine_options!r}"
        raise ConfigError(msg) from exc
    if hosts:
        words = (f"--hosts={','.join(map(str, hosts))}", *words)
    chosen = EngineOptions(
        engine=o.on,
        num_ranks=num_ranks,
        words=words,
        interfaces=_listed(o.network_interface),
        listen=o.listen,
        environ=_listed(o.env),
        start_limit_s=HOSTS_LIMIT_S if o.rdzv_timeout is None else o.rdzv_timeout,
    )
    again = {
        "--on": o.on,
        "-n": str(num_ranks or ""),
        "--engine-options": o.engine_options,
        "-H": o.hosts,
        "--hostfile": o.hostfile,
    }
    return chosen, tuple(part for name, value in again.items() if value for part in (name, value))


def _listed(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))
