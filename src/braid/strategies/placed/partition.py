"""Prunes a placed graph to the fetched values, and splits it by device.

    nodes      a   b   c   d   e          a, b, e on device 0; c, d on device 1
    segments   0───┤   1───┤   2
    sends          b ────▶ c              one pair for each tensor and destination device
                       d ────▶ e

A part is all nodes of a device. It runs in segments: nodes that follow each other in the graph. A
segment begins when its values are available, so a part may depend on itself through other devices.
Segments cannot deadlock: values and gradients wait only for earlier segments in one global order.

Gradients of a value are added from the last segment that uses it to the first, and then reach the
segment that made it. That is the order of one process, so sums have its bits:

    x made in 0, used in 1 and 3        forward 0 ─▶ 1, 0 ─▶ 3       gradients 3 ─▶ 1 ─▶ 0

Source: M. Abadi et al., "TensorFlow: Large-Scale Machine Learning on Heterogeneous Distributed
Systems", 2015, sections 3.2.2 and 4.2. There, gradients of consumers meet in one sum.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

__all__ = ["GradientLink", "NodeValues", "PlacedPart", "PlacedSegment", "partition", "pruned"]


class NodeValues(NamedTuple):
    """Values that a node of a graph reads, makes and overwrites.

    Attributes:
        inputs: Numbers of the values that the node uses.
        made: Numbers of the values that the node makes, also by writing in place.
        overwritten: Numbers that the tensors written in place had before the write.
        is_kept: Whether the node runs even if no fetched value needs it.
    """

    inputs: tuple[int, ...]
    made: tuple[int, ...]
    overwritten: tuple[int, ...] = ()
    is_kept: bool = False


class GradientLink(NamedTuple):
    """Link on which the gradient of a value is sent between two segments.

    Attributes:
        value: The value.
        segment: Segment at the other end.
        device: Device of that segment.
    """

    value: int
    segment: int
    device: str


@dataclass(frozen=True, slots=True)
class PlacedSegment:
    """Nodes of one device that follow each other in the graph.

    Attributes:
        number: Number of the segment in the order of the graph.
        nodes: Positions of the nodes in the graph.
        feeds: Values that the master feeds.
        inputs: Values of earlier segments.
        receives: Values received before the segment runs, and the devices that send them.
        sends: Values sent after the segment has run, and the devices that receive them.
        outputs: Values made here that later segments use.
        fetches: Values that the master fetches.
        sums_from: Links on which the segment receives sums of gradients in backward: of its
            outputs, and of inputs that later segments also use.
        sums_to: Links on which the segment sends sums of gradients of its inputs.
        last_uses: Values that no later segment of this device uses.
    """

    number: int
    nodes: tuple[int, ...]
    feeds: tuple[int, ...] = ()
    inputs: tuple[int, ...] = ()
    receives: tuple[tuple[int, str], ...] = ()
    sends: tuple[tuple[int, str], ...] = ()
    outputs: tuple[int, ...] = ()
    fetches: tuple[int, ...] = ()
    sums_from: tuple[GradientLink, ...] = ()
    sums_to: tuple[GradientLink, ...] = ()
    last_uses: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PlacedPart:
    """Part of a graph: all nodes that run on one device.

    Attributes:
        device: The device.
        segments: Segments of the part, in the order of the graph.
    """

    device: str
    segments: tuple[PlacedSegment, ...]

    @property
    def feeds(self) -> set[int]:
        """Values that the master feeds."""
        return {value for segment in self.segments for value in segment.feeds}

    @property
    def nodes(self) -> list[int]:
        """Positions of the nodes in the graph, ascending."""
        return [node for segment in self.segments for node in segment.nodes]


def pruned(
    nodes: Sequence[NodeValues], fetches: Collection[int], feeds: Collection[int]
) -> list[int]:
    """Return the positions of the nodes that fetched values need, and of the nodes with `is_kept`.

    Args:
        nodes: Nodes in the order of the graph.
        fetches: Values that are fetched.
        feeds: Values that the caller provides, so that the nodes which make them need not run.
    """
    needed = set(fetches) - set(feeds)
    positions = []
    for position, node in reversed(list(enumerate(nodes))):
        if node.is_kept or needed.intersection(node.made):
            positions.append(position)
            needed.update({*node.inputs, *node.overwritten}.difference(feeds))
    return positions[::-1]


class _Uses(NamedTuple):
    """Segments that make and use a value.

    Attributes:
        maker: Segment that makes it; None for feeds.
        users: Other segments that use it, in order.
    """

    maker: int | None
    users: list[int]


def partition(
    nodes: Sequence[NodeValues],
    devices: Sequence[str],
    fetches: Collection[int],
    feeds: Collection[int],
) -> list[PlacedPart]:
    """Return the part of each device that has nodes.

    Args:
        nodes: Nodes in the order of the graph.
        devices: Device of each node.
        fetches: Values that are fetched.
        feeds: Values that the caller provides. Other values that no node makes are tensors of the
            model.
    """
    kept = pruned(nodes, fetches, feeds)
    runs = [tuple(run) for _, run in groupby(kept, lambda position: devices[position])]
    places = [devices[run[0]] for run in runs]
    uses = _uses_of(nodes, runs, feeds)
    segments = [
        _segment(number, run, nodes, places, uses, set(fetches)) for number, run in enumerate(runs)
    ]
    by_device: dict[str, list[PlacedSegment]] = {}
    for place, segment in zip(places, segments, strict=True):
        by_device.setdefault(place, []).append(segment)
    return [PlacedPart(device, tuple(segments_here)) for device, segments_here in by_device.items()]


def _uses_of(
    nodes: Sequence[NodeValues], runs: Sequence[Sequence[int]], feeds: Collection[int]
) -> dict[int, _Uses]:
    uses = {value: _Uses(None, []) for value in feeds}
    for number, run in enumerate(runs):
        for position in run:
            for value in nodes[position].inputs:
                if value in uses and number not in (uses[value].maker, *uses[value].users[-1:]):
                    uses[value].users.append(number)
            for value in nodes[position].made:
                uses.setdefault(value, _Uses(number, []))
    return uses


def _segment(
    number: int,
    run: tuple[int, ...],
    nodes: Sequence[NodeValues],
    places: Sequence[str],
    uses: dict[int, _Uses],
    fetches: set[int],
) -> PlacedSegment:
    here = places[number]
    used = {value for value, use in uses.items() if number in use.users}
    inputs = sorted(value for value in used if uses[value].maker is not None)
    outputs = sorted(value for value, use in uses.items() if use.maker == number and use.users)

    def is_first(value: int) -> bool:
        return next(user for user in uses[value].users if places[user] == here) == number

    receives = []
    for value in inputs:
        maker = uses[value].maker
        assert maker is not None
        if places[maker] != here and is_first(value):
            receives.append((value, places[maker]))
    sends = [
        (value, device)
        for value in outputs
        for device in dict.fromkeys(places[user] for user in uses[value].users)
        if device != here
    ]
    links = list(_links(number, [*inputs, *outputs], uses))
    return PlacedSegment(
        number=number,
        nodes=run,
        feeds=tuple(sorted(used.difference(inputs))),
        inputs=tuple(inputs),
        receives=tuple(receives),
        sends=tuple(sends),
        outputs=tuple(outputs),
        fetches=tuple(sorted(fetches & _values(run, nodes, uses, number))),
        sums_from=tuple(
            GradientLink(value, later, places[later])
            for value, first, later in links
            if first == number
        ),
        sums_to=tuple(
            GradientLink(value, first, places[first])
            for value, first, later in links
            if later == number
        ),
        last_uses=tuple(
            value
            for value in sorted({*inputs, *outputs})
            if max([number, *(user for user in uses[value].users if places[user] == here)])
            == number
        ),
    )


def _values(
    run: Sequence[int], nodes: Sequence[NodeValues], uses: dict[int, _Uses], number: int
) -> set[int]:
    """Return the values that a segment makes, and the tensors of the model that it uses."""
    made = {value for position in run for value in nodes[position].made}
    made = {value for value in made if uses[value].maker == number}
    used = {value for position in run for value in nodes[position].inputs}
    return made | (used - uses.keys())


def _links(
    number: int, values: Sequence[int], uses: dict[int, _Uses]
) -> Iterator[tuple[int, int, int]]:
    """Yield (value, segment, next segment that uses the value) with a segment at one end."""
    for value in values:
        maker, users = uses[value]
        assert maker is not None
        for first, later in pairwise((maker, *users)):
            if number in (first, later):
                yield value, first, later
