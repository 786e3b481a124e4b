"""Pictures of a placed model: where its nodes are, and what all parts did when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from braid.parallel.graph import CapturedGraph
from braid.programs.schedule.bars import COLOURS, Bar, draw
from braid.strategies.placed.part_step import PartSpan

__all__ = ["PlacedTimeline", "placement_picture", "placement_text", "timeline_of"]

KINDS = {"forward": 0, "backward": 2, "wait": 6, "optimizer": 3}  # colours
NODE_S = 1.0  # of a node on the axis of a placement


class PlacedTimeline(NamedTuple):
    """Time spans of all parts' activities, on one time axis that begins with the first span.

    Attributes:
        lanes: Devices, each of which has one row of the picture.
        spans: Spans, with times of the master's clock.
    """

    lanes: list[str]
    spans: list[PartSpan]

    def to_svg(self) -> str:
        """Return a picture with a lane for each device."""
        begin_ns = min((span.begin_ns for span in self.spans), default=0)
        end_ns = max((span.end_ns for span in self.spans), default=0)
        bars = [
            Bar(
                self.lanes.index(span.device),
                (span.begin_ns - begin_ns) / 1e9,
                (span.end_ns - begin_ns) / 1e9,
                COLOURS[KINDS[span.kind]],
                f"{span.kind} {span.name}",
                span.name,
                "lower" if span.kind == "wait" else "whole",
            )
            for span in sorted(self.spans, key=lambda span: span.kind != "wait")
        ]
        legend = {kind: COLOURS[colour] for kind, colour in KINDS.items()}
        return draw(self.lanes, bars, (end_ns - begin_ns) / 1e9, legend=legend)

    def save(self, path: str | Path) -> None:
        """Write the picture that `to_svg` returns to the file `path`."""
        Path(path).write_text(self.to_svg())

    def __str__(self) -> str:
        begin_ns = min((span.begin_ns for span in self.spans), default=0)
        lines = []
        for span in self.spans:
            begin_ms = (span.begin_ns - begin_ns) / 1e6
            length_ms = (span.end_ns - span.begin_ns) / 1e6
            what = f"{span.kind} {span.name}"
            lines.append(f"{begin_ms:9.3f} ms {length_ms:9.3f} ms  {span.device}  {what}")
        return "\n".join(lines)


def timeline_of(
    spans: Mapping[str, Sequence[PartSpan]], offsets_ns: Mapping[str, int], lanes: list[str]
) -> PlacedTimeline:
    """Return the timeline of all tasks' time spans, converted to the master's clock.

    Args:
        spans: Spans by the name of the task's node.
        offsets_ns: Master's clock minus the clock of the node, by node.
        lanes: Devices, each of which has one row of the picture.
    """
    moved = [
        span._replace(
            begin_ns=span.begin_ns + offsets_ns[node], end_ns=span.end_ns + offsets_ns[node]
        )
        for node, node_spans in spans.items()
        for span in node_spans
    ]
    used = {span.device for span in moved}
    moved.sort(key=lambda span: span.begin_ns)
    return PlacedTimeline([lane for lane in lanes if lane in used], moved)


def placement_text(graph: CapturedGraph, placement: Sequence[str]) -> str:
    """Return a line for each node, with its device, and the tensors that other devices receive."""
    labels = graph.labels()
    wide = max([4, *map(len, labels)])
    lines = []
    for i, label in enumerate(labels):
        crossing = [f"{value} to {device}" for value, device in _crossing(graph, placement, i)]
        sends = f"   sends {', '.join(crossing)}" if crossing else ""
        lines.append(f"{label:<{wide}}  {placement[i]}{sends}")
    return "\n".join(lines) + "\n"


def placement_picture(graph: CapturedGraph, placement: Sequence[str]) -> str:
    """Return a picture: a lane for each device, nodes in the order of the graph from the left."""
    lanes = list(dict.fromkeys(placement))
    bars = []
    for i, label in enumerate(graph.labels()):
        node = graph.nodes[i]
        crossing = _crossing(graph, placement, i)
        colour = COLOURS[1 if crossing else 0]
        title = f"{node} at {node.where}"
        for value, device in crossing:
            title += f"; value {value} to {device}"
        bars.append(
            Bar(lanes.index(placement[i]), i * NODE_S, (i + 1) * NODE_S, colour, title, label)
        )
    legend = {"node": COLOURS[0], "sends": COLOURS[1]}
    caption = "nodes in the order of the graph"
    return draw(lanes, bars, len(placement) * NODE_S, legend=legend, caption=caption)


def _crossing(
    graph: CapturedGraph, placement: Sequence[str], position: int
) -> list[tuple[int, str]]:
    """Return the values of a node that other devices receive, with these devices, each once."""
    made = set(graph.nodes[position].made)
    return list(
        dict.fromkeys(
            (value, placement[i])
            for i, node in enumerate(graph.nodes)
            for value in node.inputs
            if value in made and placement[i] != placement[position]
        )
    )
