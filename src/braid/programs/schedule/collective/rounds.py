"""Rounds: an algorithm written once, for four ranks to read and for a hundred thousand to compute.

An algorithm is a list of rounds. In a round some ranks send to one other rank each, and a round
that is repeated with the same pairs (a ring) is written once:

    Round(sources [0 1 2 3], targets [1 2 3 0], num_blocks 1, repeat 3)

`program` writes it out, action by action, for validation, execution and pictures. `simulate_rounds`
in `cost` needs only pairs and numbers of blocks, so its work grows with ranks times kinds of rounds
and not with messages. `carried_out` executes an algorithm on a few numbers, to show its result:

    >>> from braid.programs.schedule.collective.ring import all_gather
    >>> carried_out(all_gather(2), [("a", None), (None, "b")])
    [('a', 'b'), ('a', 'b')]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from braid.errors import ConfigError
from braid.programs.schedule.collective.vocabulary import COLLECTIVE
from braid.programs.schedule.matching import Place, match, order
from braid.programs.schedule.program import RECEIVE, SEND, Action, Header, Program
from braid.programs.schedule.simulate import Costs

__all__ = ["Copy", "Ranks", "Round", "Rounds", "carried_out", "collective_costs", "program"]

MOST_RANKS = 512  # a ring has 4 p^2 actions
Ranks = npt.NDArray[np.int64]
Slots = Callable[[int, int], Sequence[int]]


class Round(NamedTuple):
    """Messages that ranks send at the same time, possibly repeated.

    Attributes:
        sources: Ranks that send; each at most once.
        targets: Ranks that receive; each at most once.
        num_blocks: Number of blocks of each message: one number for all, or one per message.
        slots: Function (rank, repetition) that returns the indices of the blocks that a rank sends.
        into: Function (sender, repetition) that returns the indices of the blocks at the target;
            the same indices when None.
        adds: Whether received blocks are added to the target's.
        repeat: Number of repetitions.
    """

    sources: Ranks
    targets: Ranks
    num_blocks: int | Ranks
    slots: Slots
    into: Slots | None = None
    adds: bool = False
    repeat: int = 1


class Copy(NamedTuple):
    """Copies inside each rank's buffer.

    Attributes:
        blocks: Function (rank) that returns pairs (index to copy to, index to copy from).
    """

    blocks: Callable[[int], Sequence[tuple[int, int]]]


class Rounds(NamedTuple):
    """A collective algorithm for a number of ranks, as rounds of messages.

    Attributes:
        name: Name of the algorithm.
        operation: Name of the operation.
        num_ranks: World size.
        num_blocks: Number of blocks of a rank's buffer; all_to_all has two buffers, which count
            together.
        steps: Rounds and copies, in order.
        root: Root rank, for operations that have one.
    """

    name: str
    operation: str
    num_ranks: int
    num_blocks: int
    steps: tuple[Round | Copy, ...]
    root: int = -1

    def block_bytes(self, nbytes: float) -> float:
        """Return the bytes of one block of a rank's buffer.

        Args:
            nbytes: Bytes of the largest full buffer of a rank; for all_to_all, of one of its two
                buffers.
        """
        return nbytes / (self.num_ranks if self.operation == "all_to_all" else self.num_blocks)

    @property
    def num_rounds(self) -> int:
        """Number of rounds, counting repetitions."""
        return sum(step.repeat for step in self.steps if isinstance(step, Round))


def program(rounds: Rounds) -> Program:
    """Convert an algorithm to a program, which lists the actions of each rank.

    Raises:
        ConfigError: There are too many ranks to list all actions; use `simulate_rounds` instead,
            which needs no program.
    """
    if rounds.num_ranks > MOST_RANKS:
        msg = (
            f"at most {MOST_RANKS} ranks can be written out action by action, got "
            f"{rounds.num_ranks}: use simulate_rounds"
        )
        raise ConfigError(msg)
    ranks: list[list[Action]] = [[] for _ in range(rounds.num_ranks)]
    index = 0
    for step in rounds.steps:
        if isinstance(step, Copy):
            for rank, actions in enumerate(ranks):
                blocks = step.blocks(rank)
                actions.extend(Action("copy", to, index, edge=source) for to, source in blocks)
            index += 1
            continue
        for repetition in range(step.repeat):
            _write(ranks, step, repetition, index)
            index += 1
    header = Header(rounds.name, rounds.operation, rounds.num_blocks, index, rounds.root)
    return Program(COLLECTIVE, header, tuple(map(tuple, ranks)))


def _write(ranks: list[list[Action]], step: Round, repetition: int, index: int) -> None:
    kind = "reduce" if step.adds else "recv"
    pairs = list(zip(step.sources.tolist(), step.targets.tolist(), strict=True))
    counts = np.broadcast_to(step.num_blocks, len(pairs)).tolist()
    into = step.into or step.slots
    for (source, target), count in zip(pairs, counts, strict=True):  # sends come first
        blocks = step.slots(source, repetition)
        assert len(blocks) == count, (source, blocks, step)
        ranks[source] += (Action("send", block, index, target) for block in blocks)
    for source, target in pairs:
        ranks[target] += (Action(kind, block, index, source) for block in into(source, repetition))


def carried_out(rounds: Rounds, buffers: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Execute an algorithm on in-memory buffers; return the buffers of all ranks at the end.

    Args:
        rounds: Algorithm.
        buffers: Elements of each rank's buffer, which is cut into blocks of about equal size. For
            all_to_all, both buffers concatenated.
    """
    written = program(rounds)
    matching = match(written)
    moments, deadlock = order(written, matching, buffered=False)
    assert deadlock is None, deadlock
    holds = [list(buffer) for buffer in buffers]
    size, blocks = len(holds[0]), rounds.num_blocks
    bounds = [size * i // blocks for i in range(blocks + 1)]
    read: dict[Place, list[Any]] = {}
    for rank, positions, ended in moments:
        for position in positions:
            place, action = Place(rank, position), written.ranks[rank][position]
            role = written.vocabulary.role(action)
            if not ended and role != RECEIVE:
                block = action.unit if role == SEND else action.edge
                read[place] = holds[rank][bounds[block] : bounds[block + 1]]
            elif ended and role != SEND:
                values = read[matching.partner[place] if role == RECEIVE else place]
                part = slice(bounds[action.unit], bounds[action.unit + 1])
                there = holds[rank][part]
                if action.kind == "reduce":
                    values = [a + b for a, b in zip(there, values, strict=True)]
                holds[rank][part] = values
    return [tuple(buffer) for buffer in holds]


def collective_costs(program: Program, nbytes: float, sum_s_per_byte: float = 0.0) -> Costs:
    """Return the costs of a collective for `simulate`.

    Args:
        program: Program of a collective.
        nbytes: l, bytes of the largest full buffer of a rank; for all_to_all, of one of its two
            buffers.
        sum_s_per_byte: c, seconds to add up one byte.
    """
    header = program.header
    blocks = program.num_ranks if header.operation == "all_to_all" else header.num_units
    size = nbytes / blocks
    return Costs(
        nbytes=lambda _rank, _action: size,
        seconds=lambda _rank, action: size * sum_s_per_byte * (action.kind == "reduce"),
    )
