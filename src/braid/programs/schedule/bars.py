"""The plotter: bars on lanes over one time axis, as SVG; bars show a text under the pointer.

A lane is a rank. Callers convert their spans into `Bar`s: simulated programs (`plot`), the buckets
of a backward pass (`gradients.bucket_times`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from braid.runtime.text import seconds_text

__all__ = ["COLOURS", "Bar", "draw"]

# Paul Tol's bright scheme, which colour-blind people can read, too.
COLOURS = (
    "#4477aa",
    "#ee6677",
    "#228833",
    "#ccbb44",
    "#66ccee",
    "#aa3377",
    "#bbbbbb",
)
MARKED = "#aa0000"
LANE, BAR, LEFT, RIGHT, TOP, LEGEND = 26, 18, 70, 40, 34, 90  # pixels
LETTER = 7  # pixels of a character beside the time axis
MIN_LABEL = 16  # pixels that a label in a bar needs
MIN_WIDTH = 0.5  # pixels of the shortest bar
NUM_TICKS = 4


class Bar(NamedTuple):
    """One span of one lane.

    Attributes:
        lane: Index of the lane.
        start_s: Begin, in seconds from the left edge.
        end_s: End, in seconds from the left edge.
        colour: Colour of the bar.
        title: Text under the pointer.
        label: Text in the bar, where it is wide enough.
        part: Part of the lane's height: "whole", "upper" or "lower".
        marked: Whether the bar has a red edge.
    """

    lane: int
    start_s: float
    end_s: float
    colour: str
    title: str
    label: str = ""
    part: str = "whole"
    marked: bool = False


def draw(
    lanes: Sequence[str],
    bars: Iterable[Bar],
    seconds: float,
    *,
    title: str = "",
    legend: Mapping[str, str] | None = None,
    width: int = 1000,
    caption: str = "",
    notes: Sequence[str] = (),
) -> str:
    """Draw bars as SVG.

    Args:
        lanes: Names of the lanes, from the top.
        bars: Bars in the order in which they are drawn.
        seconds: Length of the time axis.
        title: Text above the picture.
        legend: Name -> colour, above the picture.
        width: Pixels of the time axis.
        caption: Text below the time axis.
        notes: Text at the right of each lane.
    """
    total = seconds or 1.0
    legend = legend or {}
    bottom = TOP + len(lanes) * LANE
    x_low = _margin(LEFT, lanes)
    wide = x_low + max(width, LEGEND * len(legend)) + _margin(RIGHT, notes)
    high = bottom + (2 if caption else 1) * LANE
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" '
            'font-family="sans-serif" font-size="12">'
        )
    ]
    if title:
        parts.append(f'<text x="4" y="16">{escape(title)}</text>')
    for i, (name, colour) in enumerate(legend.items()):
        x = x_low + i * LEGEND
        parts.append(f'<rect x="{x}" y="4" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16}" y="14">{escape(name)}</text>')
    for tick in range(NUM_TICKS + 1):
        x = x_low + tick * width // NUM_TICKS
        parts.append(f'<path d="M{x} {TOP - 4}V{bottom}" stroke="#dddddd"/>')
        at = seconds_text(total * tick / NUM_TICKS) if tick else "0"
        parts.append(f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{at}</text>')
    for lane, name in enumerate(lanes):
        parts.append(f'<text x="4" y="{TOP + lane * LANE + 14}">{escape(name)}</text>')
    for lane, note in enumerate(notes):
        y = TOP + lane * LANE + 14
        parts.append(f'<text x="{x_low + width + 6}" y="{y}">{escape(note)}</text>')
    if caption:
        parts.append(f'<text x="{x_low}" y="{bottom + LANE + 14}">{escape(caption)}</text>')
    for bar in bars:
        parts += _bar(bar, x_low, width / total)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _margin(least: int, texts: Sequence[str]) -> int:
    """Return the pixels that texts beside the time axis need, at least `least`."""
    return max([least, *(8 + LETTER * len(text) for text in texts)])


def _bar(bar: Bar, left: int, pixels_per_s: float) -> list[str]:
    x = left + bar.start_s * pixels_per_s
    wide = max((bar.end_s - bar.start_s) * pixels_per_s, MIN_WIDTH)
    high = BAR if bar.part == "whole" else BAR / 2
    y = TOP + bar.lane * LANE + (BAR / 2 if bar.part == "lower" else 0)
    edge = f'stroke="{MARKED}" stroke-width="3"' if bar.marked else 'stroke="white"'
    parts = [
        (
            f'<rect x="{x:.2f}" y="{y:g}" width="{wide:.2f}" height="{high:g}" '
            f'fill="{bar.colour}" {edge}><title>{escape(bar.title)}</title></rect>'
        )
    ]
    if bar.label and wide >= MIN_LABEL:
        middle = x + wide / 2
        parts.append(
            f'<text x="{middle:.2f}" y="{y + 14:g}" text-anchor="middle" fill="white">'
            f"{escape(bar.label)}</text>"
        )
    return parts
