"""A program: the actions of every rank, in order, as data.

Problem: a ring all-reduce and a 1F1B pipeline are usually loops with sends inside. To see what such
a loop does one has to run it, and to see whether it hangs on 7 ranks one has to run it on 7.

Idea: generators write down the actions of every rank, and everything else reads them: the validator
(`validate`), the simulator (`simulate`), the plotter (`plot`), the executors of the engines, people
(`text`). A vocabulary defines the kinds of actions and the meaning of their numbers; two use this
machinery:

                 unit                        index          peer    edge          version
    collective   block of the buffer         round          rank    slot copied   -
    pipeline     stage                       micro-batch    rank    -             version of weights

Sends and receives between two ranks match in the order of the program (one first-in, first-out line
per pair). Actions that are `posted together`, such as all messages of one round, are under way at
the same time: a rank continues when all of them have ended. Data is read when they are posted and
written when they end, so a block may be sent and replaced in one round.

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
    """One action of one rank, such as a send or a forward; numbers without a meaning are -1.

    Attributes:
        kind: Name of the kind of action in the vocabulary, such as `F`.
        unit: Number of the block or stage.
        index: Number of the round or micro-batch.
        peer: Rank at the other end of a message.
        edge: Second block or stage, for kinds with two, such as a copy between blocks.
        version: Version of the weights.
    """

    kind: str
    unit: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which is not needed here
    peer: int = -1
    edge: int = -1
    version: int = -1


class Kind(NamedTuple):
    """A kind of action that programs (schedules of ranks' actions) may contain.

    Attributes:
        role: send, receive, or local for actions without peer.
        meaning: Description of the action, for messages and documentation.
        has_edge: Whether `edge` has a meaning.
        has_version: Whether `version` has a meaning.
    """

    role: str
    meaning: str
    has_edge: bool = False
    has_version: bool = False


class Vocabulary(NamedTuple):
    """The kinds of actions of a family of programs.

    Attributes:
        name: Name of the family, such as collective.
        kinds: Kinds by name; letters and underscores only.
        unit_name: Name of a unit in messages, such as block.
        index_name: Name of an index in messages, such as round.
        posts: Rule for the actions that a rank posts together: `round`, consecutive actions with
            the same index; or `run`, consecutive messages.
    """

    name: str
    kinds: Mapping[str, Kind]
    unit_name: str
    index_name: str
    posts: str

    def role(self, action: Action) -> str:
        """Return the role of the kind of `action`."""
        return self.kinds[action.kind].role

    def describe(self, action: Action) -> str:
        """Describe an action, as in `send of block 3 in round 0 to rank 1`."""
        words = (
            f"{action.kind} of {self.unit_name} {action.unit} in {self.index_name} {action.index}"
        )
        if action.peer < 0:
            return words
        return f"{words} {'to' if self.role(action) == SEND else 'from'} rank {action.peer}"


class Header(NamedTuple):
    """Name, operation and size of a program.

    Attributes:
        name: Name of the algorithm, such as ring.
        operation: Name of the operation, such as all_reduce.
        num_units: Number of units, such as the blocks of the buffer or the stages.
        num_indices: Number of rounds or micro-batches.
        root: Root rank, for operations that have one; else -1.
    """

    name: str
    operation: str
    num_units: int
    num_indices: int
    root: int = -1


class Program(NamedTuple):
    """Program of a collective or a pipeline: the actions of all ranks, in order.

    Attributes:
        vocabulary: Meaning of the actions.
        header: Name, operation and size.
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
        """Summarize the program, as in `ring all_reduce on 4 ranks, 24 sends`."""
        sends = sum(self.vocabulary.role(a) == SEND for actions in self.ranks for a in actions)
        header = self.header
        return f"{header.name} {header.operation} on {self.num_ranks} ranks, {sends} sends"


def batches(program: Program, rank: int) -> Iterator[range]:
    """Yield the positions of the actions of `rank` that are posted together, in order."""
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
    """Raise ConfigError if `num_ranks` is below 1."""
    if num_ranks < 1:
        msg = f"at least 1 rank is needed, got {num_ranks}"
        raise ConfigError(msg)
