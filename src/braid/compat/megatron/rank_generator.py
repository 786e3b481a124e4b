"""Megatron's RankGenerator: the ranks of the groups of each kind of parallelism.

`Grid` computes the groups, and has a picture; this module has Megatron's names, arguments and
exceptions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from braid.compat.megatron.failure import UsageError
from braid.errors import ConfigError, raise_all
from braid.programs.layout import Grid, Mesh

__all__ = ["RankGenerator", "generate_masked_orthogonal_rank_groups", "hierarchical_ranks"]


class RankGenerator:
    """Groups of ranks that differ only along some kinds of parallelism.

    Args:
        tp: Number of ranks that share each layer.
        ep: Number of ranks among which experts are divided.
        dp: Number of copies of the model.
        pp: Number of stages.
        cp: Number of ranks that share a sequence.
        order: Kinds, the fastest varying first, such as `tp-cp-ep-dp-pp`.
        rank_offset: First rank.

    Raises:
        UsageError: A kind with several ranks is not in the order, or `ep` and `cp` are both above
            1.
    """

    def __init__(
        self, tp: int, ep: int, dp: int, pp: int, cp: int, order: str, rank_offset: int = 0
    ) -> None:
        sizes = {"tp": tp, "pp": pp, "dp": dp, "ep": ep, "cp": cp}
        if ep > 1 and cp > 1:
            msg = (
                f"ep={ep} and cp={cp}: one RankGenerator supports either experts or context "
                "parallelism. Make two, as initialize_model_parallel does"
            )
            raise UsageError(msg)
        try:
            self._grid = Grid(sizes, order, first_rank=rank_offset)
        except ConfigError as error:
            raise UsageError(str(error)) from error
        self.tp, self.ep, self.dp, self.pp, self.cp = tp, ep, dp, pp, cp
        self.rank_offset = rank_offset
        self.world_size = self._grid.size
        self.name_to_size = sizes
        self.order = "-".join(self._grid.order)
        self.ordered_size = list(self._grid.sizes.values())

    def get_mask(self, order: str, token: str) -> list[bool]:
        """Return, for each kind in `order`, whether it is in a token such as `tp-dp`."""
        kinds = order.split("-")
        if unknown := [kind for kind in token.split("-") if kind not in kinds]:
            msg = f"{', '.join(unknown)} is not in the order {order}: add it, or set its size to 1"
            raise UsageError(msg)
        return [kind in token.split("-") for kind in kinds]

    def get_ranks(self, token: str) -> list[list[int]]:
        """Return all groups of ranks that differ along the kinds of a token such as `tp-dp`."""
        self.get_mask(self.order, token)
        return self._grid.groups(token)


def generate_masked_orthogonal_rank_groups(
    world_size: int, parallel_size: Sequence[int], mask: Sequence[bool]
) -> list[list[int]]:
    """Return all groups of ranks that differ only along the dims of a mask.

    Args:
        world_size: Number of ranks.
        parallel_size: Length of each dim, the fastest varying dim first.
        mask: Whether ranks of a group differ along each dim.

    Raises:
        UsageError: The product of the lengths is not `world_size`, or `mask` has another length.
    """
    problems = []
    if len(mask) != len(parallel_size):
        problems.append(
            f"parallel_size has {len(parallel_size)} entries, but mask has {len(mask)}: pass one "
            "boolean per entry"
        )
    if math.prod(parallel_size) != world_size:
        problems.append(
            f"parallel_size {list(parallel_size)} has {math.prod(parallel_size)} ranks, but "
            f"world_size is {world_size}: make the two equal"
        )
    raise_all(problems, UsageError)
    names = [f"dim{number}" for number in range(len(mask))]
    mesh = Mesh(dict(reversed([*zip(names, parallel_size, strict=True), ("all", 1)])))
    along = [name for name, masked in zip(names, mask, strict=True) if masked]
    groups = {mesh.peers(along, rank): None for rank in range(world_size)}
    return [list(group) for group in groups]


def hierarchical_ranks(ranks: Sequence[int], sizes: Sequence[int]) -> list[list[list[int]]]:
    """Return the groups of each level: adjacent ranks in level 0, larger strides above.

    >>> hierarchical_ranks(range(4), [2, 2])
    [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]
    """
    masks = [[level == dim for dim in range(len(sizes))] for level in range(len(sizes))]
    return [
        [
            [ranks[index] for index in group]
            for group in generate_masked_orthogonal_rank_groups(len(ranks), sizes, mask)
        ]
        for mask in masks
    ]
