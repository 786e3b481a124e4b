"""Pipelines of a chain of stages: where stages live, and messages between them.

A generator writes down who computes what, in order (`StageWork`). The rest follows: an output goes
to the rank of the next stage right after it is made, and a gradient to the rank of the previous
one. Messages from one rank to another arrive in the order in which they are sent, so receives are
put in this order, too, each before the first work that needs it or a later one. A receive that
stands before another therefore waits for nothing that the other would not wait for as well.

    looped, 2 ranks, 4 stages     rank 0: stages 0, 2     rank 1: stages 1, 3
    vee                           rank 0: stages 0, 3     rank 1: stages 1, 2
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from braid.errors import ConfigError
from braid.programs.schedule.pipeline.vocabulary import PIPELINE, TRAIN
from braid.programs.schedule.program import Action, Header, Program, Vocabulary

__all__ = ["StageWork", "check_size", "in_turns", "looped", "most_held", "pipeline_program", "vee"]


# rank of each stage, or ranks that take turns with its micro-batches
Placement: TypeAlias = Sequence[int | tuple[int, ...]]


class StageWork(NamedTuple):
    """Work of a rank: F, B, I (input gradients) or W (weight gradients) of a stage, or STEP.

    Attributes:
        kind: Kind of action.
        stage: Number of the stage.
        microbatch: Number of the micro-batch.
        version: Version of the weights, in asynchronous programs.
    """

    kind: str
    stage: int
    microbatch: int
    version: int = -1


def looped(num_ranks: int, num_chunks: int = 1) -> tuple[int, ...]:
    """Return the rank of each stage: round-robin, `num_chunks` stages per rank."""
    return tuple(range(num_ranks)) * num_chunks


def vee(num_ranks: int) -> tuple[int, ...]:
    """Return the rank of each stage: up from rank 0 to the last rank, and back to rank 0."""
    return (*range(num_ranks), *reversed(range(num_ranks)))


def check_size(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> None:
    """Raise ConfigError if the number of ranks, micro-batches or stages per rank is below 1."""
    if num_ranks < 1 or num_microbatches < 1:
        msg = (
            f"a pipeline needs at least 1 stage and 1 micro-batch, got {max(num_ranks, 0)} and "
            f"{num_microbatches}"
        )
        raise ConfigError(msg)
    if num_chunks < 1:
        msg = f"num_chunks must be at least 1 stage per rank, got {num_chunks}"
        raise ConfigError(msg)


def in_turns(forwards: list[StageWork], backwards: list[StageWork], ahead: int) -> list[StageWork]:
    """Return `ahead` forwards, then forwards and backwards in turns, then the other backwards."""
    items = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        items += [forward, backward]
    return items + backwards[len(forwards) - ahead :]


def pipeline_program(
    name: str,
    work: Sequence[Sequence[StageWork]],
    placement: Placement,
    num_microbatches: int,
    *,
    operation: str = TRAIN,
    vocabulary: Vocabulary = PIPELINE,
) -> Program:
    """Make a pipeline program from the work of each rank; sends and receives are added.

    Args:
        name: Name of the schedule.
        work: Work of each rank, in order.
        placement: Rank of each stage, or ranks that take turns with its micro-batches.
        num_microbatches: Number of micro-batches.
        operation: `train` or `infer`.
        vocabulary: Vocabulary of the program.
    """
    sends: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, items in enumerate(work):
        for item in items:
            for action in _sends(item, rank, placement):
                sends[rank, action.peer].append(action)
    ranks = tuple(
        tuple(_with_messages(items, rank, placement, sends)) for rank, items in enumerate(work)
    )
    return Program(vocabulary, Header(name, operation, len(placement), num_microbatches), ranks)


def rank_of(placement: Placement, stage: int, microbatch: int) -> int:
    """Return the rank that works on a micro-batch for a stage."""
    home = placement[stage]
    return home if isinstance(home, int) else home[microbatch % len(home)]


def most_held(program: Program) -> list[int]:
    """Return, for each rank, the largest number of stored activations of forwards.

    Activations of one stage and micro-batch are stored from F, or from R if it is recomputed, to
    the end of its backward.
    """
    held_most = []
    for actions in program.ranks:
        again = {(a.unit, a.index) for a in actions if a.kind == "R"}
        held = most = 0
        for action in actions:
            held -= action.kind in {"B", "W"}
            held += action.kind == ("R" if (action.unit, action.index) in again else "F")
            most = max(most, held)
        held_most.append(most)
    return held_most


def _sends(item: StageWork, rank: int, placement: Placement) -> Iterable[Action]:
    """Return the message that follows from work, if the neighbouring stage is on another rank."""
    stage, i = item.stage, item.microbatch
    kind, neighbour = ("send_f", stage + 1) if item.kind == "F" else ("send_b", stage - 1)
    if item.kind in {"F", "B", "I"} and 0 <= neighbour < len(placement):
        peer = rank_of(placement, neighbour, i)
        if peer != rank:
            yield Action(kind, stage, i, peer)


def _with_messages(
    items: Sequence[StageWork],
    rank: int,
    placement: Placement,
    sends: dict[tuple[int, int], list[Action]],
) -> list[Action]:
    coming = {
        peer: list(reversed(items)) for (peer, target), items in sends.items() if target == rank
    }
    received: set[Action] = set()
    actions: list[Action] = []
    for item in items:
        needed = _needed(item, len(placement))
        home = rank if needed is None else rank_of(placement, needed.unit, item.microbatch)
        if needed is not None and home != rank:
            source = coming.get(home, [])
            while needed not in received and source:  # and those that were sent before it
                sent = source.pop()
                received.add(sent._replace(peer=-1))
                forward = sent.kind == "send_f"
                stage = sent.unit + 1 if forward else sent.unit - 1
                kind = "recv_f" if forward else "recv_b"
                actions.append(Action(kind, stage, sent.index, home))
        actions.append(Action(item.kind, item.stage, item.microbatch, version=item.version))
        actions += _sends(item, rank, placement)
    return actions


def _needed(item: StageWork, num_stages: int) -> Action | None:
    """Return the send, without its target, that brings what work needs."""
    if item.kind == "F" and item.stage:
        return Action("send_f", item.stage - 1, item.microbatch)
    if item.kind in {"B", "I"} and item.stage + 1 < num_stages:
        return Action("send_b", item.stage + 1, item.microbatch)
    return None
