"""Profiles of models and of the ranks of a host."""

from __future__ import annotations

from braid.plan.profiling.costs import MeasuredMachines, MeasuredModel
from braid.plan.profiling.host import profile_host
from braid.plan.profiling.in_training import in_training
from braid.plan.profiling.measured import profile_layers
from braid.plan.profiling.profile import (
    Curve,
    HostProfile,
    LayerProfile,
    PerRows,
    Profile,
    read_profile,
)

__all__ = [
    "Curve",
    "HostProfile",
    "LayerProfile",
    "MeasuredMachines",
    "MeasuredModel",
    "PerRows",
    "Profile",
    "in_training",
    "profile_host",
    "profile_layers",
    "read_profile",
]
