"""Connections of ranks: hosts, switches and their links; see README.md."""

from braid.topology.cluster import Cluster, Level, flat
from braid.topology.cluster_file import from_toml, to_toml
from braid.topology.device import DEVICES, DTYPES, Device, Efficiency, find_device
from braid.topology.places import LEVEL_NAMES, Rings, cpus_of, node_of, rings

__all__ = [
    "DEVICES",
    "DTYPES",
    "LEVEL_NAMES",
    "Cluster",
    "Device",
    "Efficiency",
    "Level",
    "Rings",
    "cpus_of",
    "find_device",
    "flat",
    "from_toml",
    "node_of",
    "rings",
    "to_toml",
]
