"""Error feedback: what a lossy format left out this time is added to what it is given next time.

Problem: a format that always rounds the same way, or always leaves the small numbers out, makes
training stop somewhere else than it should, however long it runs. Numbers that are small every time
are never sent at all.

Idea: the residual, what was given less what arrives, is kept and added to the next call. Nothing is
lost then, only late: at any time, all that was sent plus the residual is all that was given.

    c = x + residual;   send encode(c);   residual = c - decode(encode(c))

There is one residual for every tensor *and* every sender, so it belongs to whoever owns the tensor,
is kept under the parameter's name in checkpoints and forgotten (`reset`) when the parameters are
replaced. It says nothing about the other formats on the way: what a server or an engine sends on in
a lossy format needs feedback of its own.

Source: Seide et al., "1-Bit Stochastic Gradient Descent" (2014), section 3; Karimireddy et al.,
"Error Feedback Fixes SignSGD and other Gradient Compression Schemes" (2019), algorithm 2, which
shows that the rate of SGD comes back.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from braid.comm.formats.wire_format import WireFormat, numbers, room, same_device
from braid.errors import ConfigError

__all__ = ["ErrorFeedback"]


class ErrorFeedback:
    """Residual that lossy sends of one tensor have left so far.

    Numbers that are not finite are sent but leave no residual, so that a step that overflowed does
    not affect later ones.

    Args:
        numel: Numbers in the tensor.
        device: Device of the tensor.

    Cost:
        4 bytes a number for as long as it lives; five passes over the numbers a call, besides the
        format's own.
    """

    def __init__(self, numel: int, *, device: torch.device | str = "cpu") -> None:
        self._residual = torch.zeros(numel, device=device)

    def __repr__(self) -> str:
        return f"ErrorFeedback({self._residual.numel()}, device={str(self._residual.device)!r})"

    def encode(self, form: WireFormat, x: torch.Tensor, into: torch.Tensor) -> int:
        """Write `x` and what was lost before into `into`; as `WireFormat.encode`, which see.

        Args:
            form: Any format, not always the same.
            x: float32, flat and contiguous; is left as it is.
            into: uint8, room for `form.nbytes(x.numel())`.

        Returns:
            Bytes written.

        Raises:
            ConfigError: A tensor is not as described; nothing has changed.
        """
        self._check(x)
        room(into, "into", form.nbytes(x.numel()))
        same_device(x, into)
        corrected = self.correct(x)
        written = form.encode(corrected, into)
        corrected.neg_()  # -(d - c) is c - d, to the bit, and needs no memory
        form.add(into[:written], corrected)
        corrected.neg_()
        self._forget_what_is_not_finite()
        return written

    def correct(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` plus what was lost before. Call `mark_sent` when it has arrived.

        Returns:
            The residual's own memory; use it until `mark_sent`, and do not keep it.

        Raises:
            ConfigError: `x` is not flat, contiguous float32 of the right size and device.
        """
        return self._residual.add_(self._check(x))

    def mark_sent(self, arrived: torch.Tensor) -> None:
        """Note what of `correct`'s result has arrived; the rest is the new residual.

        Raises:
            ConfigError: `arrived` is not flat, contiguous float32 of the right size and device.
        """
        self._residual.sub_(self._check(arrived))
        self._forget_what_is_not_finite()

    def reset(self) -> None:
        """Forget what was lost."""
        self._residual.zero_()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """A copy of the residual, for checkpoints; each rank's own."""
        return {"residual": self._residual.clone()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from what `state_dict` returned.

        Raises:
            ConfigError: It is of another size or dtype, or not there.
        """
        residual = state.get("residual")
        if residual is None:
            msg = f"the state of {self} is its residual, and this one holds {sorted(state)}"
            raise ConfigError(msg)
        self._residual.copy_(self._check(residual.to(self._residual.device)))

    def _check(self, x: torch.Tensor) -> torch.Tensor:
        x = numbers(x, "x")
        same_device(self._residual, x)
        if x.numel() != self._residual.numel():
            msg = (
                f"expected {self._residual.numel()} numbers for {self}, found {x.numel()}: one "
                "residual per tensor"
            )
            raise ConfigError(msg)
        return x

    def _forget_what_is_not_finite(self) -> None:
        self._residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
