"""Run any collective program on a channel, as steps that any waiting thread can take.

A rank writes its messages into its window, one behind the other, so no byte of it is written twice.
A turn is one step, which only its receivers read:

    turn    copy messages into the window | step | wait for the steps of senders, add or copy

Tensors are processed in pieces, and a piece begins and ends with a synchronisation of all ranks.
This is the cost of a general program: the engine's built-in algorithms overlap several chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from braid.comm.algorithms.program_stages import ProgramMove, ProgramStage, apply_move, stages
from braid.comm.channel.channel import Channel
from braid.comm.channel.window import LINE_BYTES, Window
from braid.comm.tensors.reduction import finish
from braid.errors import ConfigError
from braid.programs.schedule import Program
from braid.programs.schedule.collective import ALGORITHMS, algorithm, program
from braid.programs.schedule.collective.vocabulary import ROOTED
from braid.programs.schedule.program import batches
from braid.runtime.transport import Steps

__all__ = ["PIECE_BYTES", "PROGRAMS", "Programs", "check_equal_parts", "names_for", "program_steps"]

PIECE_BYTES = 4 << 20
MAX_PARTS = 256  # parts cached for the next call of the same size
PROGRAMS = tuple(dict.fromkeys(name for name, _ in ALGORITHMS if name != "hierarchical"))
WHOLE = ("all_reduce", "broadcast", "reduce")  # not divided by rank: can be cut anywhere


class ProgramPart(NamedTuple):
    """Messages and copies of one rank in a collective's program, for a buffer of one length.

    Attributes:
        stages: This rank's messages and copies of each round, in the order of rounds.
        num_turns: Number of steps of the rank that needs the most steps to send its messages.
        numel: Number of elements sent by the rank that sends most.
    """

    stages: tuple[ProgramStage, ...]
    num_turns: int
    numel: int


class Programs:
    """Cache of the collective programs of one rank.

    Args:
        rank: Group rank.
        size: Number of members.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._programs: dict[tuple[str, str, int], Program] = {}
        self._parts: dict[tuple[str, str, int, int], ProgramPart] = {}

    def part(self, name: str, operation: str, root: int, numel: int) -> ProgramPart:
        """Return this rank's part of the algorithm `name`, for a buffer of `numel` elements."""
        key = (name, operation, root, numel)
        part = self._parts.get(key)
        if part is None:
            if len(self._parts) >= MAX_PARTS:
                self._parts.clear()
            written = self.program(name, operation, root)
            every = [stages(written, rank, numel) for rank in range(self._size)]
            turns = max(len(list(batches(written, rank))) for rank in range(self._size))
            most = max(sum(move.numel for s in part for move in s.sends) for part in every)
            part = self._parts[key] = ProgramPart(every[self._rank], turns, most)
        return part

    def program(self, name: str, operation: str, root: int) -> Program:
        """Return the program of the algorithm `name` for `operation` on this number of ranks."""
        key = (name, operation, root)
        written = self._programs.get(key)
        if written is None:
            program_root = root if operation in ROOTED else None
            rounds = algorithm(name, operation, self._size, root=program_root)
            written = self._programs[key] = program(rounds)
        return written


def names_for(operation: str) -> tuple[str, ...]:
    """Return the names of the programs that implement `operation` on any group."""
    return tuple(n for n, what in ALGORITHMS if what == operation and n in PROGRAMS)


def check_equal_parts(kind: str, algorithm: str, widths: Sequence[int] | None) -> None:
    """Raise if parts may have different sizes; collective programs need equal parts.

    Raises:
        ConfigError: The sizes differ on this rank, or may differ on other ranks.
    """
    if widths is not None and (kind == "all_to_all" or len(set(widths)) > 1):
        msg = (
            f"algorithm {algorithm!r} of {kind} needs parts of equal size in one tensor, but "
            f"these parts have {list(widths)} elements: leave algorithm out"
        )
        raise ConfigError(msg)


