"""A GPT over bytes, small enough to be read in one sitting.

    B sequences, T tokens, V = 256 bytes, D width, H heads, K = D / H, L layers

                                          shape      parameters   FLOPs of a token, forward
    x = token[i] + position               B T D      V D + T D    0
    L times
        x += project(attend(norm(x)))     B T D      4 D D        8 D D + 4 T D  (half if causal)
        x += down(gelu(up(norm(x))))      B T 4D     8 D D        16 D D
    logits = norm(x) token^T              B T V      0 (tied)     2 V D

Backward costs twice the forward. So a token of training costs 6 N + 12 L T D floating point
operations with N = 12 L D D + V D. MFU counts these, with the full square of attention, as in
the PaLM paper.

Initial values are drawn per parameter from a generator keyed by (seed, name). They are the same on
every rank and do not depend on the order in which modules are made.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019 (pre-norm, GELU,
learned positions, residual projections scaled by 1/sqrt(2L)); without biases. FLOPs: Chowdhery et
al., "PaLM", 2022, appendix B.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as torch calls it

from braid.train.config import ModelSize
from braid.types import text_digest

__all__ = ["GPT", "flops_per_token", "generate", "mean_loss"]

VOCABULARY = 256


class TransformerBlock(nn.Module):
    """An attention layer, then an MLP, each added to the residual stream."""

    def __init__(self, size: ModelSize, dtype: str) -> None:
        super().__init__()
        width = size.width
        self.dtype = dtype
        self.head_width = width // size.heads
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.attend = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x_btd: Tensor) -> Tensor:
        """Map activations of shape (B, T, D) to activations of the same shape."""
        with _products_in(self.dtype, x_btd):
            return self._computed(x_btd)

    def _computed(self, x_btd: Tensor) -> Tensor:
        b, t, _ = x_btd.shape
        # -1: this rank may have only some of the heads
        qkv = self.attend(self.norm1(x_btd)).view(b, t, 3, -1, self.head_width)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each B H T K
        mixed_bhtk = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_btd = x_btd + self.project(mixed_bhtk.transpose(1, 2).reshape(b, t, -1))
        hidden: Tensor = self.down(F.gelu(self.up(self.norm2(x_btd)), approximate="tanh"))
        return x_btd + hidden


class GPT(nn.Module):
    """A transformer that predicts the next byte.

    Args:
        size: Number of layers, width and number of heads.
        context: Length of the longest sequence.
        seed: Seed of the initial values.
        tied: Whether the output layer shares its weight with the token embedding.
        dtype: Dtype of matrix products: `fp32`, or `bf16` by autocast in each layer.
    """

    def __init__(
        self,
        size: ModelSize,
        context: int,
        seed: int = 0,
        *,
        tied: bool = True,
        dtype: str = "fp32",
    ) -> None:
        super().__init__()
        self.context, self.dtype = context, dtype
        with torch.device("meta"):  # values are drawn below, not from the default generator
            self.token = nn.Embedding(VOCABULARY, size.width)
            self.position = nn.Embedding(context, size.width)
            self.blocks = nn.ModuleList(TransformerBlock(size, dtype) for _ in range(size.layers))
            self.norm = nn.LayerNorm(size.width, bias=False)
            self.head = None if tied else nn.Embedding(VOCABULARY, size.width)
        self.to_empty(device="cpu")
        std = 0.5 / math.sqrt(size.width)  # 0.018 at GPT-2's width, where its authors use 0.02
        residual_std = std / math.sqrt(2 * size.layers)
        with torch.no_grad():
            for name, param in self.named_parameters():
                if param.dim() == 1:
                    param.fill_(1.0)
                    continue
                generator = torch.Generator().manual_seed(text_digest(f"{seed}/{name}"))
                residual = name.endswith(("project.weight", "down.weight"))
                param.normal_(0.0, residual_std if residual else std, generator=generator)

    def layers(self) -> list[nn.Module]:
        """Return the model as a list of modules that share its parameters, for a pipeline.

        The first module maps tokens to activations, and the last one maps activations to logits.
        Both hold the token embedding if it is tied.
        """
        return [_Embed(self), *self.blocks, _Head(self)]

    @property
    def _of_logits(self) -> nn.Embedding:
        return self.token if self.head is None else self.head

    def forward(
        self,
        tokens_bt: Tensor,
        targets_bt: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Return logits (B, T, V), or the mean loss in nats per byte if there are targets.

        Without `position_ids`, the tokens have positions 0 to T - 1.
        """
        x_btd = _embedded(self.token, self.position, tokens_bt, position_ids)
        for block in self.blocks:
            x_btd = block(x_btd)
        logits_btv = _logits(x_btd, self.norm, self._of_logits, self.dtype)
        return logits_btv if targets_bt is None else mean_loss(logits_btv, targets_bt)


class _Embed(nn.Module):
    """The first layer: tokens and positions become activations."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.token, self.position = model.token, model.position

    def forward(self, tokens_bt: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        """Map tokens, or (tokens, positions) if sequences are sharded, to activations."""
        tokens, positions = tokens_bt if isinstance(tokens_bt, tuple) else (tokens_bt, None)
        return _embedded(self.token, self.position, tokens, positions)


class _Head(nn.Module):
    """The last layer: activations become logits."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.norm, self.token = model.norm, model._of_logits  # noqa: SLF001 - same module
        self.dtype = model.dtype

    def forward(self, x_btd: Tensor) -> Tensor:
        return _logits(x_btd, self.norm, self.token, self.dtype)


def mean_loss(logits_btv: Tensor, targets_bt: Tensor) -> Tensor:
    """Return the mean loss in nats per byte."""
    return F.cross_entropy(logits_btv.flatten(0, 1), targets_bt.flatten())


def _products_in(dtype: str, x: Tensor) -> AbstractContextManager[object]:
    """Return a context in which matrix products on the device of `x` compute in `dtype`.

    Each layer enters the context itself, so an engine can run the layer at any time, for example
    again in backward.
    """
    return torch.autocast(x.device.type, torch.bfloat16) if dtype == "bf16" else nullcontext()


def _logits(x_btd: Tensor, norm: nn.Module, of_logits: nn.Embedding, dtype: str) -> Tensor:
    with _products_in(dtype, x_btd):
        logits_btv = F.linear(norm(x_btd), of_logits.weight)
    return logits_btv.float() if dtype == "bf16" else logits_btv


def _embedded(
    token: nn.Embedding,
    position: nn.Embedding,
    tokens_bt: Tensor,
    positions: Tensor | None = None,
) -> Tensor:
    if positions is None:
        positions = torch.arange(tokens_bt.shape[1], device=tokens_bt.device)
    x_btd: Tensor = token(tokens_bt) + position(positions)
    return x_btd


def flops_per_token(size: ModelSize, context: int) -> int:
    """Return the FLOPs per training token, by the formula in the module's docstring."""
    weights = 12 * size.layers * size.width**2 + VOCABULARY * size.width
    return 6 * weights + 12 * size.layers * context * size.width


@torch.no_grad()
def generate(model: GPT, prompt: bytes, count: int, *, seed: int, temperature: float = 0.8) -> str:
    """Generate `count` bytes that continue `prompt`, as text for a terminal."""
    generator = torch.Generator().manual_seed(text_digest(f"{seed}/sample"))
    device = model.token.weight.device
    tokens = list(prompt)
    for _ in range(count):
        logits_v = model(torch.tensor([tokens[-model.context :]], device=device))[0, -1]
        probabilities = torch.softmax(logits_v.double().cpu() / temperature, dim=-1)
        tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    text = bytes(tokens[len(prompt) :]).decode(errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
