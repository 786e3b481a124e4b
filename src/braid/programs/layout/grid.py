"""Megatron's groups of ranks: those that differ along some kinds of parallelism only, in any order.

    order "tp-cp-ep-dp-pp"     the leftmost kind varies fastest: tp ranks are neighbours

                     tp=2, dp=2, pp=2            pp 0              pp 1
                     (order tp-dp-pp)      dp 0   0 1        dp 0   4 5
                                           dp 1   2 3        dp 1   6 7

    groups("tp")     0 1 | 2 3 | 4 5 | 6 7        groups("dp")    0 2 | 1 3 | 4 6 | 5 7
    model            0 1 4 5 | 2 3 6 7            a whole copy of the model
    embedding        0 4 | 1 5 | 2 6 | 3 7        first and last stage, which share the embedding

Source: D. Narayanan et al., Efficient large-scale language model training on GPU clusters, SC 2021;
Megatron-LM's RankGenerator, which makes the same groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from braid.errors import raise_all
from braid.programs.layout.mesh import Mesh

__all__ = ["KINDS", "Grid"]

KINDS = ("tp", "cp", "ep", "dp", "pp")
DEFAULT_ORDER = "-".join(KINDS)


class Grid:
    """Ranks arranged by kinds of parallelism, such as tp, dp and pp.

    Args:
        sizes: Number of ranks of each kind; a missing kind has size 1.
        order: Kinds, beginning with the one that varies fastest; kinds of size 1 may be omitted.
        first_rank: Rank at the first position of the grid.

    Raises:
        ConfigError: A kind is unknown, comes twice, or has several ranks and is not in the order.
    """

    def __init__(
        self, sizes: Mapping[str, int], order: str = DEFAULT_ORDER, *, first_rank: int = 0
    ) -> None:
        names = order.lower().split("-")
        unknown = [name for name in (*names, *sizes) if name not in KINDS]
        problems = [f"unknown kind {name!r}: use {', '.join(KINDS)}" for name in unknown]
        twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
        problems += [f"{name} comes twice in the order {order}: name it once" for name in twice]
        problems += [
            f"{name} has {size} ranks, but is not in the order {order}: add it"
            for name, size in sizes.items()
            if size != 1 and name not in names
        ]
        raise_all(problems)
        self.order = tuple(names) + tuple(name for name in KINDS if name not in names)
        self.sizes = {name: sizes.get(name, 1) for name in self.order}
        self.first_rank = first_rank
        self._mesh = Mesh({name: self.sizes[name] for name in reversed(self.order)})

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._mesh.size

    def groups(self, kinds: str) -> list[list[int]]:
        """Return all groups of ranks whose positions differ only in some kinds, such as `tp-dp`.

        Every rank is in one group. Groups are sorted by their first rank.

        Raises:
            ConfigError: A kind is unknown.
        """
        return list(self._groups(kinds))

    def group_of(self, kinds: str, rank: int) -> list[int]:
        """Return the group of a rank; see `groups`."""
        peers = self._mesh.peers(kinds.split("-"), rank - self.first_rank)
        return [self.first_rank + peer for peer in sorted(peers)]

    def embedding_groups(self) -> list[list[int]]:
        """Return the ranks of each pipeline's first and last stage, which share the embedding."""
        return [list(dict.fromkeys((stages[0], stages[-1]))) for stages in self.groups("pp")]

    def position_embedding_groups(self) -> list[list[int]]:
        """Return the rank of each pipeline's first stage, which has the position embedding."""
        return [stages[:1] for stages in self.groups("pp")]

    def _groups(self, kinds: str) -> Iterator[list[int]]:
        seen: set[int] = set()
        for rank in range(self.first_rank, self.first_rank + self.size):
            if rank not in seen:
                group = self.group_of(kinds, rank)
                seen.update(group)
                yield group

    def __str__(self) -> str:
        return "-".join(f"{name}{self.sizes[name]}" for name in self.order)
