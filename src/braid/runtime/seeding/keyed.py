"""Random numbers for layers, as a function of their purpose.

    key       seed, step, name of the layer, number of the operation in it
    position  number of the sample in the global batch, number of the element in the sample

So a layer drops the same elements on any rank, in any micro-batch, and when it is recomputed.
Dropout is computed like this, also in attention. Other operations that take a generator
(`torch.rand`, `normal_`, ...) get one that is seeded by seed, step, layer and first sample: their
numbers are the same for every division of the model and every schedule, but depend on the size of
micro-batches. The rest (such as `alpha_dropout`) uses torch's default generator.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FrameType, FunctionType
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as _torch_checkpoint

from braid.errors import ConfigError
from braid.runtime.seeding.philox import uniform
from braid.runtime.torch_internals import function_modes

__all__ = ["Draws", "key_of", "numbers_from_now"]

Tensor = torch.Tensor
CHECKPOINT_FILE = _torch_checkpoint.__file__
# torch's functions, with the number of last dimensions whose elements are dropped together
DROPOUT: dict[Callable[..., Any], int] = {
    functional.dropout: 0,
    torch.dropout: 0,
    functional.dropout1d: 1,
    functional.dropout2d: 2,
    functional.dropout3d: 3,
}
TAKES_GENERATOR: frozenset[Callable[..., Any]] = frozenset(
    {
        torch.bernoulli,
        torch.multinomial,
        torch.normal,
        torch.poisson,
        torch.rand,
        torch.randint,
        torch.randn,
        torch.randperm,
        Tensor.bernoulli,
        Tensor.bernoulli_,
        Tensor.cauchy_,
        Tensor.exponential_,
        Tensor.geometric_,
        Tensor.log_normal_,
        Tensor.multinomial,
        Tensor.normal_,
        Tensor.random_,
        Tensor.uniform_,
    }
)
LIKE: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.rand_like: torch.rand,
    torch.randn_like: torch.randn,
}


def _unchecked(func: Any) -> Callable[..., Any]:
    """Return a copy of a function of torch that does not check for a mode that intercepts it."""
    checks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    never = dict.fromkeys(checks, lambda *_: False)
    copy = FunctionType(func.__code__, {**func.__globals__, **never}, func.__name__)
    copy.__defaults__, copy.__kwdefaults__ = func.__defaults__, func.__kwdefaults__
    return copy


# functions of torch that draw random numbers in other functions of torch
COMPOSED: dict[Callable[..., Any], Callable[..., Any]] = {
    func: _unchecked(func)
    for func in (functional.multi_head_attention_forward, functional.gumbel_softmax)
}


# all others are passed on after one lookup, since layers call few of these
CHANGED = frozenset(
    {*COMPOSED, *DROPOUT, *TAKES_GENERATOR, *LIKE, functional.scaled_dot_product_attention}
)


def key_of(*parts: int | str) -> int:
    """Return a key of 64 bits, equal on all ranks and hosts for equal parts."""
    text = "\0".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class Draws:
    """Generator of random numbers, such as dropout masks, for some samples in one step.

    Args:
        seed: Seed of the run.
        step: Number of the step.
        samples: Numbers of the samples in the global batch, one for each row.
    """

    def __init__(self, seed: int, step: int, samples: range) -> None:
        self._seed = seed
        self._step = step
        self._samples = samples

    def layer(self, name: str) -> AbstractContextManager[object]:
        """Return a context in which random operations draw the numbers of the layer `name`.

        Cost: 1 us for each torch operation inside; dropout about 30 operations for each element.
        """
        return _LayerDraws((self._seed, self._step, name), self._samples)


def numbers_from_now() -> Callable[[], AbstractContextManager[Any]]:
    """Return a function that returns contexts, in which the random numbers from now are repeated.

    Outside of `Draws.layer` the contexts do nothing.
    """
    current = next((mode for mode in reversed(function_modes()) if type(mode) is _LayerDraws), None)
    return nullcontext if current is None else current.copy().copy


def _refuse_checkpoint() -> None:
    """Raise inside of torch's checkpoint, which calls layers again without their mode."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the only way to see the callers
    while frame is not None:
        if frame.f_code.co_filename == CHECKPOINT_FILE:
            msg = (
                "a layer draws random numbers, such as dropout, inside of torch.utils.checkpoint, "
                "which would draw other numbers in backward: use braid.comm.autograd.checkpoint "
                "there, or recompute= of the pipeline"
            )
            raise ConfigError(msg)
        frame = frame.f_back


