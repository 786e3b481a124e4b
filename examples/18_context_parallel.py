"""An unchanged model on sequences that are divided over ranks.

braid run -n 2 examples/18_context_parallel.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import braid
from braid.parallel.context_parallel import (
    context_parallel,
    mean_over_sequence,
    shifted_labels,
    split_sequence,
)

VOCABULARY, WIDTH, HEADS, LENGTH = 20, 32, 4, 64


class Model(nn.Module):
    """A layer of causal attention between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(
        self, tokens: torch.Tensor, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the logits of the next tokens."""
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1])
        x = self.token(tokens) + self.position(position_ids)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + y.transpose(1, 2).flatten(2))


def new_model() -> Model:
    torch.manual_seed(0)
    return Model()


def train(group: braid.Group, tokens: torch.Tensor, way: str) -> tuple[float, list[torch.Tensor]]:
    """Return loss and gradients on divided sequences."""
    model = new_model()
    context_parallel(model, group, attention=way, inputs={"tokens": 1})
    logits = model(tokens)  # of this rank's positions
    labels = split_sequence(group.size, group.rank, shifted_labels(tokens))
    losses = functional.cross_entropy(logits.mT, labels, reduction="none")
    loss = mean_over_sequence(group, losses, labels != -100)
    loss.backward()
    return loss.item(), [group.all_reduce(param.grad, op="avg") for param in model.parameters()]


def main() -> None:
    group = braid.init()
    tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    whole = new_model()
    expected = functional.cross_entropy(whole(tokens)[:, :-1].mT, tokens[:, 1:])
    expected.backward()
    largest = max(param.grad.abs().max().item() for param in whole.parameters())
    for way in ("ring", "all_to_all"):
        loss, grads = train(group, tokens, way)
        pairs = zip(grads, whole.parameters(), strict=True)
        gap = max((grad - param.grad).abs().max().item() for grad, param in pairs) / largest
        assert abs(loss - expected.item()) < 1e-6 * expected.item()
        assert gap < 2e-6
        again = train(group, tokens, way)
        assert loss == again[0]
        assert all(map(torch.equal, grads, again[1]))
        if group.rank == 0:
            print(f"{way}: gradients equal one process up to rounding; two runs agree bit by bit")


if __name__ == "__main__":
    main()
