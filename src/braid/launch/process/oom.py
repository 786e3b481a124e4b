"""Detects out-of-memory kills from the counters of a control group.

Problem: the kernel's memory killer sends SIGKILL, so its victim looks like a rank that a user has
killed. Reading the kernel log needs root.

Idea: both generations of cgroups count such kills. A SIGKILL that braid has not sent is an
out-of-memory kill if the counter has risen.

Source: Documentation/admin-guide/cgroup-v1/memory.rst (memory.oom_control, `oom_kill`) and
cgroup-v2.rst (memory.events).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from braid.runtime.diagnose.verdict import MemoryKill

__all__ = ["OomMonitor", "cgroup_paths", "parse_counter", "parse_limit"]

UNLIMITED_BYTES = 1 << 60  # cgroup v1 expresses "no limit" by a number near 2**63
MOUNT = Path("/sys/fs/cgroup")


class _Files(NamedTuple):
    counter: str
    limit: str
    peak: str


V1 = _Files("memory.oom_control", "memory.limit_in_bytes", "memory.max_usage_in_bytes")
V2 = _Files("memory.events", "memory.max", "memory.peak")


class OomMonitor:
    """Counts out-of-memory kills in the control group of this process, which its ranks inherit.

    Args:
        membership: Text of `/proc/self/cgroup`.
        mount: Directory where control groups are mounted.
    """

    def __init__(self, membership: str, mount: Path = MOUNT) -> None:
        groups = [
            (path, files)
            for path, files in cgroup_paths(membership, mount)
            if (path / files.counter).exists()
        ]
        self._path: Path = groups[0][0] if groups else Path()
        self._files: _Files | None = groups[0][1] if groups else None
        self._num_reported = self._kills()

    @classmethod
    def of_this_process(cls) -> OomMonitor:
        """Return a monitor of this process's group; it reports nothing without control groups."""
        return cls(_read(Path("/proc/self/cgroup")))

    def new_kill(self) -> MemoryKill | None:
        """Return the facts about one kill since the last call; None when there was none."""
        kills = self._kills()
        if kills <= self._num_reported or self._files is None:
            return None
        self._num_reported += 1  # one per call, so that two ranks that die together are explained
        return MemoryKill(
            parse_limit(_read(self._path / self._files.limit)),
            parse_limit(_read(self._path / self._files.peak)),
        )

    def _kills(self) -> int:
        return parse_counter(_read(self._path / self._files.counter)) if self._files else 0


def parse_counter(text: str) -> int:
    """Return the number of kills from `memory.oom_control` (v1) or `memory.events` (v2)."""
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.strip().isdecimal():
            return int(value)
    return 0


def parse_limit(text: str) -> int:
    """Return a limit in bytes; 0 for `max`, for no limit, and for invalid text."""
    value = text.strip()
    number = int(value) if value.isascii() and value.isdigit() and len(value) < 20 else 0
    return number if number < UNLIMITED_BYTES else 0


def cgroup_paths(membership: str, mount: Path) -> list[tuple[Path, _Files]]:
    """Return possible directories of the process's memory group, likeliest first.

    In a container, `/proc/self/cgroup` may contain the path on the host. The mount itself is then
    the container's group.
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
