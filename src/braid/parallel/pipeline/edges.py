"""Skip connections of a model that is cut into stages: those that lead from one to another."""

from __future__ import annotations

from collections.abc import Sequence

from braid.parallel.pipeline.skip import SkipKey, skips_of, verify_skippables
from braid.parallel.pipeline.stage import Edge, Layer

__all__ = ["edges_of"]


def edges_of(parts: Sequence[Sequence[Layer]]) -> list[Edge]:
    """Return the skip connections between stages, numbered alike on all ranks.

    Args:
        parts: Layers of each stage of the whole model.

    Raises:
        TypeError: Pairs of stash and pop do not match.
    """
    verify_skippables([layer.module for part in parts for layer in part])
    sources: dict[SkipKey, int] = {}
    edges: list[Edge] = []
    for stage, part in enumerate(parts):
        for layer in part:
            stashes, pops = skips_of(layer.module)
            sources.update(dict.fromkeys(stashes, stage))
            edges += [
                Edge(key, len(edges) + 1 + i, sources[key], stage)
                for i, key in enumerate(key for key in pops if sources[key] != stage)
            ]
    return edges
