"""PipeDream's plan as a file, from `braid plan pipedream --plan` to `braid train --plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from braid.errors import ConfigError
from braid.plan.pipedream.recurrences import Partition

__all__ = ["PipeDreamPlan", "read_plan"]


class PipeDreamPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Stages of an asynchronous pipeline.

    Attributes:
        kind: Kind of plan.
        model: Name of the model.
        versions: Weights that a stage uses for a micro-batch.
        replicas: Number of ranks of each stage.
        balance: Number of layers of each stage.
        seconds: Predicted time of a micro-batch.
    """

    kind: Literal["pipedream"] = "pipedream"
    model: str = ""
    versions: str = "stash"
    replicas: tuple[int, ...]
    balance: tuple[int, ...]
    seconds: float = 0.0

    @classmethod
    def of(cls, partition: Partition, model: str) -> PipeDreamPlan:
        """Return the plan of a partition of layers in a row."""
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

    @property
    def balance_text(self) -> str:
        """Numbers of layers, as `braid train --balance` takes them."""
        return ",".join(map(str, self.balance))

    def write(self, path: str | Path) -> None:
        """Write the plan as JSON, which may be changed and read again."""
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1))


def read_plan(path: str | Path) -> PipeDreamPlan:
    """Read a plan.

    Raises:
        ConfigError: The file cannot be read, or is no plan; the wrong part is named.
    """
    try:
        plan = msgspec.json.decode(Path(path).read_bytes(), type=PipeDreamPlan)
    except OSError as exc:
        msg = f"cannot read {path}: {exc.strerror}"
        raise ConfigError(msg) from exc
    except msgspec.MsgspecError as exc:
        msg = f"{path} is no plan: {exc}. Make one with `braid plan pipedream --plan {path}`"
        raise ConfigError(msg) from exc
    if (
        len(plan.replicas) != len(plan.balance)
        or min((*plan.replicas, *plan.balance), default=0) < 1
    ):
        msg = (
            f"{path}: replicas {list(plan.replicas)} and balance {list(plan.balance)} must have a "
            "number of at least 1 for each stage"
        )
        raise ConfigError(msg)
    return plan
