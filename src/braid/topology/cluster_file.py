"""A cluster as a file that people write: one table per level, from the ranks upwards.

[[level]]
name = "host"
size = 8                  # ranks of a host
latency_s = 1e-6
bytes_per_s = 600e9       # of the link from each rank
full_duplex = true

[[level]]
name = "rack"
size = 16                 # hosts of a rack
latency_s = 5e-6
bytes_per_s = 25e9        # of the link from each host
    by_size = [[65536, 6e9], [1048576, 25e9]]   # if one small message cannot fill it
    burst_bytes = 125e3       # if it lets so much through beside its rate after a rest
"""

from __future__ import annotations

import json
from dataclasses import asdict

import msgspec

from braid.errors import ConfigError
from braid.topology.cluster import Cluster, Level

__all__ = ["from_toml", "to_toml"]


class _Level(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    size: int
    latency_s: float
    bytes_per_s: float
    full_duplex: bool = True
    by_size: tuple[tuple[float, float], ...] = ()
    burst_bytes: float = 0.0


class _File(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    level: list[_Level]


def from_toml(text: str) -> Cluster:
    """Cluster that `text` describes.

    Raises:
        ConfigError: It is no TOML, or not what is expected, with the place.
    """
    try:
        found = msgspec.toml.decode(text, type=_File)
    except msgspec.DecodeError as exc:
        msg = (
            "expected the levels of a cluster as TOML ([[level]] name, size, latency_s, "
            f"bytes_per_s), found: {exc}"
        )
        raise ConfigError(msg) from exc
    return Cluster([Level(**msgspec.structs.asdict(level)) for level in found.level])


def to_toml(cluster: Cluster) -> str:
    """Text from which `from_toml` makes an equal cluster."""
    levels = [_Level(**asdict(level)) for level in cluster.levels]
    return "\n".join(f"[[level]]\n{_table(level)}" for level in levels)


def _table(level: _Level) -> str:
    """TOML is read by msgspec everywhere, but written only where a further package is installed."""
    return (
        f"name = {json.dumps(level.name, ensure_ascii=False)}\nsize = {level.size}\nlatency_s = "
        f"{level.latency_s!r}\n"
        f"bytes_per_s = {level.bytes_per_s!r}\nfull_duplex = {str(level.full_duplex).lower()}\n"
        f"by_size = [{', '.join(f'[{n!r}, {rate!r}]' for n, rate in level.by_size)}]\nburst_bytes "
        f"= {level.burst_bytes!r}\n"
    )
