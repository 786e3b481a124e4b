"""Threads for the devices of one process, one per device.

They live as long as their owner, because torch creates additional threads for each thread that
computes. Copies of the owner, made by `copy.deepcopy` or by pickling, get new threads.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch

from braid.comm.autograd.rng_and_autocast import RngAndAutocast
from braid.errors import CommError

__all__ = ["Workers"]

Result = TypeVar("Result")


class Workers:
    """Pool of threads; jobs run with the grad mode, autocast and context variables of the caller.

    Args:
        count: Number of threads.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ThreadPoolExecutor | None = None
        self._turn = threading.Lock()  # jobs wait for each other: one call uses all

    def run(self, jobs: Sequence[Callable[[], Result]]) -> list[Result]:
        """Run a job on each thread, all at the same time, and return their results.

        Raises:
            Exception: First exception that is not a CommError, since an exception in one thread
                causes CommErrors in others. If all are CommErrors, the first one.
        """
        if len(jobs) == 1:
            return [jobs[0]()]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.count, thread_name_prefix="braid-stage")
        modes = RngAndAutocast([])
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

        def in_modes(job: Callable[[], Result]) -> Result:
            with modes.again(), torch.inference_mode(inference), torch.set_grad_enabled(grad):
                return job()

        with self._turn:
            futures = [
                self._pool.submit(contextvars.copy_context().run, in_modes, job) for job in jobs
            ]
            wait(futures)
        errors = [error for future in futures if (error := future.exception()) is not None]
        own_errors = [error for error in errors if not isinstance(error, CommError)]
        for error in (*own_errors, *errors):
            raise error
        return [future.result() for future in futures]

    def __deepcopy__(self, _memo: Any) -> Workers:
        return Workers(self.count)

    def __reduce__(self) -> tuple[type[Workers], tuple[int]]:
        return Workers, (self.count,)
