"""A language model in two processes: embedding and decoder in one, the LSTM in the other.

    braid run --role trainer:1 --role ps:1 examples/rpc_lstm.py

The trainer has the LSTM. The server has the tables that grow with the vocabulary: the embedding of
characters, and the decoder that turns hidden states into scores. Gradients go back through the
calls, and one optimizer steps all three parts, each in its process.
"""

from pydoc_data import topics

import torch
from torch import nn
from torch.nn import functional

from braid import rpc
from braid.rpc import dist_autograd

STEPS, BATCH, LENGTH, SIZE = 150, 16, 32, 48
TEXT = "".join(sorted(topics.topics.values()))[:200_000]
LETTERS = sorted(set(TEXT))


def seeded(kind: type[nn.Module], seed: int, *args: int) -> nn.Module:
    """Return a module, with the same initial values in every process."""
    torch.manual_seed(seed)
    return kind(*args)


def references(module: rpc.RRef) -> list[rpc.RRef]:
    """Return references to the parameters of a module; runs in its process."""
    return [rpc.RRef(param) for param in module.local_value().parameters()]


class Model:
    """The three parts: `rnn` is local, the others are references."""

    def __init__(self, server: str) -> None:
        letters = len(LETTERS)
        self.embedding = rpc.remote(server, seeded, args=(nn.Embedding, 1, letters, SIZE))
        self.decoder = rpc.remote(server, seeded, args=(nn.Linear, 2, SIZE, letters))
        self.rnn = seeded(nn.LSTM, 3, SIZE, SIZE)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Return scores of the next letters, [length, batch, letters]."""
        hidden, _ = self.rnn(self.embedding.rpc_sync().forward(ids))
        return self.decoder.rpc_sync().forward(hidden)

    def parameters(self) -> list[rpc.RRef]:
        """Return references to all parameters."""
        parts = (self.embedding, self.decoder)
        there = [p for part in parts for p in rpc.rpc_sync(part.owner(), references, (part,))]
        return [*there, *(rpc.RRef(param) for param in self.rnn.parameters())]


def train() -> None:
    """Train, and print the loss."""
    ids = torch.tensor([LETTERS.index(letter) for letter in TEXT])
    model = Model(rpc.names_of("ps")[0])
    optimizer = rpc.DistributedOptimizer(torch.optim.Adam, model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        starts = torch.randint(len(ids) - LENGTH - 1, (BATCH,), generator=generator)
        window = torch.stack([ids[s : s + LENGTH + 1] for s in starts.tolist()], 1)
        with dist_autograd.context() as context:
            scores = model(window[:-1])
            loss = functional.cross_entropy(scores.flatten(0, 1), window[1:].flatten())
            dist_autograd.backward(context, [loss])
            optimizer.step(context, max_norm=1.0)
        if step in {0, STEPS - 1}:
            print(f"step {step + 1}: loss {loss.item():.3f}")


if __name__ == "__main__":
    rpc.init_rpc()
    if rpc.own_role().name == "trainer":
        train()
    rpc.shutdown()
