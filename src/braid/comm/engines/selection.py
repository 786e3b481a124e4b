"""Selects the algorithm for each size, from measured costs of a few primitives and closed forms.

The cost of every algorithm is a formula over five primitives. Four of them are piecewise in the
size of the tensor, since a copy within the cache is several times as fast as a copy that exceeds
it:

    a         a step of the group on few bytes          copy(l)   a byte between a tensor and a slot
    add(l)    a byte added to a tensor from a slot      pull(l)   a byte copied between processes
    send(l)   a byte through the network card of a host; zero if memory is shared

All ranks measure them together when the group of all ranks is made (`measure`), so that they share
the memory bandwidth as in later operations. All ranks use rank 0's figures, so all choose the same
algorithm. Sub-groups use the same figures with another number of ranks. Inside a host all
algorithms give the same bits: they differ only in speed. Over hosts `hierarchical` sums in another
order, unless the group requires the order of ranks.

Source: the a + b l model with piecewise b of Hockney, "The communication challenge for MPP" (1994).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch

from braid.comm.channel.channel import SENT_CHUNK_BYTES, Channel
from braid.comm.channel.peer_tensor import Remote, remote_of
from braid.comm.channel.staging import CHUNK_BYTES, LARGE_BYTES, SLOTS_BYTES
from braid.comm.tensors.node_map import NodeMap
from braid.comm.tensors.reduction import combine
from braid.runtime.clock import Clock
from braid.runtime.text import bytes_text
from braid.runtime.transport import Steps, Wait, WaitAny

__all__ = [
    "DEFAULT_COSTS",
    "DEFAULT_NETWORK_COSTS",
    "NUM_SYNCS",
    "PrimitiveCosts",
    "Selection",
    "measure",
    "predicted_s",
    "upper_median",
]

MEASURED_BYTES = (64 << 10, 512 << 10, 4 << 20, 16 << 20)  # the last one exceeds most caches
STEP_BYTES = 64
SENT_BYTES = (64 << 10, 1 << 20)
SIZES = tuple(1 << power for power in range(12, 31))  # possible table bounds: 4 KiB to 1 GiB
REPEATS = 3  # passes over each size; one over the largest, which has many chunks
CLEARLY = 0.9  # another algorithm is chosen below this share of the current algorithm's time
NUM_SYNCS = 20  # also the number of timed calls
LEAST_RATE = 1e-12  # seconds per byte; a small difference of two measured times may be negative

Piecewise = tuple[tuple[int, float], ...]  # (from bytes, seconds per byte)


class PrimitiveCosts(NamedTuple):
    """Costs of the basic steps of collectives on this machine.

    Attributes:
        sync_s: Seconds of one synchronisation of all ranks.
        copy: Seconds per byte of a copy, piecewise.
        add: Seconds per byte of an addition, piecewise.
        pull: Seconds per byte of a copy by the kernel; empty if the kernel does not permit it.
        measured: Whether the figures were measured on this machine.
        send: Seconds per byte that a host sends with all of its ranks; empty if memory is shared.
        call_s: Seconds of a call besides its steps; the same for all algorithms.
    """

    sync_s: float
    copy: Piecewise
    add: Piecewise
    pull: Piecewise
    measured: bool = False
    send: Piecewise = ()
    call_s: float = 0.0


# measured on a two-core virtual machine, for worlds that do not measure (ranks as threads, tests)
DEFAULT_COSTS = PrimitiveCosts(
    3e-6,
    ((64 << 10, 0.03e-9), (512 << 10, 0.04e-9), (4 << 20, 0.09e-9)),
    ((64 << 10, 0.04e-9), (512 << 10, 0.05e-9), (4 << 20, 0.12e-9)),
    ((64 << 10, 0.08e-9), (512 << 10, 0.08e-9), (4 << 20, 0.12e-9)),
)
# for a network of 10 Gbit/s
DEFAULT_NETWORK_COSTS = DEFAULT_COSTS._replace(sync_s=60e-6, pull=(), send=((64 << 10, 0.8e-9),))


def predicted_s(
    kind: str,
    algorithm: str,
    nbytes: int,
    size: int,
    costs: PrimitiveCosts,
    nodes: NodeMap | None = None,
) -> float:
    """Return the predicted seconds of an algorithm.

    Args:
        kind: Operation.
        algorithm: direct, two_phase, pulled or hierarchical for all_reduce; staged, pulled or
            hierarchical for other operations.
        nbytes: l, bytes of the largest full buffer of a rank.
        size: n, number of ranks.
        costs: Costs of the primitives.
        nodes: Ranks by host; None if every rank is alone on its host.
    """
    rate = dict(zip(("copy", "add", "pull"), (_at(p, nbytes) for p in costs[1:4]), strict=True))
    moves = (size - 1) / size * nbytes
    steps, copied, added, pulled = _FORMS[kind, algorithm](size, nbytes, moves)
    sent = 0.0
    if costs.send and (kind, algorithm) in _SENT:
        nodes = nodes or NodeMap.of(range(size))
        steps, sent = _SENT[kind, algorithm](size, nbytes, nodes)
    return (
        costs.call_s
        + steps * costs.sync_s
        + copied * rate["copy"]
        + added * rate["add"]
        + pulled * rate["pull"]
        + sent * _at(costs.send, nbytes)
    )


# (n, l, (n-1)/n l) -> synchronisations, bytes copied, bytes added, bytes pulled, on the busiest
# rank
_Form = Callable[[int, int, float], tuple[float, float, float, float]]
_FORMS: dict[tuple[str, str], _Form] = {
    # the cost model calls it l
    ("all_reduce", "direct"): lambda n, l, _: (_chunks(l), l, (n - 1) * l, 0),  # noqa: E741
    ("all_reduce", "two_phase"): lambda n, l, m: (  # noqa: E741
        2 * _chunks(l / n * 2),
        l + 2 * l / n + m,
        m,
        0,
    ),
    ("all_reduce", "hierarchical"): lambda _n, l, m: (1, 2 * l, m, 0),  # noqa: E741
    ("all_reduce", "pulled"): lambda _n, _l, m: (3, 0, m, 2 * m),
    ("broadcast", "staged"): lambda _n, l, _: (  # noqa: E741
        1 + _chunks(l),
        l + min(l, CHUNK_BYTES),
        0,
        0,
    ),
    ("broadcast", "pulled"): lambda _n, l, _: (2, 0, 0, l),  # noqa: E741
    ("all_gather", "staged"): lambda n, l, m: (_offered(l / n), 2 * l / n + m, 0, 0),  # noqa: E741
    ("all_gather", "pulled"): lambda n, l, m: (2, l / n, 0, m),  # noqa: E741
    ("reduce_scatter", "staged"): lambda n, l, m: (_offered(l), m + l / n, m, 0),  # noqa: E741
    ("reduce_scatter", "pulled"): lambda _n, _l, m: (2, 0, m, m),
    ("broadcast", "hierarchical"): lambda _n, l, _: (1, 2 * l, 0, 0),  # noqa: E741
    ("all_gather", "hierarchical"): lambda _n, l, m: (1, 2 * m, 0, 0),  # noqa: ARG005, E741
    ("reduce_scatter", "hierarchical"): lambda _n, l, m: (1, l, m, 0),  # noqa: E741
    ("reduce", "staged"): lambda n, l, m: (2 * _chunks(l), l + l / n + m, m, 0),  # noqa: E741
    ("reduce", "pulled"): lambda n, l, m: (2, l / n + m, m, m),  # noqa: E741
    ("all_to_all", "staged"): lambda n, l, m: (_offered(l), 2 * m + l / n, 0, 0),  # noqa: E741
    ("all_to_all", "pulled"): lambda n, l, m: (2, l / n, 0, m),  # noqa: E741
    ("gather", "staged"): lambda n, l, m: (1 + _chunks(l / n), l / n + m, 0, 0),  # noqa: E741
    ("gather", "pulled"): lambda _n, _l, m: (3, 0, 0, m),
    ("scatter", "staged"): lambda n, l, m: (1 + _chunks(l), m + l / n, 0, 0),  # noqa: E741
    ("scatter", "pulled"): lambda n, l, _: (3, 0, 0, l / n),  # noqa: E741
    ("send", "staged"): lambda _n, l, _: (_chunks(l), l + min(l, CHUNK_BYTES), 0, 0),  # noqa: E741
    ("send", "pulled"): lambda _n, l, _: (2, 0, 0, l),  # noqa: E741
}
# (n, l, nodes) -> synchronisations, bytes that the busiest host sends; for operations that have
# several algorithms if memory is not shared
_SENT: dict[tuple[str, str], Callable[[int, int, NodeMap], tuple[float, float]]] = {
    ("all_reduce", "direct"): lambda _n, l, nodes: (  # noqa: E741
        _chunks(l, SENT_CHUNK_BYTES),
        nodes.bytes_out(l),
    ),
    ("all_reduce", "two_phase"): lambda n, l, nodes: (  # noqa: E741
        2 * _chunks(l / n * 2, SENT_CHUNK_BYTES),
        2 * nodes.bytes_out(l / n),
    ),
    ("all_reduce", "hierarchical"): lambda _n, l, nodes: (  # noqa: E741
        3 if len(nodes.hosts) > 2 else 2,
        2 * (len(nodes.hosts) - 1) / len(nodes.hosts) * l,
    ),
    ("broadcast", "staged"): lambda n, l, nodes: (  # noqa: E741
        1 + _chunks(l),
        (n - nodes.fewest) * l,
    ),
    ("broadcast", "hierarchical"): lambda _n, l, nodes: (  # noqa: E741
        3,
        (len(nodes.hosts) - 1) * l,
    ),
    ("all_gather", "staged"): lambda n, l, nodes: (  # noqa: E741
        _chunks(l / n),
        nodes.bytes_out(l / n),
    ),
    ("all_gather", "hierarchical"): lambda n, l, nodes: (  # noqa: E741
        3,
        nodes.most * (len(nodes.hosts) - 1) * l / n,
    ),
    ("reduce_scatter", "staged"): lambda n, l, nodes: (  # noqa: E741
        _chunks(l),
        nodes.bytes_out(l / n),
    ),
    ("reduce_scatter", "hierarchical"): lambda n, l, nodes: (  # noqa: E741
        3,
        (n - nodes.fewest) * l / n,
    ),
}
_KINDS = tuple(dict.fromkeys(kind for kind, _ in _FORMS))
_Table: TypeAlias = tuple[list[int], list[str]]
_FIRST = {"all_reduce": "direct"}  # for small tensors; other operations begin with staged


class Selection:
    """Choices of algorithms for groups of one size.

    Args:
        costs: Costs of the primitives.
        size: Number of ranks.
        may_pull: Whether ranks may read each other's private memory.
        nodes: Ranks by host; None if all are on one.
        in_order: Whether sums must be in the order of ranks.
    """

    def __init__(
        self,
        costs: PrimitiveCosts,
        size: int,
        *,
        may_pull: bool,
        nodes: NodeMap | None = None,
        in_order: bool = False,
    ) -> None:
        self.costs = costs
        self.size = size
        self.may_pull = may_pull and bool(costs.pull)
        self.nodes = nodes
        self._in_order = in_order
        self._tables: dict[str, _Table] = {}  # by operation, made at first use

    def choose(self, kind: str, nbytes: int) -> str:
        """Return the fastest algorithm for an operation on `nbytes` bytes."""
        bounds, names = self._tables.get(kind) or self._table(kind)
        return names[bisect.bisect(bounds, nbytes)]

    def explain(self) -> str:
        """Return a text with the choices and the predicted times behind them."""
        origin = "measured here" if self.costs.measured else "built in, not measured here"
        lines = [
            f"{self.size} ranks, costs {origin}: synchronisation {self.costs.sync_s * 1e6:.1f} us"
        ]
        primitives = list(zip(("copy", "add", "pull"), self.costs[1:4], strict=True))
        primitives += [("send", self.costs.send)] if self.costs.send else []
        for name, rates in primitives:
            at = ", ".join(
                f"{1e-9 / rate:.1f} GB/s at {bytes_text(nbytes)}" for nbytes, rate in rates
            )
            lines.append(f"  {name:<5} {at or 'not permitted by the host'}")
        for kind in _KINDS:
            bounds, names = self._table(kind)
            parts = [names[0]]
            for bound, name in zip(bounds, names[1:], strict=True):
                times = sorted(
                    (self._predicted_s(kind, other, bound), other) for other in self._names(kind)
                )
                estimates = ", ".join(f"{other} {s * 1e6:.0f} us" for s, other in times)
                parts.append(f"from {bytes_text(bound)} {name} (there {estimates})")
            lines.append(f"  {kind:<14} {', '.join(parts)}")
        return "\n".join(lines)

    def record(self) -> dict[str, list[tuple[int, str]]]:
        """Return algorithms by size: operation -> [(from bytes, algorithm)]."""
        return {
            kind: list(zip([0, *bounds], names, strict=True))
            for kind, (bounds, names) in ((kind, self._table(kind)) for kind in _KINDS)
        }

    def _names(self, kind: str) -> list[str]:
        names = [name for other, name in _FORMS if other == kind]
        if not self.may_pull and "pulled" in names:
            names.remove("pulled")
        if "hierarchical" in names and not self._may_divide(kind):
            names.remove("hierarchical")
        return names

    def _may_divide(self, kind: str) -> bool:
        """Return whether an algorithm may work inside each host first."""
        if self.nodes is None:
            return False
        alone = len(self.nodes.hosts) == self.size
        reduces = kind in {"all_reduce", "reduce_scatter"}
        return kind == "all_reduce" if alone else not (reduces and self._in_order)

    def _predicted_s(self, kind: str, name: str, nbytes: int) -> float:
        # each rank measures its own time per call, but all must choose the same algorithm
        costs = self.costs._replace(call_s=0.0)
        return predicted_s(kind, name, nbytes, self.size, costs, self.nodes)

    def _table(self, kind: str) -> _Table:
        """Return the sizes at which the choice changes, and the chosen algorithms."""
        bounds: list[int] = []
        names = [_FIRST.get(kind, "staged")]
        for nbytes in SIZES if kind in _KINDS else ():
            times = {name: self._predicted_s(kind, name, nbytes) for name in self._names(kind)}
            best = min(times, key=times.__getitem__)
            if times[best] < CLEARLY * times[names[-1]]:
                bounds.append(nbytes)
                names.append(best)
        self._tables[kind] = bounds, names
        return bounds, names


def measure(
    ch: Channel,
    clock: Clock,
    *,
    may_pull: bool,
    nodes: NodeMap | None = None,
    results: list[PrimitiveCosts],
) -> Steps:
    """Measure the steps of collectives on all ranks and append rank 0's figures to `results`.

    Cost: about 40 ms with two ranks, once per job; on a network of 1 Gbit/s another 50 ms.
    """
    # filled, since the kernel maps all pages that are only read to one page of zeros
    x = torch.empty(MEASURED_BYTES[-1], dtype=torch.uint8, device="cpu").fill_(0)
    peer = (ch.rank + 1) % ch.size
    if may_pull:
        ch.own.expose(x, private=True)
    yield from ch.publish_and_wait()
    remote = remote_of(ch, peer, x.numel(), x.dtype) if may_pull and peer != ch.rank else None
    syncs = []
    little = x[:STEP_BYTES]
    # whole steps with a reduction: on few bytes, calls of torch take most of the time
    for _ in range(NUM_SYNCS):
        start_ns = clock.now_ns()
        ch.own.stage(little)
        yield from ch.publish_and_wait()
        combine([little, ch.peek(peer, STEP_BYTES, x.dtype)], little, "max", None)
        syncs.append(clock.now_ns() - start_ns)
    # not the mean: a rank that lost its core for a millisecond would raise the cost of every chunk
    figures = [upper_median(syncs) * 1e-9]
    for nbytes in (LARGE_BYTES, CHUNK_BYTES) if ch.shares else ():
        for _ in range(SLOTS_BYTES // nbytes):  # the system clears pages at their first use
            ch.own.stage(x[:nbytes])
            yield from ch.publish_and_wait()
    for act in (_copy, _add):
        for nbytes in MEASURED_BYTES:
            figures += [(yield from _passes(ch, clock, act, x, nbytes, peer))]
    for nbytes in MEASURED_BYTES:
        figures += [0.0 if remote is None else (yield from _pulled(ch, clock, remote, x, nbytes))]
    for nbytes in SENT_BYTES:
        hosts = nodes or NodeMap.of(range(ch.size))
        figures += [(yield from _sent(ch, clock, x[:nbytes], hosts, sync_s=figures[0]))]
    # little data may fit into network buffers and seem to take no time; the next call finds them
    # full
    for i in range(2, 1 + len(SENT_BYTES)):
        figures[-i] = max(figures[-i], figures[1 - i])
    ch.own.stage(torch.tensor(figures, dtype=torch.float64, device="cpu"))
    yield from ch.publish_and_wait()
    if ch.rank != 0:
        figures = ch.peek(0, len(figures), torch.float64).tolist()
    n = len(MEASURED_BYTES)
    copies, adds, pulls = (
        tuple(zip(MEASURED_BYTES, figures[1 + i * n : 1 + (i + 1) * n], strict=True))
        for i in range(3)
    )
    sends = () if ch.shares else tuple(zip(SENT_BYTES, figures[1 + 3 * n :], strict=True))
    pulls = pulls if remote is not None else ()
    results.append(PrimitiveCosts(figures[0], copies, adds, pulls, measured=True, send=sends))


def _sent(
    ch: Channel, clock: Clock, x: torch.Tensor, nodes: NodeMap, *, sync_s: float
) -> Generator[Wait | WaitAny, None, float]:
    """Return the seconds per byte that a host sends while all ranks send `x` to all others."""
    if ch.shares:
        return 0.0
    times = []
    for _ in range(REPEATS):
        ch.own.stage(x)
        start_ns = clock.now_ns()
        yield from ch.publish_and_wait()
        times.append((clock.now_ns() - start_ns) * 1e-9)
    return max(LEAST_RATE, (min(times) - sync_s) / nodes.bytes_out(x.numel()))


def _passes(
    ch: Channel,
    clock: Clock,
    act: Callable[[torch.Tensor, torch.Tensor], int],
    x: torch.Tensor,
    nbytes: int,
    peer: int,
) -> Generator[Wait | WaitAny, None, float]:
    """Return the seconds per byte of `act`, on a peer's staged data if memory is shared."""
    passes = []
    for _ in range(_num_passes(nbytes)):
        rates = []
        for part, other in _apart(x, nbytes):
            if ch.shares:
                spent_ns = yield from _pass(ch, clock, act, part, other, peer)
            else:
                start_ns = clock.now_ns()
                act(part, other)
                spent_ns = clock.now_ns() - start_ns
            rates.append(spent_ns * 1e-9 / part.numel())
        passes.append(upper_median(rates))
    return min(passes)


