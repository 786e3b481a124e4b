"""Elastic training with Horovod's API: `hvd.elastic.run` and its states."""

from braid.compat.horovod.torch.elastic.loop import run
from braid.compat.horovod.torch.elastic.sampler import ElasticSampler
from braid.compat.horovod.torch.elastic.state import ObjectState, State, TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
