"""Objects of a rank that runs another program than the other ranks of an elastic training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from braid.elasticity.state_transfer import TrainingState

DIFFERENCES = {  # kind, and words of the message
    "fewer": "bias is missing here and float32[1] (parameter group 0) there",
    "more": "weight2 is float32[1] (parameter group none) here and missing there",
    "names": ".0.weight is float32[1, ",
    "shape": "bias is float32[2] (parameter group 0) here and float32[1] (parameter group 0)",
    "dtype": "bias is bfloat16[1] (parameter group 0) here and float32[1] (parameter",
    "frozen": "bias is float32[1] frozen (parameter group 0) here and float32[1] (parameter",
    "order": "parameters have another order",
    "buffer": "mask is float32[2] here and missing there",
    "optimizer": "optimizer is SGD here and AdamW there",
    "groups": "number of parameter groups is 2 here and 1 there",
    "no object": "object scheduler is missing here and MultiStepLR there",
    "object": "object sampler is MultiStepLR here and missing there",
}


def differing(state: TrainingState, kind: str) -> TrainingState:
    """Return the objects of a rank that runs another program; see `DIFFERENCES`."""
    layers: Any = getattr(state.model, "blocks", state.model)
    width = layers[-1].in_features
    if kind == "fewer":
        layers[-1] = nn.Linear(width, 1, bias=False)
    elif kind == "names":
        layers[-1] = nn.Sequential(layers[-1])
    elif kind == "shape":
        layers[-1] = nn.Linear(width, 2)
    elif kind == "dtype":
        layers[-1].bfloat16()
    elif kind == "frozen":
        layers[-1].bias.requires_grad_(False)
    elif kind == "order":
        layers[-1].weight = layers[-1]._parameters.pop("weight")
    elif kind == "buffer":
        layers[-1].register_buffer("mask", torch.ones(2), persistent=False)
    params = list(state.model.parameters())
    if kind == "more":
        layers[-1].weight2 = nn.Parameter(torch.ones(1))
    groups = [params[:1], params[1:]] if kind == "groups" else [params]
    optimizer = torch.optim.SGD if kind == "optimizer" else torch.optim.AdamW
    others = {} if kind == "no object" else dict(state.others)
    others |= {"sampler": others["scheduler"]} if kind == "object" else {}
    return TrainingState(
        state.model, optimizer([{"params": group} for group in groups], lr=0.05), others
    )