def _pulled(
    ch: Channel, clock: Clock, remote: Remote, x: torch.Tensor, nbytes: int
) -> Generator[Wait | WaitAny, None, float]:
    """Return the seconds per byte of reading a peer's private tensor."""
    passes = []
    for _ in range(_num_passes(nbytes)):
        if nbytes < x.numel():  # as a tensor that the peer has just computed: in its core's cache
            x[:nbytes].fill_(0)
        yield from ch.publish_and_wait()
        rates = []
        for number, (_, out) in enumerate(_apart(x, nbytes)):
            start_ns = clock.now_ns()
            remote.read(number * CHUNK_BYTES, out)
            rates.append((clock.now_ns() - start_ns) * 1e-9 / out.numel())
        passes.append(upper_median(rates))
        yield from ch.publish_and_wait()  # no rank reads `x` now
    return min(passes)


def _apart(x: torch.Tensor, nbytes: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Return the chunks of the first bytes of `x`, each with memory half of `x` away."""
    for low in range(0, nbytes, CHUNK_BYTES):
        part = x[low : min(nbytes, low + CHUNK_BYTES)]
        away = (low + x.numel() // 2) % x.numel()
        yield part, x[away : away + part.numel()]


def upper_median(values: Sequence[float]) -> float:
    """Return the upper median; `statistics` takes 3 ms to import."""
    return sorted(values)[len(values) // 2]


def _num_passes(nbytes: int) -> int:
    return 1 if nbytes == MEASURED_BYTES[-1] else REPEATS


def _pass(
    ch: Channel,
    clock: Clock,
    act: Callable[[torch.Tensor, torch.Tensor], int],
    part: torch.Tensor,
    other: torch.Tensor,
    peer: int,
) -> Generator[Wait | WaitAny, None, int]:
    """Stage a chunk and use the peer's chunk, which is in another core's cache as in a collective.

    A copy writes to other memory than was staged; an addition writes to the staged tensor.
    """
    start_ns = clock.now_ns()
    ch.own.stage(part)
    staged_ns = clock.now_ns() - start_ns
    yield from ch.publish_and_wait()
    theirs = ch.peek(peer, part.numel(), part.dtype)
    start_ns = clock.now_ns()
    weight = act(other if act is _copy else part, theirs)
    used_ns = clock.now_ns() - start_ns
    # a copy is the mean of staging and reading; an addition is timed alone
    return (staged_ns + used_ns) // 2 if weight == 2 else used_ns


def _copy(part: torch.Tensor, theirs: torch.Tensor) -> int:
    part.copy_(theirs)
    return 2


def _add(part: torch.Tensor, theirs: torch.Tensor) -> int:
    numbers = part.view(torch.float32)
    torch.add(numbers, theirs.view(torch.float32), out=numbers)
    return 1


def _at(rates: Piecewise, nbytes: int) -> float:
    """Return the rate at a size: of the next smaller measured size, or of the smallest."""
    if not rates:
        return 0.0
    index = bisect.bisect([size for size, _ in rates], nbytes) - 1
    return rates[max(0, index)][1]


def _chunks(nbytes: float, chunk_bytes: int = CHUNK_BYTES) -> int:
    return max(1, -(-int(nbytes) // chunk_bytes))


def _offered(nbytes: float) -> int:
    """Return the number of steps; several chunks need one more, to compare registrations."""
    chunks = _chunks(nbytes)
    return chunks + (chunks > 1)
