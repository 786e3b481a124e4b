"""Placed models: parts on named devices of several tasks, run by a master and workers."""

from __future__ import annotations

from braid.strategies.placed.master import PlacedModel
from braid.strategies.placed.placement import place
from braid.strategies.placed.spec import DeviceSpec, device

__all__ = ["DeviceSpec", "PlacedModel", "device", "place"]
