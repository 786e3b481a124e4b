"""A program: what every rank does, in order, as data.

Problem: a ring all-reduce and a 1F1B pipeline are usually loops with sends inside. What such a loop
does can only be found out by running it, and whether it hangs on 7 ranks only by running it on 7.

Idea: generators write down the actions of every rank, and everything else reads them: the validator
(`validate`), the simulator (`simulate`), the plotter (`plot`), the executors of the engines, people
(`text`). A vocabulary says which kinds of actions there are and what their numbers mean; two use
this machinery:

                 unit                        index          peer    edge          version
    collective   block of the buffer         round          rank    slot copied   -
    pipeline     stage                       micro-batch    rank    -             version of the weights

Sends and receives between two ranks match in the order in which they stand there (one first-in,
first-out line per pair). What is `posted together`, such as all messages of one round, is under way
at the same time: a rank goes on when all of it has ended. It reads what was there before and writes
at the end, so a block may be sent and replaced in one round.

Source: MSCCL (Cowan et al., ASPLOS 2023) for collectives as programs; torch's pipelining schedules
for pipelines as lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from braid.errors import ConfigError

__all__ = ["Action", "Header", "Kind", "Program", "Vocabulary", "batches", "check_ranks"]

SEND, RECEIVE, LOCAL = "send", "receive", "local"


class Action(NamedTuple):
    """One thing that one rank does; a number that has no meaning for its kind is -1.

    Attributes:
        kind: Name in the vocabulary.
        unit: What it is done with.
        index: When, or for which micro-batch.
        peer: The other rank of a message.
        edge: Second unit.
        version: Of the weights.
    """

    kind: str
    unit: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    peer: int = -1
    edge: int = -1
    version: int = -1


class Kind(NamedTuple):
    """A word of a vocabulary.

    Attributes:
        role: send, receive, or local for what needs no peer.
        meaning: In words.
        has_edge: Whether `edge` means something.
        has_version: Whether `version` does.
    """

    role: str
    meaning: str
    has_edge: bool = False
    has_version: bool = False


class Vocabulary(NamedTuple):
    """The kinds of actions of a family of programs.

    Attributes:
        name: Such as collective.
        kinds: Words, by name; letters and underscores only.
        unit_name: What a unit is called in messages, such as block.
        index_name: What an index is called.
        posts: What a rank posts together: `round`, actions beside each other that have the same
            index, or `run`, messages beside each other.
    """

    name: str
    kinds: Mapping[str, Kind]
    unit_name: str
    index_name: str
    posts: str

    def role(self, action: Action) -> str:
        """Role of the kind of `action`."""
        return self.kinds[action.kind].role

    def describe(self, action: Action) -> str:
        """In words: `send of block 3 in round 0 to rank 1`."""
        words = (
            f"{action.kind} of {self.unit_name} {action.unit} in {self.index_name} {action.index}"
        )
        if action.peer < 0:
            return words
        return f"{words} {'to' if self.role(action) == SEND else 'from'} rank {action.peer}"


class Header(NamedTuple):
    """What a program is.

    Attributes:
        name: Of the algorithm, such as ring.
        operation: What it carries out, such as all_reduce.
        num_units: Number of units, such as the blocks of the buffer or the stages.
        num_indices: Number of rounds or micro-batches.
        root: Rank, for operations that have one; else -1.
    """

    name: str
    operation: str
    num_units: int
    num_indices: int
    root: int = -1


class Program(NamedTuple):
    """What every rank does.

    Attributes:
        vocabulary: What the actions mean.
        header: What it is for.
        ranks: Actions, by rank.
    """

    vocabulary: Vocabulary
    header: Header
    ranks: tuple[tuple[Action, ...], ...]

    @property
    def num_ranks(self) -> int:
        """World size."""
        return len(self.ranks)

    def __str__(self) -> str:
        """`ring all_reduce on 4 ranks, 24 sends`."""
        sends = sum(self.vocabulary.role(a) == SEND for actions in self.ranks for a in actions)
        header = self.header
        return f"{header.name} {header.operation} on {self.num_ranks} ranks, {sends} sends"


def batches(program: Program, rank: int) -> Iterator[range]:
    """Positions of the actions of `rank` that are posted together, in order."""
    actions, vocabulary = program.ranks[rank], program.vocabulary
    start = 0
    for end in range(1, len(actions) + 1):
        if end < len(actions) and _together(vocabulary, actions[end - 1], actions[end]):
            continue
        yield range(start, end)
        start = end


def _together(vocabulary: Vocabulary, one: Action, other: Action) -> bool:
    if vocabulary.posts == "round":
        return one.index == other.index
    return LOCAL not in {vocabulary.role(one), vocabulary.role(other)}


def check_ranks(num_ranks: int) -> None:
    """Raise ConfigError unless it is a number of ranks."""
    if num_ranks < 1:
        msg = f"expected at least 1 rank, found {num_ranks}"
        raise ConfigError(msg)
