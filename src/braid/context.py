"""The one default context: `braid.init()`.

A program that is one job from beginning to end calls `braid.init()` once and becomes a rank. Only
this module stores the default group; all other code gets its group as an argument.
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

    CPU tensors use shared memory inside a host and sockets between hosts. CUDA tensors use NCCL if
    there are several ranks and each has its GPU (select it with `torch.cuda.set_device` before the
    first operation), and pinned host memory if ranks share a GPU. A single rank sends nothing.

    Works under `braid run`, under torchrun, and without a launcher (world size 1). Calling it again
    returns the same group.

    Args:
        timeout_s: Seconds to wait for the other ranks.
        sum_order: `rank` to sum in the order of ranks, as one process does, also over several
            hosts; see `Group.world`.

    Raises:
        RendezvousError: Some ranks did not arrive in time; the message names them.
        ConfigError: The launcher's environment variables are not valid; the message lists every
            problem.
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
    """Create the group of all ranks and store it as the default group."""
    group = Group.world(member.context, member.transport, sum_order=_DEFAULT.sum_order)
    costs = group.objects.broadcast(_DEFAULT.costs) if member.epoch > 0 else ""
    if costs:  # nothing is measured again while others wait to go on
        group.engine.use_costs(costs)
    else:
        _tune(group, member.transport.hosts, timeout_s)
    _DEFAULT.costs = group.engine.costs or _DEFAULT.costs
    if _have_own_gpus(group, member.transport.hosts):
        LOG.info("CUDA tensors use NCCL: no two ranks share a GPU")
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
    num_steps: int,
    timeout_s: float = 600.0,
    *,
    limit_s: float | None = None,
    directory: str = "",
) -> tuple[Group, NewEpoch]:
    """Join the next epoch (period with the same ranks) of an elastic run; return its group.

    An epoch is a period of the run in which the ranks stay the same.

    Tensors of the old group stay readable. Its operations and requests have ended.

    Args:
        num_steps: Number of training steps in the state of this process; -1 without state.
        timeout_s: Seconds to wait for the members of the next epoch.
        limit_s: Seconds to wait until the next epoch begins; None for no limit.
        directory: Directory of checkpoints that all members see, in which they agree on a last
            epoch if the launcher is gone; empty for none.

    Raises:
        ConfigError: The run is not elastic, or no file can be opened in `directory`.
        PeerLostError: The launcher ends the run, or is gone and there is no `directory`, or the
            other members continue without this process.
        CommTimeout: No epoch began within `limit_s`.
    """
    member = membership()
    torch_backend.share(None)
    world().close()
    return _share_next_world(member, num_steps, timeout_s, limit_s, directory)


def _share_next_world(
    member: Membership,
    num_steps: int,
    timeout_s: float,
    limit_s: float | None = None,
    directory: str = "",
) -> tuple[Group, NewEpoch]:
    while True:
        epoch = member.next_epoch(num_steps, timeout_s, limit_s=limit_s, directory=directory)
        try:
            return _share_world(member, timeout_s), epoch
        except PeerLostError:
            LOG.info("a member of epoch %d was lost before it had begun", epoch.epoch)


def _tune(group: Group, hosts: tuple[int, ...], timeout_s: float) -> None:
    """Measure transfer costs among all ranks and inside each host, to choose algorithms by."""
    group.engine.tune(timeout_s)
    if len(set(hosts)) > 1:
        here = group.split(hosts[group.rank])
        assert here is not None
        here.engine.tune(timeout_s)
        here.close()


def _have_own_gpus(group: Group, hosts: tuple[int, ...]) -> bool:
    """Return whether each rank can use a separate GPU; False for a single rank."""
    if group.size == 1:  # sends nothing
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

    `braid report` draws each value over the steps, once as the average over the ranks that logged
    it and once for rank 0. It also draws step times, memory and, from `samples` or `tokens`, the
    throughput. This call does not communicate, so each rank may log different values, or none.

    Args:
        step: Number of the step; the last logged step plus 1 when None.
        values: Numbers, such as `loss=loss`, or tensors with one element. A tensor on a GPU makes
            the program wait for the GPU. `loss`, `eval_loss`, `samples` and `tokens` have fixed
            meanings; see `braid.runtime.metrics.rows`.

    Raises:
        ConfigError: A value is not a number; the message names all such values.
        StaleError: `init` has not been called.

    Cost: about 30 microseconds; one line in `metrics/rank<r>.jsonl` in the run's directory.
    """
    if _DEFAULT.metrics is None:
        msg = "braid.log was called before braid.init(): call braid.init() once at the start"
        raise StaleError(msg)
    _DEFAULT.metrics.log(step, values)


def log_step(step: int, **values: float) -> None:
    """Log that this rank has finished a step, for programs that watch a running job.

    Does nothing without braid's launcher. The default step number of `log` does not change.

    Args:
        step: Number of the step.
        values: Numbers of the step by name, such as `loss=0.5`.
    """
    if _DEFAULT.metrics is not None:
        _DEFAULT.metrics.log_step(step, values)


def shutdown() -> None:
    """Leave the job and release all its resources; also called at exit. `init` may follow."""
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
    """Return the group of all ranks, or of the remaining ranks if the group was rebuilt.

    Raises:
        StaleError: `init` has not been called.
    """
    if _DEFAULT.group is None:
        msg = "the default group does not exist yet: call braid.init() once at the start"
        raise StaleError(msg)
    return _DEFAULT.group.current


def mesh(axes: str | Mapping[str, int], group: Group | None = None) -> MeshGroups:
    """Arrange ranks in a mesh with named axes.

    Args:
        axes: Text such as `dp=2,tp=4`, or a mapping from names to sizes. Neighboring ranks differ
            in the last axis.
        group: Ranks to arrange; all ranks when None.

    Raises:
        ConfigError: The axes are not valid, or the product of their sizes is not the number of
            ranks.
    """
    from braid.comm.mesh_groups import MeshGroups  # noqa: PLC0415 - not for every program
    from braid.programs.layout import Mesh  # noqa: PLC0415

    layout = Mesh.parse(axes) if isinstance(axes, str) else Mesh(dict(axes))
    return MeshGroups(layout, init() if group is None else group)


def membership() -> Membership:
    """Return the membership of this rank: its environment and its connection to the launcher.

    Raises:
        StaleError: `init` has not been called.
    """
    if _DEFAULT.membership is None:
        msg = "this process is not a rank yet: call braid.init() once at the start"
        raise StaleError(msg)
    return _DEFAULT.membership
