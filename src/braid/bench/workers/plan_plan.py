"""Plan of `braid bench plan`, which its front and its processes share."""

from __future__ import annotations

import msgspec

from braid.schedule.pipeline import VersionRule

__all__ = ["PARTS", "RULES", "SYNCHRONOUS", "Plan"]

PARTS = ("asynchronous",)
SYNCHRONOUS = "1f1b"
RULES: tuple[VersionRule, ...] = ("stash", "vertical_sync", "2bw")


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements to make.

    Attributes:
        parts: Names out of `PARTS`.
        models: Sizes of `braid train`, each with its rows of a micro-batch, such as mini:4.
        context: Tokens of a sequence.
        num_microbatches: Micro-batches of a synchronous batch, and of a step of 2bw.
        batches: Number of such batches in a round.
        rounds: Number of rounds, in each of which all pipelines train in turn.
        out: File for the figures.
    """

    parts: tuple[str, ...] = PARTS
    models: tuple[str, ...] = ("mini:4", "small:2")
    context: int = 128
    num_microbatches: int = 4
    batches: int = 6
    rounds: int = 6
    out: str = ""
