"""PipeDream's plan as a file, from `braid plan pipedream --plan` to `braid train --plan`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from braid.errors import ConfigError
from braid.plan.pipedream.recurrences import Partition

__all__ = ["PipeDreamPlan"]


class PipeDreamPlan(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag="pipedream",
):
    """Plan file of an asynchronous pipeline: its stages, as PipeDream's search has found them.

    Attributes:
        model: Name of the model.
        versions: Rule for the version of the weights that a stage uses for a micro-batch.
        replicas: Number of ranks of each stage.
        balance: Number of layers of each stage.
        seconds: Predicted time of a micro-batch.
    """

    model: str = ""
    versions: str = "stash"
    replicas: tuple[int, ...]
    balance: tuple[int, ...]
    seconds: float = 0.0

    @classmethod
    def of(cls, partition: Partition, model: str) -> PipeDreamPlan:
        """Convert a partition of sequential layers to a plan; `model` is the model's name."""
        return cls(
            model=model,
            replicas=tuple(stage.replicas for stage in partition.stages),
            balance=tuple(len(stage.nodes) for stage in partition.stages),
            seconds=partition.seconds,
        )

    @property
    def num_ranks(self) -> int:
        """Number of ranks of all stages."""
        return sum(self.replicas)

    def write(self, path: str | Path) -> None:
        """Write the plan as JSON, which may be changed and read again."""
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1))

    def check(self, path: str) -> None:
        """Raise ConfigError unless each stage has ranks and layers."""
        numbers = (*self.replicas, *self.balance)
        if len(self.replicas) != len(self.balance) or min(numbers, default=0) < 1:
            msg = (
                f"{path}: replicas {list(self.replicas)} and balance {list(self.balance)} must "
                "have a number of at least 1 for each stage"
            )
            raise ConfigError(msg)
