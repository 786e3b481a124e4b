"""The program of each rank of `braid prove`; the first rank prints the proof."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from braid.context import init, shutdown
from braid.train.prove.proving import Proof, prove
from braid.train.prove.task import load_task

__all__ = ["ProofConfig", "ProofLine", "main"]


class ProofConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The task that is trained in both ways and compared, and the number of steps.

    Attributes:
        file: Path of the task.
        steps: Number of steps.
    """

    file: str
    steps: int


class ProofLine(msgspec.Struct, frozen=True, kw_only=True):
    """The line that the first rank prints.

    Attributes:
        proof: Result of the comparison.
    """

    proof: Proof


def main(config: ProofConfig) -> Iterator[ProofLine]:
    """Compare the two runs; the first rank yields the proof."""
    group = init()
    proof = prove(group, load_task(Path(config.file)), config.steps)
    if proof is not None:
        yield ProofLine(proof=proof)
    shutdown()
