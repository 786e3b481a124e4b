"""Agreement of the survivors of a loss on the members of the next group, through the store.

Problem: survivors notice a death at different times, and a second rank may die while they agree. If
each survivor went on with the ranks it believes in, there would be two groups that wait for each
other.

Idea: each survivor puts one entry into the store, with the ranks that it has lost. As soon as a
survivor sees that every rank has an entry or is lost, it proposes as many ranks as have not lost
each other. The first proposal is the decision for all (`Store.compare_set`). Of two living ranks
that cannot reach each other any more, the later one is left out. A decision may name a rank that
has just died. The new group notices that death as any group does, and is rebuilt. A rank that the
decision leaves out raises, since the survivors have gone on without it.

Source: the shrinking of communicators in Bland et al., "Post-failure recovery of MPI communication
capability" (2013), sec. 4, with the store in place of an agreement over messages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence

from braid.errors import CommTimeout, ConfigError, PeerLostError, StaleError
from braid.runtime.transport import RankContext

__all__ = ["meet_survivors", "together"]

LOOK_S = 0.05  # between two looks at the ranks that have died


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
        survivors: Ranks that are left, if the program knows; the same on all of them.
        name: Name of the meeting, new for each.
        value: Value of this rank for the other survivors.
        timeout_s: Seconds to wait for the other ranks.

    Returns:
        The value of each survivor by global rank, in the order of the group.

    Raises:
        StaleError: The survivors have gone on without this rank.
        PeerLostError: One of `survivors` is gone.
        CommTimeout: Some ranks neither joined the meeting nor died.
        ConfigError: Some of `survivors` are not members, or this rank is not among them.
    """
    if survivors is not None:
        strangers = [rank for rank in survivors if rank not in ranks]
        if strangers or context.rank not in survivors:
            msg = (
                f"survivors {list(survivors)} are not different ranks out of {list(ranks)} "
                f"with {context.rank} among them"
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
                f"ranks {missing} neither joined the rebuilding of the group of ranks "
                f"{list(ranks)} within {timeout_s:g} s nor died: every survivor calls rebuild()"
            )
            raise CommTimeout(msg)
    if context.rank not in decided:
        msg = (
            f"the survivors of ranks {list(ranks)} have gone on as {decided} without rank "
            f"{context.rank}: they took this process for lost, so end it"
        )
        raise StaleError(msg)
    entries = _entries(context, topic, decided)
    return {rank: value for rank, (_, value) in zip(decided, entries, strict=True)}


def _decision(context: RankContext, ranks: Sequence[int], topic: str, *, agreed: bool) -> list[int]:
    """Return the ranks that go on, proposed by this rank if nobody else has decided.

    The list is empty while it is unknown whether some rank is lost.
    """
    store, health = context.store, context.health
    key = f"{topic}/decision"
    if not store.check([key]):
        missing = [r for r in ranks if not store.check([f"{topic}/{r}"])]
        health.collect()
        lost = [r for r in missing if r in health.lost]
        if agreed and lost:
            msg = (
                f"rank {lost[0]} is named as a survivor, but it {health.lost[lost[0]].reason}: "
                "leave it out"
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
    """Return the ranks that have not lost each other, in their order.

    A rank is added to those before it unless one of them has lost it, or it has lost one of them.

    Args:
        arrived: Global ranks that have joined the meeting.
        lost: Ranks that each of these has lost.
        known: Ranks that the caller knows to be lost.
    """
    losses = dict(zip(arrived, lost, strict=True))
    left: list[int] = []
    for rank in arrived:
        apart = any(rank in losses[other] or other in losses[rank] for other in left)
        if not apart and rank not in known:
            left.append(rank)
    return left


def _entries(context: RankContext, topic: str, ranks: Sequence[int]) -> list[tuple[list[int], str]]:
    """Return the entry of each of `ranks`: the ranks that it has lost, and its value."""
    texts = context.store.multi_get([f"{topic}/{rank}" for rank in ranks])
    pairs = [text.decode().partition("|") for text in texts]
    return [([int(r) for r in lost.split(",") if r], value) for lost, _, value in pairs]
