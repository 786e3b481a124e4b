"""The tables of a run: how each is divided into shards, and on which chain each shard lies.

All nodes declare the same tables, so that nothing of this travels.

    dense      element i of n lies on shard i * num_shards // n ... in ranges of equal size
    sparse     row `id` lies on shard hash(id) mod num_shards
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from braid.ps.consistency import Consistency
from braid.ps.protocol.directory import virtual_shard
from braid.ps.storage import Storage

__all__ = ["SHARD_BYTES", "TableSpec", "num_dense_shards"]

SHARD_BYTES = 1 << 20  # a dense table has a shard for each so many bytes
MAX_SHARDS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSpec:
    """A table, as all nodes know it.

    Attributes:
        name: Its name.
        num_shards: Number of its shards.
        consistency: When pushes are applied, and pulls answered, at first.
        make_storage: Function of a shard's number that returns its storage.
        form: Shape, dtype and whatever else all nodes must agree on, as text.
        first: Checksum of the first values, on which servers must agree.
        sizes: Lengths of the parameters that a dense table consists of, if it has several.
    """

    name: str
    num_shards: int
    consistency: Consistency
    make_storage: Callable[[int], Storage]
    form: str = ""
    first: int = 0
    sizes: tuple[int, ...] = ()

    def virtual(self, shard: int) -> int:
        """Return the virtual shard of a shard."""
        return virtual_shard(self.name, shard)


def num_dense_shards(nbytes: int) -> int:
    """Return of how many shards a dense table consists."""
    return max(1, min(MAX_SHARDS, -(-nbytes // SHARD_BYTES)))
