"""Operations under the name `horovod.torch.mpi_ops`, from which many scripts import them."""

from braid.compat.horovod import torch as _front
from braid.compat.horovod.torch import *  # noqa: F403

__all__ = list(_front.__all__)
