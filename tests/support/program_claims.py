"""Claims about programs: each algorithm of the catalogue gives what its operation promises."""

from __future__ import annotations

import torch

from braid.comm import Group
from braid.comm.algorithms.programs import names_for
from support.claims import Claim, needs, of_rank, same

__all__ = ["PROGRAM_CLAIMS"]

WIDTHS = (1, 7, 301)


def _inputs(group: Group, numel: int) -> list[torch.Tensor]:
    """Make small whole numbers, whose sums are exact in any order."""
    return [of_rank(r, numel, torch.int64).float() for r in range(group.size)]


@needs("programs")
def programs_reduce(group: Group) -> None:
    """All-reduce, reduce-scatter and reduce work by every algorithm and leave inputs alone."""
    me = group.rank
    for width in WIDTHS:
        inputs = _inputs(group, width * group.size)
        total = torch.stack(inputs).sum(0)
        for name in names_for("all_reduce"):
            same(group.all_reduce(inputs[me].clone(), algorithm=name), total)
            mean = group.all_reduce(inputs[me].clone(), "avg", algorithm=name)
            same(mean, total / group.size)
        for name in names_for("reduce_scatter"):
            x = inputs[me].clone()
            own = total[me * width : (me + 1) * width]
            same(group.reduce_scatter(x, algorithm=name), own)
            same(x, inputs[me])
        for name in names_for("reduce"):
            root = group.size - 1
            x = inputs[me].clone()
            group.reduce(x, root=root, algorithm=name)
            same(x, total if me == root else inputs[me])


@needs("programs")
def programs_move(group: Group) -> None:
    """Broadcast, gather, scatter, all-gather and all-to-all work by every algorithm."""
    me = group.rank
    for width in WIDTHS:
        inputs = _inputs(group, width * group.size)
        root = group.size - 1
        for name in names_for("broadcast"):
            same(group.broadcast(inputs[me].clone(), root, algorithm=name), inputs[root])
        for name in names_for("gather"):
            gathered = group.gather(inputs[me], root, algorithm=name)
            assert (gathered is None) == (me != root)
            if gathered is not None:
                same(gathered, torch.cat(inputs))
        for name in names_for("scatter"):
            parts = inputs[root].clone() if me == root else None
            same(
                group.scatter(parts, root, out=torch.empty(width), algorithm=name),
                inputs[root][me * width : (me + 1) * width],
            )
            assert parts is None or torch.equal(parts, inputs[root])
        for name in names_for("all_gather"):
            same(group.all_gather(inputs[me], algorithm=name), torch.cat(inputs))
        for name in names_for("all_to_all"):
            own = [x[me * width : (me + 1) * width] for x in inputs]
            same(group.all_to_all(inputs[me], algorithm=name), torch.cat(own))


@needs("programs")
def programs_cut_large_tensors(group: Group) -> None:
    """Programs work on tensors of several pieces, one behind the other."""
    numel = 400_000 * group.size
    inputs = _inputs(group, numel)
    same(group.all_reduce(inputs[group.rank].clone(), algorithm="ring"), torch.stack(inputs).sum(0))
    same(group.all_gather(inputs[group.rank], algorithm="ring"), torch.cat(inputs))


PROGRAM_CLAIMS: tuple[Claim, ...] = (programs_reduce, programs_move, programs_cut_large_tensors)
