"""Layouts of parameters, gradients and optimizer states at each stage.

    stage   compute   storage   gradient   optimizer      bytes sent, x parameters
      0     -         -         -          -              2   (data parallel)
      1     -         -         -          shard          2   reduce-scatter, all-gather
      2     -         -         shard      shard          2   the same
      3     -         shard     shard      shard          3   one more all-gather, for backward

A parameter with storage layout `shard` and compute layout `-` is gathered before use. With an axis
of replicas, the layouts are the same: axes that a layout does not name hold replicas.

Source: S. Rajbhandari et al., "ZeRO", SC 2020, section 5 and 7.
"""

from __future__ import annotations

from typing import NamedTuple

from braid.errors import ConfigError
from braid.programs.layout import Layout, Mesh

__all__ = ["SHARD", "STAGES", "Bytes", "Layouts", "layouts_of"]

SHARD = "shard"
STAGES = (1, 2, 3)


class Layouts(NamedTuple):
    """Layouts (parts on each rank) of a flat vector of parameters, by phase of a step.

    Attributes:
        compute: Layout in forward and backward.
        storage: Layout between a forward and the next use of the parameters.
        gradient: Layout of gradients after backward.
        optimizer: Layout of the optimizer's parameters and states.
    """

    compute: Layout
    storage: Layout
    gradient: Layout
    optimizer: Layout


def layouts_of(stage: int, mesh: Mesh, axis: str = SHARD) -> Layouts:
    """Return the layouts of a stage of sharding (ZeRO).

    Args:
        stage: 1, 2 or 3.
        mesh: Mesh of the ranks; other axes than `axis` hold replicas.
        axis: Axis over which vectors are sharded.

    Raises:
        ConfigError: The stage is unknown.
    """
    if stage not in STAGES:
        msg = f"stage must be 1, 2 or 3, got {stage!r}"
        raise ConfigError(msg)
    whole, cut = Layout(mesh, ((),)), Layout(mesh, ((axis,),))
    return Layouts(
        compute=whole,
        storage=cut if stage >= STAGES[2] else whole,
        gradient=cut if stage >= STAGES[1] else whole,
        optimizer=cut,
    )


class Bytes(NamedTuple):
    """Bytes that a rank holds per parameter, by kind of tensor.

    Attributes:
        param: Bytes of a parameter in computation.
        gradient: Bytes of a gradient after backward.
        owned_gradient: Bytes of a gradient for the optimizer, if it is a separate tensor.
        states: Bytes of the optimizer's states, and of the parameter in float32 if it is a separate
            tensor.
    """

    param: float
    gradient: float
    owned_gradient: float
    states: float

    def live(self, stage: int, num_ranks: int) -> float:
        """Return the bytes on each rank per parameter, from the end of a backward to `zero_grad`.

        Temporary memory of a backward is not included: gathered units, and gradients before sums.

        Args:
            stage: Stage of sharding (ZeRO): 1, 2 or 3.
            num_ranks: Number of ranks.

        >>> Bytes(2, 2, 0, 12).live(3, 4), Bytes(2, 2, 0, 12).live(2, 4)
        (4.0, 5.5)
        """
        param = self.param / (num_ranks if stage == STAGES[2] else 1)
        gradient = self.gradient / (num_ranks if stage >= STAGES[1] else 1)
        return param + gradient + (self.owned_gradient + self.states) / num_ranks
