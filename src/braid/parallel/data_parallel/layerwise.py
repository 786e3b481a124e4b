"""LARS and LAMB: one learning rate per layer, for batches that grow with the number of ranks.

Problem: twice the ranks are twice the batch, and half the steps for the same data. To make the same
progress, steps must be longer; but layers with weights that are small compared to their gradients
diverge before the other layers have moved far.

Idea: scale the step of each layer by its trust ratio, the norm of its weights divided by the norm
of its update, so that every layer moves by the same fraction of its norm. LARS does this to
momentum SGD, LAMB to Adam.

    LARS    trust  = coefficient |w| / (|g| + decay |w|)
            update = trust (g + decay w), through momentum
            w     -= lr update

    LAMB    update = Adam's + decay w
            trust  = |w| / |update|
            w     -= lr trust update

A layer with one of these norms equal to zero takes a plain step (trust 1).

Source: You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks" (2017), algorithm 1;
You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 Minutes", ICLR 2020,
algorithm 2. In LARS the learning rate is outside of the momentum, as in torch's SGD: when it
changes between steps, the paper's momentum keeps the old rate for old updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from braid.errors import ConfigError

__all__ = ["LAMB", "LARS"]


class LARS(torch.optim.Optimizer):
    """Momentum SGD with a trust ratio per parameter.

    The trust ratio, the norm of the weights over the norm of the gradient, is a factor of the step.

    Args:
        params: Parameters or groups of them; a group with `trust=False` (biases, norms) takes plain
            steps.
        lr: Learning rate of all layers.
        momentum: Factor of the accumulated update at every step.
        weight_decay: Factor of the weight that is added to the gradient.
        trust_coefficient: Fraction of its norm by which a layer moves at lr 1.
        eps: Number added to a divisor, against division by zero.
        nesterov: Whether to use Nesterov momentum, as in SGD.

    Raises:
        ConfigError: A number is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.1,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        eps: float = 1e-8,
        nesterov: bool = False,
    ) -> None:
        _check(
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            trust_coefficient=trust_coefficient,
            eps=eps,
        )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "nesterov": nesterov,
            "trust": True,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step; `closure`, if given, recomputes the loss."""
        loss = _loss(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                _check_dense(param)
                update = param.grad.add(param, alpha=group["weight_decay"])
                if group["trust"]:
                    weight = param.norm()
                    moved = param.grad.norm() + group["weight_decay"] * weight
                    update *= _trust(group["trust_coefficient"] * weight, moved, group["eps"])
                if group["momentum"]:
                    kept = self.state[param].setdefault("momentum", torch.zeros_like(param))
                    kept.mul_(group["momentum"]).add_(update)
                    update = (
                        update.add_(kept, alpha=group["momentum"]) if group["nesterov"] else kept
                    )
                param.add_(update, alpha=-group["lr"])
        return loss


class LAMB(torch.optim.Optimizer):
    """Adam with a trust ratio per parameter.

    The trust ratio, the norm of the weights over the norm of the update, is a factor of the step.

    Args:
        params: Parameters or groups of them; a group with `trust=False` (biases, norms) takes plain
            steps.
        lr: Learning rate of all layers.
        betas: Decay of the first and the second moment.
        eps: Number added to a divisor, against division by zero.
        weight_decay: Factor of the weight that is added to the update.

    Raises:
        ConfigError: A number is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        _check(lr=lr, eps=eps, weight_decay=weight_decay, beta1=betas[0], beta2=betas[1])
        if max(betas) >= 1:
            msg = f"betas must be below 1, got {betas}"
            raise ConfigError(msg)
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "trust": True},
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step; `closure`, if given, recomputes the loss."""
        loss = _loss(closure)
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                _check_dense(param)
                state = self.state[param]
                if not state:
                    state["step"] = 0
                    state["first"] = torch.zeros_like(param)
                    state["second"] = torch.zeros_like(param)
                state["step"] += 1
                weight, grad = _real(param), _real(param.grad.resolve_conj())
                first, second = _real(state["first"]), _real(state["second"])
                first.lerp_(grad, 1 - beta1)
                second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                update = first / (1 - beta1 ** state["step"])
                scale = second / (1 - beta2 ** state["step"])
                update.div_(scale.sqrt_().add_(group["eps"]))
                update.add_(weight, alpha=group["weight_decay"])
                if group["trust"]:
                    update *= _trust(weight.norm(), update.norm(), 0.0)
                weight.add_(update, alpha=-group["lr"])
        return loss


def _real(x: torch.Tensor) -> torch.Tensor:
    """Return complex numbers as pairs of real numbers with separate moments, as torch's Adam."""
    return torch.view_as_real(x) if x.is_complex() else x


def _trust(weight: torch.Tensor, moved: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the norm of weights divided by the norm of their update; 1 if either is zero."""
    ratio = weight / (moved + eps)
    return torch.where((weight > 0) & (moved > 0), ratio, torch.ones_like(ratio))


def _check_dense(param: torch.Tensor) -> None:
    grad = param.grad
    if grad is not None and grad.layout != torch.strided:
        msg = (
            f"gradient of a parameter of shape {tuple(param.shape)} has layout {grad.layout}, "
            "but this optimizer needs dense gradients: use torch.optim.SparseAdam or SGD for it, "
            "or sparse=False"
        )
        raise ConfigError(msg)


def _loss(closure: Callable[[], float] | None) -> float | None:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _check(**numbers: float) -> None:
    wrong = [f"{name}={value}" for name, value in numbers.items() if not 0 <= value < float("inf")]
    if wrong:
        msg = f"options of an optimizer must be finite and not negative, got {', '.join(wrong)}"
        raise ConfigError(msg)
