"""What a launcher and its agents on other hosts tell each other.

    launcher                                 agent
                                     <----   AgentHello: who it is, and its braid
      Greeting (the job's secret)    ---->
                                     <----   HostAddresses: its addresses
      ProbeRequest these addresses            ---->
                                     <----   ProbeResult
      Prepare                        ---->
                                     <----   Prepared, or why this host cannot run the job
      Start, Send (signals), StackRequest     ---->
                                     <----   Started, Output, FinalRecord, ProcessChanged, OpenWaits, RankSnapshot
      Ping                           ---->
                                     <----   Pong
      Finish                         ---->
                                     <----   Finished
      Bye                            ---->

They are messages of the room `message`; bytes that may be many follow as buffers.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import msgspec

from braid.diagnose import MemoryKill, RankView
from braid.launch.cluster.reachability import Attempt, Endpoint
from braid.launch.process.hang_state import OpenWait
from braid.message import NUM_PRIORITIES, Schema
from braid.rendezvous import JobEnvironment

__all__ = [
    "AGENT_ROLE",
    "AGENT_SCHEMA",
    "AgentHello",
    "Bye",
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
    "Refused",
    "Send",
    "Signalled",
    "StackRequest",
    "Start",
    "Started",
    "ToAgent",
    "priority_of",
]

AGENT_ROLE = "agent"


class Greeting(msgspec.Struct, tag=True, frozen=True):
    """You may take part; the job's secret follows as a buffer, unless the agent has it.

    Attributes:
        run_id: Name of the run.
        node: Number of the agent's host.
        cwd: Where to run; empty to stay.
    """

    run_id: str
    node: int
    cwd: str = ""


class AgentHello(msgspec.Struct, tag=True, frozen=True):
    """An agent speaks first; fields may be added, but never change.

    Attributes:
        version: Its braid.
        hostname: What its host calls itself.
        pid: Its process.
        node_rank: Number of its host, as its user gave it; None when the launcher gives it.
        num_nodes: Number of hosts, as its user gave it; 0 likewise.
        slots: Number of ranks, as its user gave it; 0 likewise.
        command: What its user wants to run there; empty likewise.
    """

    version: str
    hostname: str
    pid: int
    node_rank: int | None = None
    num_nodes: int = 0
    slots: int = 0
    command: tuple[str, ...] = ()


class HostAddresses(msgspec.Struct, tag=True, frozen=True):
    """An agent says where it is.

    Attributes:
        machine: Equal for two agents that share network interfaces.
        endpoints: Where it waits to be found.
        problem: Why it cannot take part.
    """

    machine: str
    endpoints: tuple[Endpoint, ...]
    problem: str = ""


class ProbeRequest(msgspec.Struct, tag=True, frozen=True):
    """ProbeRequest to reach these, all at once."""

    targets: tuple[Endpoint, ...]
    limit_s: float


class ProbeResult(msgspec.Struct, tag=True, frozen=True):
    """What came of it."""

    attempts: tuple[Attempt, ...]


class Prepare(msgspec.Struct, tag=True, frozen=True):
    """Make ready for ranks.

    Attributes:
        command: What they will run.
        kind: What `command[0]` is, see `JobSpec`.
        num_ranks: How many of them here.
        threads: OMP_NUM_THREADS of each; None to choose.
        environ: Variables of the launcher's host that ranks shall have.
        interface: The one that has the address of this host, for torch's own backends.
        look_s: How often to tell what ranks wait for; 0 for never.
        master_addr: Address to keep a port on for torch.distributed; empty on hosts without rank 0.
        port: That port; 0 for any.
    """

    command: tuple[str, ...]
    kind: Literal["script", "module", "program"]
    num_ranks: int
    threads: int | None
    environ: dict[str, str]
    interface: str
    look_s: float
    master_addr: str = ""
    port: int = 0


class Prepared(msgspec.Struct, tag=True, frozen=True):
    """AgentHello, unless there is a problem."""

    port: int = 0
    threads: str = ""
    problem: str = ""


class Start(msgspec.Struct, tag=True, frozen=True):
    """Start a rank; the agent adds the descriptors."""

    environment: JobEnvironment


class Started(msgspec.Struct, tag=True, frozen=True):
    """The rank's process exists."""

    rank: int
    pid: int


class NotStarted(msgspec.Struct, tag=True, frozen=True):
    """The system could not start another process."""

    rank: int
    problem: str


class Send(msgspec.Struct, tag=True, frozen=True):
    """Send a signal to a rank."""

    rank: int
    signum: int


class StackRequest(msgspec.Struct, tag=True, frozen=True):
    """StackRequest all ranks for their stacks, and say what is seen of them after a moment.

    Attributes:
        handlers: Ranks that answer SIGUSR1, which would end the others.
    """

    handlers: tuple[int, ...]


class Output(msgspec.Struct, tag=True, frozen=True):
    """A rank wrote; the bytes follow."""

    rank: int
    stream: int


class FinalRecord(msgspec.Struct, tag=True, frozen=True):
    """What a rank's black box holds; pieces of its ring (by offset) follow, then its stacks."""

    rank: int
    offsets: tuple[int, ...]


class ProcessChanged(msgspec.Struct, tag=True, frozen=True):
    """A rank stopped, went on or ended, at `t_ns` of the agent's clock; see `processes.Change`."""

    rank: int
    kind: str
    status: int
    t_ns: int
    memory_kill: MemoryKill | None = None


class OpenWaits(msgspec.Struct, tag=True, frozen=True):
    """Collectives that ranks are inside of, on the agent's clock; sent when they change."""

    waits: tuple[OpenWait, ...]


class RankSnapshot(msgspec.Struct, tag=True, frozen=True):
    """The answer to `StackRequest`, on the agent's clock."""

    views: tuple[RankView, ...]


class Signalled(msgspec.Struct, tag=True, frozen=True):
    """Somebody sent the agent a signal that asks a program to end."""

    signum: int


class Ping(msgspec.Struct, tag=True, frozen=True):
    """Are you there?"""

    t_ns: int


class Pong(msgspec.Struct, tag=True, frozen=True):
    """Yes; the ping's time, and the agent's own."""

    t_ns: int
    now_ns: int


class Finish(msgspec.Struct, tag=True, frozen=True):
    """End what ranks have left behind."""


class Finished(msgspec.Struct, tag=True, frozen=True):
    """Nothing of the run is left on the host."""


class Bye(msgspec.Struct, tag=True, frozen=True):
    """Go.

    Attributes:
        exit_code: That of the run.
        text: How it ended, for a user at the agent's end.
    """

    exit_code: int
    text: str = ""


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The agent may not take part."""

    reason: str


ToAgent: TypeAlias = (
    Greeting | ProbeRequest | Prepare | Start | Send | StackRequest | Ping | Finish | Bye | Refused
)
FromAgent: TypeAlias = (
    AgentHello
    | HostAddresses
    | ProbeResult
    | Prepared
    | Started
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
# That a rank has ended is told after what it wrote last, in which it says why; and that nothing is
# left, after that.
IN_TURN = (Output, FinalRecord, ProcessChanged, Finished)
URGENT = NUM_PRIORITIES // 2


def priority_of(message: ToAgent | FromAgent) -> int:
    """Of two on their way, the greater leaves first: what ranks print waits for everything else."""
    return 0 if isinstance(message, IN_TURN) else URGENT
