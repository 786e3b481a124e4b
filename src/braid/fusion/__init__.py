"""Operations by name, in any order, agreed on in the background and carried out together."""

from braid.fusion.autotune import Autotuner, Settings, TuneOptions
from braid.fusion.batching import Batch
from braid.fusion.entry import Entry, Handle, Result
from braid.fusion.fusion import Fusion
from braid.fusion.fusion_state import FusionState, Outcome
from braid.fusion.operations import Operation, Operations
from braid.fusion.options import FusionOptions, StateOptions
from braid.fusion.request import Request, Response
from braid.fusion.stall import Stall

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
