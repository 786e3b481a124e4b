"""Explanation of a sharding: a table of split values and collectives.

value             module            operation          layout       collective         bytes  us
linear_2          model.mlp.up      aten.linear        - | - | tp
linear_3_reduce   model.mlp.down    all_reduce         - | - | -    all_reduce tp      16384  ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from braid.parallel.tensor_parallel.insertion.moves import StepCollective
from braid.parallel.tensor_parallel.insertion.records import ExplanationRow

__all__ = ["Division", "table", "to_svg", "totals"]

LINE = 20  # pixels of a row
SPLIT, WHOLE, PARTIAL = "#bcd9f5", "#e8e8e8", "#f8d7a8"
HEAD = ("value", "module", "operation", "layout", "forward", "backward", "bytes", "us")


class Text(NamedTuple):
    """Line of text in the chart that explains a sharding."""

    name: str
    layout: str
    colour: str
    sent: str


class Totals(NamedTuple):
    """Collectives of a step.

    Attributes:
        forward: Number of collectives of each kind forward.
        backward: Number of collectives of each kind backward.
        nbytes: Bytes that a rank receives.
        seconds: Estimated time of all collectives.
    """

    forward: Counter[str]
    backward: Counter[str]
    nbytes: int
    seconds: float


def totals(rows: Sequence[ExplanationRow]) -> Totals:
    """Return the collectives of a step, forward and backward."""
    sent = [collective for row in rows for collective in row.collectives]
    return Totals(
        Counter(c.name for c in sent if not c.backward),
        Counter(c.name for c in sent if c.backward),
        sum(c.nbytes for c in sent),
        sum(c.seconds for c in sent),
    )


def table(rows: Sequence[ExplanationRow]) -> str:
    """Return the rows as text, with the totals at the end."""
    lines = [HEAD, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    text = [
        "  ".join(
            cell.rjust(width) if i >= len(HEAD) - 2 else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    sums = totals(rows)
    ends = [
        f"{name}: {', '.join(f'{n} {kind}' for kind, n in counts.items()) or 'nothing'}"
        for name, counts in (("forward", sums.forward), ("backward", sums.backward))
    ]
    return "\n".join(
        [*text, f"{'; '.join(ends)}; {sums.nbytes} bytes, {sums.seconds * 1e6:.0f} us"]
    )


def _cells(row: ExplanationRow) -> tuple[str, ...]:
    forward = ", ".join(f"{c.name} {c.axis}" for c in row.collectives if not c.backward)
    backward = ", ".join(f"{c.name} {c.axis}" for c in row.collectives if c.backward)
    nbytes = sum(c.nbytes for c in row.collectives)
    seconds = sum(c.seconds for c in row.collectives)
    sent = (str(nbytes), f"{seconds * 1e6:.1f}") if row.collectives else ("", "")
    return (row.node, row.module, row.operation, str(row.layout), forward, backward, *sent)


def to_svg(rows: Sequence[ExplanationRow], width: int = 900) -> str:
    """Draw the rows as SVG, from top to bottom: boxes of values, arrows of messages.

    Consecutive values of a module with the same layout share one box.
    """
    lines = [
        Text(f"{name}  {row.operation.removeprefix('aten.')}", str(row.layout), _colour(row), sent)
        for row, name, sent in _merged(rows)
    ]
    height = LINE * (len(lines) + 1)
    body = "".join(_drawn(line, LINE * (i + 0.5), width) for i, line in enumerate(lines))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:.0f}" '
        f'font-family="sans-serif" font-size="11">{body}</svg>\n'
    )


def _merged(rows: Sequence[ExplanationRow]) -> list[tuple[ExplanationRow, str, str]]:
    """Return the rows to draw, with their names and messages."""
    drawn: list[tuple[ExplanationRow, str, str]] = []
    last: tuple[str, str] | None = None
    for row in rows:
        place = (row.module, str(row.layout))
        if row.collectives:
            drawn.append((row, row.module, ", ".join(map(_sent, row.collectives))))
        elif place != last and row.operation != "parameter":
            drawn.append((row, row.module or row.node, ""))
        last = place
    return drawn


def _sent(collective: StepCollective) -> str:
    name = f"{collective.name} backward" if collective.backward else collective.name
    return f"{name} {collective.nbytes} B, {collective.seconds * 1e6:.0f} us"


def _colour(row: ExplanationRow) -> str:
    if row.layout.partial:
        return PARTIAL
    return SPLIT if any(row.layout.dims) else WHOLE


def _drawn(line: Text, top: float, width: int) -> str:
    name, layout, sent = (escape(text) for text in (line.name, line.layout, line.sent))
    box = f'<rect x="8" y="{top:.0f}" width="330" height="{LINE - 4}" fill="{line.colour}"/>'
    texts = f'<text x="14" y="{top + 12:.0f}">{name}</text>'
    texts += f'<text x="348" y="{top + 12:.0f}" fill="#555">{layout}</text>'
    if sent:
        middle = top + LINE / 2 - 2
        texts += f'<path d="M 480 {middle:.0f} h 30" stroke="#c33" stroke-width="2"/>'
        texts += f'<text x="{min(516, width)}" y="{top + 12:.0f}" fill="#c33">{sent}</text>'
    return box + texts


class Division(dict[str, str]):
    """Result of `parallelize`: the kind of each sharded module, by name.

    Attributes:
        rows: Split values and collectives; empty if the model is sharded by modules.
        whole: Reasons why layers are not sharded, by the pattern of their names.
    """

    def __init__(
        self,
        kinds: Mapping[str, object],
        rows: Sequence[ExplanationRow] = (),
        whole: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__({name: str(kind) for name, kind in kinds.items()})
        self.rows = list(rows)
        self.whole = dict(whole or {})

    def explain(self) -> str:
        """Return a table of values, layouts and messages, with bytes and costs."""
        if not self.rows:
            lines = [f"{name}  {kind}" for name, kind in self.items()]
            return "\n".join([*lines, "pass inputs= to see the collectives"])
        reasons = [f"whole: {name}: {why}" for name, why in self.whole.items()]
        return "\n".join([table(self.rows), *reasons])

    def to_svg(self) -> str:
        """Return the table as an SVG chart: a line per value, colored by its layout."""
        return to_svg(self.rows)
