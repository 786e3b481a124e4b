"""Profiles of models: what each layer costs."""

from __future__ import annotations

from braid.plan.profiling.measured import profile_layers
from braid.plan.profiling.profile import LayerProfile, PerRows, Profile, read_profile

__all__ = ["LayerProfile", "PerRows", "Profile", "profile_layers", "read_profile"]
