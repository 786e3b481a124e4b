"""Options and figures of `plan`, shared by its command and its ranks."""

from __future__ import annotations

import msgspec

from braid.programs.schedule.pipeline import VersionRule

__all__ = ["PARTS", "RULES", "SYNCHRONOUS", "Plan", "StepError", "Steps", "StepsPlan"]

PARTS = ("steps", "oversubscribed", "asynchronous", "device")
SYNCHRONOUS = "1f1b"
RULES: tuple[VersionRule, ...] = ("stash", "vertical_sync", "2bw")


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements to make.

    Attributes:
        models: Model sizes of `braid train` with the rows of a micro-batch, such as mini:4.
        context: Number of tokens in a sequence.
        num_microbatches: Number of micro-batches in a synchronous batch, and in a step of 2bw.
        batches: Number of batches in a round.
        rounds: Number of rounds; all pipelines train in turn in each of them.
        steps: Trainings to predict and measure: model, batch and context.
        vtrain: File of vTrain's measured iterations.
    """

    models: tuple[str, ...] = ("mini:4", "small:2")
    context: int = 128
    num_microbatches: int = 4
    batches: int = 6
    rounds: int = 6
    steps: tuple[str, ...] = ("tiny:32:128", "mini:16:128", "small:8:64", "medium:8:32")
    vtrain: str = ""


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """A training with splits to predict and measure.

    Attributes:
        model: Model size of `braid train`.
        batch: Number of rows in a step.
        context: Number of bytes in a sequence.
        microbatches: Number of micro-batches in pipelines.
        rounds: Number of rounds; every split takes two steps in each of them.
        profile_s: Seconds of profiling in each round.
    """

    model: str
    batch: int
    context: int
    microbatches: int = 4
    rounds: int = 5
    profile_s: float = 1.5

    @property
    def name(self) -> str:
        """Name of the training."""
        return f"{self.model}:{self.batch}:{self.context}"


class StepsPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Trainings to measure."""

    steps: list[Steps]


class StepError(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted and measured step of a split.

    Attributes:
        model: Name of the training.
        ranks: Number of ranks.
        split: The split.
        predicted_s: Predicted seconds of a step.
        measured_s: Measured seconds of a step, at the median speed of the machine.
        predicted_bytes: Predicted bytes of tensors on the rank that holds most.
        measured_bytes: Measured bytes of tensors on the rank that holds most.
    """

    model: str
    ranks: int
    split: str
    predicted_s: float
    measured_s: float
    predicted_bytes: float
    measured_bytes: float

    @property
    def error(self) -> float:
        """Relative error of the time."""
        return self.predicted_s / self.measured_s - 1

    @property
    def bytes_error(self) -> float:
        """Relative error of the bytes."""
        return self.predicted_bytes / self.measured_bytes - 1
