"""Models of many kinds in plain torch, small, for tests that capture or convert them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class NormAct(nn.BatchNorm2d):
    """A layer of torch with a part of its own, which counts its calls in training."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.num_batches_tracked.add_(1)
        mean, var = self.running_mean, self.running_var
        x = functional.batch_norm(x, mean, var, self.weight, self.bias, self.training)
        return self.act(x)


class Cnn(nn.Module):
    """Convolutions with norms, and dropout as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second, self.norm2 = nn.Conv2d(4, 8, 3, stride=2), NormAct(8)
        self.pool, self.head = nn.AdaptiveAvgPool2d(2), nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.norm(self.first(x)), inplace=True)
        x = functional.max_pool2d(self.norm2(self.second(x)).relu_(), 2)
        x = functional.dropout(self.pool(x).flatten(1), 0.5, self.training)
        return self.head(functional.dropout(x, 0.25, training=self.training))


class Lstm(nn.Module):
    """Modules that return nested tuples, of which parts are handed on."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.first = nn.LSTM(6, 8, batch_first=True, num_layers=2, dropout=0.5)
        self.second = nn.LSTM(8, 8, batch_first=True, num_layers=2)
        self.last = nn.GRU(8, 4, batch_first=True, bidirectional=True)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, Any]]:
        x, state = self.first(self.embed(tokens))
        x, (hidden, cell) = self.second(x, state)
        x, last = self.last(x)
        return self.head(x), (last, {"hidden": hidden, "cell": cell})


class Down(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inner, outer, 3, padding=1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.relu(self.conv(x))
        return functional.avg_pool2d(x, 2), x


class UNet(nn.Module):
    """Skip connections between modules, by the model's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Down(3, 4), Down(4, 8)])
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ModuleList([nn.Conv2d(16, 4, 3, padding=1), nn.Conv2d(8, 2, 3, padding=1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for down in self.down:
            x, skip = down(x)
            skips.append(skip)
        x = functional.gelu(self.middle(x))
        for up in self.up:
            x = functional.interpolate(x, scale_factor=2, mode="nearest")
            x = up(torch.cat([x, skips.pop()], dim=1))
        return x


class Branched(NamedTuple):
    logits: torch.Tensor
    parts: dict[str, torch.Tensor]


@dataclasses.dataclass
class Hidden:
    state: torch.Tensor
    extra: dict[str, Any]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(6, 6), nn.Dropout(0.3)

    def forward(self, hidden: Hidden, *, gain: float = 1.0) -> Hidden:
        state = hidden.state + self.drop(torch.tanh(self.inner(hidden.state))) * gain
        return Hidden(state, {"seen": [*hidden.extra["seen"], state.mean(-1)], "count": 3})


class Containers(nn.Module):
    """Modules that take and return dataclasses and dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 6)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> Branched:
        hidden = Hidden(self.enter(x), {"seen": []})
        for layer in self.layers:
            hidden = layer(hidden, gain=0.5)
        seen = {f"layer{i}": value for i, value in enumerate(hidden.extra["seen"])}
        return Branched(self.head(hidden.state), seen)


class Shared(nn.Module):
    """A module that is called twice, and a tied weight; `x` and `drop(x)` are one in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.drop = nn.Linear(6, 6), nn.Dropout(0.5)
        self.other, self.head = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.head.weight = self.other.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.twice(x)
        y = self.drop(x)
        x = self.other(self.twice(x + y)) - x
        return self.head(self.drop(x) * x)


class Checkpointed(nn.Module):
    """Modules under `torch.utils.checkpoint` in the model's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *blocks = self.blocks
        x = first(x)
        for number, block in enumerate(blocks):
            x = x + checkpoint(block, x, use_reentrant=number == 1)
        return x


