"""Determines which hosts cannot communicate, from each host's statistics of its connections.

Problem: a network link that is down, or transmits in one direction only, makes all ranks wait. No
rank is at fault, and the operations in which they wait differ by chance.

Idea: a host that sends again and again without an answer is cut off from the other host. Its
received data shows whether packets still arrive; the other host's received data shows whether its
packets arrive there. So both directions are judged.

    a repeats, last from b     b, last from a      verdict
    long ago                   long ago            a and b receive nothing from each other
    lately                     long ago            b receives nothing from a
    long ago                   lately              a receives nothing from b
    long ago                   unknown             a receives nothing from b, as far as is known

Unanswered packets are repeated at intervals that double. So `lately` is compared with the silence
of the other direction: about half of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from braid.runtime.diagnose.hang_view import LinkView, RankView

__all__ = ["broken_links"]

MIN_REPEATS = 2  # one packet may be lost on any network
LATELY = 0.55  # share of the silence of the other direction


class _Direction(NamedTuple):
    """One host's statistics of its connections to another host.

    Attributes:
        received_ns: Time of the last packet from the other host.
        num_repeats: Largest number of repeats without an answer.
        ranks: Ranks of this host with connections to the other one.
    """

    received_ns: int
    num_repeats: int
    ranks: tuple[int, ...]


def broken_links(
    views: Sequence[RankView], hosts: Mapping[str, str], *, now_ns: int
) -> list[tuple[str, tuple[int, ...]]]:
    """Return (text, ranks) for each pair of hosts whose packets do not arrive in some direction.

    Args:
        views: Views of all ranks.
        hosts: Names of the hosts by address.
        now_ns: Current time on the clock of the views.
    """
    known = _directions(views)
    texts = []
    for (host, peer), mine in sorted(known.items()):
        back = known.get((peer, host))
        if back is not None and back.num_repeats >= MIN_REPEATS and peer < host:
            continue  # described from the other end
        if mine.num_repeats < MIN_REPEATS:
            continue
        text = _text(hosts.get(host, host), hosts.get(peer, peer), mine, back, now_ns)
        texts.append((text, tuple(sorted({*mine.ranks, *(back.ranks if back else ())}))))
    return texts


def _directions(views: Sequence[RankView]) -> dict[tuple[str, str], _Direction]:
    known: dict[tuple[str, str], _Direction] = {}
    for view in views:
        for link in view.links if not view.ended else ():
            key = (link.local, link.peer)
            before = known.get(key, _Direction(0, 0, ()))
            known[key] = _merged(before, link, view.rank)
    return known


def _merged(before: _Direction, link: LinkView, rank: int) -> _Direction:
    return _Direction(
        max(before.received_ns, link.received_ns),
        max(before.num_repeats, link.num_repeats),
        (*before.ranks, rank),
    )


def _text(host: str, peer: str, mine: _Direction, back: _Direction | None, now_ns: int) -> str:
    mine_ns = now_ns - mine.received_ns
    if back is None:
        return (
            f"host {host} has received nothing from host {peer} for {_seconds(mine_ns)}, not even "
            f"an answer; the state of host {peer} is unknown"
        )
    back_ns = now_ns - back.received_ns
    last = f"(last from {peer}: {_seconds(mine_ns)} ago, last from {host}: {_seconds(back_ns)} ago)"
    if mine_ns <= LATELY * back_ns:
        return f"host {peer} has received nothing from host {host} for {_seconds(back_ns)} {last}"
    if back_ns <= LATELY * mine_ns:
        return f"host {host} has received nothing from host {peer} for {_seconds(mine_ns)} {last}"
    since = _seconds(min(mine_ns, back_ns))
    return f"hosts {host} and {peer} have received nothing from each other for {since} {last}"


def _seconds(duration_ns: float) -> str:
    return f"{duration_ns / 1e9:.0f} s" if duration_ns >= 9.95e9 else f"{duration_ns / 1e9:.1f} s"
