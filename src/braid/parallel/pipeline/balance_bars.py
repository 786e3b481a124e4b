"""A balance as text: a bar for each stage, and below it one for each of its layers.

stage 0  3 layers  12.1 ms  ██████████████████████████████
  0 Embedding       1.1 ms  ██▋
  1 Block           5.5 ms  █████████████▋
  2 Block           5.5 ms  █████████████▋
stage 1  2 layers  11.2 ms  ███████████████████████████▋
  ...
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

from rich.cells import cell_len, set_cell_size

from braid.runtime.text import seconds_text

__all__ = ["bars"]

WIDTH = 30  # characters of the longest bar
EIGHTHS = " ▏▎▍▌▋▊▉"
MOST_NAME = 40  # characters of a layer's name
KIB = 1024


def bars(sizes: Sequence[int], names: Sequence[str], costs: Sequence[float], unit: str) -> str:
    """Draw the balance of stages.

    Args:
        sizes: Number of layers, by stage.
        names: Name of each layer.
        costs: Cost of each layer.
        unit: Unit of costs: `s` or `bytes`.
    """
    rows = list(_rows(sizes, names, costs))
    heaviest = max((cost for _, cost, is_stage in rows if is_stage), default=0.0)
    shown = [_text(cost, unit) for _, cost, _ in rows]
    wide = min(MOST_NAME, max((cell_len(name) for name, _, _ in rows), default=0))
    right = max(map(len, shown), default=0)
    lines = []
    marks = sum(is_stage and cost == heaviest for _, cost, is_stage in rows) < len(sizes)
    for (name, cost, is_stage), text in zip(rows, shown, strict=True):
        bar = _bar(cost / heaviest if heaviest else 0.0)
        mark = "  heaviest" if marks and is_stage and cost == heaviest else ""
        lines.append(f"{set_cell_size(name, wide)}  {text:>{right}}  {bar}{mark}".rstrip())
    return "\n".join(lines)


def _rows(
    sizes: Sequence[int], names: Sequence[str], costs: Sequence[float]
) -> Iterator[tuple[str, float, bool]]:
    """Yield name, cost, and whether it is a stage's: each stage, followed by its layers."""
    for stage, (size, end) in enumerate(zip(sizes, accumulate(sizes), strict=True)):
        own = range(end - size, end)
        layers = f"{size} layer{'s' * (size != 1)}"
        yield f"stage {stage}  {layers}", math.fsum(costs[i] for i in own), True
        for i in own:
            yield f"  {names[i]}", costs[i], False


def _bar(share: float) -> str:
    eighths = round(share * WIDTH * 8)
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def _text(cost: float, unit: str) -> str:
    if unit == "s":
        return seconds_text(cost)
    for name in ("B", "KiB", "MiB"):
        if cost < KIB:
            return f"{cost:.0f} B" if name == "B" else f"{cost:.1f} {name}"
        cost /= KIB
    return f"{cost:.1f} GiB"
