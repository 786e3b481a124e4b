"""Pictures of the pages on launchers.

They are drawn from the functions that place ranks on nodes, the state machines of the rendezvous and of the supervisor, and
the times at which real engines sent signals.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import NamedTuple

from braid._version import __version__
from braid.launch.cluster.agent_messages import AgentHello, HostAddresses, Prepared
from braid.launch.cluster.host_rendezvous_state import (
    Greet,
    HostRendezvousState,
    Instruction,
    PrepareHost,
    ProbeTargets,
)
from braid.launch.cluster.rank_assignment import Host, assign, parse_hosts
from braid.launch.cluster.reachability import LAUNCHER, Attempt, Endpoint
from braid.launch.engines.mpi_client import shares
from braid.launch.engines.ray_nodes import RayNode, place
from braid.launch.engines.slurm_client import allocated
from braid.launch.process.job import JobSpec
from braid.launch.supervise.supervisor_state import (
    Exited,
    RunPhase,
    SendSignal,
    Started,
    SupervisorState,
    Tick,
    TimeLimits,
)
from braid.programs.schedule.bars import COLOURS, Bar, draw
from braid.runtime.rendezvous.survivors import WAIT_S
from handbook_calls import Row, _ladder
from handbook_servers import GREY, _svg, _text

# -- ranks on nodes

NUM_RANKS = 6
CORES = {"a": 4, "b": 4, "c": 2}
CELL, GAP = 26, 24  # pixels: a rank, between nodes


def ranks_on_nodes() -> str:
    """Where six ranks go on nodes with 4, 4 and 2 processors, by the function of each way to launch."""
    nodes = [RayNode(name, name, {"CPU": float(count)}) for name, count in CORES.items()]
    slurm = {"SLURM_JOB_NODELIST": "a,b,c", "SLURM_TASKS_PER_NODE": "4(x2),2"}

    def by_ray(strategy: str) -> list[Host]:
        return [
            Host(node.name, count)
            for node, count in place(nodes, NUM_RANKS, {"CPU": 1.0}, strategy)
        ]

    ways: dict[str, Sequence[Host]] = {
        "braid run -n 6 -H a:4,b:4,c:2": parse_hosts("a:4,b:4,c:2"),
        "braid run -n 6 -H a:2,b:2,c:2": parse_hosts("a:2,b:2,c:2"),
        "--on slurm -n 6": allocated(slurm, NUM_RANKS),
        "--on mpi -n 6": shares(list(CORES.items()), NUM_RANKS),
        "--on mpi -n 15, more than processors": shares(list(CORES.items()), 15),
        "--on ray -n 6": by_ray("pack"),
        "--on ray -n 6, --strategy=spread": by_ray("spread"),
    }
    left, top, high = 250, 26, 34
    starts, x = {}, left
    for name, count in CORES.items():
        starts[name] = x
        x += max(count, 5) * CELL + GAP
    parts = [
        _text(starts[name], 16, f"{name}: {count} processors") for name, count in CORES.items()
    ]
    for row, (way, hosts) in enumerate(ways.items()):
        y = top + row * high
        parts.append(_text(4, y + 17, way))
        wanted = 15 if "15" in way else NUM_RANKS
        for name, count in CORES.items():
            parts += [_cell(starts[name] + slot * CELL, y, GREY, "") for slot in range(count)]
        for each in assign(hosts, wanted):
            name = hosts[each.node].name
            parts.append(
                _cell(starts[name] + each.local_rank * CELL, y, COLOURS[each.node], str(each.rank))
            )
    return _svg(x, top + len(ways) * high + 4, parts)


def _cell(x: float, y: float, colour: str, text: str) -> str:
    box = (
        f'<rect x="{x}" y="{y}" width="{CELL - 2}" height="{CELL - 2}" fill="{colour}"/>'
        if text
        else f'<rect x="{x + 0.5}" y="{y + 0.5}" width="{CELL - 3}" height="{CELL - 3}" fill="none" stroke="{colour}"/>'
    )
    return box + (_text(x + CELL / 2 - 1, y + 17, text, "middle", "white") if text else "")


# -- hosts that are gathered

ANSWERS = {Greet: "HostAddresses", ProbeTargets: "ProbeResult", PrepareHost: "Prepared"}
ASKS = {Greet: "Greeting, the secret", ProbeTargets: "ProbeRequest", PrepareHost: "Prepare"}
PHASES = {
    "GATHERING": COLOURS[0],
    "PROBING": COLOURS[2],
    "PREPARING": COLOURS[5],
}


def hosts_gather() -> str:
    """Messages between the launcher and two agents, with the phases of the launcher's state machine."""
    state = HostRendezvousState(
        {0: "a", 1: "b"},
        2,
        own_addresses=_addresses(LAUNCHER),
        version=__version__,
        limit_s=60,
        now_ns=0,
    )
    place_of = {0: 0, LAUNCHER: 1, 1: 2}
    rows: list[Row] = []
    waiting: list[tuple[int, type | None, ProbeTargets | None]] = [(0, None, None), (1, None, None)]
    while waiting:
        node, asked, probe = waiting.pop(0)
        before, out = state.phase, list[Instruction]()
        if asked is None:
            out = state.on_hello(node, AgentHello(__version__, "ab"[node], 800 + node), 0)
        elif asked is Greet:
            out = state.on_addresses(node, _addresses(node), 0)
        elif asked is ProbeTargets:
            assert probe is not None
            tried = tuple(Attempt(node, end.node, end.ip) for end in probe.targets)
            out = state.on_probe_result(node, tried, 0)
        else:
            out = state.on_prepared(node, Prepared(port=29500))
        if node != LAUNCHER:
            text = "AgentHello" if asked is None else ANSWERS[asked]
            note = state.phase.name if state.phase is not before else ""
            rows.append(Row(place_of[node], 1, text, before.name, note))
        for each in out:
            if each.node != LAUNCHER:
                text = ASKS[type(each)]
                rows.append(Row(1, place_of[each.node], text, state.phase.name))
            waiting.append(
                (each.node, type(each), each if isinstance(each, ProbeTargets) else None)
            )
        if out and isinstance(out[0], ProbeTargets):  # all try to reach all
            tries = [(0, 2), (2, 0)]
            rows += [Row(a, b, "probe", "PROBING") for a, b in tries]
    rows[0] = rows[0]._replace(note="GATHERING")
    return _ladder(["agent of a", "launcher", "agent of b"], rows, PHASES)


