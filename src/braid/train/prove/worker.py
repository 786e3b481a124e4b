"""The program of each rank of `braid prove`; the first rank prints the proof."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from braid.context import init, shutdown
from braid.train.prove.proving import Proof, prove
from braid.train.prove.task import load_task

__all__ = ["ProofConfig", "ProofLine", "main"]


class ProofConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The task to prove and the number of steps.

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


def main(config: ProofConfig) -> None:
    """Compare the two runs and print the proof on the first rank."""
    group = init()
    proof = prove(group, load_task(Path(config.file)), config.steps)
    if proof is not None:
        print(msgspec.json.encode(ProofLine(proof=proof)).decode(), flush=True)
    shutdown()


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=ProofConfig))
