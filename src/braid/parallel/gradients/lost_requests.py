"""Channels of requests that no member of a group holds any more, for example of deleted wrappers.

Each member detects at a different time that a persistent request was deleted. Its number may be
reused only after all members have detected it, and only at the same point on all of them.
"""

from __future__ import annotations

from braid.comm import Group

__all__ = ["reclaim_lost_requests"]


def reclaim_lost_requests(group: Group) -> None:
    """Free the numbers of requests that no member of `group` uses any more; a collective.

    Nothing is freed if members have created different numbers of requests, since equal requests
        must get equal numbers on all members.

    Cost: one all_gather of the numbers, and one of their lengths.
    """
    numbers = group.numbers
    members = group.objects.all_gather([numbers.state(), numbers.lost()])
    if len({state for state, _ in members}) == 1:
        numbers.reclaim(sorted(set.intersection(*(set(lost) for _, lost in members))))
