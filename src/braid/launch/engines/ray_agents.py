"""The agents of a run in a Ray cluster: reserves resources on nodes, and starts an agent in each.

Problem: a cluster gets nodes, or resources become free, while an elastic run has fewer ranks than
it may have.

Idea: each second, reserve the free resources of a node in a placement group, which the launcher
sees as one more host once Ray has made the group. A run with its largest number of ranks does not
ask Ray.

    free resources            placement group, requested
    the group is made         a new host in the list for the launcher, which then invites its agent
    the group is not made     removed; resources that are still free are requested again later
    an agent has ended        its host leaves the list, and the group is removed
"""

from __future__ import annotations

import io
import select
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from braid.launch.engines.client_words import FromClient
from braid.launch.engines.invitation import Invitation
from braid.launch.engines.ray_nodes import RayNode, free_nodes, place

__all__ = ["RayAgents"]

POLL_S = 0.5
GROW_S = 1.0  # between searches for free resources


class Reservation(NamedTuple):
    """Resources that are reserved on a node for an agent and its ranks.

    Attributes:
        name: Name of the agent's host; name of the node until Ray has made the reservation.
        node: Identifier of the node.
        num_ranks: Number of ranks.
        group: Placement group.
        bundle: Index of the bundle with the resources in the group.
    """

    name: str
    node: str
    num_ranks: int
    group: Any
    bundle: int


