"""Tokens cut into samples: sample i is the i-th window, with targets shifted by one token.

tokens    t0 t1 t2 t3 t4 t5 t6 ...        context 3
sample 0  t0 t1 t2  ->  t1 t2 t3
sample 1           t3 t4 t5  ->  t4 t5 t6
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from braid.errors import ConfigError

__all__ = ["Windows"]


class Windows:
    """A data set of (inputs, targets) over a sequence of tokens.

    Args:
        tokens: Tokens of one byte each.
        context: Number of tokens of an input.
        name: Name of the text, for messages.
        device: Device of the samples; the tokens stay in host memory.

    Raises:
        ConfigError: There are too few tokens for one window.
    """

    def __init__(
        self,
        tokens: bytes,
        context: int,
        *,
        name: str = "data",
        device: torch.device | str = "cpu",
    ) -> None:
        if not 1 <= context < len(tokens):
            msg = (
                f"context must be 1 to {max(1, len(tokens) - 1)} tokens for this {name} of "
                f"{len(tokens)}, got {context}: choose a shorter --context or more --data"
            )
            raise ConfigError(msg)
        self._context, self._device = context, device
        self._num = (len(tokens) - 1) // context
        # a view with overlapping rows of T + 1 tokens, one every T tokens
        whole = torch.frombuffer(bytearray(tokens), dtype=torch.uint8)
        self._rows = whole.as_strided((self._num, context + 1), (context, 1))

    def __len__(self) -> int:
        return self._num

    def batch(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets of these samples.

        Shape:
            Both int64 of (len(indices), context).
        """
        rows = self._rows[torch.tensor(indices)].to(self._device).long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def __repr__(self) -> str:
        return f"Windows({self._num} of {self._context} tokens)"
