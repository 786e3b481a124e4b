"""Vocabulary of collectives: blocks that are sent, received, added and copied.

The buffer of every rank is divided into blocks, which are the units of its actions. The content of
a block is written `(block, ranks)`: a block of the result, and the ranks with a contribution to its
current sum. An operation defines what all ranks hold at the start and what they must hold
at the end; between them the validator only adds up (`contributions`).

    all_reduce       block b of all ranks        ->  all ranks: block b of all ranks
    reduce           block b of all ranks        ->  root: block b of all ranks
    reduce_scatter   block b of all ranks        ->  rank r: block r of all ranks
    broadcast        block b of the root         ->  all ranks: block b of the root
    scatter          block b of the root         ->  rank r: block r of the root
    all_gather       rank r: block r             ->  all ranks: block b of rank b
    gather           rank r: block r             ->  root: block b of rank b
    all_to_all       rank r: p blocks, b for     ->  in p further blocks of rank r,
                     rank b                          block b from rank b
"""

from __future__ import annotations

from typing import NamedTuple

from braid.errors import raise_all
from braid.programs.schedule.program import LOCAL, RECEIVE, SEND, Kind, Vocabulary

__all__ = [
    "COLLECTIVE",
    "OPERATIONS",
    "ROOTED",
    "Held",
    "header_problems",
    "held_at_end",
    "held_at_start",
    "num_slots",
]

COLLECTIVE = Vocabulary(
    name="collective",
    kinds={
        "send": Kind(SEND, "send a block"),
        "recv": Kind(RECEIVE, "receive a block, and overwrite the old one"),
        "reduce": Kind(RECEIVE, "receive a block and add it"),
        "copy": Kind(LOCAL, "copy block `edge` to `unit`", has_edge=True),
    },
    unit_name="block",
    index_name="round",
    posts="round",
)

OPERATIONS = (
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "broadcast",
    "scatter",
    "all_gather",
    "gather",
    "all_to_all",
)
ROOTED = ("broadcast", "reduce", "gather", "scatter")


class Held(NamedTuple):
    """Content of a block in a rank's buffer: which block of the result, and from which ranks.

    Attributes:
        block: Index of the block in the result; for all_to_all, sender * p + receiver.
        ranks: Bit mask; bit r is set if the block contains the contribution of rank r.
    """

    block: int
    ranks: int


def num_slots(operation: str, num_ranks: int, num_blocks: int) -> int:
    """Return the number of blocks of a rank's buffer; all_to_all has two buffers in a row."""
    return 2 * num_ranks if operation == "all_to_all" else num_blocks


def held_at_start(
    operation: str, num_ranks: int, num_blocks: int, root: int
) -> list[dict[int, Held]]:
    """Return the contents of every rank's blocks at the start; missing blocks hold nothing."""
    _check(operation, num_ranks, num_blocks, root)
    bits = [1 << rank for rank in range(num_ranks)]
    if operation in {"all_reduce", "reduce", "reduce_scatter"}:
        return [{b: Held(b, bits[r]) for b in range(num_blocks)} for r in range(num_ranks)]
    if operation in {"broadcast", "scatter"}:
        full = {b: Held(b, bits[root]) for b in range(num_blocks)}
        return [full if r == root else {} for r in range(num_ranks)]
    if operation in {"all_gather", "gather"}:
        return [{r: Held(r, bits[r])} for r in range(num_ranks)]
    return [
        {b: Held(r * num_ranks + b, bits[r]) for b in range(num_ranks)} for r in range(num_ranks)
    ]


def held_at_end(
    operation: str, num_ranks: int, num_blocks: int, root: int
) -> list[dict[int, Held]]:
    """Return the required contents of blocks at the end; missing blocks may hold anything."""
    _check(operation, num_ranks, num_blocks, root)
    everybody = (1 << num_ranks) - 1
    ranks, blocks = range(num_ranks), range(num_blocks)
    reduced = {b: Held(b, everybody) for b in blocks}
    gathered = {r: Held(r, 1 << r) for r in ranks}
    if operation == "all_reduce":
        return [reduced for _ in ranks]
    if operation == "reduce":
        return [reduced if r == root else {} for r in ranks]
    if operation == "reduce_scatter":
        return [{r: reduced[r]} for r in ranks]
    if operation == "broadcast":
        return [{b: Held(b, 1 << root) for b in blocks} for _ in ranks]
    if operation == "scatter":
        return [{r: Held(r, 1 << root)} for r in ranks]
    if operation == "all_gather":
        return [gathered for _ in ranks]
    if operation == "gather":
        return [gathered if r == root else {} for r in ranks]
    return [{num_ranks + b: Held(b * num_ranks + r, 1 << b) for b in ranks} for r in ranks]


def header_problems(operation: str, num_ranks: int, num_blocks: int, root: int) -> list[str]:
    """Return the errors in a header as texts; an empty list if it is valid."""
    if operation not in OPERATIONS:
        return [f"unknown operation {operation!r}: choose one of {', '.join(OPERATIONS)}"]
    problems = []
    rooted = operation in ROOTED
    if rooted != (root >= 0) or root >= num_ranks:
        wanted = f"a root from 0 to {num_ranks - 1}" if rooted else "no root"
        problems.append(f"{operation} needs {wanted}, got {(root if root >= 0 else 'none')}")
    by_rank = operation in {"reduce_scatter", "scatter", "all_gather", "gather", "all_to_all"}
    expected = num_slots(operation, num_ranks, num_ranks)
    if by_rank and num_blocks != expected:
        needs = f"{operation} on {num_ranks} ranks needs {expected} blocks"
        problems.append(f"{needs}, got {num_blocks}")
    return problems


def _check(operation: str, num_ranks: int, num_blocks: int, root: int) -> None:
    problems = header_problems(operation, num_ranks, num_blocks, root)
    raise_all(problems)
