"""The program of each rank of `braid prove`; the first rank returns the proof."""

from __future__ import annotations

from pathlib import Path

import msgspec

from braid.context import init, shutdown
from braid.train.prove.proving import Proof, prove
from braid.train.prove.task import load_task

__all__ = ["ProofConfig", "main"]


class ProofConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The task that is trained in both ways and compared, and the number of steps.

    Attributes:
        file: Path of the task.
        steps: Number of steps.
    """

    file: str
    steps: int


def main(config: ProofConfig) -> Proof | None:
    """Compare the two runs; the first rank returns the proof."""
    group = init()
    proof = prove(group, load_task(Path(config.file)), config.steps)
    shutdown()
    return proof
