"""Sequences divided over ranks in place of shards: every rank has some positions of its samples.

The model, the optimizer and checkpoints are those of data parallel training: parameters are whole
on all ranks, and gradients are averaged over all of them. Ranks have equally many positions, so the
mean of their mean losses is the loss.
"""

from __future__ import annotations

from collections.abc import Sequence

from braid.comm import Group
from braid.context_parallel import context_parallel
from braid.data import Windows
from braid.layout import Mesh
from braid.sampling import share_of
from braid.train.config import TrainConfig
from braid.train.gpt import GPT
from braid.train.shards import ParallelShards

__all__ = ["SequenceShards"]


class SequenceShards(ParallelShards):
    """Trains a GPT on divided sequences; see `Shards`.

    Args:
        model: The model, equal on all ranks.
        windows: Samples to train on.
        group: All ranks that train.
        config: Mesh of divided sequences (cp) and replicas (dp).
    """

    def __init__(self, model: GPT, windows: Windows, group: Group, config: TrainConfig) -> None:
        super().__init__(model, windows, group)
        mesh = Mesh.parse(config.mesh)
        self._replica = mesh.coordinates(group.rank).get("dp", 0)
        self._num_replicas = dict(mesh.axes).get("dp", 1)
        sequences = group.split(self._replica)
        assert sequences is not None
        inputs = {"tokens_bt": 1, "targets_bt": 1}
        self._divided = context_parallel(model, sequences, inputs=inputs)

    def share_weights(self) -> None:
        """See `Shards`: every rank has them, and the model gets whole sequences again."""
        self._divided.remove()

    def _share(self, indices: Sequence[int]) -> list[int]:
        return share_of(indices, self._replica, self._num_replicas)
