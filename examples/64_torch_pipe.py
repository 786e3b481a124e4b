"""torch's Pipe: a transformer over two devices, which trains like one module.

braid run -n 1 examples/64_torch_pipe.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from braid.compat.torch_pipe import NoChunk, Pipe
from braid.compat.torch_pipe.pipe import PipeSequential
from braid.compat.torch_rpc import rpc

WORDS, WIDTH, HEADS, LENGTH, ROWS, CHUNKS = 64, 32, 4, 16, 8, 4


class Encoder(nn.Module):
    """Words to vectors; passes the mask on."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: D102
        return self.words(x) + self.places.weight, mask


class Block(nn.Module):
    """A layer of the transformer, in which no word sees a later one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.0, batch_first=True)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: D102
        return self.layer(x, src_mask=mask), mask


class Decoder(nn.Linear):
    """Vectors to scores of words."""

    def forward(self, x: torch.Tensor, _mask: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return super().forward(x)


def new_stages() -> list[nn.Sequential]:
    torch.manual_seed(0)
    encoder, blocks, decoder = Encoder(), [Block() for _ in range(4)], Decoder(WIDTH, WORDS)
    return [nn.Sequential(encoder, *blocks[:2]), nn.Sequential(*blocks[2:], decoder)]


def main() -> None:
    torch.set_num_threads(1)
    rpc.init_rpc("worker", rank=0, world_size=1)
    devices = ["cuda:0", "cuda:1"] if torch.cuda.device_count() > 1 else ["cpu", "cpu"]
    stages = [stage.to(device) for stage, device in zip(new_stages(), devices, strict=True)]
    model = Pipe(nn.Sequential(*stages), chunks=CHUNKS)
    whole = PipeSequential(*(layer for stage in new_stages() for layer in stage)).to(devices[0])
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (model, whole)]
    x = (torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) * 7 % WORDS).to(devices[0])
    y, mask = (x + 7) % WORDS, nn.Transformer.generate_square_subsequent_mask(LENGTH, devices[0])
    for step in range(31):
        output = model(x, NoChunk(mask)).local_value()
        loss = functional.cross_entropy(output.mT, y.to(output.device))
        loss.backward()
        for inputs, target in zip(x.chunk(CHUNKS), y.chunk(CHUNKS), strict=True):
            (functional.cross_entropy(whole(inputs, mask).mT, target) / CHUNKS).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step:2}   loss {loss.item():.3f}")
    rpc.shutdown()
    for stage_param, param in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(stage_param.to(param.device), param)
    print("two stages train the parameters of one module, bit by bit")


if __name__ == "__main__":
    main()
