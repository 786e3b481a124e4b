"""What ranks are joined by; see README.md."""

from braid.topology.cluster import Cluster, Level, flat

__all__ = ["Cluster", "Level", "flat"]
