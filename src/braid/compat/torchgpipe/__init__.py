"""torchgpipe's API: `from braid.compat.torchgpipe import GPipe`.

Scripts for torchgpipe 0.0.7 run after changing the import. Stages run on threads, one per device;
without GPUs all devices are the CPU.
"""

from braid.compat.torchgpipe.checkpoint import is_checkpointing, is_recomputing
from braid.compat.torchgpipe.gpipe import GPipe

__all__ = ["GPipe", "is_checkpointing", "is_recomputing"]

__version__ = "0.0.7"  # of the interface
