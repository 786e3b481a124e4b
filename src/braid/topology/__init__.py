"""What ranks are joined by; see README.md."""

from braid.topology.cluster import Cluster, Level, flat
from braid.topology.cluster_file import from_toml, to_toml

__all__ = ["Cluster", "Level", "flat", "from_toml", "to_toml"]
