"""Parses lists of hosts and assigns ranks to hosts.

Problem: mpirun, horovodrun and deepspeed each read host lists in their own way and guess at the
meaning of mistakes. A host that is named twice becomes two hosts, a missing number becomes one.

Idea: one small grammar, and one error message that lists all mistakes. Ranks are numbered host by
host, so that consecutive ranks share memory.

    -H a:2,b:2            hostfile:  a slots=2      # a comment
                                     b slots=2      or  b:2
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from braid.errors import ConfigError

__all__ = ["Host", "RankPlace", "assign", "parse_hostfile", "parse_hosts", "used_slots"]

# user@name, an IPv4 address, or an IPv6 address in brackets; never an option of the remote shell
NAME = re.compile(r"(?:[\w.+][\w.+-]*@)?(?:\[[0-9A-Fa-f:.%\w]+\]|\w[\w.-]*)", re.ASCII)
LINE = re.compile(r"(\S+)(?:\s+slots\s*=\s*(\S+))?", re.ASCII)
SLOTS = re.compile(r"[1-9][0-9]{0,3}", re.ASCII)


class Host(NamedTuple):
    """A host in the user's list.

    Attributes:
        name: Name of the host, as the remote shell knows it.
        slots: Largest number of ranks on the host.
    """

    name: str
    slots: int = 1

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


class RankPlace(NamedTuple):
    """Host of a rank.

    Attributes:
        rank: Global rank.
        node: Number of the host.
        local_rank: Index of the rank on its host.
        local_world_size: Number of ranks on the host.
    """

    rank: int
    node: int
    local_rank: int
    local_world_size: int


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parse a list of hosts with their numbers of ranks, such as `a:2,b:2`; 1 if missing.

    Raises:
        ConfigError: An item is empty or malformed, or a host is named twice; the message lists all
            mistakes.
    """
    problems: list[str] = []
    hosts = [_item(item.strip(), f"-H {text}", problems) for item in text.split(",")]
    return _checked(hosts, problems)


def parse_hostfile(text: str, name: str = "hostfile") -> tuple[Host, ...]:
    """Parse a file with lines such as `a slots=2` or `a:2`; `#` begins a comment.

    Args:
        text: Contents of the file.
        name: Name of the file for error messages.

    Raises:
        ConfigError: A line is malformed, a host is named twice, or the file names no host.
    """
    problems: list[str] = []
    hosts = []
    for number, raw in enumerate(text.splitlines(), 1):
        text, where = raw.partition("#")[0].strip(), f"{name}:{number}"
        line = LINE.fullmatch(text)
        if line is not None:
            hosts.append(_item(":".join(filter(None, line.groups())), where, problems))
        elif text:
            problems.append(f"{where}: {text!r} is not a line such as `a slots=2`")
    if not hosts and not problems:
        problems.append(f"{name} names no host: write lines such as `a slots=2`")
    return _checked(hosts, problems)


def assign(hosts: Sequence[Host], num_ranks: int | None = None) -> tuple[RankPlace, ...]:
    """Assign ranks to the slots of hosts, host by host; the result has only hosts with ranks.

    Args:
        hosts: Hosts in the order of their ranks.
        num_ranks: Number of ranks; the number of all slots when None.

    Raises:
        ConfigError: There are fewer slots than ranks.
    """
    slots = sum(host.slots for host in hosts)
    wanted = slots if num_ranks is None else num_ranks
    if not 1 <= wanted <= slots:
        listed = ",".join(map(str, hosts))
        msg = (
            f"-n {wanted} does not match {listed}, with slots for 1 to {slots} ranks: lower -n, "
            "or name more hosts or slots"
        )
        raise ConfigError(msg)
    places: list[RankPlace] = []
    for node, host in enumerate(hosts):
        size = min(host.slots, wanted - len(places))
        places += [RankPlace(len(places) + local, node, local, size) for local in range(size)]
    return tuple(places)


def used_slots(
    listed: Mapping[str, int],
    blocked: Mapping[str, int],
    current: Mapping[str, int],
    max_ranks: int,
) -> dict[str, int]:
    """Return the slots that ranks may use, by host.

    Args:
        listed: Slots by host; the name of this host is empty in a run without agents.
        blocked: Blocked slots by host.
        current: Slots that ranks use now, which come first so that ranks stay where they are.
        max_ranks: Maximum number of slots.
    """
    used: dict[str, int] = {}
    for source in (current, listed):
        for host, num_wanted in source.items():
            num_free = listed.get(host, 0) - blocked.get(host, 0)
            room = max_ranks - sum(used.values()) + used.get(host, 0)
            number = min(num_wanted, num_free, room)
            if number > used.get(host, 0):
                used[host] = number
    return used


def _item(item: str, where: str, problems: list[str]) -> Host:
    name, slots = item, "1"
    if ":" in item and not item.endswith("]"):
        name, _, slots = item.rpartition(":")
    if not item:
        problems.append(f"{where} has an empty entry: remove a comma")
    elif NAME.fullmatch(name) is None:
        problems.append(f"{where}: {name!r} is not the name of a host")
    elif SLOTS.fullmatch(slots) is None:
        problems.append(f"{where}: slots of {name} must be a number from 1 to 9999, got {slots!r}")
    else:
        return Host(name, int(slots))
    return Host(name)


def _checked(hosts: Sequence[Host], problems: list[str]) -> tuple[Host, ...]:
    names = [host.name for host in hosts if host.name]
    twice = sorted({name for name in names if names.count(name) > 1})
    problems += [
        f"{name} is named {names.count(name)} times: give its slots once" for name in twice
    ]
    if problems:
        msg = f"{'; '.join(problems)}. Write hosts as a:2,b:2, or in lines such as a slots=2"
        raise ConfigError(msg)
    return tuple(hosts)
