"""Phonies: edges without data, which make autograd run a backward that no gradient asks for.

They have two uses. A collective must run backward on every rank, even if the input does not require
grad; and one backward may have to wait for another although no data flows between them. A *phony*,
a tensor without elements that is only an edge in the graph, solves both.

There is one phony per device and value of `requires_grad`, cached: making one costs as much as a
small operation.

Source: Kim et al., "torchgpipe: On-the-fly Pipeline Parallelism for Training Giant Models" (2020),
section 3.2.
"""

from __future__ import annotations

from functools import cache

import torch

__all__ = ["phony"]


@cache
def phony(device: torch.device, requires_grad: bool) -> torch.Tensor:
    """Return a phony: a tensor without elements, used only as an edge in autograd's graph.

    It is cached for each device, and never gets a gradient.

    Args:
        device: Device, with an index if the type has several.
        requires_grad: Whether tensors computed from it belong to a graph.
    """
    # a tensor made in inference mode could not be used outside of it
    with torch.inference_mode(mode=False):
        return torch.empty(0, device=device, requires_grad=requires_grad)