class _LayerDraws(TorchFunctionMode):
    def __init__(self, key: tuple[int, int, str], samples: range) -> None:
        super().__init__()
        self._key = key
        self._samples = samples
        self._num_drops = 0
        self._generators: dict[torch.device, torch.Generator] = {}

    def copy(self) -> _LayerDraws:
        """Return a mode that draws the same numbers from now on."""
        twin = _LayerDraws(self._key, self._samples)
        twin._num_drops = self._num_drops
        twin._generators = {device: g.clone_state() for device, g in self._generators.items()}
        return twin

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in CHANGED:  # most functions
            return func(*args, **kwargs)
        if func in COMPOSED:
            with self:  # torch leaves a mode while the mode handles a function
                return COMPOSED[func](*args, **kwargs)
        if func in DROPOUT:
            return self._dropout(func, DROPOUT[func], *args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func in TAKES_GENERATOR and kwargs.get("generator") is None:
            device = next((x.device for x in args if isinstance(x, Tensor)), kwargs.get("device"))
            kwargs = {**kwargs, "generator": self._generator(device)}
        elif func in LIKE:
            x = args[0]
            options = {"dtype": x.dtype, "device": x.device, **kwargs}
            return LIKE[func](x.shape, generator=self._generator(options["device"]), **options)
        return func(*args, **kwargs)

    def _generator(self, device: torch.device | str | None) -> torch.Generator:
        device = torch.get_default_device() if device is None else torch.device(device)
        _refuse_checkpoint()
        if device not in self._generators:
            first = self._samples.start
            generator = torch.Generator(device).manual_seed(key_of(*self._key, first) >> 1)
            self._generators[device] = generator
        return self._generators[device]

    def _dropout(
        self,
        func: Callable[..., Any],
        num_shared: int,
        x: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Tensor:
        if not training or not 0 < p < 1:
            rest = () if func is torch.dropout else (inplace,)
            return func(x, p, training, *rest)  # type: ignore[no-any-return]
        shape = x.shape[: x.dim() - num_shared]
        scale = self._scale(p, shape, x).view(*shape, *[1] * num_shared)
        return x.mul_(scale) if inplace else x * scale

    def _scale(self, p: float, shape: torch.Size, x: Tensor) -> Tensor:
        """Return a factor for each element: 0, or 1 / (1 - p).

        Rows are samples; if the elements cannot be divided evenly, all belong to the first sample.
        """
        _refuse_checkpoint()
        self._num_drops += 1
        key, samples = key_of(*self._key, self._num_drops), self._samples
        if not samples or shape.numel() % len(samples):
            samples = range(self._samples.start, self._samples.start + 1)
        numbers = torch.tensor(samples, dtype=torch.int64, device=x.device)
        kept = uniform(key, numbers, shape.numel() // len(samples)) >= p
        return (kept.to(x.dtype) / (1 - p)).view(shape)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Compute attention; with dropout without kernels, since they draw their own numbers."""
        if not dropout_p:
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if enable_gqa:
            repeats = query.shape[-3] // key.shape[-3]
            key, value = (x.repeat_interleave(repeats, dim=-3) for x in (key, value))
        scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones_like(scores, dtype=torch.bool).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        weights = torch.softmax(scores, dim=-1)
        return self._dropout(functional.dropout, 0, weights, dropout_p) @ value
