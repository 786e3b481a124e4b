"""Messages between a launcher and its agents on other hosts.

    launcher                          agent
                              <----   AgentHello: its identity and its version of braid
      Greeting: the secret    ---->
                              <----   HostAddresses: its addresses
      ProbeRequest            ---->
                              <----   ProbeResult
      Prepare                 ---->
                              <----   Prepared, or the reason why the host cannot run the job
      Start, SignalRequest,
      StackRequest            ---->
                              <----   RankStarted, NotStarted, Output, FinalRecord, ProcessChanged,
                                      OpenWaits, RankSnapshot, Signalled
      Ping                    ---->
                              <----   Pong
      Finish                  ---->
                              <----   Finished
      AgentBye                ---->

`braid.runtime.message` carries them; large data follow as buffers.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import msgspec

from braid.launch.cluster.reachability import Attempt, Endpoint
from braid.launch.process.hang_state import OpenWait
from braid.runtime.diagnose.hang_view import RankView
from braid.runtime.diagnose.verdict import MemoryKill
from braid.runtime.message import NUM_PRIORITIES, Schema
from braid.runtime.rendezvous import JobEnvironment

__all__ = [
    "AGENT_ROLE",
    "AGENT_SCHEMA",
    "AgentBye",
    "AgentHello",
    "AgentRefused",
    "FinalRecord",
    "Finish",
    "Finished",
    "FromAgent",
    "Greeting",
    "HostAddresses",
    "NotStarted",
    "OpenWaits",
    "Output",
    "Ping",
    "Pong",
    "Prepare",
    "Prepared",
    "ProbeRequest",
    "ProbeResult",
    "ProcessChanged",
    "RankSnapshot",
    "RankStarted",
    "SignalRequest",
    "Signalled",
    "StackRequest",
    "Start",
    "ToAgent",
    "priority_of",
]

AGENT_ROLE = "agent"


class Greeting(msgspec.Struct, tag=True, frozen=True):
    """Message of the launcher that accepts an agent.

    The job's secret follows as a buffer, unless the agent already has it.

    Attributes:
        run_id: Name of the run.
        node: Number of the agent's host.
        cwd: Working directory for ranks; empty for the agent's own.
    """

    run_id: str
    node: int
    cwd: str = ""


class AgentHello(msgspec.Struct, tag=True, frozen=True):
    """First message of an agent to the launcher; its fields never change, but may be added to.

    The last four fields repeat the user's options on the agent's host. They are empty if the
    launcher has started the agent.

    Attributes:
        version: Version of the agent's braid.
        hostname: Host name of the agent.
        pid: Process id of the agent.
        node_rank: Number of the agent's host, or None.
        num_nodes: Number of hosts, or 0.
        slots: Number of ranks on the agent's host, or 0.
        command: Command of the ranks.
    """

    version: str
    hostname: str
    pid: int
    node_rank: int | None = None
    num_nodes: int = 0
    slots: int = 0
    command: tuple[str, ...] = ()


class HostAddresses(msgspec.Struct, tag=True, frozen=True):
    """Message of an agent to the launcher with the addresses of the agent's host.

    Attributes:
        machine: Identifier of the machine; equal for agents that share network interfaces.
        endpoints: Endpoints on which the agent listens for probes.
        problem: Reason why the host cannot take part; empty if it can.
    """

    machine: str
    endpoints: tuple[Endpoint, ...]
    problem: str = ""


class ProbeRequest(msgspec.Struct, tag=True, frozen=True):
    """Request of the launcher to an agent to try to reach endpoints, all at the same time.

    Attributes:
        targets: Endpoints to reach.
        limit_s: Time limit in seconds.
    """

    targets: tuple[Endpoint, ...]
    limit_s: float


class ProbeResult(msgspec.Struct, tag=True, frozen=True):
    """Answer of an agent to `ProbeRequest`: the results of all attempts."""

    attempts: tuple[Attempt, ...]


class Prepare(msgspec.Struct, tag=True, frozen=True):
    """Request of the launcher to an agent to prepare for ranks.

    Attributes:
        command: Command of the ranks.
        kind: Kind of `command[0]`; see `JobSpec`.
        num_ranks: Number of ranks on the host.
        threads: OMP_NUM_THREADS of each rank; None lets the agent choose.
        environ: Environment variables from the launcher's host.
        interface: Network interface of the host's address, for torch's own backends.
        look_s: Seconds between `OpenWaits` messages; 0 for none.
        save_s: Seconds that ranks have to save and end when the launcher is lost; 0 for none.
        master_addr: Address on which to reserve a port for torch.distributed; empty on hosts
            without rank 0.
        port: Number of the port to reserve; 0 for any.
        may_grow: Whether hosts may join later; then the agent answers their probes.
    """

    command: tuple[str, ...]
    kind: Literal["script", "module", "program"]
    num_ranks: int
    threads: int | None
    environ: dict[str, str]
    interface: str
    look_s: float
    save_s: float
    master_addr: str = ""
    port: int = 0
    may_grow: bool = False


class Prepared(msgspec.Struct, tag=True, frozen=True):
    """Answer of an agent to `Prepare`.

    Attributes:
        port: Number of the reserved port; 0 if there is none.
        threads: OMP_NUM_THREADS of the ranks, with the reason for the choice.
        problem: Reason why the host cannot run the job; empty if it can.
    """

    port: int = 0
    threads: str = ""
    problem: str = ""


class Start(msgspec.Struct, tag=True, frozen=True):
    """Request of the launcher to start a rank.

    The agent adds descriptors of its host to the rank's settings.

    Attributes:
        environment: Settings of the rank.
        num_threads: OMP_NUM_THREADS of the rank; empty for the agent's choice.
    """

    environment: JobEnvironment
    num_threads: str = ""


class RankStarted(msgspec.Struct, tag=True, frozen=True):
    """Notice of an agent that a rank's process exists."""

    rank: int
    pid: int


