"""Entry point that registers the backend named "braid" with torch; it cannot raise.

torch imports this module while it is itself being imported (group `torch.backends`). So the module
is tiny and never breaks a program that does not use braid. It adds one name to torch's table; braid
is imported when the first process group of that name is made.
"""

from __future__ import annotations

import contextlib
import sys
from importlib import import_module
from typing import Any

__all__ = ["autoload"]


def autoload() -> None:
    """Register the backend; torch calls this once, at the end of `import torch`."""
    with contextlib.suppress(Exception):  # a torch without distributed, or an unknown version
        # torch has imported it by now if it has it at all
        backend = sys.modules["torch.distributed.distributed_c10d"].Backend
        backend.register_backend("braid", _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, backend_options: Any) -> Any:
    return import_module("braid.torch_backend").create(options, backend_options)
