"""Profiles of models and of the ranks of a host."""

from __future__ import annotations

from braid.plan.profiling.costs import MeasuredMachines, MeasuredModel
from braid.plan.profiling.host import profile_host
from braid.plan.profiling.measured import profile_layers
from braid.plan.profiling.profile import (
    FORMAT,
    Curve,
    HostProfile,
    LayerProfile,
    PerRows,
    Profile,
    read_profile,
)
from braid.plan.profiling.slowdown import slowdown

__all__ = [
    "FORMAT",
    "Curve",
    "HostProfile",
    "LayerProfile",
    "MeasuredMachines",
    "MeasuredModel",
    "PerRows",
    "Profile",
    "profile_host",
    "profile_layers",
    "read_profile",
    "slowdown",
]
