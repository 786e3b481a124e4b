"""Save and restore the random numbers and the autocast state that a function depends on.

A function that runs a second time computes the same only if it draws the same random numbers and
uses the same autocast settings. In a layer of a pipeline, random numbers do not come from
generators (`braid.runtime.seeding`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from braid.runtime.seeding.keyed import numbers_from_now

__all__ = ["RngAndAutocast", "generators_of"]


class RngAndAutocast:
    """State of random numbers and autocast at the time of construction.

    Args:
        generators: Generators to save.
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self._generators = generators
        self._numbers = numbers_from_now()
        self._states = [generator.get_state() for generator in generators]
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cpu", *(["cuda"] if torch.cuda.is_available() else []))
        ]
        self._cached = torch.is_autocast_cache_enabled()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Restore the saved state inside the context; generators resume their state afterwards."""
        now = [generator.get_state() for generator in self._generators]
        try:
            for generator, state in zip(self._generators, self._states, strict=True):
                generator.set_state(state)
            with contextlib.ExitStack() as stack:
                stack.enter_context(self._numbers())
                for kind, enabled, dtype in self._autocast:
                    cast = torch.autocast(
                        kind, dtype=dtype, enabled=enabled, cache_enabled=self._cached
                    )
                    stack.enter_context(cast)
                yield
        finally:
            for generator, state in zip(self._generators, now, strict=True):
                generator.set_state(state)


def generators_of(tensors: Sequence[torch.Tensor]) -> list[torch.Generator]:
    """Return torch's default generators of the CPU and of the CUDA devices of `tensors`."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        indices = {x.device.index for x in tensors if x.is_cuda} | {torch.cuda.current_device()}
        generators += [torch.cuda.default_generators[index] for index in sorted(indices)]
    return generators
