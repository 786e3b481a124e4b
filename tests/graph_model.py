"""A model with operations between its modules, for tests that capture it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, *, scale: float) -> torch.Tensor:
        return x + torch.tanh(self.inner(self.norm(x))) * mask * scale


class Output(NamedTuple):
    logits: torch.Tensor
    rows: torch.Tensor


class Model(nn.Module):
    """Has positions, a mask that skips over blocks, a weight in the glue, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(11, 8), nn.Embedding(6, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.scale = nn.Parameter(torch.full((8,), 1.5))
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: torch.Tensor, *, keep: torch.Tensor | None = None) -> Output:
        rows, length = tokens.shape
        positions = torch.arange(length, device=tokens.device)
        if positions.max() >= 6:  # a condition on shapes alone
            raise ValueError(length)
        mask = torch.ones(rows, length, 1) if keep is None else keep.unsqueeze(-1).float()
        x = self.token(tokens) + self.position(positions).expand(rows, length, 8)
        for block in self.blocks:
            x = block(x, mask, scale=0.5)
        x = self.drop(x * self.scale).view(rows * length, 8)
        return Output(self.head(x).view(rows, length, -1), torch.full((rows,), rows))


def tokens(rows: int) -> torch.Tensor:
    return torch.randint(0, 11, (rows, 5), generator=torch.Generator().manual_seed(rows))
