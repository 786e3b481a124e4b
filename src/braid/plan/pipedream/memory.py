"""Memory of a stage of an asynchronous pipeline.

    parameters x (versions + gradient + states of the optimizer) + activations x minibatches

A stage on n machines that has M machines from itself to the end works on h = (M - 1) // n + 1
minibatches at a time: it keeps the activations of h, and h versions of its weights.

Source: D. Narayanan et al., SOSP 2019, section 3.3; its released optimizer leaves gradients and
states out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["MemoryLimit"]

Floats = NDArray[np.float64]


class MemoryLimit(NamedTuple):
    """Memory of one machine, as a limit for stages.

    Attributes:
        nbytes: Bytes of memory of one machine.
        states: Number of optimizer states per parameter: 0 for SGD, 1 with momentum, 2 for Adam.
    """

    nbytes: float
    states: int = 2

    def needed(self, params: Floats, saved: Floats, held: int) -> Floats:
        """Return the bytes that each stage needs to work on `held` minibatches at a time.

        Args:
            params: Bytes of parameters of each stage.
            saved: Bytes that each stage keeps for the backward of a minibatch.
            held: Number of minibatches in progress; each has a version of the weights.
        """
        return params * (held + 1 + self.states) + saved * held

    def fits(self, params: Floats, saved: Floats, held: int) -> NDArray[np.bool_]:
        """Return which stages fit into the machine's memory; see `needed` for the arguments."""
        return self.needed(params, saved, held) <= self.nbytes

    def too_small(self, params: Floats, saved: Floats, machines: int) -> str:
        """Return the error message for the case that no pipeline fits into memory.

        Args:
            params: Bytes of parameters of each stage, by its first and last state.
            saved: Bytes that each stage keeps for the backward of a minibatch, by first and last
                state.
            machines: Number of machines.
        """
        least = np.diagonal(self.needed(params, saved, 1)).max()
        whole = self.needed(params[:1, -1:], saved[:1, -1:], 1)[0, 0]
        return (
            f"no pipeline of {machines} machines fits into {self.nbytes / 1e9:.3g} GB each: the "
            f"model takes {whole / 1e9:.3g} GB on one, and its largest part {least / 1e9:.3g} GB, "
            "before versions for other minibatches. Use more machines, more memory or fewer rows"
        )
