"""Whether training on N ranks is what one process would have done: the same bits, or where they first differ."""

from braid.prove.compare import Difference, ulps_between
from braid.prove.proving import Proof, prove
from braid.prove.task import Task, load_task

__all__ = ["Difference", "Proof", "Task", "load_task", "prove", "ulps_between"]