class Random(nn.Module):
    """Draws random numbers between its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = functional.dropout(layer(x), 0.2, self.training)
            if self.training:
                x = x + 0
            noise = torch.rand(len(x), 6) if self.training else torch.zeros(len(x), 6)
            x = x + noise + torch.randn_like(x) + torch.bernoulli(torch.full_like(x, 0.5))
        return x


class Noisy(nn.Module):
    """Draws random numbers between its modules, in training and evaluation alike."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = functional.dropout(layer(x), 0.2 if self.training else 0.1, True)
            x = x + torch.rand(len(x), 6) + torch.randn_like(x).clamp_(-1, 1)
        return x * torch.empty(x.shape).uniform_(0, 1)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(_ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * 3


class Custom(nn.Module):
    """Has an autograd.Function with a backward of its own between its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = Twice.apply(layer(x)).tanh()
        return x


class Cast(nn.Module):
    """Sets autocast and grad mode inside of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.body = nn.Linear(6, 6), nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.last = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = self.frozen(x) * 2
        first, second, third = self.body
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = torch.tanh(second(first(x)))
            with torch.autocast("cpu", enabled=False):
                y = third(x.float())
            y = self.last(y)
        return first(y.float()) + x.detach()


class Hooked(nn.Module):
    """Has layers with hooks, layers that write in place, and containers with both."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.Dropout(0.2, inplace=True)
        )
        self.out = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.net.register_forward_hook(lambda _module, _args, x: x * 2)
        self.net[2].register_forward_hook(lambda _module, _args, x: x + 3)
        self.out.register_forward_pre_hook(lambda _module, args: (args[0] + 1,))
        self.out.register_full_backward_hook(lambda _module, grads, _: (grads[0] * 2,))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.net(x))


class Frozen(nn.Module):
    """Runs a module in inference mode, and tells the rows of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.layers = nn.Linear(6, 6), nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        with torch.inference_mode():
            features = self.body(x) * 2
        x = features.clone()
        for layer in self.layers:
            x = layer(x + torch.arange(6, device=x.device))
        return {"rows": len(x), "more": (2 * x.shape[0] + 1, x.shape[1]), "x": x}


class InPlace(nn.Module):
    """Writes in place between its modules: to views, by index, and to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second, third, fourth = self.layers
        x = first(x)
        y = torch.zeros_like(x)
        y[:, :3] = x[:, 3:]
        y[1:].mul_(2)
        x = second(y)
        self.calls += 1
        with torch.no_grad():
            self.mean.mul_(0.5).add_(x.mean(0), alpha=0.5)
        x = third(x - self.mean)
        x += y
        return fourth(x) * self.calls, y


class Unpacked(nn.Module):
    """Unpacks tensors, uses attributes, keyword arguments, slices and sizes of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(6, 18), nn.LayerNorm(6)
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.2, batch_first=True)
        self.leave = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        query, key, value = self.enter(x).view(len(x), -1, 3, 6).permute(2, 0, 1, 3)
        length = x.shape[1]
        mask = torch.ones(length, length).triu(1).bool().to(x.device)
        x, _ = self.attention(query, key, value, attn_mask=mask, need_weights=False)
        x = self.norm(x.mT.mT[: len(x)] * self.scale)
        if keep is not None:
            x = torch.where(keep[..., None], x, -x / 2)
        x = torch.stack([*x.reshape(x.shape[0] * length, 6).chunk(2, dim=-1)]).amax(dim=0)
        first, *_ = (self.leave(torch.cat((x, x), 1)).view(-1, length, 6), None)
        return first[..., 0:4:2] ** 2


class Encoder(nn.Module):
    """Layers of torch itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.body = nn.Transformer(8, 2, 2, 2, 16, dropout=0.1, batch_first=True)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return (
            self.body(self.embed(source), self.embed(target), tgt_mask=mask) @ self.embed.weight.T
        )


def images(rows: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(rows, 3, 8, 8, generator=torch.Generator().manual_seed(rows))}


def tokens(rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return {"tokens": torch.randint(0, 11, (rows, 5), generator=generator)}


def pairs(rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return {
        "source": torch.randint(0, 11, (rows, 7), generator=generator),
        "target": torch.randint(0, 11, (rows, 5), generator=generator),
    }


def numbers(rows: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(rows, 6, generator=torch.Generator().manual_seed(rows))}


def kept(rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return {
        "x": torch.randn(rows, 5, 6, generator=generator),
        "keep": torch.rand(rows, 5, generator=generator) > 0.5,
    }


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, torch.Tensor]]]] = {
    "cnn": (Cnn, images),
    "lstm": (Lstm, tokens),
    "unet": (UNet, images),
    "containers": (Containers, numbers),
    "shared": (Shared, numbers),
    "checkpointed": (Checkpointed, numbers),
    "custom": (Custom, numbers),
    "noisy": (Noisy, numbers),
    "cast": (Cast, numbers),
    "frozen": (Frozen, numbers),
    "hooked": (Hooked, numbers),
    "in place": (InPlace, numbers),
    "unpacked": (Unpacked, kept),
    "transformer": (Encoder, pairs),
}
