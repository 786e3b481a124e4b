"""Slots of an elastic run from a list of hosts that may change, such as `--hostfile FILE`.

The launcher reads the list each second. A new host or slot gets ranks, and the ranks of a host or
slot that is missing leave. A host that was lost gets no ranks until the list changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from braid.errors import ConfigError
from braid.launch.cluster.rank_assignment import Host, parse_hostfile, used_slots
from braid.launch.process.job import MAX_RANKS
from braid.runtime.clock import Clock

__all__ = ["ListedSlots", "read_hostfile"]

PERIOD_S = 1.0


class ListedSlots:
    """Slots in a list of hosts, a `braid.launch.supervise.slots.SlotSource`.

    Args:
        read: Reads the list; its `ConfigError` leaves the slots unchanged.
        hosts: Hosts at the start.
        num_ranks: Number of ranks at the start.
        max_ranks: Maximum number of ranks.
        clock: Time source.

    Attributes:
        hosts: Slots that ranks may use, by host.
    """

    def __init__(
        self,
        read: Callable[[], Sequence[Host]],
        hosts: Sequence[Host],
        num_ranks: int,
        max_ranks: int,
        clock: Clock,
    ) -> None:
        self._read = read
        self._max_ranks = max_ranks
        self._clock = clock
        self._listed = dict(hosts)
        self._lost: dict[str, int] = {}  # slots of lost hosts, which are blocked
        self._problem = ""
        self.hosts: Mapping[str, int] = used_slots(self._listed, {}, {}, num_ranks)
        self.deadline_ns = clock.after_ns(PERIOD_S)

    def lost(self, host: str, *, is_gone: bool = False) -> None:
        """Give a lost host no ranks; a rank that dies on another host frees its slot."""
        if is_gone:
            self._lost[host] = MAX_RANKS
            self.deadline_ns = self._clock.now_ns()

    def poll(self) -> tuple[bool, str]:
        """Read the list when it is due; return whether `hosts` has changed, and a notice."""
        if self._clock.now_ns() < self.deadline_ns:
            return False, ""
        self.deadline_ns = self._clock.after_ns(PERIOD_S)
        problem = ""
        try:
            listed = dict(self._read())
        except ConfigError as error:
            problem = f"{error}; the slots stay as they were"
        else:
            if listed != self._listed:
                self._listed, self._lost = listed, {}
        is_new, self._problem = problem != self._problem, problem
        before = self.hosts
        self.hosts = used_slots(self._listed, self._lost, before, self._max_ranks)
        return self.hosts != before, problem * is_new


def read_hostfile(path: str) -> tuple[Host, ...]:
    """Return the hosts in a file.

    Raises:
        ConfigError: The file cannot be read, or a line is malformed.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "it is not a text file"
        msg = f"the file that names hosts, {path}, cannot be read: {why}"
        raise ConfigError(msg) from exc
    return parse_hostfile(text, path)
