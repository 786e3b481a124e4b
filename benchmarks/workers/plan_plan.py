"""Plan of `plan`, which its front and its processes share."""

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
        models: Sizes of `braid train`, each with its rows of a micro-batch, such as mini:4.
        context: Tokens of a sequence.
        num_microbatches: Micro-batches of a synchronous batch, and of a step of 2bw.
        batches: Number of such batches in a round.
        rounds: Number of rounds, in each of which all pipelines train in turn.
        steps: Trainings whose splits are predicted and measured: model, batch and context.
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
    """A training whose splits are predicted and measured.

    Attributes:
        model: Size of `braid train`.
        batch: Rows of a step.
        context: Bytes of a sequence.
        microbatches: Micro-batches of pipelines.
        rounds: Number of rounds, in each of which every split takes two steps.
        profile_s: Seconds to profile for in each round.
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
    """Trainings to measure, and the file for the figures."""

    steps: list[Steps]


class StepError(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted and measured step of a split.

    Attributes:
        model: Name of the training.
        ranks: Number of ranks.
        split: The split.
        predicted_s: Predicted seconds of a step.
        measured_s: Measured seconds of a step, at the usual speed of the machine.
        predicted_bytes: Predicted bytes of tensors of the rank that holds most.
        measured_bytes: Measured bytes.
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
