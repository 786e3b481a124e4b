"""Which GPUs of a host are near each other: the matrix that `nvidia-smi topo -m` prints, as levels of a cluster.

            GPU0   GPU1   GPU2   GPU3   CPU Affinity        NV#        NVLink, # of them
    GPU0     X     NV4    SYS    SYS    0-15                PIX, PXB   PCIe switches only
    GPU1    NV4     X     SYS    SYS    0-15                PHB, NODE  through the processor's PCIe, inside a socket
    GPU2    SYS    SYS     X     NV4    16-31               SYS        from socket to socket
    GPU3    SYS    SYS    NV4     X     16-31

Source: the legend that `nvidia-smi topo -m` prints itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from braid.errors import ConfigError
from braid.topology.places import Rings, levels

__all__ = ["GPU_LEVEL_NAMES", "gpu_levels", "parse_links"]

GPU_LEVEL_NAMES = ("nvlink", "switch", "socket", "host")
KINDS = {"PIX": 1, "PXB": 1, "PHB": 2, "NODE": 2, "SYS": 3}  # level at which they meet; NVLink: 0
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def parse_links(text: str, *, count: int | None = None) -> list[list[int]]:
    """Level at which each pair of GPUs meets, as an index of `GPU_LEVEL_NAMES`; 0 on the diagonal, too.

    Args:
        text: What `nvidia-smi topo -m` prints.
        count: How many GPUs it must have; any number when None.

    Raises:
        ConfigError: It has no square matrix of GPUs, or a kind of link that is not known.
    """
    rows = [line.split() for line in ESCAPES.sub("", text).splitlines()]
    heads = next((row for row in rows if row[:1] == ["GPU0"] and "X" not in row), [])
    names = [cell for cell in heads if re.fullmatch(r"GPU\d+", cell)]
    found = []
    for name in names:
        row = next((r for r in rows if r[:1] == [name] and "X" in r), [])
        cells = row[1 : len(names) + 1]
        if len(cells) < len(names):
            msg = f"expected a row of {len(names)} links for {name} from nvidia-smi topo -m, found {' '.join(row) or 'none'}"
            raise ConfigError(msg)
        found.append([_level(cell, name) for cell in cells])
    if not found:
        msg = f"expected a matrix of GPUs from nvidia-smi topo -m, found {text[:80]!r}"
        raise ConfigError(msg)
    if count is not None and len(found) != count:
        msg = f"expected {count} GPUs, as torch sees them, found {len(found)} in nvidia-smi topo -m: unset CUDA_VISIBLE_DEVICES"
        raise ConfigError(msg)
    return found


def gpu_levels(links: Sequence[Sequence[int]]) -> list[Rings]:
    """The GPUs as ranks of a cluster.

    Args:
        links: From `parse_links`.

    Raises:
        ConfigError: Units of one level are of different sizes, or their GPUs do not follow each other.
    """
    count = len(links)
    paths = []
    for gpu in range(count):
        # a unit is known by its first GPU; from the top
        units = [
            min(other for other in range(count) if links[gpu][other] <= level)
            for level in range(len(GPU_LEVEL_NAMES) - 1)
        ]
        paths.append(tuple(reversed(units)))
    return levels(paths, GPU_LEVEL_NAMES)


def _level(cell: str, name: str) -> int:
    if cell == "X" or re.fullmatch(r"NV\d+", cell):
        return 0
    if cell not in KINDS:
        msg = f"expected a link out of NV#, {', '.join(KINDS)} in the row of {name}, found {cell!r}"
        raise ConfigError(msg)
    return KINDS[cell]