def program_steps(
    ch: Channel,
    programs: Programs,
    name: str,
    operation: str,
    x: torch.Tensor,
    *,
    op: str = "sum",
    scale: float | None = None,
    root: int = 0,
) -> Steps:
    """Run a program on the flat buffer `x`, in place.

    Args:
        ch: Channel of the group.
        programs: Programs of this rank.
        name: Name of the algorithm.
        operation: Operation that the algorithm implements.
        x: All blocks in the order of ranks; for all_to_all the input and the output, concatenated.
        op: Reduction.
        scale: Factor for a reduced result.
        root: Group rank.
    """
    rows = 0 if operation in WHOLE else ch.size * (2 if operation == "all_to_all" else 1)
    if rows and x.numel() % rows:
        msg = (
            f"algorithm {name!r} needs parts of equal size, but {x.numel()} elements cannot be "
            f"divided into {rows} equal parts: pad the tensor, or leave algorithm out"
        )
        raise ConfigError(msg)
    for piece in _pieces(x, rows):
        part = programs.part(name, operation, root, piece.data.numel())
        yield from _carry_out(ch, part, piece.data, "sum" if op == "avg" else op)
        if piece.home is not None:
            piece.home.copy_(piece.data.view(piece.home.shape))
    finish(x, op, ch.size, scale)


class _Piece(NamedTuple):
    """A flat part of a buffer, or of each of its rows, with the slice to copy it back to."""

    data: torch.Tensor
    home: torch.Tensor | None = None


def _pieces(x: torch.Tensor, rows: int) -> list[_Piece]:
    limit = max(1, PIECE_BYTES // x.element_size())
    if x.numel() <= limit:
        return [_Piece(x)]
    if not rows:
        return [_Piece(x[i : i + limit]) for i in range(0, x.numel(), limit)]
    table = x.view(rows, -1)
    width = max(1, limit // rows)
    parts = [table[:, i : i + width] for i in range(0, table.shape[1], width)]
    return [_Piece(part.reshape(-1), part) for part in parts]


def _carry_out(ch: Channel, part: ProgramPart, x: torch.Tensor, op: str) -> Steps:
    window = Window(ch, max(LINE_BYTES, part.numel * x.element_size()))
    yield from window.open()
    first = ch.value + 1
    for number in range(part.num_turns):
        stage = part.stages[number] if number < len(part.stages) else ProgramStage((), (), ())
        copied = [torch.cat([x[s] for s in move.sources]) for move in stage.copies]
        _send(window, ch.rank, stage.sends, x)
        for move in stage.receives:
            yield from window.reached([move.peer], first + move.turn)
            apply_move(x, move, _row(window, move.peer, move, x.dtype), op)
        for move, data in zip(stage.copies, copied, strict=True):
            apply_move(x, move, data, op)
    yield from window.close()


def _send(window: Window, rank: int, sends: Sequence[ProgramMove], x: torch.Tensor) -> None:
    """Write messages into this rank's window and publish them in one step."""
    if not sends:
        window.publish(())
        return
    size = x.element_size()
    low = min(move.place for move in sends) * size // LINE_BYTES * LINE_BYTES
    parts: dict[int, tuple[int, int]] = {}
    for move in sends:
        row = _row(window, rank, move, x.dtype)
        torch.cat([x[s] for s in move.parts], out=row)
        start = move.place * size - low
        known = parts.get(move.peer, (start, start))
        parts[move.peer] = (known[0], start + move.numel * size)
    window.publish(list(parts), low, max(end for _, end in parts.values()), list(parts.values()))


def _row(window: Window, member: int, move: ProgramMove, dtype: torch.dtype) -> torch.Tensor:
    """Return the elements of a message in its sender's window.

    A message may begin anywhere; views begin at a multiple of 64 bytes.
    """
    start = move.place * dtype.itemsize
    before = start % LINE_BYTES // dtype.itemsize
    return window.view(member, start - before * dtype.itemsize, before + move.numel, dtype)[before:]
