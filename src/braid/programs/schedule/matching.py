"""Pairs of sends and receives, and a possible order of a program's actions.

Sends and receives between two ranks form one first-in, first-out queue in each direction, so
matching needs no search. An unmatched action is an error of the program. It is reported here,
before a rank waits without end.

`order` executes a program without time: it posts the batches of all ranks and ends every action
that can end. Under *rendezvous* semantics a send ends only when its receive has been posted; under
*buffered* semantics a send ends immediately. *Sequential* semantics are buffered, and each receive
ends before the next action begins. A program that is valid under rendezvous needs no memory for
messages in flight. If some actions cannot end, the program deadlocks, and the cycle of waiting
ranks is reported.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import NamedTuple

from braid.programs.schedule.program import LOCAL, SEND, Action, Program, batches

__all__ = ["Deadlock", "Matching", "Message", "Moment", "Place", "match", "messages", "order"]


class Place(NamedTuple):
    """Position of an action in a program: its rank, and its index in the rank's list.

    Attributes:
        rank: Rank of the action.
        position: Index in the rank's list.
    """

    rank: int
    position: int


class Matching(NamedTuple):
    """Pairs of the sends and receives of a program.

    Attributes:
        partner: Place of the matching receive for each send, and of the send for each receive.
        alone: Places of sends and receives without a match.
    """

    partner: dict[Place, Place]
    alone: list[Place]


class Message(NamedTuple):
    """One message: sends that a rank posts together, and the receives that match them.

    The receiver posts these receives together as well.

    Attributes:
        source: Sending rank.
        posted: Index of the sender's batch (actions that are posted together) with the sends.
        target: Receiving rank.
        awaited: Index of the receiver's batch with the receives.
        sends: Actions of the source.
        receives: Actions of the target, in the same order.
    """

    source: int
    posted: int
    target: int
    awaited: int
    sends: tuple[Action, ...]
    receives: tuple[Action, ...]


class Moment(NamedTuple):
    """Point in a program's execution: a rank posts a batch of actions, or the batch ends.

    Attributes:
        rank: Rank of the batch.
        positions: Positions of the batch's actions in the rank's list.
        ended: True if the batch ends, False if it is posted. Data to send or copy is read when the
            batch is posted; received data is written when the batch ends.
    """

    rank: int
    positions: range
    ended: bool


class Deadlock(NamedTuple):
    """Actions that wait for one another in a circle, or for a rank that has ended.

    Attributes:
        circle: Waiting actions. Each waits for a later action on the rank of the next one, and the
            last one waits for the first. Without a circle: the chain of actions that leads to a
            rank that has ended.
    """

    circle: list[Place]


def match(program: Program) -> Matching:
    """Pair sends with receives: for two ranks, the n-th send with the n-th receive."""
    sends: dict[tuple[int, int], list[Place]] = defaultdict(list)
    receives: dict[tuple[int, int], list[Place]] = defaultdict(list)
    for rank, actions in enumerate(program.ranks):
        for position, action in enumerate(actions):
            role = program.vocabulary.role(action)
            if role == LOCAL:
                continue
            if role == SEND:
                sends[rank, action.peer].append(Place(rank, position))
            else:
                receives[action.peer, rank].append(Place(rank, position))
    partner: dict[Place, Place] = {}
    alone: list[Place] = []
    for pair in sorted({*sends, *receives}):
        out, into = sends[pair], receives[pair]
        both = min(len(out), len(into))
        for one, other in zip(out[:both], into[:both], strict=True):
            partner[one], partner[other] = other, one
        alone += out[both:] + into[both:]
    return Matching(partner, sorted(alone))


def messages(program: Program, matching: Matching) -> list[Message]:
    """Return all messages of a program, sorted by sender and then in the order of sending.

    Args:
        program: Program without unmatched messages.
        matching: Matching of the program.
    """
    batch_of = [
        [number for number, positions in enumerate(batches(program, rank)) for _ in positions]
        for rank in range(program.num_ranks)
    ]
    by_ends: dict[tuple[int, int, int, int], tuple[list[Action], list[Action]]] = {}
    for rank, actions in enumerate(program.ranks):
        for position, action in enumerate(actions):
            if program.vocabulary.role(action) != SEND:
                continue
            target, there = matching.partner[Place(rank, position)]
            ends = (rank, batch_of[rank][position], target, batch_of[target][there])
            sends, receives = by_ends.setdefault(ends, ([], []))
            sends.append(action)
            receives.append(program.ranks[target][there])
    return [Message(*ends, tuple(s), tuple(r)) for ends, (s, r) in by_ends.items()]


def order(
    program: Program, matching: Matching, *, buffered: bool, sequential: bool = False
) -> tuple[list[Moment], Deadlock | None]:
    """Execute a program symbolically; return its moments in a possible order, and its deadlock.

    Args:
        program: Program without unmatched messages.
        matching: Matching of the program.
        buffered: Whether a send can complete before its receive is posted.
        sequential: Whether a rank posts its actions one by one instead of in batches.
    """
    return _ProgramRun(program, matching, buffered=buffered, sequential=sequential).run()


class _ProgramRun:
    def __init__(
        self, program: Program, matching: Matching, *, buffered: bool, sequential: bool
    ) -> None:
        self._program = program
        self._partner = matching.partner
        self._buffered = buffered
        self._batches = [
            deque(range(i, i + 1) for i in range(len(actions)))
            if sequential
            else deque(batches(program, rank))
            for rank, actions in enumerate(program.ranks)
        ]
        self._posted = [0] * program.num_ranks  # number of posted actions of each rank
        self._moments: list[Moment] = []

    def run(self) -> tuple[list[Moment], Deadlock | None]:
        fresh = deque(range(self._program.num_ranks))  # ranks that may be able to end a batch
        for rank in range(self._program.num_ranks):
            self._post(rank)
        while fresh:
            rank = fresh.popleft()
            while self._batches[rank] and self._stuck_at(rank) is None:
                self._moments.append(Moment(rank, self._batches[rank].popleft(), ended=True))
                self._post(rank)
                fresh.extend(self._peers_of_head(rank))
        waiting = [rank for rank, batch in enumerate(self._batches) if batch]
        return self._moments, (Deadlock(self._circle(waiting[0])) if waiting else None)

    def _post(self, rank: int) -> None:
        if self._batches[rank]:
            positions = self._batches[rank][0]
            self._posted[rank] = positions.stop
            self._moments.append(Moment(rank, positions, ended=False))

    def _peers_of_head(self, rank: int) -> list[int]:
        if not self._batches[rank]:
            return []
        actions = self._program.ranks[rank]
        return [actions[i].peer for i in self._batches[rank][0] if actions[i].peer >= 0]

    def _stuck_at(self, rank: int) -> Place | None:
        """Return the first action of the head of `rank` that cannot end."""
        for position in self._batches[rank][0]:
            partner = self._partner.get(Place(rank, position))
            if partner is None or partner.position < self._posted[partner.rank]:
                continue
            action = self._program.ranks[rank][position]
            if not (self._buffered and self._program.vocabulary.role(action) == SEND):
                return Place(rank, position)
        return None

    def _circle(self, rank: int) -> list[Place]:
        path: list[Place] = []
        seen: dict[int, int] = {}
        while rank not in seen:
            seen[rank] = len(path)
            stuck = self._stuck_at(rank)
            assert stuck is not None  # it waits
            path.append(stuck)
            rank = self._partner[stuck].rank
        return path[seen[rank] :]
