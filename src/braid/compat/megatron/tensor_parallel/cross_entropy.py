"""`megatron.core.tensor_parallel.cross_entropy`: a loss over classes divided among ranks."""

from __future__ import annotations

import torch

from braid.compat.megatron.failure import UsageError
from braid.compat.megatron.utils import tensor_group
from braid.parallel import tensor_parallel

__all__ = ["vocab_parallel_cross_entropy"]


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor, target: torch.Tensor, label_smoothing: float = 0.0
) -> torch.Tensor:
    """Return the loss of each row.

    Args:
        vocab_parallel_logits: Logits of this rank's classes, shape [..., classes / n].
        target: Classes over all ranks, shape [...].
        label_smoothing: Fraction of each target that is spread over all other classes. (torch's
            function spreads it over all classes including the target.)

    Raises:
        UsageError: `label_smoothing` is out of range.
    """
    group = tensor_group()
    classes = vocab_parallel_logits.shape[-1] * group.size
    spread = label_smoothing * classes / max(classes - 1, 1)
    if not 0 <= label_smoothing < 1 or spread >= 1:
        msg = (
            f"label_smoothing must be at least 0 and below {(classes - 1) / classes:.4g} with "
            f"{classes} classes, got {label_smoothing}"
        )
        raise UsageError(msg)
    return tensor_parallel.vocab_parallel_cross_entropy(
        group, vocab_parallel_logits, target, label_smoothing=spread
    )
