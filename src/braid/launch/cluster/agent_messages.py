"""What a launcher and its agents on other hosts tell each other.

    launcher                                 agent
                                     <----   Ready: who it is, and its braid
      Greeting (the job's secret)    ---->
                                     <----   Here: its addresses
      Try these addresses            ---->
                                     <----   Tried
      Prepare                        ---->
                                     <----   Prepared, or why this host cannot run the job
      Start, Send (signals), Ask     ---->
                                     <----   Started, Output, Remains, Changed, Waits, Seen
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
    "Ask",
    "Bye",
    "Changed",
    "Finish",
    "Finished",
    "FromAgent",
    "Greeting",
    "Here",
    "NotStarted",
    "Output",
    "Ping",
    "Pong",
    "Prepare",
    "Prepared",
    "Ready",
    "Refused",
    "Remains",
    "Seen",
    "Send",
    "Signalled",
    "Start",
    "Started",
    "ToAgent",
    "Tried",
    "Try",
    "Waits",
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


class Ready(msgspec.Struct, tag=True, frozen=True):
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


class Here(msgspec.Struct, tag=True, frozen=True):
    """An agent says where it is.

    Attributes:
        machine: Equal for two agents that share network interfaces.
        endpoints: Where it waits to be found.
        problem: Why it cannot take part.
    """

    machine: str
    endpoints: tuple[Endpoint, ...]
    problem: str = ""


class Try(msgspec.Struct, tag=True, frozen=True):
    """Try to reach these, all at once."""

    targets: tuple[Endpoint, ...]
    limit_s: float


class Tried(msgspec.Struct, tag=True, frozen=True):
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
    """Ready, unless there is a problem."""

    port: int = 0
    threads: str = ""
    problem: str = ""


class Start(msgspec.Struct, tag=True, frozen=True):
    """Start a rank; the agent adds the descriptors."""

    told: JobEnvironment


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


class Ask(msgspec.Struct, tag=True, frozen=True):
    """Ask all ranks for their stacks, and say what is seen of them after a moment.

    Attributes:
        handlers: Ranks that answer SIGUSR1, which would end the others.
    """

    handlers: tuple[int, ...]


class Output(msgspec.Struct, tag=True, frozen=True):
    """A rank wrote; the bytes follow."""

    rank: int
    stream: int


class Remains(msgspec.Struct, tag=True, frozen=True):
    """What a rank's black box holds; pieces of its ring (by offset) follow, then its stacks."""

    rank: int
    offsets: tuple[int, ...]


class Changed(msgspec.Struct, tag=True, frozen=True):
    """A rank stopped, went on or ended, at `t_ns` of the agent's clock; see `processes.Change`."""

    rank: int
    what: str
    status: int
    t_ns: int
    memory_kill: MemoryKill | None = None


class Waits(msgspec.Struct, tag=True, frozen=True):
    """Collectives that ranks are inside of, on the agent's clock; sent when they change."""

    waits: tuple[OpenWait, ...]


class Seen(msgspec.Struct, tag=True, frozen=True):
    """The answer to `Ask`, on the agent's clock."""

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


ToAgent: TypeAlias = Greeting | Try | Prepare | Start | Send | Ask | Ping | Finish | Bye | Refused
FromAgent: TypeAlias = (
    Ready
    | Here
    | Tried
    | Prepared
    | Started
    | NotStarted
    | Output
    | Remains
    | Changed
    | Waits
    | Seen
    | Signalled
    | Pong
    | Finished
)
AGENT_SCHEMA = Schema(*get_args(ToAgent), *get_args(FromAgent))
# That a rank has ended is told after what it wrote last, in which it says why; and that nothing is left, after that.
IN_TURN = (Output, Remains, Changed, Finished)
URGENT = NUM_PRIORITIES // 2


def priority_of(message: ToAgent | FromAgent) -> int:
    """Of two on their way, the greater leaves first: what ranks print waits for everything else."""
    return 0 if isinstance(message, IN_TURN) else URGENT
