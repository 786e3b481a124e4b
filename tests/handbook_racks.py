"""Pictures of the page on racks, computed by the simulator of collectives."""

from __future__ import annotations

import math

from braid.programs.cost.rounds import simulate_rounds
from braid.programs.schedule.bars import COLOURS
from braid.programs.schedule.collective import algorithm
from braid.programs.topology import Cluster, Level
from handbook_servers import GREY, _line, _svg, _text

HOST, HOSTS, RACKS = 4, 4, 4  # ranks of a host, hosts of a rack, racks
NBYTES = 64 << 20
HOST_BYTES_PER_S = 25e9  # of a host's link
OVERSUBSCRIPTIONS = (1, 2, 4, 8, 16)


def _racks(oversubscription: float) -> Cluster:
    """Return racks with links that carry a part of the bytes of their hosts' links."""
    rack_bytes_per_s = HOSTS * HOST_BYTES_PER_S / oversubscription
    return Cluster(
        [
            Level(name="host", size=HOST, latency_s=2e-6, bytes_per_s=100e9),
            Level(name="rack", size=HOSTS, latency_s=5e-6, bytes_per_s=HOST_BYTES_PER_S),
            Level(name="spine", size=RACKS, latency_s=10e-6, bytes_per_s=rack_bytes_per_s),
        ]
    )


def oversubscribed_racks() -> str:
    """Milliseconds of all-reduces over the oversubscription of racks."""
    wide, high, left, top = 520, 260, 60, 20
    num_ranks = HOST * HOSTS * RACKS
    algorithms = {
        "halving-doubling": algorithm("halving_doubling", "all_reduce", num_ranks),
        "tree": algorithm("tree", "all_reduce", num_ranks),
        "ring": algorithm("ring", "all_reduce", num_ranks),
        "rows: hosts": algorithm("hierarchical", "all_reduce", num_ranks, row=HOST),
        "rows: racks": algorithm("hierarchical", "all_reduce", num_ranks, row=HOST * HOSTS),
    }
    lines = {
        name: [1e3 * simulate_rounds(each, NBYTES, _racks(n)).seconds for n in OVERSUBSCRIPTIONS]
        for name, each in algorithms.items()
    }
    ticks = (4, 8, 16, 32, 64, 128, 256)

    def x(ratio: float) -> float:
        return left + wide * math.log2(ratio) / math.log2(OVERSUBSCRIPTIONS[-1])

    def y(ms: float) -> float:
        share = math.log2(ms / ticks[0]) / math.log2(ticks[-1] / ticks[0])
        return top + high * (1 - share)

    parts = []
    for ratio in OVERSUBSCRIPTIONS:
        parts.append(_line(f"M{x(ratio):.1f} {top}V{top + high}", GREY))
        parts.append(_text(x(ratio), top + high + 16, f"{ratio} : 1", "middle"))
    for ms in ticks:
        parts.append(_line(f"M{left} {y(ms):.1f}H{left + wide}", GREY))
        parts.append(_text(left - 6, y(ms) + 4, f"{ms} ms", "end"))
    caption = "links of the hosts of a rack : link of the rack"
    parts.append(_text(left + wide, top + high + 34, caption, "end"))
    for number, (colour, (name, values)) in enumerate(zip(COLOURS, lines.items(), strict=False)):
        points = [f"{x(n):.1f} {y(v):.1f}" for n, v in zip(OVERSUBSCRIPTIONS, values, strict=True)]
        parts.append(_line(f"M{'L'.join(points)}", colour, ' stroke-width="2.5"'))
        at = top + 14 + 18 * number
        parts.append(_line(f"M{left + wide + 14} {at - 4}h18", colour, ' stroke-width="2.5"'))
        parts.append(_text(left + wide + 38, at, name))
    return _svg(left + wide + 160, top + high + 44, parts)


RACK_PICTURES = (oversubscribed_racks,)
