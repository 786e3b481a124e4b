"""The plotter: bars on lanes over one time axis, as SVG; bars show a text under the pointer.

A lane is a rank. A colour means the same in all pictures: `FORWARD`, `SEND` and so on. Callers
convert their spans into `Bar`s: simulated programs (`plot`), the buckets of a backward pass
(`gradients.bucket_times`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

__all__ = [
    "BACKWARD",
    "COLOURS",
    "COLOUR_OF",
    "FORWARD",
    "RECEIVE",
    "RECOMPUTE",
    "REDUCE",
    "SEND",
    "STEP",
    "WAIT",
    "Bar",
    "draw",
]

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
FORWARD, BACKWARD, REDUCE, SEND, RECEIVE, STEP, WAIT = COLOURS
RECOMPUTE = "#88aacc"  # a pale FORWARD
INPUT_GRADIENTS, WEIGHT_GRADIENTS = "#c23b4e", "#f09aa5"  # the two halves of BACKWARD
COLOUR_OF = {
    "F": FORWARD,
    "B": BACKWARD,
    "I": INPUT_GRADIENTS,
    "W": WEIGHT_GRADIENTS,
    "R": RECOMPUTE,
    "STEP": STEP,
    "send": SEND,
    "recv": RECEIVE,
    "reduce": REDUCE,
    "copy": WAIT,
}  # by kind of action of a program, without its direction
MARKED = "#aa0000"
LANE, BAR, LEFT, RIGHT, TOP, LINE = 26, 18, 70, 40, 34, 18  # pixels
LETTER = 7  # pixels of a character
MIN_AXIS = 240  # pixels of the shortest time axis
MIN_WIDTH = 0.5  # pixels of the shortest bar
MOST_TICKS = 6
UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))


class Bar(NamedTuple):
    """One span in one lane of a timeline picture.

    Attributes:
        lane: Index of the lane.
        start_s: Begin of the bar, in seconds from the left edge.
        end_s: End of the bar, in seconds from the left edge.
        colour: Colour of the bar.
        title: Text that is shown while the mouse is over the bar.
        label: Text in the bar, if the bar is wide enough.
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
    width: int = 800,
    caption: str = "",
    notes: Sequence[str] = (),
    axis: bool = True,
) -> str:
    """Draw bars as SVG.

    Args:
        lanes: Names of the lanes, from the top.
        bars: Bars in the order in which they are drawn.
        seconds: Length of the time axis.
        title: Text above the picture.
        legend: Name -> colour, shown above the picture.
        width: Pixels of the picture; it is wider if its texts leave no room for the time axis.
        caption: Text below the time axis.
        notes: Text at the right of each lane.
        axis: Whether to write times below the lanes.
    """
    total = seconds or 1.0
    legend = legend or {}
    x_low = _margin(LEFT, lanes)
    length = max(MIN_AXIS, width - x_low - _margin(RIGHT, notes))
    wide = x_low + length + _margin(RIGHT, notes)
    heads = _legend(legend, x_low, wide)
    top = TOP + max((y for _, y, _, _ in heads), default=0)
    bottom = top + len(lanes) * LANE
    high = bottom + (2 if caption else 1) * LANE
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" '
            'font-family="sans-serif" font-size="12">'
        )
    ]
    if title:
        parts.append(f'<text x="4" y="16">{escape(title)}</text>')
    for x, y, name, colour in heads:
        parts.append(f'<rect x="{x}" y="{y + 4}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16}" y="{y + 14}">{escape(name)}</text>')
    for seconds_at, text in _ticks(total) if axis else ():
        x = round(x_low + seconds_at / total * length)
        parts.append(f'<path d="M{x} {top - 4}V{bottom}" stroke="#dddddd"/>')
        parts.append(f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{text}</text>')
    for lane, name in enumerate(lanes):
        parts.append(f'<text x="4" y="{top + lane * LANE + 14}">{escape(name)}</text>')
    for lane, note in enumerate(notes):
        y = top + lane * LANE + 14
        parts.append(f'<text x="{x_low + length + 6}" y="{y}">{escape(note)}</text>')
    if caption:
        parts.append(f'<text x="{x_low}" y="{bottom + LANE + 14}">{escape(caption)}</text>')
    for bar in bars:
        parts += _bar(bar, x_low, top, length / total)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(legend: Mapping[str, str], begin: int, right: int) -> list[tuple[int, int, str, str]]:
    """Return the place, name and colour of each entry, on as many lines as they need."""
    heads, x, y = [], begin, 0
    for name, colour in legend.items():
        wide = 36 + LETTER * len(name)
        if x > begin and x + wide > right:
            x, y = begin, y + LINE
        heads.append((x, y, name, colour))
        x += wide
    return heads


def _ticks(seconds: float) -> list[tuple[float, str]]:
    """Return round times from 0 to `seconds`, with their texts in one unit."""
    least = seconds / MOST_TICKS
    power = 10.0 ** math.floor(math.log10(least))
    step = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= least * 0.999)
    count = math.floor(seconds / step * 1.001)
    unit, size = next((pair for pair in UNITS if count * step >= pair[1] * 0.999), UNITS[-1])
    times = [number * step for number in range(1, count + 1)]
    return [(0.0, "0"), *((time, f"{time / size:.6g} {unit}") for time in times)]


def _margin(least: int, texts: Sequence[str]) -> int:
    """Return the pixels that texts beside the time axis need, at least `least`."""
    return max([least, *(8 + LETTER * len(text) for text in texts)])


def _bar(bar: Bar, begin: int, top: int, pixels_per_s: float) -> list[str]:
    x = begin + bar.start_s * pixels_per_s
    wide = max((bar.end_s - bar.start_s) * pixels_per_s, MIN_WIDTH)
    high = BAR if bar.part == "whole" else BAR / 2
    y = top + bar.lane * LANE + (BAR / 2 if bar.part == "lower" else 0)
    edge = f'stroke="{MARKED}" stroke-width="3"' if bar.marked else 'stroke="white"'
    parts = [
        (
            f'<rect x="{x:.2f}" y="{y:g}" width="{wide:.2f}" height="{high:g}" '
            f'fill="{bar.colour}" {edge}><title>{escape(bar.title)}</title></rect>'
        )
    ]
    if bar.label and wide >= LETTER * len(bar.label) + 4:
        middle = x + wide / 2
        parts.append(
            f'<text x="{middle:.2f}" y="{y + 14:g}" text-anchor="middle" fill="white">'
            f"{escape(bar.label)}</text>"
        )
    return parts
