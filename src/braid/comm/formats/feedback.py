"""Error feedback: the error of a lossy format is added to the next numbers to encode.

Problem: a format that always rounds the same way, or always leaves out small numbers, makes
training converge to another point. Numbers that are small every time are never sent.

Idea: keep the residual, the difference between the input and the decoded output, and add it to the
next input. Then no part of an input is lost, only delayed: at any time, the sum of all sent numbers
plus the residual equals the sum of all inputs.

    c = x + residual;   send encode(c);   residual = c - decode(encode(c))

There is one residual for every tensor *and* every sender. The owner of the tensor keeps it, saves
it under the parameter's name in checkpoints, and resets it (`reset`) when parameters are replaced.
It covers only this sender's encoding: if a server or an engine encodes its result again in a lossy
format, that step needs separate error feedback.

Source: Seide et al., "1-Bit Stochastic Gradient Descent" (2014), section 3; Karimireddy et al.,
"Error Feedback Fixes SignSGD and other Gradient Compression Schemes" (2019), algorithm 2, which
proves that the convergence rate of SGD is restored.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from braid.comm.formats.wire_format import WireFormat, numbers, room, same_device
from braid.errors import ConfigError

__all__ = ["ErrorFeedback"]


class ErrorFeedback:
    """Residual of the lossy encodings of one tensor.

    Numbers that are not finite are sent but leave no residual, so that a step that overflowed does
    not affect later ones.

    Args:
        numel: Number of elements of the tensor.
        device: Device of the tensor.

    Cost:
        4 bytes per number while it exists; five passes over the numbers per call, besides the
        format's passes.
    """

    def __init__(self, numel: int, *, device: torch.device | str = "cpu") -> None:
        self._residual = torch.zeros(numel, device=device)

    def __repr__(self) -> str:
        return f"ErrorFeedback({self._residual.numel()}, device={str(self._residual.device)!r})"

    def encode(self, form: WireFormat, x: torch.Tensor, into: torch.Tensor) -> int:
        """Encode `x` plus the residual into `into`, and update the residual.

        Args:
            form: Any format; it may differ between calls.
            x: float32, flat and contiguous; unchanged.
            into: uint8, at least `form.nbytes(x.numel())` long.

        Returns:
            Number of bytes written.

        Raises:
            ConfigError: A tensor does not fit this description; nothing has changed.
        """
        self._check(x)
        room(into, "into", form.nbytes(x.numel()))
        same_device(x, into)
        corrected = self.correct(x)
        written = form.encode(corrected, into)
        corrected.neg_()  # -(d - c) equals c - d bit by bit, and needs no memory
        form.add(into[:written], corrected)
        corrected.neg_()
        self._drop_infinite()
        return written

    def correct(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` plus the residual. Call `mark_sent` when it has been sent.

        Returns:
            The memory of the residual; use it until `mark_sent`, and do not keep it.

        Raises:
            ConfigError: `x` is not flat, contiguous float32 of the right size and device.
        """
        return self._residual.add_(self._check(x))

    def mark_sent(self, arrived: torch.Tensor) -> None:
        """Subtract the decoded numbers from the result of `correct`; the rest is the new residual.

        Raises:
            ConfigError: `arrived` is not flat, contiguous float32 of the right size and device.
        """
        self._residual.sub_(self._check(arrived))
        self._drop_infinite()

    def reset(self) -> None:
        """Set the residual to zero."""
        self._residual.zero_()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return a copy of the residual, for checkpoints; each rank has a different one."""
        return {"residual": self._residual.clone()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore a residual from `state_dict`.

        Raises:
            ConfigError: The residual is missing, or has another size or dtype.
        """
        residual = state.get("residual")
        if residual is None:
            msg = f"the state of {self} must contain 'residual', but this one holds {sorted(state)}"
            raise ConfigError(msg)
        self._residual.copy_(self._check(residual.to(self._residual.device)))

    def _check(self, x: torch.Tensor) -> torch.Tensor:
        x = numbers(x, "x")
        same_device(self._residual, x)
        if x.numel() != self._residual.numel():
            msg = (
                f"{self} is for tensors of {self._residual.numel()} numbers, got {x.numel()}: "
                "make one object per tensor"
            )
            raise ConfigError(msg)
        return x

    def _drop_infinite(self) -> None:
        self._residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
