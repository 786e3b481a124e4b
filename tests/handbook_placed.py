"""The picture of the page on placed models: parts of a graph as `partition` splits it, run in unit times."""

from __future__ import annotations

from braid.programs.schedule.bars import BACKWARD, FORWARD, RECEIVE, SEND, Bar, draw
from braid.strategies.placed.partition import NodeValues, PlacedSegment, partition

NODE_S, MESSAGE_S = 1e-3, 0.25e-3
# x -> a -> b -> c -> d -> loss, with a skip connection from a to d
NAMES = ("a", "b", "c", "d", "loss")
NODES = (
    NodeValues((0,), (1,)),
    NodeValues((1,), (2,)),
    NodeValues((2,), (3,)),
    NodeValues((1, 3), (4,)),
    NodeValues((4,), (5,)),
)
DEVICES = ("task 0", "task 1", "task 1", "task 0", "task 0")


class _Clock:
    """Times at which devices are free and values arrive."""

    def __init__(self, lanes: list[str]) -> None:
        self.lanes = lanes
        self.free_s = dict.fromkeys(lanes, 0.0)
        self.bars: list[Bar] = []

    def work(self, device: str, ready_s: float, seconds: float, colour: str, label: str) -> float:
        """Draw work that begins when its values are there; return its end."""
        begin_s = max(self.free_s[device], ready_s)
        self.free_s[device] = end_s = begin_s + seconds
        lane = self.lanes.index(device)
        self.bars.append(Bar(lane, begin_s, end_s, colour, label, label))
        return end_s

    def send(self, device: str, target: str, begin_s: float, label: str) -> float:
        """Draw a message; return the time at which it arrives."""
        end_s = begin_s + MESSAGE_S
        for lane, part, colour in ((device, "upper", SEND), (target, "lower", RECEIVE)):
            index = self.lanes.index(lane)
            self.bars.append(Bar(index, begin_s, end_s, colour, label, "", part))
        return end_s


def placed_step() -> str:
    """Draw forward and backward of a graph that leaves task 0 and returns to it."""
    parts = partition(NODES, DEVICES, {5}, {0})
    segments = sorted(
        ((segment, part.device) for part in parts for segment in part.segments),
        key=lambda pair: pair[0].number,
    )
    clock = _Clock([part.device for part in parts])
    arrived_s: dict[tuple[object, str], float] = {}
    for segment, device in segments:
        ready_s = max([0.0, *(arrived_s[value, device] for value, _ in segment.receives)])
        seconds = NODE_S * len(segment.nodes)
        end_s = clock.work(device, ready_s, seconds, FORWARD, _label(segment))
        for value, target in segment.sends:
            arrived_s[value, target] = clock.send(device, target, end_s, f"value {value}")
    summed_s: dict[tuple[int, int], float] = {}
    for segment, device in reversed(segments):
        ready_s = max([0.0, *(summed_s[link.value, segment.number] for link in segment.sums_from)])
        seconds = 2 * NODE_S * len(segment.nodes)
        end_s = clock.work(device, ready_s, seconds, BACKWARD, _label(segment))
        for link in segment.sums_to:
            there_s = end_s
            if link.device != device:
                there_s = clock.send(device, link.device, end_s, f"gradient of {link.value}")
            summed_s[link.value, link.segment] = there_s
    legend = {"forward": FORWARD, "backward": BACKWARD, "send": SEND, "receive": RECEIVE}
    end_s = max(bar.end_s for bar in clock.bars)
    return draw(clock.lanes, clock.bars, end_s, legend=legend)


def _label(segment: PlacedSegment) -> str:
    return " ".join(NAMES[node] for node in segment.nodes)
