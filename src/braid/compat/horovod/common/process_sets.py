"""Process sets: operations among some of the ranks."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from braid.compat.horovod.common.exceptions import translated
from braid.compat.horovod.session import GLOBAL, SessionMember, session, started
from braid.errors import ConfigError

__all__ = [
    "ProcessSet",
    "add_process_set",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "process_set_by_id",
    "remove_process_set",
    "renew_process_sets",
]


class ProcessSet:
    """A set of ranks; usable after `add_process_set`, or `init(process_sets=[...])`.

    Args:
        ranks: Global ranks, each once.

    Raises:
        ConfigError: A rank is repeated or negative, or the list is empty.

    Attributes:
        process_set_id: Number of the set; None until it is added, and after it has been removed.
    """

    def __init__(self, ranks: Iterable[int] | int) -> None:
        try:
            members = [operator.index(r) for r in ([ranks] if isinstance(ranks, int) else ranks)]
        except TypeError as error:
            msg = f"ranks of a process set must be whole numbers, such as [0, 2], got {ranks!r}"
            raise ConfigError(msg) from error
        if not members or len(set(members)) < len(members) or min(members) < 0:
            msg = f"ranks of a process set must be different and at least 0, got {members}"
            raise ConfigError(msg)
        self._ranks = sorted(members)
        self.process_set_id: int | None = None

    @property
    def ranks(self) -> list[int]:
        """Global ranks."""
        return list(self._ranks)

    @property
    def member(self) -> SessionMember:
        """This rank's `SessionMember`: its position and engine in the set.

        Raises:
            ConfigError: The set has not been added.
        """
        if self.process_set_id is None:
            msg = (
                f"{self} is not registered: call hvd.add_process_set on all ranks, or "
                "hvd.init(process_sets=[...])"
            )
            raise ConfigError(msg)
        return session().member(self.process_set_id)

    def size(self) -> int:
        """Number of ranks."""
        return len(self.member.ranks)

    def rank(self) -> int:
        """This rank's position in the set; -1 on other ranks."""
        member = self.member
        return member.engine.group.rank if member.included else -1

    def included(self) -> bool:
        """Return whether this rank is in the set."""
        return self.member.included

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcessSet) and self.ranks == other.ranks

    def __hash__(self) -> int:
        return hash(tuple(self.ranks))

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _Global(ProcessSet):
    """The set of all ranks of the current session."""

    def __init__(self) -> None:
        super().__init__(0)
        self.process_set_id = GLOBAL

    @property
    def ranks(self) -> list[int]:
        return list(session().whole.ranks) if started() else []


global_process_set = _Global()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a set of global ranks for operations; all ranks call this, in the same order.

    A process that joins an elastic run can use the set once the other members have accepted the
    process.

    Raises:
        ConfigError: The set has ranks that do not exist, or a set of the same ranks exists.
        HorovodInternalError: Ranks pass different sets.
    """
    try:
        added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
        if session().is_newcomer:
            session().added_sets.append(added)
            return added
        _check_new(added, session().group.size)
    except ConfigError as error:
        session().refuse_set(str(error))
        raise
    with translated():
        member = session().add(added.ranks)
    added.process_set_id = member.number
    session().added_sets.append(added)
    return added


def renew_process_sets(sets: Sequence[ProcessSet]) -> None:
    """Add the process sets of rank 0 to the session of a new epoch; all members call this.

    An epoch is a period of an elastic run with the same members. If a set has ranks that do not
    exist now, it is added in a later epoch that has these ranks.

    Args:
        sets: Sets that this rank's program has added before.

    Raises:
        HorovodInternalError: A member was lost.
    """
    current = session()
    with translated():
        wanted = current.group.objects.broadcast([added.ranks for added in sets])
    known = {tuple(added.ranks): added for added in sets}
    for added in sets:
        added.process_set_id = None
    current.added_sets = [known.get(tuple(ranks)) or ProcessSet(ranks) for ranks in wanted]
    for added in current.added_sets:
        if added.ranks[-1] < current.group.size:
            with translated():
                added.process_set_id = current.add(added.ranks).number


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set, on all ranks; return False if it was not added."""
    number = process_set.process_set_id
    if number is None or number == GLOBAL or number not in session().numbers():
        return False
    session().remove(number)
    kept = [added for added in session().added_sets if added != process_set]
    session().added_sets = kept
    process_set.process_set_id = None
    return True


def process_set_by_id(process_set_id: int) -> ProcessSet:
    """Return the process set with the number `process_set_id`; 0 is the set of all ranks."""
    if process_set_id == GLOBAL:
        return global_process_set
    added = ProcessSet(session().member(process_set_id).ranks)
    added.process_set_id = process_set_id
    return added


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """Return the ranks of each process set, by number."""
    return {number: list(session().member(number).ranks) for number in session().numbers()}


def check_sets(sets: Iterable[ProcessSet | Sequence[int]]) -> list[ProcessSet]:
    """Return the process sets for `init`, after checking their ranks."""
    return [item if isinstance(item, ProcessSet) else ProcessSet(item) for item in sets]


def _check_new(added: ProcessSet, size: int) -> None:
    strangers = [rank for rank in added.ranks if rank >= size]
    if strangers:
        msg = f"ranks of a process set must be below {size}, got {strangers}"
        raise ConfigError(msg)
    for number, ranks in get_process_set_ids_and_ranks().items():
        if added.ranks == ranks:
            msg = f"a process set of ranks {ranks} exists already: use process set {number}"
            raise ConfigError(msg)
