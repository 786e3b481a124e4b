"""Whether the kernel killed a process for memory, told from the counters of its control group.

Problem: the kernel's memory killer sends SIGKILL, and a rank that dies of signal 9 looks like one
that a colleague killed. The kernel log needs root. Idea: both generations of cgroups count such
kills; a SIGKILL that nobody of ours sent, while the counter rose, is one.

Source: Documentation/admin-guide/cgroup-v1/memory.rst (memory.oom_control, `oom_kill`) and
cgroup-v2.rst (memory.events).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from braid.diagnose import MemoryKill

__all__ = ["MemoryWatch", "cgroup_paths", "parse_counter", "parse_limit"]

UNLIMITED_BYTES = 1 << 60  # cgroup v1 says "no limit" by a number near 2**63
MOUNT = Path("/sys/fs/cgroup")


class _Files(NamedTuple):
    counter: str
    limit: str
    peak: str


V1 = _Files("memory.oom_control", "memory.limit_in_bytes", "memory.max_usage_in_bytes")
V2 = _Files("memory.events", "memory.max", "memory.peak")


class MemoryWatch:
    """Notices kills in the control group of this process, which its ranks inherit.

    Args:
        membership: Text of `/proc/self/cgroup`.
        mount: Where control groups are mounted.
    """

    def __init__(self, membership: str, mount: Path = MOUNT) -> None:
        found = [
            (path, files)
            for path, files in cgroup_paths(membership, mount)
            if (path / files.counter).exists()
        ]
        self._path: Path = found[0][0] if found else Path()
        self._files: _Files | None = found[0][1] if found else None
        self._seen = self._kills()

    @classmethod
    def of_this_process(cls) -> MemoryWatch:
        """Watch the group that this process is in; a system without groups has no kills to see."""
        return cls(_read(Path("/proc/self/cgroup")))

    def new_kill(self) -> MemoryKill | None:
        """What the kernel says about a kill since the last call; None when there was none."""
        kills = self._kills()
        if kills <= self._seen or self._files is None:
            return None
        self._seen += 1  # one process per kill: two ranks that die together are both explained
        return MemoryKill(
            parse_limit(_read(self._path / self._files.limit)),
            parse_limit(_read(self._path / self._files.peak)),
        )

    def _kills(self) -> int:
        return parse_counter(_read(self._path / self._files.counter)) if self._files else 0


def parse_counter(text: str) -> int:
    """Number of kills, from `memory.oom_control` (v1) or `memory.events` (v2)."""
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.strip().isdecimal():
            return int(value)
    return 0


def parse_limit(text: str) -> int:
    """A number of bytes; 0 for `max`, for no limit, and for anything else."""
    value = text.strip()
    number = int(value) if value.isascii() and value.isdigit() and len(value) < 20 else 0
    return number if number < UNLIMITED_BYTES else 0


def cgroup_paths(membership: str, mount: Path) -> list[tuple[Path, _Files]]:
    """Where the files of this process's memory group may be, likeliest first.

    Inside a container the path of `/proc/self/cgroup` may be the host's; its own group is then the
    mount itself.
    """
    paths: list[tuple[Path, _Files]] = []
    for line in membership.splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        relative = path.strip("/")
        if "memory" in controllers.split(","):
            root = mount / "memory"
            paths = [(root / relative, V1), (root, V1), *paths]
        elif hierarchy == "0" and not controllers:
            paths += [(root / relative, V2) for root in (mount, mount / "unified")]
            paths.append((mount, V2))
    return paths


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
