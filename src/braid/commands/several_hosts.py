"""The options of `braid run` that say on which hosts a job runs, read together: most of them exclude each other."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from braid.errors import ConfigError
from braid.launch import Host, Hosts, Nodes, parse_hostfile, parse_hosts
from braid.launch.placement import DEFAULT_RSH
from braid.rendezvous.meeting import MeetingPoint

__all__ = ["choose_where"]


def choose_where(
    *,
    num_ranks: int | None,
    hosts: str,
    hostfile: str,
    rsh: str,
    remote_python: str,
    env: str,
    nnodes: int | None,
    node_rank: int | None,
    rdzv: str,
    rdzv_timeout: float,
    insecure_network: bool,
    network_interface: str,
    environ: Mapping[str, str] | None = None,
) -> tuple[Hosts | Nodes | None, tuple[str, ...]]:
    """On which hosts to run, None for this one; and the options that say so again, for the line that resumes.

    Args:
        num_ranks: Value of -n.
        hosts: Value of -H.
        hostfile: Value of --hostfile.
        rsh: Value of --rsh.
        remote_python: Value of --remote-python.
        env: Value of --env.
        nnodes: Value of --nnodes.
        node_rank: Value of --node-rank.
        rdzv: Value of --rdzv.
        rdzv_timeout: Value of --rdzv-timeout, in seconds.
        insecure_network: Value of --insecure-network.
        network_interface: Value of --network-interface.
        environ: The environment; that of this process when None.

    Raises:
        ConfigError: Options that exclude or need each other.
    """
    reached = {"-H": hosts, "--hostfile": hostfile}
    how = {"--rsh": rsh, "--remote-python": remote_python, "--env": env}
    by_hand = {
        "--nnodes": nnodes is not None,
        "--node-rank": node_rank is not None,
        "--rdzv": rdzv,
        "--insecure-network": insecure_network,
    }
    told = [f"{name} {value}" for name, value in {**reached, **how}.items() if value]
    own = [name for name, value in by_hand.items() if value]
    problems = []
    if any(reached.values()) and own:
        problems.append(
            f"{told[0]} lets braid reach the hosts, {own[0]} means that you start it there"
        )
    if hosts and hostfile:
        problems.append("-H and --hostfile both name the hosts")
    if any(how.values()) and not any(reached.values()):
        problems.append(f"{told[0]} needs hosts: name them with -H or --hostfile")
    if network_interface and not any(reached.values()) and not own:
        problems.append("--network-interface needs several hosts")
    if problems:
        msg = f"options exclude each other: {'; '.join(problems)}"
        raise ConfigError(msg)
    networks = tuple(filter(None, network_interface.split(",")))
    if any(reached.values()):
        where = Hosts(
            hosts=parse_hosts(hosts) if hosts else _read_hostfile(hostfile),
            num_ranks=num_ranks,
            rsh=rsh or DEFAULT_RSH,
            remote_python=remote_python,
            interfaces=networks,
            environ=tuple(filter(None, env.split(","))),
        )
        again = {
            "-n": str(num_ranks or ""),
            **reached,
            **how,
            "--network-interface": network_interface,
        }
        return where, tuple(
            word for name, value in again.items() if value for word in (name, value)
        )
    if own:
        return _nodes(
            num_ranks, nnodes, node_rank, rdzv, rdzv_timeout,
            insecure=insecure_network, networks=networks, environ=os.environ if environ is None else environ,
        )  # fmt: skip
    return None, ()


def _nodes(
    num_ranks: int | None,
    nnodes: int | None,
    node_rank: int | None,
    rdzv: str,
    rdzv_timeout: float,
    *,
    insecure: bool,
    networks: tuple[str, ...],
    environ: Mapping[str, str],
) -> tuple[Nodes, tuple[str, ...]]:
    rdzv = rdzv or "env://"
    point = MeetingPoint.parse(rdzv, num_nodes=nnodes, node_rank=node_rank, environ=environ)
    slots = 1 if num_ranks is None else num_ranks
    nodes = Nodes(
        meeting=point,
        slots=slots,
        secret_file=environ.get("BRAID_SECRET_FILE", ""),
        insecure_network=insecure or environ.get("BRAID_INSECURE_NETWORK") == "1",
        interfaces=networks,
        join_limit_s=rdzv_timeout,
    )
    again = ["--nnodes", str(point.num_nodes), "--node-rank", str(point.node_rank or 0)]
    again += ["--rdzv", rdzv, "-n", str(slots), *(["--insecure-network"] if insecure else [])]
    return nodes, tuple(again)


def _read_hostfile(name: str) -> tuple[Host, ...]:
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "it is no text"
        msg = f"expected a file that names hosts, found that {name} cannot be read: {why}"
        raise ConfigError(msg) from exc
    return parse_hostfile(text, name)
