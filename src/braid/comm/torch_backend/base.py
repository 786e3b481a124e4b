"""A process group of torch: its attributes, the execution of its operations, and its end.

torch's docstrings apply to the methods that have torch's names; these say only what differs.
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

c10d: Any = distributed_c10d  # its stubs know a part of it only

_CPU = torch.device("cpu")

NUM_DROPPED = 16  # works that a rank may start between the one of DDP's `join` and its backward
LARGE_BYTES = 256 << 10  # from here a spare core carries it out; below, handing it over costs more

Call = Callable[[Any, bool], Any]


class _Ended:
    """Stand-in for an ended group; every access raises StaleError.

    Args:
        text: Description of the end of the group.
        use: Purpose that the error names; the name of the attribute when empty.
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
    """A process group of torch over a group of braid, without its operations.

    Args:
        shared_world: Shared memory in which the group was made.
        group: Group of braid.
        foreign: Backends of torch for tensors that shared memory does not carry.
        store: torch's store, with this group's prefix.
        shared_worlds: Registry that is told when the group ends.
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
        self._group: Any = group  # its overloads want literals; here async_op is a variable
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
        self._splits: list[BaseProcessGroup] = []
        self.dropped: deque[PendingWork] = deque(maxlen=NUM_DROPPED)

    @property
    def braid_group(self) -> Group | None:
        """Group of braid behind this one; None after its end."""
        return None if self.ended else self._group

    # What torch asks about a group.

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
        own = [] if accelerator is None else [torch.device(accelerator.type)]
        return [_CPU, *(d for d in {*own, *self._foreign.devices} if d != _CPU)]

    def _get_backend(self, device: torch.device) -> Any:
        if device.type == "cpu":
            return self
        if device.type not in {known.type for known in self._device_types}:
            # torch asks for GPUs on machines that have none, and expects its own error
            msg = (
                f"this process group has no backend for device {device}: use a device of this "
                "machine"
            )
            raise RuntimeError(msg)
        return self._foreign.backend(device)

    # How everything is carried out.

    def _carry_out(
        self, call: Call, outputs: list[Any], opts: Any, *, several: bool = False
    ) -> Any:
        """Execute a collective here if the caller waits for it, else start it.

        Args:
            call: Executes it: (a group or a batch of one, whether in the background).
            outputs: Value of the future.
            opts: torch's options of the collective.
            several: Whether `call` makes several operations, to be started as one.
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
        """Return torch's face of a work without a thread, whose steps the poller takes."""
        if waited_soon or not work.done():
            self._shared_world.poller.poll(work, rarely=waited_soon)
            if waited_soon:
                work.add_done_callback(self._shared_world.poller.release)
        return self._started(work, outputs, source)

    def _is_waited_for_soon(self) -> bool:
        """Return whether steps, which would delay backward now, can be left to its end."""
        return inside_backward() and not self._shared_world.spare_cores

    def _started(
        self, work: Started, outputs: list[Any], source: Callable[[], int] | None = None
    ) -> PendingWork:
        """Return torch's face of a work that is under way."""
        if self._coalesced is not None:
            self._coalesced.append(work)
        return PendingWork(work, outputs, self, source)

    def finish_later(self, work: Started, future: WorkFuture, /) -> None:
        """Finish a future when its work has ended, whoever waits for it."""
        if self.ended:  # and with it all that was started in it
            future.finish()
        elif inside_backward():
            self._shared_world.backward.finish_at_end(future)
        else:
            self._shared_world.poller.when_done(work, future.finish)

    def _deadline(self, opts: Any) -> float | None:
        timeout = opts.timeout
        return self._timeout_s if timeout.days < 0 else seconds(timeout) or self._timeout_s

    def _elsewhere(self, x: torch.Tensor) -> Any:
        """Return torch's own process group for tensors that shared memory does not carry."""
        return ExplainedGroup(self._foreign.group(x.device), self._foreign.ranks)

    # Its life.

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
        """Leave the group amid its operations; the members' waits end with CommError."""
        if not self.ended:
            self._group.abort(f"process group {self._name!r} was aborted")
        self._end(f"the process group {self._name!r} has been aborted", self._foreign.abort)

    def _end(self, text: str, end_foreign: Callable[[], None]) -> None:
        if self.ended:
            return
        group, self._group = self._group, _Ended(text)
        self._now = self._later = self._group
        self.dropped.clear()
        for split in (
            self._splits
        ):  # which torch may not know of, and which would keep the shared_world open
            split.shutdown()
        end_foreign()
        self._shared_worlds.close_group(self._shared_world, group)
        # torch keeps ended process groups in its caches, and with them whatever they hold
        self._shared_world = self._buckets = _Ended(text, "operations")


def _nbytes(outputs: list[Any]) -> int:
    return sum(x.numel() * x.element_size() for x in flat_outputs(outputs))
