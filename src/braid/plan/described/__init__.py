"""Costs of models and machines that are described, not measured."""

from __future__ import annotations

from braid.plan.described.machines import DescribedMachines
from braid.plan.described.model import DescribedModel
from braid.plan.described.operations import LayerOperations, count_operations

__all__ = [
    "DescribedMachines",
    "DescribedModel",
    "LayerOperations",
    "count_operations",
]
