"""Options of `braid run` that choose the hosts of a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from braid.runtime.option_types import Number, Text, shown_as

__all__ = ["HostOptions"]

Seconds = Annotated[float | None, shown_as("FLOAT")]


@dataclass(frozen=True, kw_only=True, slots=True)
class HostOptions:
    """Options for several hosts, as typed and unchecked.

    Attributes:
        on: Run on the nodes of an engine: ray, slurm or mpi.
        engine_options: Words for the engine of --on: "--partition=gpu --time=60" for slurm,
            "--strategy=spread --resources=CPU=2,GPU=1" for ray, "--bind-to none" for mpi.
        hosts: Run on these hosts, such as a:2,b:2 for two ranks each, with braid installed.
        hostfile: File that lists the hosts, in lines such as `a slots=2`.
        rsh: Command that runs a program on {host} (default: ssh without prompts).
        remote_python: Interpreter on the hosts (default: the path of this one).
        env: Names of environment variables to copy from this host to the ranks, with commas.
        nnodes: Number of hosts on which you start `braid run` yourself, with the same command.
        node_rank: Number of this host; 0 shows the output of all of them.
        rdzv: Meeting place of the hosts: tcp://HOST:PORT of node 0, file:///SHARED/PATH, or env://
            (default).
        rdzv_timeout: Longest time for hosts to answer (default: 60), or for nodes to join (default:
            300), in seconds.
        insecure_network: Trust every node that joins, without BRAID_SECRET_FILE.
        no_frame_mac: Send frames between ranks of several hosts without message authentication
            codes: faster, but anyone on the network path can change them.
        network_interface: Interfaces (eth0) or networks (10.0.0.0/8) that ranks of several hosts
            may use, with commas.
        listen: Address on which the launcher listens for other hosts, such as 0.0.0.0 (default: the
            address at which they reach it).
    """

    on: Annotated[str, shown_as("ENGINE")] = ""
    engine_options: Text = ""
    hosts: Annotated[str, shown_as("a:2,b:2", "-H")] = ""
    hostfile: Text = ""
    rsh: Text = ""
    remote_python: Text = ""
    env: Text = ""
    nnodes: Number = None
    node_rank: Number = None
    rdzv: Text = ""
    rdzv_timeout: Seconds = None
    insecure_network: bool = False
    no_frame_mac: bool = False
    network_interface: Text = ""
    listen: Text = ""
