"""Program of a benchmark's ranks: calls a function with its plan, and passes on its figures.

python -m braid.cli.bench.harness.rank module:function PLAN [FILE]
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

import msgspec
import torch

__all__ = ["main"]


def main(target: str, plan: str, file: str = "") -> None:
    """Call the function that `target` names with `plan`, on one thread.

    Args:
        target: `module:function`; the function's first argument has the type of the plan.
        plan: The plan as JSON.
        file: File for the figures that the function returns on one rank. Without it, they are
            an iterable, whose elements are printed as they come, a line of JSON each.
    """
    module, _, name = target.partition(":")
    function = getattr(import_module(module), name)
    kind = next(iter(get_type_hints(function).values()))
    torch.set_num_threads(1)
    figures = function(msgspec.json.decode(plan, type=kind))
    if figures is None:
        return
    if file:
        Path(file).write_bytes(msgspec.json.encode(figures))
    else:
        for each in figures:
            print(msgspec.json.encode(each).decode(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
