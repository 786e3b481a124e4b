"""Exchange of addresses and settings between the ranks of a job, through the store.

Each rank publishes its host and how to reach it. All ranks compare these, and if they are not
compatible, all raise the same error. A rank that waits here also listens to the launcher, since a
rank that died before the meeting will never come.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

from braid._version import __version__
from braid.errors import BraidError, ConfigError, PeerLostError, RendezvousError
from braid.runtime.clock import Clock
from braid.runtime.store import RanksMissingError, Store, exchange
from braid.runtime.transport.health import Health

__all__ = ["Meeting", "host_name"]

PARTING_S = 5.0


class Meeting:
    """One rank's part in the exchange of addresses at the start of a job.

    Args:
        rank: Global rank of this process.
        world_size: Number of ranks of the job.
        store: Store that all ranks share.
        clock: Clock for the deadline.
        health: Registry of lost ranks, fed by the launcher's reports.
        timeout_s: Seconds to wait for the other ranks, in each exchange.

    Raises:
        RendezvousError: Another process has the same rank.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Store,
        *,
        clock: Clock,
        health: Health,
        timeout_s: float,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.store = store
        self.clock = clock
        self.health = health
        self.timeout_s = timeout_s
        if store.add(f"shm/joined/{rank}", 1) > 1:
            msg = (
                f"this is a second process with rank {rank} (pid {os.getpid()}): give every "
                "process its own RANK, or use a fresh rendezvous address for a new job"
            )
            raise RendezvousError(msg)

    def hosts(self, way: str, name: str) -> tuple[int, ...]:
        """Publish this rank's host, and return the host number of each rank.

        Args:
            way: Name of the way in which ranks of one host reach each other. It must be the same on
                all ranks, and so must braid's version.
            name: Name of the host; equal on ranks that can share memory.

        Returns:
            Number of each rank's host, in the order of their first ranks.

        Raises:
            RendezvousError: Some ranks did not join; the message names them.
            ConfigError: Ranks have different versions of braid or different values of `way`.
        """
        value = f"{__version__}|{way}|{name}"
        try:
            values = self._exchange("shm/host", value, range(self.world_size))
        except RanksMissingError as exc:
            msg = (
                f"ranks {exc.ranks} of {self.world_size} have not joined within "
                f"{self.timeout_s:g} s (this is rank {self.rank}): start them with the same "
                "WORLD_SIZE and rendezvous address"
            )
            raise RendezvousError(msg) from exc
        entries = [value.split("|", 2) for value in values]
        wrong = _disagreement(
            [entry[0] for entry in entries],
            "have the same version of braid",
            "install the same version of braid on all hosts",
        ) or _disagreement(
            [entry[1] for entry in entries],
            "reach each other in the same way",
            "set BRAID_PORTABLE=1 for all ranks or for none",
        )
        if wrong:
            self.part()
            raise ConfigError(wrong)
        numbers: dict[str, int] = {}
        return tuple(numbers.setdefault(entry[2], len(numbers)) for entry in entries)

    def gather(self, topic: str, text: str, ranks: Iterable[int] | None = None) -> list[str]:
        """Publish a text, and return the texts of `ranks`, or of all ranks when None.

        Each topic is used once.
        """
        members = list(range(self.world_size) if ranks is None else ranks)
        try:
            return self._exchange(topic, text, members)
        except RanksMissingError as exc:
            msg = f"{exc} (this is rank {self.rank})"
            raise RendezvousError(msg) from exc

    def part(self) -> None:
        """Wait until all ranks have read the data of an error that all of them will raise.

        Rank 0, which may serve the store, leaves last.
        """
        self.store.set(f"shm/parted/{self.rank}", b"")
        if self.rank == 0:
            with contextlib.suppress(BraidError):
                self.store.wait([f"shm/parted/{r}" for r in range(self.world_size)], PARTING_S)

    def _exchange(self, topic: str, text: str, ranks: Sequence[int]) -> list[str]:
        values = exchange(
            self.store,
            topic,
            self.rank,
            ranks,
            text.encode(),
            timeout_s=self.timeout_s,
            clock=self.clock,
            check=self.look,
        )
        return [value.decode() for value in values]

    def look(self) -> None:
        """Raise PeerLostError if a rank has died before the meeting was over."""
        self.health.collect()
        for loss in self.health.lost.values():
            number = self.health.number(loss.rank)
            msg = f"rank {number} {loss.reason}, before all ranks had joined"
            raise PeerLostError(msg, rank=loss.rank) from None


def _disagreement(words: list[str], claim: str, advice: str) -> str:
    if len(set(words)) == 1:
        return ""
    usual = max(words, key=words.count)
    clear = words.count(usual) > len(words) / 2  # without a majority no rank is marked
    width = max(map(len, words))
    table = "\n".join(
        f"  rank {r}  {word:<{width}}{'  <-- differs' if clear and word != usual else ''}".rstrip()
        for r, word in enumerate(words)
    )
    return f"not all ranks {claim}:\n{table}\n{advice}"


def host_name() -> str:
    """Return a text of host name, boot and network; equal where memory can be shared."""
    path = Path("/proc/sys/kernel/random/boot_id")
    boot = path.read_text().strip() if path.exists() else ""
    network = "/proc/self/ns/net"
    number = Path(network).stat().st_ino if Path(network).exists() else ""
    return f"{socket.gethostname()}/{boot}/{number}"
