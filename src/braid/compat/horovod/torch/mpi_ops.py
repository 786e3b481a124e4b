"""The module `horovod.torch.mpi_ops`, from which many scripts import operations."""

from braid.compat.horovod import torch as _front
from braid.compat.horovod.torch import *  # noqa: F403

__all__ = list(_front.__all__)
