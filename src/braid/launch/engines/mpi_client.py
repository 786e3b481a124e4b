"""The client of MPI: a process of mpirun for each node, which starts the node's agent.

    braid run ── mpi_client ──┬── mpirun -np 1 --host a ──> agent of a ──> ranks 0, 1
                              └── mpirun -np 1 --host b ──> agent of b ──> ranks 2, 3

mpirun forwards its stdin to rank 0 alone, so one mpirun is started for each node. Works with Open
MPI and MPICH, and with any way in which these reach hosts: ssh, or a batch system.

Words: --hosts=a:2,b:2 (from -H or --hostfile), and options of mpirun, such as --mca NAME VALUE.

Source: the manual pages mpirun(1) of Open MPI 4.1 and mpiexec(1) of MPICH 4.0.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence

from braid.errors import ConfigError
from braid.launch.cluster.rank_assignment import Host, assign, parse_hosts
from braid.launch.engines.client_words import ClientWords, FromClient, run_client
from braid.launch.engines.invitation import Invitation
from braid.launch.engines.starting import AGENT, Command, run_commands

__all__ = ["command_for", "main", "shares"]

PROGRAMS = ("mpirun", "mpiexec")
OPEN_MPI, MPICH = "Open MPI", "MPICH"
LIMIT_S = 60.0
LOOK = "import os, socket; print('@', socket.gethostname(), os.cpu_count())"
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def find_mpirun() -> tuple[str, str]:
    """Return the path of mpirun, and its implementation: Open MPI or MPICH.

    Raises:
        ConfigError: No mpirun is on PATH, or it belongs to another implementation.
    """
    program = next((path for path in map(shutil.which, PROGRAMS) if path), None)
    if program is None:
        msg = (
            f"MPI is not installed here: neither {' nor '.join(PROGRAMS)} is on PATH. Install "
            "Open MPI or MPICH"
        )
        raise ConfigError(msg)
    answer = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    text = answer.stdout + answer.stderr
    if "Open MPI" in text or "Open RTE" in text or "PRRTE" in text:
        return program, OPEN_MPI
    if "HYDRA" in text or "Intel(R) MPI" in text:
        return program, MPICH
    first = (text.strip().splitlines() or ["nothing"])[0]
    msg = (
        f"{program} is neither Open MPI nor MPICH, its --version prints {first!r}: put one of "
        "the two on PATH"
    )
    raise ConfigError(msg)


def command_for(
    program: str, whose: str, words: Sequence[str], host: str, what: Sequence[str]
) -> list[str]:
    """Return the mpirun command that runs one process on a host.

    Args:
        program: Path of mpirun.
        whose: Implementation of mpirun: Open MPI or MPICH.
        words: Options of mpirun.
        host: Name of the host; any host when empty.
        what: Command to run.
    """
    if whose == MPICH:
        return [program, *(("-hosts", host) if host else ()), "-n", "1", *words, *what]
    passed = ("-x", "PYTHONPATH") if "PYTHONPATH" in os.environ else ()
    where = ("--host", host) if host else ()
    return [program, "-np", "1", *where, "--bind-to", "none", *passed, *words, *what]


def shares(nodes: Sequence[tuple[str, int]], num_ranks: int) -> tuple[Host, ...]:
    """Return the nodes that a job needs, with the number of ranks of each.

    Each core of a node gets one rank; if there are more ranks than cores, they are spread evenly.

    >>> [str(host) for host in shares([("a", 4), ("b", 4)], 6)]
    ['a:4', 'b:2']
    >>> [str(host) for host in shares([("a", 2), ("b", 2)], 6)]
    ['a:3', 'b:3']
    """
    cores = sum(count for _, count in nodes)
    wanted = num_ranks or cores
    most = [count for _, count in nodes]
    if wanted > cores:
        least, more = divmod(wanted, len(nodes))
        most = [least + (number < more) for number in range(len(nodes))]
    hosts = [Host(name, count) for (name, _), count in zip(nodes, most, strict=True)]
    return _used(hosts, wanted)


def _used(hosts: Sequence[Host], num_ranks: int | None) -> tuple[Host, ...]:
    """Return the hosts that get ranks, with their number."""
    sizes = {place.node: place.local_world_size for place in assign(hosts, num_ranks)}
    return tuple(Host(hosts[node].name, size) for node, size in sizes.items())


def main(words: Sequence[str]) -> int:
    """Find nodes, start agents, and wait for their end; return the exit code.

    `words` are the arguments of this program.
    """
    options = ClientWords.parse(words, {"hosts"}, others=True)
    program, whose = find_mpirun()
    os.environ.update(AS_ROOT if os.geteuid() == 0 else {})
    if "hosts" in options:
        hosts = _used(parse_hosts(options["hosts"]), options.num_ranks or None)
    else:
        hosts = shares(_look(program, whose, options.rest), options.num_ranks)
    FromClient(hosts=tuple((host.name, host.slots) for host in hosts)).send()
    line = sys.stdin.buffer.readline()
    if not line:  # the launcher has given up
        return 0
    invitation = Invitation.from_line(line)
    commands = []
    for node, host in enumerate(hosts):
        name = "" if len(hosts) == 1 and host.name == socket.gethostname() else host.name
        argv = command_for(program, whose, options.rest, name, AGENT)
        commands.append(Command(argv, invitation.for_node(node).to_line(), node=node))
    return run_commands(commands, os.environ)


def _look(program: str, whose: str, words: Sequence[str]) -> list[tuple[str, int]]:
    """Return mpirun's default hosts, such as the hosts of a batch job, and their cores.

    Raises:
        ConfigError: mpirun fails.
    """
    placing = ("-ppn", "1") if whose == MPICH else ("--map-by", "ppr:1:node")
    argv = [program, *placing, *words, sys.executable, "-c", LOOK]
    try:
        answer = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired as exc:
        msg = f"`{' '.join(argv[:3])}` does not answer within {LIMIT_S:g} s"
        raise ConfigError(msg) from exc
    nodes = [line.split()[1:] for line in answer.stdout.splitlines() if line.startswith("@ ")]
    if answer.returncode or not nodes:
        lines = [line.strip() for line in (answer.stderr or answer.stdout).splitlines()]
        why = next((line for line in lines if line.strip("- ")), "it gives no reason")
        msg = f"mpirun cannot start processes (exit code {answer.returncode}): {why}"
        raise ConfigError(msg)
    return [(name, int(cores)) for name, cores in nodes]


if __name__ == "__main__":
    sys.exit(run_client("mpi", main))
