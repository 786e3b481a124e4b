"""prove: compare training on N ranks with one process, bit by bit; see README.md."""

from braid.train.prove.compare import Difference, ulps_between
from braid.train.prove.proving import Proof, prove
from braid.train.prove.task import Task, load_task

__all__ = ["Difference", "Proof", "Task", "load_task", "prove", "ulps_between"]
