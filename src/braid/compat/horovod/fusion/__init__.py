"""Collective operations by name, submitted in any order and carried out by a background thread."""

from braid.compat.horovod.fusion.autotune import Autotuner, Settings, TuneOptions
from braid.compat.horovod.fusion.batching import FusedBatch
from braid.compat.horovod.fusion.entry import FusionHandle, Result, TensorTableEntry
from braid.compat.horovod.fusion.fusion import Fusion
from braid.compat.horovod.fusion.fusion_state import CycleOutcome, FusionState
from braid.compat.horovod.fusion.operations import BatchOperation, Operations
from braid.compat.horovod.fusion.options import FusionOptions, StateOptions
from braid.compat.horovod.fusion.request import Request, Response
from braid.compat.horovod.fusion.stall import Stall

__all__ = [
    "Autotuner",
    "BatchOperation",
    "CycleOutcome",
    "FusedBatch",
    "Fusion",
    "FusionHandle",
    "FusionOptions",
    "FusionState",
    "Operations",
    "Request",
    "Response",
    "Result",
    "Settings",
    "Stall",
    "StateOptions",
    "TensorTableEntry",
    "TuneOptions",
]
