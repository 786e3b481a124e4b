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

[device]                  # of each rank, for `braid plan`
name = "a100-40gb"        # of the table; figures that follow replace its own
memory_bytes = 40e9
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import msgspec

from braid.errors import ConfigError
from braid.programs.schedule.files import read_text
from braid.programs.topology.cluster import Cluster, Level
from braid.programs.topology.device import DEVICES, Device, Efficiency

__all__ = ["from_toml", "read_cluster", "to_toml"]


class _Level(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    size: int
    latency_s: float
    bytes_per_s: float
    full_duplex: bool = True
    by_size: tuple[tuple[float, float], ...] = ()
    burst_bytes: float = 0.0


class _Device(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    flops_per_s: dict[str, float] | None = None
    bytes_per_s: float | None = None
    memory_bytes: float | None = None
    overlap: float | None = None
    efficiency: dict[str, float] = {}
    source: str | None = None

    def device(self) -> Device:
        """Return the described device, with its figures checked.

        Raises:
            ConfigError: The device is not in the table and lacks figures, or a figure is wrong.
        """
        fields = {k: v for k, v in msgspec.structs.asdict(self).items() if v is not None}
        shares = fields.pop("efficiency")
        known = DEVICES.get(self.name)
        problems = [
            f"{name} = {value}"
            for name, value in shares.items()
            if not (0 <= value < float("inf") and (value or name.endswith("_s")))
        ]
        figures = [*(self.flops_per_s or {}).values(), self.bytes_per_s, self.memory_bytes]
        problems += [str(x) for x in figures if x is not None and not 0 < x < float("inf")]
        if self.overlap is not None and not 0 <= self.overlap <= 1:
            problems.append(f"overlap = {self.overlap} (at most 1)")
        if others := set(shares) - set(Efficiency.__dataclass_fields__):
            problems.append(f"efficiency has no {', '.join(sorted(others))}")
        if problems:
            msg = f"[device] {self.name}: figures must be positive numbers, got {problems[0]}"
            raise ConfigError(msg)
        needed = ("flops_per_s", "bytes_per_s", "memory_bytes")
        missing = [name for name in needed if name not in fields]
        if known is None and missing:
            msg = (
                f"[device] {self.name} is not in the table ({', '.join(DEVICES)}): give "
                f"{', '.join(missing)}, too"
            )
            raise ConfigError(msg)
        if known is None:
            return Device(**fields, efficiency=Efficiency(**shares))
        return replace(known, **fields, efficiency=replace(known.efficiency, **shares))


class _File(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    level: list[_Level]
    device: _Device | None = None


def from_toml(text: str) -> Cluster:
    """Parse a cluster from TOML text.

    Raises:
        ConfigError: `text` is not TOML, or has wrong tables; the message has the position.
    """
    try:
        file = msgspec.toml.decode(text, type=_File)
    except msgspec.DecodeError as exc:
        msg = (
            f"these are not the levels of a cluster as TOML: {exc}; write [[level]] with name, "
            "size, latency_s, bytes_per_s"
        )
        raise ConfigError(msg) from exc
    levels = [Level(**msgspec.structs.asdict(level)) for level in file.level]
    return Cluster(levels, None if file.device is None else file.device.device())


def read_cluster(file: str | Path) -> Cluster:
    """Read a cluster from a TOML file.

    Raises:
        ConfigError: The file cannot be read, or has wrong tables; the message names the file.
    """
    try:
        return from_toml(read_text(str(file)))
    except ConfigError as exc:
        msg = f"{file}: {exc}"
        raise ConfigError(msg) from exc


def to_toml(cluster: Cluster) -> str:
    """Convert a cluster to TOML text; `from_toml` converts it back."""
    text = "\n".join(f"[[level]]\n{_table(level)}" for level in cluster.levels)
    return text if cluster.device is None else f"{text}\n{_device_table(cluster.device)}"


def _device_table(device: Device) -> str:
    """Write a device with all of its figures."""
    shares = ", ".join(f"{k} = {v!r}" for k, v in asdict(device.efficiency).items())
    peaks = ", ".join(f"{k} = {v!r}" for k, v in device.flops_per_s.items())
    return (
        f"[device]\nname = {json.dumps(device.name)}\nflops_per_s = {{ {peaks} }}\n"
        f"bytes_per_s = {device.bytes_per_s!r}\nmemory_bytes = {device.memory_bytes!r}\n"
        f"overlap = {device.overlap!r}\nefficiency = {{ {shares} }}\n"
        f"source = {json.dumps(device.source)}\n"
    )


def _table(level: Level) -> str:
    """Write one table; msgspec reads TOML everywhere, but writes it only with a further package."""
    return (
        f"name = {json.dumps(level.name, ensure_ascii=False)}\nsize = {level.size}\n"
        f"latency_s = {level.latency_s!r}\n"
        f"bytes_per_s = {level.bytes_per_s!r}\nfull_duplex = {str(level.full_duplex).lower()}\n"
        f"by_size = [{', '.join(f'[{n!r}, {rate!r}]' for n, rate in level.by_size)}]\n"
        f"burst_bytes = {level.burst_bytes!r}\n"
    )
