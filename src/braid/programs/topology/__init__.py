"""Connections of ranks: hosts, switches and their links; see README.md."""

from braid.programs.topology.cluster import Cluster, Level, flat
from braid.programs.topology.cluster_file import from_toml, read_cluster, to_toml
from braid.programs.topology.device import DEVICES, DTYPES, Device, Efficiency, find_device
from braid.programs.topology.places import LEVEL_NAMES, Rings, cpus_of, node_of, rings

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
    "read_cluster",
    "rings",
    "to_toml",
]
