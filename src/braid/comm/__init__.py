"""Collectives: groups of ranks, the algorithms they run, and what is said when one of them fails."""

from braid.comm.arguments import Buffer
from braid.comm.batch import Batch
from braid.comm.group import Group
from braid.comm.request import Request
from braid.comm.work import Work

__all__ = ["Batch", "Buffer", "Group", "Request", "Work"]
