"""Comparison of the batches that the ranks of a pipeline get.

The first stage takes the inputs of its rank, and the last stage the targets of its rank. If ranks
got different batches, inputs would meet targets of other samples. Inputs that only differ where
they are not read do no harm, nor do such targets. So a rank counts as wrong if both differ.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from braid.comm import Group
from braid.errors import ConfigError
from braid.parallel.gradients.same_batches import ADVICE, SameBatches
from braid.types import ranks_text

__all__ = ["SharedBatch"]


class SharedBatch:
    """Check of the batches of a pipeline.

    Args:
        group: Ranks of the pipeline.
        first: Group ranks with the first stage, which read inputs.
        last: Group ranks with the last stage, which read targets.

    Attributes:
        layer_group: Ranks that share the layers of this rank's stages, by tensor parallelism; None
            if layers are whole.
    """

    def __init__(self, group: Group, first: Sequence[int], last: Sequence[int]) -> None:
        self._group, self._first, self._last = group, first, last
        self._comparison = SameBatches()
        self._has_warned = False
        self.layer_group: Group | None = None

    def check_rows(self, rows: int) -> None:
        """Check that batches have the same number of rows on all ranks; a collective.

        Raises:
            ConfigError: Numbers of rows differ.
        """
        counts = self._group.all_gather(torch.tensor([rows])).tolist()
        if len(set(counts)) > 1:
            msg = (
                f"ranks of a pipeline got batches of different sizes, {counts} rows by rank: "
                "pass the same batch on all ranks"
            )
            raise ConfigError(msg)

    def compare(self, batch: Any, target: Any) -> None:
        """Compare a batch and its target with the values of other ranks; a collective.

        Warns once if the ranks that read inputs or targets have different batches.

        Raises:
            MismatchError: Ranks that share layers have different batches.
        """
        if not self._comparison.is_due():
            return
        group = self._group
        if self.layer_group is not None and group.rank in self._first:
            self._comparison.require(self.layer_group, "inputs", batch)
        if self.layer_group is not None and group.rank in self._last:
            self._comparison.require(self.layer_group, "targets", target)
        root = self._first[0]
        differing = self._comparison.differing(group, batch, target, root=root)
        readers = {group.ranks[rank] for rank in (*self._first, *self._last)}
        others = readers.intersection(*differing)
        if others and not self._has_warned:
            self._has_warned = True
            text = (
                f"the first and the last stage read batches on rank {group.ranks[root]} and "
                f"{ranks_text(sorted(others))}, which got different batches, so inputs meet "
                f"targets of other samples. {ADVICE}. Shown once"
            )
            warnings.warn(text, UserWarning, stacklevel=2)
