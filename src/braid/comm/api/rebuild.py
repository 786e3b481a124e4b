"""Agreement of the survivors of a loss on the members of the next group, through the store.

Problem: survivors notice a death at different times, and a second rank may die while they agree. If
each survivor continued with the ranks that it believes alive, two groups could wait for each other.

Idea: each survivor writes one entry into the store, with the ranks that it has lost. As soon as a
survivor sees that every rank has an entry or is lost, it proposes a set of ranks that have not lost
each other. The first proposal is the decision for all (`Store.compare_set`). Of two living ranks
that cannot reach each other, the later one is left out. A decision may name a rank that has just
died: the new group notices that death as any group does, and is rebuilt. A rank that the decision
leaves out raises an error.

Source: the shrinking of communicators in Bland et al., "Post-failure recovery of MPI communication
capability" (2013), sec. 4, with the store instead of an agreement over messages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence

from braid.errors import CommTimeout, ConfigError, PeerLostError, StaleError
from braid.runtime.transport import RankContext

__all__ = ["meet_survivors", "together"]

LOOK_S = 0.05  # between two checks for dead ranks


def meet_survivors(
    context: RankContext,
    ranks: Sequence[int],
    survivors: Sequence[int] | None,
    *,
    name: str,
    value: str,
    timeout_s: float,
) -> dict[int, str]:
    """Agree on the survivors of a group, and exchange one value of each survivor.

    Args:
        context: Context of this rank.
        ranks: Global ranks of the group.
        survivors: Global ranks that survive, the same on all of them; None to agree on them.
        name: Name of the meeting, new for each.
        value: Value of this rank for the other survivors.
        timeout_s: Seconds to wait for the other ranks.

    Returns:
        The value of each survivor by global rank, in the order of the group.

    Raises:
        StaleError: The other survivors have rebuilt the group without this rank.
        PeerLostError: One of `survivors` is lost.
        CommTimeout: Some ranks neither joined the meeting nor died.
        ConfigError: Some of `survivors` are not members, or this rank is not among them.
    """
    if survivors is not None:
        strangers = [rank for rank in survivors if rank not in ranks]
        if strangers or context.rank not in survivors:
            msg = (
                f"survivors {list(survivors)} must be ranks of this group, {list(ranks)}, and "
                f"include this rank, {context.rank}: correct the list"
            )
            raise ConfigError(msg)
        topic = f"rebuild/{name}/of {sorted(set(survivors))}"
        ranks = [rank for rank in ranks if rank in set(survivors)]
    else:
        topic = f"rebuild/{name}"
    lost = ",".join(str(r) for r in ranks if r in context.health.lost)
    # a second attempt keeps the first entry, which other ranks may have read
    context.store.compare_set(f"{topic}/{context.rank}", b"", f"{lost}|{value}".encode())
    deadline_ns = context.clock.after_ns(timeout_s)
    while True:
        decided = _decision(context, ranks, topic, agreed=survivors is not None)
        if decided:
            break
        if context.clock.now_ns() > deadline_ns:
            missing = [r for r in ranks if not context.store.check([f"{topic}/{r}"])]
            msg = (
                f"ranks {missing} neither joined the rebuild of the group of ranks {list(ranks)} "
                f"within {timeout_s:g} s nor died: call rebuild() on every surviving rank"
            )
            raise CommTimeout(msg)
    if context.rank not in decided:
        msg = (
            f"the survivors of ranks {list(ranks)} have rebuilt the group as {decided} without "
            f"rank {context.rank}, which they considered lost: end this process"
        )
        raise StaleError(msg)
    entries = _entries(context, topic, decided)
    return {rank: value for rank, (_, value) in zip(decided, entries, strict=True)}


def _decision(context: RankContext, ranks: Sequence[int], topic: str, *, agreed: bool) -> list[int]:
    """Return the ranks of the next group; this rank proposes them if there is no decision yet.

    The list is empty while some rank has neither joined nor been found lost.
    """
    store, health = context.store, context.health
    key = f"{topic}/decision"
    if not store.check([key]):
        missing = [r for r in ranks if not store.check([f"{topic}/{r}"])]
        health.collect()
        lost = [r for r in missing if r in health.lost]
        if agreed and lost:
            msg = (
                f"rank {lost[0]} is listed in survivors, but this rank "
                f"{health.lost[lost[0]].reason}: leave it out"
            )
            raise PeerLostError(msg, rank=lost[0])
        awaited = [r for r in missing if r not in lost]
        if awaited:
            with contextlib.suppress(CommTimeout):
                store.wait([f"{topic}/{awaited[0]}"], LOOK_S)
            return []
        arrived = [r for r in ranks if r not in missing]
        if not agreed:
            arrived = together(
                arrived, [lost for lost, _ in _entries(context, topic, arrived)], health.lost
            )
        store.compare_set(key, b"", ",".join(map(str, arrived)).encode())
    return [int(text) for text in store.get(key).decode().split(",")]


def together(
    arrived: Sequence[int], lost: Sequence[Collection[int]], known: Collection[int]
) -> list[int]:
    """Select ranks such that no selected rank has lost another selected rank.

    Ranks are considered in the order of `arrived`. A rank is left out if it has lost a rank that
    was selected before, or if such a rank has lost it.

    Args:
        arrived: Global ranks that have joined the meeting.
        lost: Ranks that each rank in `arrived` has lost.
        known: Ranks that the caller knows to be lost; they are left out.
    """
    losses = dict(zip(arrived, lost, strict=True))
    kept: list[int] = []
    for rank in arrived:
        apart = any(rank in losses[other] or other in losses[rank] for other in kept)
        if not apart and rank not in known:
            kept.append(rank)
    return kept


def _entries(context: RankContext, topic: str, ranks: Sequence[int]) -> list[tuple[list[int], str]]:
    """Return the entry of each of `ranks`: the ranks that it has lost, and its value."""
    texts = context.store.multi_get([f"{topic}/{rank}" for rank in ranks])
    pairs = [text.decode().partition("|") for text in texts]
    return [([int(r) for r in lost.split(",") if r], value) for lost, _, value in pairs]
