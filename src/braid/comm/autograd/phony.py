"""Phonies: edges without data, which make autograd run a backward that no gradient asks for.

Two things need them. A collective must run backward on every rank, also where the input needs no
gradient; and one backward may have to wait for another although no number flows between them. Both
are solved by a tensor without elements, a *phony*, that takes part in the graph and in nothing
else.

There is one phony per device and value of `requires_grad`, kept for good: making one costs as much
as a small operation.

Source: Kim et al., "torchgpipe: On-the-fly Pipeline Parallelism for Training Giant Models" (2020),
section 3.2.
"""

from __future__ import annotations

from functools import cache

import torch

__all__ = ["phony"]


@cache
def phony(device: torch.device, requires_grad: bool) -> torch.Tensor:
    """Return the tensor without elements on `device`; never changed, and never given a gradient.

    Args:
        device: Device, with an index if the type has several.
        requires_grad: Whether tensors computed from it belong to a graph.
    """
    # one that is born in inference mode could not be used outside of it
    with torch.inference_mode(mode=False):
        return torch.empty(0, device=device, requires_grad=requires_grad)