class RayAgents:
    """Agents of a run in a Ray cluster, in resources that are reserved for them.

    If the run may grow, free resources on any node are reserved for one more agent, which is
    another host of the run: Ray chooses the GPUs of each actor when the actor starts. A node on
    which an agent has ended is not used again; a node that comes back to the cluster has another
    identifier.

    Args:
        ray: The module.
        actor_class: Class of the actors, with a method `run` that runs an agent.
        demand: Resources of a rank.
        strategy: Strategy of `place`.
        max_ranks: Largest number of ranks; 0 if the run cannot grow.
        payload: File with the function that ranks call; empty for a script.
    """

    def __init__(
        self,
        ray: Any,
        actor_class: Any,
        demand: Mapping[str, float],
        strategy: str,
        max_ranks: int,
        payload: str,
    ) -> None:
        self._ray = ray
        self._actor_class = actor_class
        self._demand = demand
        self._strategy = strategy
        self._max_ranks = max_ranks
        self._payload = payload
        self._num_uses: Counter[str] = Counter()  # of a node's name
        self._requested: list[Reservation] = []  # which Ray may not have made yet
        self._reserved: dict[str, Reservation] = {}  # without an agent, by name
        # number, resources and actor of each agent, by the future of its end
        self._agents: dict[Any, tuple[int, Reservation, Any]] = {}
        self._unusable: set[str] = set()  # nodes on which an agent has ended

    def reserve(self, chosen: Sequence[tuple[RayNode, int]]) -> None:
        """Reserve resources on all chosen nodes together, and wait for them."""
        self._requested = self._request(chosen)
        group = self._requested[0].group
        is_announced = False
        while not group.wait(POLL_S):  # others may have been faster; the launcher limits the time
            state = self._ray.util.placement_group_table(group)["stats"]["scheduling_state"]
            if not is_announced:
                print(f"Ray answers {state}: others use what was free", file=sys.stderr, flush=True)
                is_announced = True
            if _has_input(
                0
            ):  # the launcher sends nothing before it has the hosts: stdin was closed
                sys.exit(0)
        while self._requested:
            self._accept(self._requested.pop(0))
        self._send_hosts()

    def run(self, stdin: io.RawIOBase) -> int:
        """Start the agents that the launcher asks for, and wait until all agents have ended.

        Returns:
            Exit code; the launcher receives the reason for each lost node.
        """
        code = 0
        self.start(stdin.readline())
        while self._agents:
            limit_s = GROW_S if self._max_ranks else None
            ended, _ = self._ray.wait(list(self._agents), num_returns=1, timeout=limit_s)
            for end in ended:
                code |= self.ended(end)
            if self._max_ranks and _has_input(stdin.fileno()):
                self.start(stdin.readline())
            if self._max_ranks:
                try:
                    self.grow()
                except Exception as exc:  # noqa: BLE001 - while Ray's server starts again
                    print(f"Ray cannot be asked for more nodes: {exc}", file=sys.stderr, flush=True)
        return code

    def start(self, line: bytes) -> None:
        """Start the agents of an invitation, each in an actor; an empty line ends the growth."""
        if not line:
            self._max_ranks = 0
            return
        invitation = Invitation.from_line(line)
        payload = Path(self._payload).read_bytes() if self._payload else b""
        in_bundle = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        for number, name in invitation.nodes.items():
            reservation = self._reserved.pop(name, None)
            if reservation is None:  # the launcher has lost its agent, which has not ended yet
                FromClient(lost=number, why="has an earlier agent, which has not ended").send()
                continue
            bundle = self._bundle(reservation.num_ranks)
            actor = self._actor_class.options(
                num_cpus=bundle.pop("CPU"),
                num_gpus=bundle.pop("GPU", 0.0),
                resources=bundle,
                scheduling_strategy=in_bundle(
                    reservation.group, placement_group_bundle_index=reservation.bundle
                ),
            ).remote()
            end = actor.run.remote(invitation.for_node(number).to_line(), payload)
            self._agents[end] = number, reservation, actor  # Ray ends actors without a reference

    def grow(self) -> None:
        """Reserve free resources on nodes for more ranks, without waiting.

        A reservation that Ray has not made until the next call is given back.
        """
        if self._requested:
            while self._requested:
                group = self._requested[0].group
                is_made = self._ray.util.placement_group_table(group)["state"] == "CREATED"
                reservation = self._requested.pop(0)
                if is_made:
                    self._accept(reservation)
                else:
                    self._ray.util.remove_placement_group(group)
            self._send_hosts()
            return
        room = self._max_ranks - sum(reservation.num_ranks for reservation in self._usable)
        if room <= 0:
            return
        nodes = [node for node in free_nodes(self._ray) if node.key not in self._unusable]
        if any(node.fits(self._demand) for node in nodes):
            for choice in place(nodes, 0, self._demand, self._strategy, room):
                self._requested += self._request([choice])

    def ended(self, end: Any) -> bool:
        """Give the resources of an agent back; report its loss, and return whether it was lost."""
        number, reservation, _ = self._agents.pop(end)
        why = ""
        try:
            status, printed, results = self._ray.get(end)
        except self._ray.exceptions.RayError as exc:
            why = _why(exc)
        else:
            for rank, result in results.items():
                Path(f"{self._payload}.{rank}").write_bytes(result)
            if status:
                last = printed.strip().splitlines()[-1:] or ["it printed nothing"]
                why = f"ended with exit code {status}: {last[0]}"
                print(printed, file=sys.stderr, flush=True)
        if why:
            FromClient(lost=number, why=why).send()
        self._unusable.add(reservation.node)
        if reservation.group not in {other.group for other in self._usable}:
            with suppress(Exception):  # while Ray's server starts again
                self._ray.util.remove_placement_group(reservation.group)
        self._send_hosts()
        return bool(why)

    def close(self) -> None:
        """Give all resources back."""
        for group in {reservation.group for reservation in (*self._usable, *self._requested)}:
            self._ray.util.remove_placement_group(group)

    @property
    def _usable(self) -> list[Reservation]:
        """Resources that the launcher may use."""
        return [*(agent[1] for agent in self._agents.values()), *self._reserved.values()]

    def _bundle(self, num_ranks: int) -> dict[str, float]:
        return {name: num_ranks * want for name, want in self._demand.items()}

    def _request(self, chosen: Sequence[tuple[RayNode, int]]) -> list[Reservation]:
        """Return reservations in one placement group, which Ray then makes."""
        group = self._ray.util.placement_group(
            [self._bundle(num_ranks) for _, num_ranks in chosen],
            strategy="PACK",
            bundle_label_selector=[{"ray.io/node-id": node.key} for node, _ in chosen],
        )
        return [
            Reservation(node.name, node.key, num_ranks, group, bundle)
            for bundle, (node, num_ranks) in enumerate(chosen)
        ]

    def _accept(self, reservation: Reservation) -> None:
        """Name a host that the launcher may use; a name is never used again, as after a loss."""
        self._num_uses[reservation.name] += 1
        number = self._num_uses[reservation.name]
        name = reservation.name if number == 1 else f"{reservation.name}#{number}"
        self._reserved[name] = reservation._replace(name=name)

    def _send_hosts(self) -> None:
        FromClient(hosts=tuple((host.name, host.num_ranks) for host in self._usable)).send()


def _has_input(fd: int) -> bool:
    """Return whether the launcher has sent a line, or has closed stdin."""
    return bool(select.select([fd], [], [], 0.0)[0])


def _why(exc: Exception) -> str:
    """Return Ray's reason for the end of an actor as a clause, without its list of guesses."""
    text = " ".join(str(exc).split())
    for mark in ("Worker exit detail:", "The actor died because", "The actor is dead because"):
        if mark in text:
            text = text.partition(mark)[2]
            break
    text = text.partition("Some common causes")[0].strip().rstrip(".")
    return f"lost its Ray actor: {text[:300]}"
