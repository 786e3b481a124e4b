"""Collectives: groups of ranks, the algorithms that they run, and the errors of failed calls."""

from braid.comm.api.batch import Batch
from braid.comm.api.group import Group
from braid.comm.api.request import Request
from braid.comm.engines.work import StepsBy, Work
from braid.comm.tensors.arguments import Buffer

__all__ = ["Batch", "Buffer", "Group", "Request", "StepsBy", "Work"]