class NotStarted(msgspec.Struct, tag=True, frozen=True):
    """Notice of an agent that its host's system could not start the process of a rank."""

    rank: int
    problem: str


class SignalRequest(msgspec.Struct, tag=True, frozen=True):
    """Request of the launcher to an agent to send a signal to a rank."""

    rank: int
    signum: int


class StackRequest(msgspec.Struct, tag=True, frozen=True):
    """Request of the launcher for a `RankSnapshot` of each rank of the agent, with stacks.

    Attributes:
        handlers: Ranks that handle SIGUSR1; the signal would end any other rank.
    """

    handlers: tuple[int, ...]


class Output(msgspec.Struct, tag=True, frozen=True):
    """Output of a rank to `stream` (1 or 2); the bytes follow as a buffer."""

    rank: int
    stream: int


class FinalRecord(msgspec.Struct, tag=True, frozen=True):
    """Recorded events and stacks of a rank; buffers hold pieces of its event ring, then stacks."""

    rank: int
    offsets: tuple[int, ...]


class ProcessChanged(msgspec.Struct, tag=True, frozen=True):
    """State change of a rank's process at `t_ns` on the agent's clock; see `processes.Change`."""

    rank: int
    kind: str
    status: int
    t_ns: int
    memory_kill: MemoryKill | None = None


class OpenWaits(msgspec.Struct, tag=True, frozen=True):
    """Open collectives of the host's ranks, on the agent's clock; sent when they change."""

    waits: tuple[OpenWait, ...]


class RankSnapshot(msgspec.Struct, tag=True, frozen=True):
    """Answer to `StackRequest`: views of the agent's ranks, with times on the agent's clock."""

    views: tuple[RankView, ...]


class Signalled(msgspec.Struct, tag=True, frozen=True):
    """Notice of an agent that it has received a signal that asks a program to end."""

    signum: int


class Ping(msgspec.Struct, tag=True, frozen=True):
    """Request of the launcher for a `Pong`, to compare clocks; `t_ns` is the launcher's time."""

    t_ns: int


class Pong(msgspec.Struct, tag=True, frozen=True):
    """Answer to `Ping`: the time of the ping, and the agent's own time."""

    t_ns: int
    now_ns: int


class Finish(msgspec.Struct, tag=True, frozen=True):
    """Request of the launcher to an agent to end all processes of the run on its host."""


class Finished(msgspec.Struct, tag=True, frozen=True):
    """Answer to `Finish`: no process of the run is left on the host."""


class AgentBye(msgspec.Struct, tag=True, frozen=True):
    """Request of the launcher to an agent to end, with the outcome of the run.

    Attributes:
        exit_code: Exit code of the run.
        text: Error block for a user at the agent's host; empty after success.
    """

    exit_code: int
    text: str = ""


class AgentRefused(msgspec.Struct, tag=True, frozen=True):
    """Answer of the launcher to an agent that may not join the run."""

    reason: str


ToAgent: TypeAlias = (
    Greeting
    | ProbeRequest
    | Prepare
    | Start
    | SignalRequest
    | StackRequest
    | Ping
    | Finish
    | AgentBye
    | AgentRefused
)
FromAgent: TypeAlias = (
    AgentHello
    | HostAddresses
    | ProbeResult
    | Prepared
    | RankStarted
    | NotStarted
    | Output
    | FinalRecord
    | ProcessChanged
    | OpenWaits
    | RankSnapshot
    | Signalled
    | Pong
    | Finished
)
AGENT_SCHEMA = Schema(*get_args(ToAgent), *get_args(FromAgent))
# The news of a rank's end follows its last output, which explains the end; `Finished` comes last.
IN_TURN = (Output, FinalRecord, ProcessChanged, Finished)
URGENT = NUM_PRIORITIES // 2


def priority_of(message: ToAgent | FromAgent) -> int:
    """Return the priority of a message in the send queue; it is lowest for output of ranks."""
    return 0 if isinstance(message, IN_TURN) else URGENT
