"""Megatron's optimizers: an optimizer of torch on main parameters, with clipping and ZeRO stage 1.

The main parameter of a float32 parameter is the parameter itself; a 16-bit parameter has a float32
copy. With the distributed optimizer each rank has the main parameters of its shards only.

    main_grad -> grad of main parameters -> clip -> torch step -> parameters -> all_gather of shards

Source: S. Rajbhandari et al., ZeRO, SC 2020 (stage 1); megatron-core 0.16.1, `optimizer/`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from braid.comm import Group
from braid.compat.megatron.failure import UnsupportedError, UsageError
from braid.compat.megatron.optimizer.optimizer_config import OptimizerConfig
from braid.compat.megatron.tensor_parallel.attributes import param_is_not_tensor_parallel_duplicate
from braid.compat.megatron.utils import timed
from braid.parallel.data_parallel.clipping import grad_norm

__all__ = ["MainParam", "MegatronOptimizer"]


class MainParam(NamedTuple):
    """Parameter of the torch optimizer, for a parameter of the model or this rank's part of it.

    Attributes:
        param: Parameter of the model.
        value: Elements of the parameter that this rank updates.
        grad: Their gradients.
        main: Parameter of the torch optimizer.
    """

    param: nn.Parameter
    value: torch.Tensor
    grad: torch.Tensor
    main: nn.Parameter

    @property
    def is_copy(self) -> bool:
        """Whether `main` is a float32 copy."""
        return self.main.dtype != self.value.dtype

    @property
    def counts(self) -> bool:
        """Whether the gradient counts in the norm; replicas of other ranks' parameters do not."""
        is_shared = getattr(self.param, "shared", False)
        return not is_shared and param_is_not_tensor_parallel_duplicate(self.param)


class MegatronOptimizer:
    """Optimizer of model chunks; made by `get_megatron_optimizer`.

    Args:
        optimizer: Optimizer of torch on main parameters.
        config: Options.
        mains: Main parameters.
        chunks: Model chunks, each in DistributedDataParallel.
        groups: Ranks over which norms are summed: model parallel, then data parallel ranks with
            the distributed optimizer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: OptimizerConfig,
        mains: Sequence[MainParam],
        chunks: Sequence[Any],
        groups: Sequence[Group],
    ) -> None:
        self.optimizer, self.config = optimizer, config
        self._mains, self._chunks, self._groups = list(mains), list(chunks), list(groups)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the torch optimizer."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        """State of the torch optimizer."""
        return self.optimizer.state

    def get_parameters(self) -> list[nn.Parameter]:
        """Return the main parameters."""
        return [main.main for main in self._mains]

    def get_loss_scale(self) -> torch.Tensor:
        """Return 1, as there is no loss scale."""
        return torch.ones(1, device=self._device())

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients of parameters; `zero_grad_buffer` of the chunks sets `main_grad` to 0."""
        self.optimizer.zero_grad(set_to_none)
        for main in self._mains:
            if set_to_none:
                main.param.grad = None

    def step(self) -> tuple[bool, float, int | None]:
        """Update the parameters.

        Returns:
            True, the norm of all gradients before clipping, and the number of zeros in them (None
            unless `log_num_zeros_in_grad`).

        Cost: an all_reduce of a number per group of ranks; with the distributed optimizer also an
            all_gather of the parameters.
        """
        for main in self._mains:
            main.main.grad = main.grad.to(main.main.dtype)
        norm = self.get_grad_norm()
        if self.config.clip_grad > 0:
            self._clip(self.config.clip_grad, norm)
        num_zeros = self.count_zeros() if self.config.log_num_zeros_in_grad else None
        with timed(self.config, "optimizer-inner-step", log_level=1):
            self.optimizer.step()
            self._write_values()
        return True, norm, num_zeros

    def get_grad_norm(self) -> float:
        """Return the norm of the gradients of all ranks; replicated parameters count once."""
        total = grad_norm([main.main for main in self._mains if main.counts]).square()
        return math.sqrt(self._summed(total.double()))

    def clip_grad_norm(self, clip_grad: float) -> float:
        """Scale gradients so that their norm is at most `clip_grad`; return the norm before."""
        norm = self.get_grad_norm()
        self._clip(clip_grad, norm)
        return norm

    def count_zeros(self) -> int:
        """Return the number of zeros in the gradients of all ranks."""
        zeros = sum(
            main.main.grad.numel() - int(main.main.grad.count_nonzero())
            for main in self._mains
            if main.counts and main.main.grad is not None
        )
        return int(self._summed(torch.tensor(float(zeros), dtype=torch.float64)))

    def reload_model_params(self, state_dict: Any = None) -> None:
        """Copy the parameters of the model to their float32 copies, such as after a load."""
        if state_dict is not None:
            msg = "reload_model_params takes no state_dict: load it into the model first"
            raise UnsupportedError(msg)
        for main in self._mains:
            if main.is_copy:
                main.main.detach().copy_(main.value)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank: the torch optimizer's state, and float32 copies."""
        copies = [main.main.detach() for main in self._mains if main.is_copy]
        return {
            "optimizer": self.optimizer.state_dict(),
            "fp32_params": copies,
            "sizes": [main.value.numel() for main in self._mains],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of the same rank in groups of the same sizes, and update the parameters.

        Raises:
            UsageError: The state belongs to other parameters, or to groups of other sizes.
        """
        sizes = [main.value.numel() for main in self._mains]
        if state_dict.get("sizes") != sizes:
            msg = (
                f"the state is for main parameters of sizes {state_dict.get('sizes')}, but this "
                f"rank has {sizes}: load the state of the same rank, with the same parallel sizes"
            )
            raise UsageError(msg)
        self.optimizer.load_state_dict(dict(state_dict["optimizer"]))
        copies = [main for main in self._mains if main.is_copy]
        for main, saved in zip(copies, state_dict["fp32_params"], strict=True):
            main.main.detach().copy_(saved)
        self._write_values()

    def _device(self) -> torch.device:
        return next((main.main.device for main in self._mains), torch.device("cpu"))

    def _summed(self, number: torch.Tensor) -> float:
        """Return the sum of a number over all ranks that have parts of the model."""
        total = number.to(self._device())
        for group in self._groups:
            group.all_reduce(total)
        return float(total)

    def _clip(self, limit: float, norm: float) -> None:
        factor = limit / (norm + 1e-6)
        if factor < 1:
            for main in self._mains:
                if main.main.grad is not None:
                    main.main.grad.mul_(factor)

    def _write_values(self) -> None:
        """Copy main parameters to the model, and gather the shards of the distributed optimizer."""
        for main in self._mains:
            if main.is_copy:
                main.value.copy_(main.main.detach())
        for chunk in self._chunks:
            chunk.start_param_sync()