def _addresses(node: int) -> HostAddresses:
    network = Endpoint(node, "eth0", f"10.0.0.{node + 2}", 24, 5000)
    return HostAddresses(f"machine {node}", (network,))


# -- after a death


class Measured(NamedTuple):
    """What an engine does to the other ranks when a signal has killed one; measured on real engines.

    Attributes:
        term_s: Time of SIGTERM; None for none.
        kill_s: Time of SIGKILL; None for none.
    """

    term_s: float | None
    kill_s: float | None


ENGINES = {
    "Open MPI 4.1": Measured(1.0, 2.0),
    "MPICH 4.0": Measured(None, 0.01),
    "srun 22.05": Measured(None, None),
    "srun --kill-on-bad-exit": Measured(0.1, 5.1),  # KillWait=5; 30 by default
    "torchrun": Measured(0.0, None),
}
SHOWN_S = 8.0


def after_a_death() -> str:
    """How long a rank that heeds nothing lives after another one was killed, by launcher."""
    lanes = {"braid run": _braid(), **ENGINES}
    free, asked = COLOURS[2], COLOURS[3]
    bars = []
    for lane, (name, (term_s, kill_s)) in enumerate(lanes.items()):
        end_s = SHOWN_S if kill_s is None else kill_s
        first_s = end_s if term_s is None else term_s
        if first_s > 0.0:
            bars.append(Bar(lane, 0.0, first_s, free, f"{name}: no signal", "no signal"))
        if end_s > first_s:
            title = f"{name}: after SIGTERM at {first_s:g} s"
            bars.append(Bar(lane, first_s, end_s, asked, title, "SIGTERM"))
        if kill_s is not None:
            title = f"{name}: SIGKILL at {kill_s:g} s"
            bars.append(Bar(lane, kill_s, kill_s + 0.06, COLOURS[1], title))
    bars.append(
        Bar(
            len(lanes), 0.0, WAIT_S, COLOURS[0], f"survivors have printed their block by {WAIT_S} s"
        )
    )
    legend = {"no signal": free, "SIGTERM": asked, "SIGKILL": COLOURS[1], "block": COLOURS[0]}
    return draw([*lanes, "survivors' block"], bars, SHOWN_S, legend=legend)


def _braid() -> Measured:
    """Times of the launcher's signals, from its state machine."""
    job = JobSpec(command=("train.py",), num_ranks=2)
    state = SupervisorState(2, TimeLimits.of(job), 0)
    sent: dict[int, float] = {}
    for rank in range(2):
        state.handle(Started(rank), 0)
    event, now_ns = Exited(1, "was killed by signal 9 (SIGKILL)", ok=False), 0
    while state.phase is not RunPhase.KILLING:
        for out in state.handle(event, now_ns):
            if isinstance(out, SendSignal):
                sent[out.signum] = now_ns / 1e9
        event, now_ns = Tick(), state.deadline_ns or now_ns
    return Measured(sent[signal.SIGTERM], sent[signal.SIGKILL])


LAUNCHING = (ranks_on_nodes, hosts_gather, after_a_death)
