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
burst_bytes = 125e3       # if it carries so much above its rate after a rest
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
    """Read the cluster that `text` describes.

    Raises:
        ConfigError: `text` is no TOML, or has wrong tables; names the place.
    """
    try:
        file = msgspec.toml.decode(text, type=_File)
    except msgspec.DecodeError as exc:
        msg = (
            f"these are not the levels of a cluster as TOML: {exc}; write [[level]] with name, "
            "size, latency_s, bytes_per_s"
        )
        raise ConfigError(msg) from exc
    return Cluster([Level(**msgspec.structs.asdict(level)) for level in file.level])


def to_toml(cluster: Cluster) -> str:
    """Write text from which `from_toml` makes an equal cluster."""
    levels = [_Level(**asdict(level)) for level in cluster.levels]
    return "\n".join(f"[[level]]\n{_table(level)}" for level in levels)


def _table(level: _Level) -> str:
    """Write one table; msgspec reads TOML everywhere, but writes it only with a further package."""
    return (
        f"name = {json.dumps(level.name, ensure_ascii=False)}\nsize = {level.size}\n"
        f"latency_s = {level.latency_s!r}\n"
        f"bytes_per_s = {level.bytes_per_s!r}\nfull_duplex = {str(level.full_duplex).lower()}\n"
        f"by_size = [{', '.join(f'[{n!r}, {rate!r}]' for n, rate in level.by_size)}]\n"
        f"burst_bytes = {level.burst_bytes!r}\n"
    )
