"""Operations by name, in any order, agreed on in the background and carried out together."""

from braid.compat.horovod.fusion.autotune import Autotuner, Settings, TuneOptions
from braid.compat.horovod.fusion.batching import Batch
from braid.compat.horovod.fusion.entry import Entry, Handle, Result
from braid.compat.horovod.fusion.fusion import Fusion
from braid.compat.horovod.fusion.fusion_state import FusionState, Outcome
from braid.compat.horovod.fusion.operations import Operation, Operations
from braid.compat.horovod.fusion.options import FusionOptions, StateOptions
from braid.compat.horovod.fusion.request import Request, Response
from braid.compat.horovod.fusion.stall import Stall

__all__ = [
    "Autotuner",
    "Batch",
    "Entry",
    "Fusion",
    "FusionOptions",
    "FusionState",
    "Handle",
    "Operation",
    "Operations",
    "Outcome",
    "Request",
    "Response",
    "Result",
    "Settings",
    "Stall",
    "StateOptions",
    "TuneOptions",
]
