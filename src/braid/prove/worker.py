"""One rank of `braid prove`; the first prints what was found."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from braid.context import init, shutdown
from braid.prove.proving import Proof, prove
from braid.prove.task import load_task

__all__ = ["Plan", "Told", "main"]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to prove.

    Attributes:
        file: Path of the task.
        steps: How many.
    """

    file: str
    steps: int


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What the first rank prints."""

    proof: Proof


def main(plan: Plan) -> None:
    """Prove it."""
    group = init()
    found = prove(group, load_task(Path(plan.file)), plan.steps)
    if found is not None:
        print(msgspec.json.encode(Told(proof=found)).decode(), flush=True)
    shutdown()


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Plan))
