"""Channels of requests that no member of a group holds any more, as of dead wrappers.

Each member notices for itself when a persistent request dies, at a time of its own. Its number may
be used again only when all members have noticed, and only at the same point on all of them.
"""

from __future__ import annotations

from braid.comm import Group

__all__ = ["reclaim_lost_requests"]


def reclaim_lost_requests(group: Group) -> None:
    """Free the numbers of requests that are gone on every member of `group`; a collective.

    Nothing is freed while a member has made requests that the others have not: a lower number
    must not come between them.

    Cost: one all_gather of the numbers, and one of their lengths.
    """
    numbers = group.numbers
    members = group.objects.all_gather([numbers.state(), numbers.lost()])
    if len({state for state, _ in members}) == 1:
        numbers.reclaim(sorted(set.intersection(*(set(lost) for _, lost in members))))
