"""Makes groups of all ranks over a backend of torch, for tests and benchmarks of `C10dEngine`."""

from __future__ import annotations

import threading

from braid.comm import Group
from braid.comm.engines.c10d import C10dEngine, MakeProcessGroup, make_gloo, make_nccl
from braid.runtime.events import NameTable
from braid.runtime.transport import RankContext

__all__ = ["delegated_world"]


def delegated_world(
    context: RankContext, make: MakeProcessGroup = make_gloo, *, checked: bool = False
) -> Group:
    """Make the group of all ranks over a backend of torch; every rank calls it once.

    Args:
        context: Context of this rank.
        make: `make_gloo`, `make_nccl`, or a function that makes another backend's process group.
        checked: Whether ranks compare their calls before each collective.
    """
    kind = "cuda" if make is make_nccl else "cpu"
    ranks = tuple(range(context.world_size))
    types = frozenset({kind})
    engine = C10dEngine(context, ranks, make, device_types=types, checked=checked)
    # no peer reads this table: ranks compare their calls through the store
    names = NameTable(memoryview(bytearray(256 << 10)), threading.Lock())
    return Group(context, engine, ranks, names)
