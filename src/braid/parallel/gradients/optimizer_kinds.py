"""Kinds of optimizers, by the part of a model that one update uses.

by elements   each element changes by its own gradient and state: bits do not depend on the sharding
whole         updates use the shape or the norm of a parameter, so parameters must not be sharded
together      updates use all parameters together, as LBFGS does, so the model must not be divided
unknown       anything else, such as an optimizer of the user

Classes are identified by name, so that their packages need not be imported.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from torch.optim import Optimizer

__all__ = ["kind_of_optimizer", "refusal_of_optimizer"]

OptimizerKind: TypeAlias = Literal["by elements", "whole", "together", "unknown"]

BY_ELEMENTS = {
    *("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop"),
    *("Rprop", "SGD", "Lion"),
}
WHOLE = {
    *("Adafactor", "Muon", "LARS", "LAMB", "Lamb", "Lars", "FusedLAMB", "NovoGrad", "Shampoo"),
    *("SOAP", "Kron", "PSGD", "Prodigy"),
}
REFUSED = {
    "LBFGS": "it takes inner products of all parameters together",
    "SparseAdam": "it takes sparse gradients, which are not summed in flat vectors",
}


def kind_of_optimizer(optimizer: Optimizer) -> OptimizerKind:
    """Return whether an optimizer updates by elements or needs whole parameters, or all of them.

    The name of its class decides; other names are `unknown`.
    """
    name = type(optimizer).__name__
    if "LBFGS" in [kind.__name__ for kind in type(optimizer).__mro__]:
        return "together"
    if name in BY_ELEMENTS:
        return "by elements"
    return "whole" if name in WHOLE else "unknown"


def refusal_of_optimizer(optimizer: Optimizer) -> str | None:
    """Return why an optimizer cannot step on shards of parameters; None if it can."""
    names = (kind.__name__ for kind in type(optimizer).__mro__)
    return next((REFUSED[name] for name in names if name in REFUSED), None)
