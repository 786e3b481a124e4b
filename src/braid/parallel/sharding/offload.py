"""Optimizer states in memory-mapped files.

After a step, tensors that the optimizer has created are copied into files, and the mapped tensors
replace them in its state. The kernel writes pages back and drops them when memory is short, so a
rank can train models that exceed its memory. Optimizers must change their states in place, as
torch's do.

Source: S. Rajbhandari et al., "ZeRO-Infinity", SC 2021, section 5, for states beyond the host's
memory; mapped files replace its own input and output.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

import torch

from braid.runtime.closing import Closing

__all__ = ["StatesOnDisk"]

LEAST_BYTES = 4096  # smaller states stay in memory, as a file takes a page at least


class StatesOnDisk(Closing):
    """Files to which optimizer states are moved; a context manager that removes the files.

    Args:
        directory: Directory in which a directory for this rank is created.
        rank: Rank, used in the name.

    Attributes:
        directory: Directory of this rank's files.
    """

    def __init__(self, directory: str | Path, rank: int) -> None:
        Path(directory).mkdir(parents=True, exist_ok=True)
        self.directory = Path(tempfile.mkdtemp(prefix=f"states-{rank:05d}-", dir=directory))
        self._num_files = 0
        self._mapped: dict[int, weakref.ref[torch.Tensor]] = {}  # by id
        # mapped files stay until the tensors are freed
        self._finalizer = weakref.finalize(self, shutil.rmtree, self.directory, ignore_errors=True)

    def register(self, optimizer: torch.optim.Optimizer) -> None:
        """Move new states of the optimizer to files after each of its steps."""
        reference = weakref.ref(self)

        def after_step(stepped: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            states = reference()
            if states is not None:
                states.move(stepped)

        optimizer.register_step_post_hook(after_step)

    def move(self, optimizer: torch.optim.Optimizer) -> None:
        """Move states of an optimizer that are not in files yet."""
        for state in optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and self._is_new(value):
                    state[name] = self._in_file(value)

    @property
    def nbytes(self) -> int:
        """Total bytes in files."""
        return sum(path.stat().st_size for path in self.directory.iterdir())

    def close(self) -> None:
        """Remove the files; tensors in use keep their memory until they are freed."""
        self._finalizer()

    def _is_new(self, value: torch.Tensor) -> bool:
        known = self._mapped.get(id(value))
        is_known = known is not None and known() is value
        return value.device.type == "cpu" and value.nbytes >= LEAST_BYTES and not is_known

    def _in_file(self, value: torch.Tensor) -> torch.Tensor:
        path = self.directory / f"{self._num_files:06d}"
        self._num_files += 1
        mapped = torch.from_file(
            str(path), shared=True, size=value.numel(), dtype=value.dtype
        ).view(value.shape)
        mapped.copy_(value)
        self._mapped[id(mapped)] = weakref.ref(mapped)
        return mapped
