"""One rank's part of a collective program, as slices of a tensor to send, receive and copy.

Problem: the algorithms of `schedule.collective` are lists of blocks, but a transport moves memory.
Each algorithm raises the same questions: which blocks go into one message, which are adjacent and
form one slice, and in which of the sender's turns a message is sent.

Idea: answer these questions once, before any transfer. `stages` turns a program into slices of the
flat buffer for one rank. Each stage lists the slices to send (read when the stage begins), to
receive (added or replacing) and to copy. Running the stages (`programs`) is then a loop without
decisions.

The sizes of blocks differ by at most one element. Sums are taken in the order of the program's
messages: the same in every run, but not the order of ranks. 16-bit numbers are rounded at every
addition.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch

from braid.comm.tensors.reduction import combine
from braid.errors import ConfigError
from braid.programs.schedule import Action, Program, match, messages
from braid.programs.schedule.program import LOCAL, batches

__all__ = ["ProgramMove", "ProgramStage", "apply_move", "stages"]


class ProgramMove(NamedTuple):
    """A message, or a copy inside the buffer.

    Attributes:
        peer: The other rank; -1 for a copy.
        parts: Slices of the buffer, in the order in which they are sent.
        adds: Whether the data is added to the slices rather than replacing them.
        sources: Slices that a copy reads.
        turn: Number of the stage in which the sender sends the message.
        place: Number of elements that the sender has sent before the message.
    """

    peer: int
    parts: tuple[slice, ...]
    adds: bool = False
    sources: tuple[slice, ...] = ()
    turn: int = 0
    place: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return sum(part.stop - part.start for part in self.parts)


class ProgramStage(NamedTuple):
    """Messages and copies of one rank in one round of a collective.

    Attributes:
        sends: Messages to send.
        receives: Messages to receive.
        copies: Copies inside the buffer; they read its state before the stage.
    """

    sends: tuple[ProgramMove, ...]
    receives: tuple[ProgramMove, ...]
    copies: tuple[ProgramMove, ...]


def stages(program: Program, rank: int, numel: int) -> tuple[ProgramStage, ...]:
    """Return the rounds of messages and copies that `rank` runs, without empty messages.

    Args:
        program: Valid program of the collective vocabulary.
        rank: Rank that runs the stages.
        numel: Number of elements of the buffer. all_to_all has an input and an output buffer,
            concatenated.

    Raises:
        ConfigError: all_to_all cannot cut the buffer into equal blocks.
    """
    blocks = program.header.num_units
    if program.header.operation == "all_to_all" and numel % blocks:
        msg = (
            f"all_to_all cannot cut {numel} elements into {blocks} equal blocks: pass a "
            f"multiple of {blocks}"
        )
        raise ConfigError(msg)
    bounds = [numel * i // blocks for i in range(blocks + 1)]
    out: dict[int, list[ProgramMove]] = defaultdict(list)
    into: dict[int, list[ProgramMove]] = defaultdict(list)
    places: dict[int, int] = defaultdict(int)  # offset of the next message of each source
    for message in sorted(messages(program, match(program)), key=lambda m: m.posted):
        parts = _slices(message.sends, bounds)
        turn, place = message.posted, places[message.source]
        move = ProgramMove(message.target, parts, turn=turn, place=place)
        places[message.source] += move.numel
        if message.source == rank:
            out[message.posted].append(move)
        if message.target == rank:
            adds = {action.kind == "reduce" for action in message.receives}
            assert len(adds) == 1, message  # all actions of a message add, or all replace
            received = move._replace(peer=message.source, adds=adds.pop())
            into[message.awaited].append(received._replace(parts=_slices(message.receives, bounds)))
    result = []
    actions = program.ranks[rank]
    for number, positions in enumerate(batches(program, rank)):
        sends = tuple(move for move in out[number] if move.numel)
        receives = tuple(move for move in into[number] if move.numel)
        local = [actions[i] for i in positions if program.vocabulary.role(actions[i]) == LOCAL]
        copies = tuple(_copy(action, bounds) for action in local)
        result.append(ProgramStage(sends, receives, copies))
    return tuple(result)


def apply_move(x: torch.Tensor, move: ProgramMove, data: torch.Tensor, op: str) -> None:
    """Combine `data` by `op` with the slices of `x` that `move` names, or replace them by it."""
    start = 0
    for part in move.parts:
        end = start + part.stop - part.start
        there, here = x[part], data[start:end]
        if move.adds:
            combine([there, here], there, op, None)
        else:
            there.copy_(here)
        start = end


def _slices(actions: Sequence[Action], bounds: Sequence[int]) -> tuple[slice, ...]:
    """Return the slices of blocks, joining adjacent blocks."""
    slices: list[slice] = []
    for action in actions:
        start, stop = bounds[action.unit], bounds[action.unit + 1]
        if slices and slices[-1].stop == start:
            slices[-1] = slice(slices[-1].start, stop)
        else:
            slices.append(slice(start, stop))
    return tuple(part for part in slices if part.start < part.stop) or (slice(0, 0),)


def _copy(action: Action, bounds: Sequence[int]) -> ProgramMove:
    to = slice(bounds[action.unit], bounds[action.unit + 1])
    source = slice(bounds[action.edge], bounds[action.edge + 1])
    return ProgramMove(-1, (to,), sources=(source,))
