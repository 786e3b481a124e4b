"""Base of torch's process group: its attributes, the execution of operations, and its end.

For methods with torch's names, torch's docstrings apply; docstrings here describe differences.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d

from braid.comm import Group, StepsBy, Work
from braid.comm.engines.work import Works
from braid.comm.torch_backend.backward import inside_backward
from braid.comm.torch_backend.buckets import BucketStorages
from braid.comm.torch_backend.foreign import ExplainedGroup, Foreign
from braid.comm.torch_backend.futures import WorkFuture
from braid.comm.torch_backend.shapes import flat_outputs
from braid.comm.torch_backend.shared_world import SharedWorld, SharedWorlds
from braid.comm.torch_backend.work import FinishedWork, PendingWork, Started, seconds
from braid.errors import StaleError

__all__ = ["BaseProcessGroup", "c10d"]

c10d: Any = distributed_c10d  # torch's stubs are incomplete

_CPU = torch.device("cpu")

NUM_DROPPED = 16  # works that a rank may start between DDP's `join` and its backward
LARGE_BYTES = 256 << 10  # a spare core runs operations from this size on; handing over costs time

Call = Callable[[Any, bool], Any]


class _Ended:
    """Stand-in for an ended group; every access raises StaleError.

    Args:
        text: Description of the end of the group.
        use: Name of the operation for the error; empty to use the attribute's name.
    """

    def __init__(self, text: str, use: str = "") -> None:
        self._text = text
        self._use = use

    def __getattr__(self, name: str) -> Any:
        msg = (
            f"{self._use or name} cannot be called: {self._text}. Make a new process group "
            "with init_process_group or new_group"
        )
        raise StaleError(msg)


class BaseProcessGroup(c10d.ProcessGroup):  # type: ignore[misc]  # see c10d
    """Process group of torch over a group of braid, without its operations.

    Args:
        shared_world: Shared memory in which the group was made.
        group: Group of braid.
        foreign: Backends of torch for tensors that cannot be in shared memory.
        store: torch's store, with this group's prefix.
        shared_worlds: Registry to notify when the group ends.
    """

    def __init__(
        self,
        shared_world: SharedWorld,
        group: Group,
        foreign: Foreign,
        store: Any,
        shared_worlds: SharedWorlds,
    ) -> None:
        super().__init__(group.rank, group.size)
        self._group: Any = group  # its overloads need literals, but here async_op is a variable
        self._now: Any = group.starting()
        self._later: Any = group.starting(steps_by=StepsBy.WAITER)
        self._shared_world: Any = shared_world
        self._buckets: Any = BucketStorages(group)
        self._foreign = foreign
        self._store = store
        self._shared_worlds = shared_worlds
        self._timeout_s = seconds(foreign.timeout)
        self._name = self._desc = ""
        self._coalesced: list[Started] | None = None
        self._done = FinishedWork([])  # of blocking messages, whose caller only waits for it
        self._splits: list[BaseProcessGroup] = []
        self.dropped: deque[PendingWork] = deque(maxlen=NUM_DROPPED)

    @property
    def braid_group(self) -> Group | None:
        """Group of braid that this process group uses; None after its end."""
        return None if self.ended else self._group

    # Properties of a group that torch reads.

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Name under which torch knows the backend."""
        return "braid"

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        """Torch's name of the group."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        """Set torch's name of the group; torch calls this once."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802 - torch's name
        """Torch's description of the group."""
        return self._desc

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802 - torch's name
        """Set torch's description of the group; torch calls this once."""
        self._desc = desc

    def get_group_store(self) -> Any:
        """Torch's store, with this group's prefix."""
        return self._store

    def _get_sequence_number_for_group(self) -> int:
        return int(self._group.statistics()["num_operations"])

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: every group counts from 0."""

    @property
    def _device_types(self) -> list[torch.device]:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        current = [] if accelerator is None else [torch.device(accelerator.type)]
        return [_CPU, *(d for d in {*current, *self._foreign.devices} if d != _CPU)]

    def _get_backend(self, device: torch.device) -> Any:
        if device.type == "cpu":
            return self
        if device.type not in {known.type for known in self._device_types}:
            # torch calls this for GPUs on machines without any, and expects this error
            msg = (
                f"this process group has no backend for device {device}, which this machine does "
                "not have: move the tensor to the CPU or to a GPU of this machine"
            )
            raise RuntimeError(msg)
        return self._foreign.backend(device)

    # Execution of operations.

    def _carry_out(
        self, call: Call, outputs: list[Any], opts: Any, *, several: bool = False
    ) -> Any:
        """Run a collective in this thread if it is synchronous, else start it.

        Args:
            call: Function that runs it: (a group or a similar object, whether in the background).
            outputs: Value of the future.
            opts: torch's options of the collective.
            several: Whether `call` makes several operations, to start together.
        """
        if not (opts.asyncOp or several):
            call(self._group, False)
            return FinishedWork(outputs)
        if not several and self._shared_world.spare_cores and _nbytes(outputs) >= LARGE_BYTES:
            return self._started(call(self._group, True), outputs)
        waited_soon = opts.asyncOp and self._is_waited_for_soon()
        if not several:
            starter = self._later if waited_soon else self._now
            return self._passing(call(starter, False), outputs, waited_soon=waited_soon)
        steps_by = StepsBy.WAITER if waited_soon else StepsBy.CALLER
        with self._group.coalesce(steps_by=steps_by) as batch:
            call(batch, False)
        if opts.asyncOp:
            return self._passing(batch.work, outputs, waited_soon=waited_soon)
        batch.work.wait()
        return FinishedWork(outputs)

    def _passing(
        self,
        work: Work | Works,
        outputs: list[Any],
        source: Callable[[], int] | None = None,
        *,
        waited_soon: bool,
    ) -> PendingWork:
        """Return torch's work for a work without a thread; the poller takes its steps."""
        if waited_soon or not work.done():
            self._shared_world.poller.poll(work, rarely=waited_soon)
            if waited_soon:
                work.add_done_callback(self._shared_world.poller.release)
        return self._started(work, outputs, source)

    def _is_waited_for_soon(self) -> bool:
        """Return whether steps can wait until the end of backward, which they would delay now."""
        return inside_backward() and not self._shared_world.spare_cores

    def _started(
        self, work: Started, outputs: list[Any], source: Callable[[], int] | None = None
    ) -> PendingWork:
        """Return torch's work for a work in progress."""
        if self._coalesced is not None:
            self._coalesced.append(work)
        return PendingWork(work, outputs, self, source)

    def finish_later(self, work: Started, future: WorkFuture, /) -> None:
        """Complete a future when its collective has ended, even if no thread waits for it."""
        if self.ended:  # all operations of the group have ended as well
            future.finish()
        elif inside_backward():
            self._shared_world.backward.finish_at_end(future)
            # a hook may wait for it in C++, where no steps are taken
            self._shared_world.poller.when_done(work, future.finish_alone, rarely=True)
        else:
            self._shared_world.poller.when_done(work, future.finish)

    def _deadline(self, opts: Any) -> float | None:
        timeout = opts.timeout
        return self._timeout_s if timeout.days < 0 else seconds(timeout) or self._timeout_s

    def _elsewhere(self, x: torch.Tensor) -> Any:
        """Return torch's process group for tensors that cannot be in shared memory."""
        return ExplainedGroup(self._foreign.group(x.device), self._foreign.ranks)

    # End of the group.

    @property
    def ended(self) -> bool:
        """Whether the group has been destroyed or aborted."""
        return isinstance(self._group, _Ended)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the deadline of later operations."""
        self._timeout_s = seconds(timeout)
        self._foreign.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Close the group; called by `destroy_process_group`."""
        self._end(f"the process group {self._name!r} has been destroyed", self._foreign.shutdown)

    def abort(self) -> None:
        """Abort the group during its operations; other members' waits end with CommError."""
        if not self.ended:
            self._group.abort(f"process group {self._name!r} was aborted")
        self._end(f"the process group {self._name!r} has been aborted", self._foreign.abort)

    def _end(self, text: str, end_foreign: Callable[[], None]) -> None:
        if self.ended:
            return
        group, self._group = self._group, _Ended(text)
        self._now = self._later = self._group
        self.dropped.clear()
        # torch may not know them, and they would keep the shared world open
        for split in self._splits:
            split.shutdown()
        end_foreign()
        self._shared_worlds.close_group(self._shared_world, group)
        # torch keeps ended process groups in its caches, and so all objects that they refer to
        self._shared_world = self._buckets = _Ended(text, "operations")


def _nbytes(outputs: list[Any]) -> int:
    return sum(x.numel() * x.element_size() for x in flat_outputs(outputs))
