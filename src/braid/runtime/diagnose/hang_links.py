"""Determines which hosts do not hear each other, from what each of them sees of its connections.

Problem: a network link that is down, or carries packets one way only, makes all ranks wait. No rank
is at fault, and the operations in which they wait differ by chance.

Idea: a host that sends something again and again without an answer is cut off from the other one.
Its own count of what comes in says whether it still receives; that of the other host, whether what
it sends arrives. So both directions are judged.

    a repeats, last from b     b, last from a      verdict
    long ago                   long ago            a and b do not hear each other
    lately                     long ago            b does not hear a
    long ago                   lately              a does not hear b
    long ago                   unknown             a does not hear b, as far as is known

What is sent again in vain comes at intervals that double. So `lately` is compared with the silence
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
    """Knowledge of one host about another one.

    Attributes:
        received_ns: Time at which anything came from there last.
        num_repeats: Most times that something was sent there again without an answer.
        ranks: Ranks of this host with connections there.
    """

    received_ns: int
    num_repeats: int
    ranks: tuple[int, ...]


def broken_links(
    views: Sequence[RankView], hosts: Mapping[str, str], *, now_ns: int
) -> list[tuple[str, tuple[int, ...]]]:
    """Return each pair of hosts that do not hear each other, in words, and the ranks there.

    Args:
        views: Views of all ranks.
        hosts: Names of the hosts by address.
        now_ns: Current time on the clock of the views.
    """
    known = _directions(views)
    texts = []
    for (own, peer), mine in sorted(known.items()):
        back = known.get((peer, own))
        if back is not None and back.num_repeats >= MIN_REPEATS and peer < own:
            continue  # described from the other end
        if mine.num_repeats < MIN_REPEATS:
            continue
        text = _text(hosts.get(own, own), hosts.get(peer, peer), mine, back, now_ns)
        texts.append((text, tuple(sorted({*mine.ranks, *(back.ranks if back else ())}))))
    return texts


def _directions(views: Sequence[RankView]) -> dict[tuple[str, str], _Direction]:
    known: dict[tuple[str, str], _Direction] = {}
    for view in views:
        for link in view.links if not view.ended else ():
            key = (link.own, link.peer)
            before = known.get(key, _Direction(0, 0, ()))
            known[key] = _merged(before, link, view.rank)
    return known


def _merged(before: _Direction, link: LinkView, rank: int) -> _Direction:
    return _Direction(
        max(before.received_ns, link.received_ns),
        max(before.num_repeats, link.num_repeats),
        (*before.ranks, rank),
    )


def _text(own: str, peer: str, mine: _Direction, back: _Direction | None, now_ns: int) -> str:
    mine_ns = now_ns - mine.received_ns
    if back is None:
        return (
            f"host {own} does not hear host {peer} since {_seconds(mine_ns)}, and what it sends "
            f"there is not answered; how host {peer} sees it is not known"
        )
    back_ns = now_ns - back.received_ns
    last = f"(last from {peer}: {_seconds(mine_ns)} ago, last from {own}: {_seconds(back_ns)} ago)"
    if mine_ns <= LATELY * back_ns:
        return f"host {peer} does not hear host {own} since {_seconds(back_ns)} {last}"
    if back_ns <= LATELY * mine_ns:
        return f"host {own} does not hear host {peer} since {_seconds(mine_ns)} {last}"
    since_ns = min(mine_ns, back_ns)
    return f"hosts {own} and {peer} do not hear each other since {_seconds(since_ns)} {last}"


def _seconds(duration_ns: float) -> str:
    return f"{duration_ns / 1e9:.0f} s" if duration_ns >= 9.95e9 else f"{duration_ns / 1e9:.1f} s"
