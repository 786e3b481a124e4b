"""The one default context: `braid.init()`.

Programs that are one job from beginning to end call `braid.init()` once and are a rank. This is the
only place that remembers it; everything below gets its group as an argument.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from braid.comm import Group, torch_backend
from braid.comm.engines.c10d import C10dEngine, make_nccl
from braid.errors import PeerLostError, StaleError
from braid.runtime.metrics import RunMetrics
from braid.runtime.rendezvous import JobEnvironment, NewEpoch
from braid.runtime.rendezvous.membership import Membership, join_job

if TYPE_CHECKING:
    from braid.comm.mesh_groups import MeshGroups

__all__ = ["init", "log", "log_step", "membership", "mesh", "next_epoch", "shutdown", "world"]

LOG = logging.getLogger(__name__)


class _Default:
    """Holder of the default membership and its group.

    Attributes:
        has_joined: Whether this process has ever been a rank.
    """

    def __init__(self) -> None:
        self.has_joined = False
        self.membership: Membership | None = None
        self.group: Group | None = None
        self.metrics: RunMetrics | None = None
        self.sum_order = "any"
        self.costs = ""  # of collectives, as measured in an earlier epoch


_DEFAULT = _Default()


def init(*, timeout_s: float = 600.0, sum_order: str = "any") -> Group:
    """Become a rank of the job that the launcher started, and return the group of all ranks.

    CPU tensors travel through shared memory inside a host and by sockets between hosts. CUDA
    tensors go to NCCL if there are several ranks with a GPU each (choose it with
    `torch.cuda.set_device` before the first operation), and through pinned memory if ranks share a
    GPU. A single rank sends nothing.

    Works under `braid run`, under torchrun, and alone (a world of one). Calling it again returns
    the same group.

    Args:
        timeout_s: Seconds to wait for the other ranks.
        sum_order: `rank` to sum in the order of ranks over several hosts, too, as one process does;
            see `Group.world`.

    Raises:
        RendezvousError: Some ranks did not come; they are named.
        ConfigError: The launcher's environment makes no sense; everything wrong with it is listed.
    """
    if _DEFAULT.membership is None:
        member = join_job(JobEnvironment.from_os(), timeout_s=timeout_s)
        _DEFAULT.sum_order = "rank" if member.environment.elastic else sum_order
        try:
            _share_world(member, timeout_s)
        except PeerLostError:
            if not member.environment.elastic:
                raise
            _share_next_world(member, -1, timeout_s)
        _DEFAULT.metrics = RunMetrics(
            member.environment,
            member.control,
            member.context.clock,
            member.context.events,
            member.context.store,
        )
        _DEFAULT.membership = member
        _DEFAULT.has_joined = True
        atexit.register(shutdown)  # runs before the interpreter ends threads and frees memory
    return world()


def _share_world(member: Membership, timeout_s: float) -> Group:
    """Make the group of all ranks, the default from now on."""
    group = Group.world(member.context, member.transport, sum_order=_DEFAULT.sum_order)
    costs = group.objects.broadcast(_DEFAULT.costs) if member.epoch > 0 else ""
    if costs:  # nothing is measured again while others wait to go on
        group.engine.use_costs(costs)
    else:
        _tune(group, member.transport.hosts, timeout_s)
    _DEFAULT.costs = group.engine.costs or _DEFAULT.costs
    if _have_own_gpus(group, member.transport.hosts):
        LOG.info("CUDA tensors go to NCCL: every rank has a GPU of its own")
        group.attach(
            C10dEngine(
                member.context,
                group.ranks,
                make_nccl,
                device_types=frozenset({"cuda"}),
                name="nccl",
            )
        )
    torch_backend.share(group)
    LOG.info("rank %d of %d, started by %s", group.rank, group.size, member.environment.launched_by)
    _DEFAULT.group = group
    return group


def next_epoch(
    num_steps: int, timeout_s: float = 600.0, *, limit_s: float | None = None
) -> tuple[Group, NewEpoch]:
    """Leave this epoch of an elastic run, and return the group of all ranks of the next one.

    Tensors of the old group stay readable; its operations and requests have ended.

    Args:
        num_steps: Number of steps that the state of this process has seen; -1 without state.
        timeout_s: Seconds to wait for the members of the next epoch.
        limit_s: Seconds to wait for its beginning; None for no limit.

    Raises:
        ConfigError: The run is not elastic.
        PeerLostError: The launcher ends the run, or is gone.
        CommTimeout: No epoch has begun in time.
    """
    member = membership()
    torch_backend.share(None)
    world().close()
    return _share_next_world(member, num_steps, timeout_s, limit_s)


def _share_next_world(
    member: Membership, num_steps: int, timeout_s: float, limit_s: float | None = None
) -> tuple[Group, NewEpoch]:
    while True:
        epoch = member.next_epoch(num_steps, timeout_s, limit_s=limit_s)
        try:
            return _share_world(member, timeout_s), epoch
        except PeerLostError:
            LOG.info("a member of epoch %d was lost before it had begun", epoch.epoch)


def _tune(group: Group, hosts: tuple[int, ...], timeout_s: float) -> None:
    """Measure what algorithms depend on, among all ranks and inside of each host."""
    group.engine.tune(timeout_s)
    if len(set(hosts)) > 1:
        here = group.split(hosts[group.rank])
        assert here is not None
        here.engine.tune(timeout_s)
        here.close()


def _have_own_gpus(group: Group, hosts: tuple[int, ...]) -> bool:
    """Return whether every rank can have a GPU of its own; one rank alone has nothing to move."""
    if group.size == 1:
        return False
    here = hosts.count(hosts[group.rank])
    has = (
        torch.cuda.is_available() and dist.is_nccl_available() and here <= torch.cuda.device_count()
    )
    if len(set(hosts)) > 1:  # hosts may differ
        has = bool(group.all_reduce(torch.tensor(int(has)), "min").item())
    return has


def log(*, step: int | None = None, **values: Any) -> None:
    """Log numbers of this rank for one step.

    `braid report` draws every value over the steps, as the average of the ranks that have logged it
    and of rank 0, beside step times, memory and, from `samples` or `tokens`, throughput. Ranks do
    not communicate here, so any of them may log anything, or nothing.

    Args:
        step: Number of the step; the one after the last when None.
        values: Numbers, such as `loss=loss`; tensors of one element, of which those on a GPU make
            the program wait for it. `loss`, `eval_loss`, `samples` and `tokens` have meanings; see
            `braid.runtime.metrics.rows`.

    Raises:
        ConfigError: A value is not a number; all such values are named.
        StaleError: `init` has not been called.

    Cost: some 30 microseconds; one line in `metrics/rank<r>.jsonl` of the run's directory.
    """
    if _DEFAULT.metrics is None:
        msg = "braid.log before braid.init(): call braid.init() once at the start"
        raise StaleError(msg)
    _DEFAULT.metrics.log(step, values)


def log_step(step: int, **values: float) -> None:
    """Log that this rank has finished a step, for readers of a run that goes on.

    Nothing happens without braid's launcher. The step that `log` takes by itself does not change.
    """
    if _DEFAULT.metrics is not None:
        _DEFAULT.metrics.log_step(step, values)


def shutdown() -> None:
    """Leave the job and release everything; `init` may be called again. Also happens at exit."""
    group, member = _DEFAULT.group and _DEFAULT.group.current, _DEFAULT.membership
    metrics, _DEFAULT.metrics = _DEFAULT.metrics, None
    _DEFAULT.group = _DEFAULT.membership = None
    if metrics is not None:
        metrics.close()
    if group is None or member is None:
        return
    atexit.unregister(shutdown)
    torch_backend.share(None)
    member.report_uncaught()
    if member.failed:
        group.abort(member.failure)
    group.close()
    member.close()


def world() -> Group:
    """Return the group of all ranks, or of those that are left if it was rebuilt.

    Raises:
        StaleError: `init` has not been called.
    """
    if _DEFAULT.group is None:
        msg = "there is no default group: call braid.init() once at the start"
        raise StaleError(msg)
    return _DEFAULT.group.current


def mesh(axes: str | Mapping[str, int], group: Group | None = None) -> MeshGroups:
    """Arrange ranks along named axes.

    Args:
        axes: Text such as `dp=2,tp=4`, or sizes by name; the last axis varies fastest.
        group: Ranks to arrange; all ranks when None.

    Raises:
        ConfigError: The axes are not valid, or do not multiply to the number of ranks.
    """
    from braid.comm.mesh_groups import MeshGroups  # noqa: PLC0415 - not for every program
    from braid.programs.layout import Mesh  # noqa: PLC0415

    layout = Mesh.parse(axes) if isinstance(axes, str) else Mesh(dict(axes))
    return MeshGroups(layout, init() if group is None else group)


def membership() -> Membership:
    """Return this process as a rank: its environment, its connection to the launcher.

    Raises:
        StaleError: `init` has not been called.
    """
    if _DEFAULT.membership is None:
        msg = "this process is no rank yet: call braid.init() once at the start"
        raise StaleError(msg)
    return _DEFAULT.membership
