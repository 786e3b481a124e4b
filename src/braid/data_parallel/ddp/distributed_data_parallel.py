"""DistributedDataParallel: one replica per process, gradients averaged during backward.

Every rank holds the whole model and its share of the batch. At wrapping, rank 0's parameters and buffers are copied to
all, so that replicas start equal; since they then apply equal gradients, they stay equal, and parameters never travel again.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020. What differs: buckets
leave when they are full, not in order; unused parameters need no flag; sums are in the order of ranks; `no_sync` follows the
backward; buffers are made equal after each averaging, not before the next forward.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from braid.comm import Group, Work
from braid.data_parallel.ddp.arguments import (
    arguments_in_common,
    caps_of,
    checked_hash_every,
    checked_names,
    checked_weight,
    first_given,
    table_of,
    trigger_of,
)
from braid.data_parallel.ddp.join import Join, Joinable, JoinHook, syncs_in_forward
from braid.data_parallel.ddp.mixed_precision import precision_of
from braid.data_parallel.ddp.module_buffers import ModuleBuffers
from braid.data_parallel.ddp.once_warnings import Remarks
from braid.data_parallel.ddp.param_snapshot import KnownParams
from braid.data_parallel.finite import Reaction, react, reaction_of
from braid.data_parallel.groups import group_of
from braid.data_parallel.hooks.catalogue import hook_of
from braid.data_parallel.outputs import tensors_in
from braid.data_parallel.replicas.data_parallel import DataParallel
from braid.errors import ConfigError
from braid.params import (
    GradientReducer,
    Hook,
    Outcome,
    ParamRecord,
    ReducerOptions,
    Standing,
)
from braid.params.bucket_times import BucketTimes
from braid.params.hashing import compare_values
from braid.params.lost_requests import reclaim_lost_requests

__all__ = ["DistributedDataParallel"]

IGNORED = "_ddp_params_and_buffers_to_ignore"


class DistributedDataParallel(nn.Module, Joinable):
    """Wraps a module so that backward leaves the same averaged gradients on every rank.

    Names, order and defaults up to `forward_sync_buffers` are those of torch's class; attributes of the module are found here, too.

    Args:
        module: The same on every rank, up to values.
        device_ids: None, or one device, where the module is already; or several, each of which gets a replica and a share of this rank's batch
            (`DataParallel`), whose gradients are summed here before they are averaged over ranks.
        output_device: Where outputs of several devices go.
        dim: Dim of the batch, where it is divided.
        broadcast_buffers: See `forward_sync_buffers`; False leaves them alone at wrapping, too.
        init_sync: Compare parameters and copy rank 0's values at wrapping.
        process_group: Ranks that train together, such as `braid.init()`; a process group of torch over the backend "braid"; by default
            torch's default group, if there is one.
        bucket_cap_mb: Gradients are reduced in pieces of about this many MiB, 25 by default; the first is at most 1 MiB.
        find_unused_parameters: Unused parameters need no flag; True says that they are expected, and silences the word on them.
        check_reduction: Without effect, as in torch.
        gradient_as_bucket_view: Without effect: gradients always are views of buckets, of which there is one copy.
        static_graph: Every step uses the same parameters, equally often; needed for re-entrant checkpointing of shared ones.
        delay_all_reduce_named_params: (name, parameter) pairs whose gradients leave together ...
        param_to_hook_all_reduce: ... when this parameter has its gradient.
        mixed_precision: See `MixedPrecision`; dtypes of the forward and of what is sent.
        device_mesh: A mesh of one dim, instead of `process_group`.
        skip_all_reduce_unused_params: Without effect: what no rank has used is never sent.
        bucket_cap_mb_list: Caps of the first, second, ... bucket; the last is that of all others.
        batched_grad_copy: Without effect.
        forward_sync_buffers: Whether buffers (such as running means) follow rank 0's, from backward to backward.
        every: Average in every k-th backward; the others accumulate, as in one process.
        nonfinite: What to do about NaN and Inf in gradients: ignore, warn (once), raise, skip (leave all gradients None), or a function
            called with a `NonFinite` on all ranks. With a `torch.amp.GradScaler`, which looks itself, say ignore.
        check_all: Look at every number for that, rather than at one of each gradient.
        hash_every: Compare parameters of all ranks after every n-th averaging; never when 0.
        hook: A communication hook by name, such as "bf16", "topk:0.01" or "powersgd:rank=2" (`hooks.hook_of`).

    Raises:
        ConfigError: Nothing to train, no group, or arguments that contradict each other.
        MismatchError: Ranks have other parameters; the message shows which.

    Cost:
        A step sends 2 (n-1)/n l bytes a rank, l = bytes of the gradients; in shared memory each rank reads and writes
        2 l / n, most of it while backward computes. And one message of 24 bytes per parameter and 16 per rank.

    On failure:
        A lost rank raises PeerLostError in everyone's backward; gradients are then undefined. An exception in backward of one rank
        raises CommError in that of the others as soon as it begins its next forward; all may go on after that. One that is raised before
        backward has come to this module, in its forward or in the loss, ends nobody's step: where it is caught, the rank goes on with its next
        batch in place of this one, and gradients of different batches are averaged from then on. A warning says so once, as far as it shows. Let
        the rank end, or skip the batch on all ranks.
    """

    def __init__(  # noqa: PLR0917 - the order of torch's
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        every: int = 1,
        nonfinite: str | Reaction = "warn",
        check_all: bool = False,
        hash_every: int = 0,
        hook: str | None = None,
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        del check_reduction, skip_all_reduce_unused_params, batched_grad_copy
        group = group_of(process_group, device_mesh)
        ignored = frozenset(getattr(module, IGNORED, ()))
        self._table = table = table_of(module, ignored)
        self.module = module
        self.process_group = group
        self.device_ids = None if device_ids is None else list(device_ids)
        several = self.device_ids is not None and len(self.device_ids) > 1
        # in a tuple: a submodule would give every parameter a second name
        self._replicas = (DataParallel(module, device_ids, output_device, dim),) if several else ()
        self.dim = dim
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.forward_sync_buffers = first_given(forward_sync_buffers, broadcast_buffers)
        self.mixed_precision = mixed_precision
        self._hash_every = checked_hash_every(hash_every)
        self._known = KnownParams(module.parameters())
        self._buffers_of_all = ModuleBuffers(group, module, ignored)
        self._has_buffers = self._buffers_of_all.any()
        self._workers = list(range(group.size))
        self._reaction = reaction_of(nonfinite, [record.param for record in table])
        self._precision = precision_of(mixed_precision, module)
        wire, comm_hook = (None, None) if hook is None else hook_of(hook, group, table)
        options = ReducerOptions(
            caps=caps_of(bucket_cap_mb, bucket_cap_mb_list),
            wire=wire or self._precision.wire,
            every=every,
            static_graph=static_graph,
            delayed=frozenset(name for name, _ in delay_all_reduce_named_params or ()),
            delayed_after=trigger_of(
                table, param_to_hook_all_reduce, delay_all_reduce_named_params
            ),
            check_all=check_all,
        )
        if init_sync:
            others = {"buffers": self.forward_sync_buffers, "hash_every": hash_every, "hook": hook}
            common = arguments_in_common(options, nonfinite, **others)
            table.make_equal(group, common)
            reclaim_lost_requests(group)
            if broadcast_buffers is not False:
                self._buffers_of_all.broadcast()
        self._reducer = GradientReducer(group, table, options)
        self._comm_hook = comm_hook
        self._hook_name = hook
        if comm_hook is not None:
            self._reducer.use((None, comm_hook))
        self._listen()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module."""
        if self._join is not None and self._join.throws:  # before collectives of the forward
            Join.notify_join_context(self)
        follows = torch.is_grad_enabled()
        if follows:
            self._reducer.begin()
            self._known.check(self.module.parameters(), self.module.named_parameters())
        found = self._precision.call(
            self._replicas[0] if self._replicas else self.module, args, kwargs
        )
        if follows:
            if self._has_buffers and self.forward_sync_buffers and self.module.training:
                self._reducer.buffers_used = True
            outputs = [x for x in tensors_in(found) if x.requires_grad]
            self._reducer.watch(outputs)
        return found

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside keep their gradients local, wherever their forward was; the next one outside averages the sum."""
        with self._reducer.no_sync():
            yield

    def weigh(self, weight: float | None) -> None:
        """Let gradients of the forwards that follow count `weight`, such as their number of samples or tokens.

        The average is then sum(weight * gradient) / sum(weight) over all forwards of all ranks since the last one: what one process
        finds whose loss is a mean over all of them. None counts every rank's backwards once. Gradients are multiplied where they are
        accumulated, so in 16-bit floats weights should be near 1; zero gradients after each averaging, as optimizers expect. What backward reaches
        by no output of a forward, as where outputs hide their tensors, counts what was set last.

        Raises:
            ConfigError: It is negative or not finite.
            MismatchError: In backward, on all ranks: only some of them weigh.
        """
        self._reducer.weigh(checked_weight(weight))

    def average_next(self) -> None:
        """Let the next backward average, whichever of `every` it is, on all ranks: the last one of an epoch that is no multiple of it.

        An optimizer's step after any other backward is told in the next forward, by a warning. Gradients that are set to None restart the count.
        """
        self._reducer.average_next()

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Let `hook(state, bucket)` take the place of the all-reduce of each bucket.

        Args:
            state: Handed to the hook.
            hook: Returns a `torch.futures.Future` of the average, a Work, or a generator of Works (`params.grad_bucket`).

        Raises:
            ConfigError: It cannot be called, or there is one already.
        """
        if not callable(hook):
            msg = f"expected a communication hook that can be called, found {type(hook).__name__}"  # type: ignore[unreachable]  # users without a type checker
            raise ConfigError(msg)
        if self._comm_hook is not None or self._hook_name is not None:
            msg = (
                "expected one communication hook, found that another one has been registered before"
            )
            raise ConfigError(msg)
        self._reducer.use((state, hook))
        self._comm_hook = hook

    def step_in_backward(
        self, optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    ) -> dict[str, torch.optim.Optimizer]:
        """Let the optimizer's step be taken inside of backward: of each bucket when its averages are there, while others are on their way.

        Gradients are dropped after it. Steps in which some gradient is not finite are not taken, and clipping by the norm of all gradients is not
        possible. Sparse parameters stay for an optimizer of your own.

        Args:
            optimizer: Makes the optimizer of one parameter, such as `lambda params: torch.optim.AdamW(params, lr=1e-3)`.

        Returns:
            The optimizers by the parameter's name, for schedules and checkpoints; one of a parameter that is unfrozen later comes with its first step.
        """
        trained = [record for record in self._table.trained if not record.sparse]
        steps = {record.name: optimizer([record.param]) for record in trained}

        def step(records: Sequence[ParamRecord], usable: bool) -> None:
            for record in records:
                if record.name not in steps:  # unfrozen meanwhile
                    steps[record.name] = optimizer([record.param])
                if usable:
                    steps[record.name].step()
                record.param.grad = None

        self._reducer.on_bucket = step
        return steps

    def hook_state(self) -> dict[str, Any]:
        """What compression has left out on this rank so far and will send later, for checkpoints; each rank keeps its own.

        Returns:
            `residuals` of the wire format, by parameter, and the `hook`'s own state, if it has any.
        """
        read = getattr(self._comm_hook, "state_dict", None)
        return {
            "residuals": self._reducer.buckets.residuals(),
            "hook": {} if read is None else read(),
        }

    def load_hook_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `hook_state` returned.

        Residuals are added to this rank's next gradients, so they may be given to another rank, as long as each is given to one.

        Raises:
            ConfigError: It is not that, or is of another hook.
        """
        load = getattr(self._comm_hook, "load_state_dict", None)
        if set(state) != {"residuals", "hook"} or (load is None and state["hook"]):
            msg = (
                f"expected what hook_state() returns with {self._comm_hook!r} as the communication hook, found {sorted(state)}"
                f"{' of one that has a state' if state.get('hook') else ''}: wrap with the same hook"
            )
            raise ConfigError(msg)
        names = {record.name for record in self._table}
        residuals = {name: left for name, left in state["residuals"].items() if name in names}
        self._reducer.buckets.owe(residuals)
        if load is not None and state["hook"]:
            load(state["hook"])

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Context for uneven inputs: a rank that has no more helps the others, at no further message.

        Args:
            divide_by_initial_world_size: Whether averages are over all ranks, or over those that still have inputs.
            enable: False for inputs that are known to be even.
            throw_on_early_termination: Raise on all ranks as soon as one has no more; costs one small all-reduce a forward.

        Raises:
            ConfigError: The module has batch statistics of all ranks, which a rank without input cannot help with, and nothing shall be thrown.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """See `Joinable`; `divide_by_initial_world_size` as in `join`."""
        return _Helper(self, by_all=bool(kwargs.get("divide_by_initial_world_size", True)))

    @property
    def join_device(self) -> torch.device:
        """Where it communicates."""
        return self._table.records[0].param.device

    @property
    def join_process_group(self) -> Group:
        """With whom it communicates."""
        return self.process_group

    def bucket_times(self) -> BucketTimes:
        """When each bucket of the last step was full on each rank, which is who makes the others wait; print it. A collective."""
        return self._reducer.bucket_times()

    @property
    def num_buckets(self) -> int:
        """Number of reductions a step."""
        return len(self._reducer.buckets.plan)

    def __getattr__(self, name: str) -> Any:
        """What is no attribute of the wrapper is one of the module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def __getstate__(self) -> Any:
        """Asked for by copy and pickle, which would share the memory and the hooks that gradients travel through."""
        msg = (
            "expected the module itself (.module) to be copied or pickled, found its DistributedDataParallel, which holds memory and hooks of this "
            "group: copy.deepcopy(model.module), such as for averaged weights; torch.save(model.state_dict()), and wrap anew where it is loaded"
        )
        raise ConfigError(msg)

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Collection[str]
    ) -> None:
        """Leave parameters and buffers with these names, as `named_parameters` tells them, to each rank; before wrapping."""
        setattr(module, IGNORED, checked_names(params_and_buffers_to_ignore))

    def _set_static_graph(self) -> None:
        msg = "expected static_graph=True at wrapping, found that it is asked for afterwards"
        raise ConfigError(msg)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Figures under torch's names."""
        buckets = self._reducer.buckets
        return {
            "world_size": self.process_group.size,
            "rank": self.process_group.rank,
            "module_name": type(self.module).__name__,
            "num_parameter_tensors": len(self._table),
            "total_parameter_size_bytes": sum(
                r.param.numel() * r.param.element_size() for r in self._table
            ),
            "bucket_sizes": ", ".join(str(n) for n in buckets.sizes_bytes),
            "num_buckets_reduced": self.num_buckets,
            "iteration": self._reducer.num_reductions,
            "find_unused_parameters": self.find_unused_parameters,
            "gradient_as_bucket_view": True,
            "static_graph": self.static_graph,
            "forward_sync_buffers": self.forward_sync_buffers,
            "backend_name": "braid",
        }

    def _listen(self) -> None:
        group = self.process_group
        self._remarks = Remarks(
            type(self.module).__name__,
            group.ranks,
            speaks=group.rank == 0,
            names_unused=not self.find_unused_parameters,
        )
        reference = weakref.ref(self)  # the reducer must not keep the wrapper alive

        def on_outcome(outcome: Outcome) -> None:
            wrapper = reference()
            if wrapper is not None:
                wrapper._after(outcome)  # noqa: SLF001 - its continuation

        def on_exchange() -> Sequence[Work]:
            wrapper = reference()
            return () if wrapper is None else wrapper._send_beside()  # noqa: SLF001 - its continuation

        def on_begin() -> None:
            wrapper = reference()
            if wrapper is not None:
                wrapper._tell_joined()  # noqa: SLF001 - its continuation

        self._word: Work | None = None  # to ranks that have joined
        self._reducer.on_begin = on_begin
        self._reducer.on_outcome = on_outcome
        self._reducer.on_exchange = on_exchange

    def _tell_joined(self) -> None:
        if self._join is not None and not self._join.throws:
            self._word = Join.notify_join_context(self)

    def _send_beside(self) -> Sequence[Work]:
        word, self._word = self._word, None
        buffers = self._buffers_of_all.send_early(self._workers[0]) if self._has_buffers else ()
        return buffers if word is None else [*buffers, word]

    def _after(self, outcome: Outcome) -> None:
        """Gradients have been averaged."""
        status = outcome.status
        self._workers = [
            rank
            for rank, standing in enumerate(status.standings)
            if standing is not Standing.JOINED
        ]
        with torch.no_grad():
            self._buffers_of_all.settle(self._workers[0], change=bool(status.buffers))
        self._reducer.buffers_used = False
        all_work = len(self._workers) == len(
            status.standings
        )  # others have not taken the last steps
        if self._hash_every and outcome.number % self._hash_every == 0 and all_work:
            when = f"before the optimizer's step {outcome.number}"
            compare_values(self.process_group, self._table.records, when)
        react(outcome, self.process_group.ranks, self._reaction)
        self._remarks.of(outcome)  # last: the program may turn it into an error, on one rank only


class _Helper(JoinHook):
    """What a rank without input does for one wrapper."""

    def __init__(self, wrapper: DistributedDataParallel, *, by_all: bool) -> None:
        self._wrapper = wrapper
        self._by_all = by_all

    def shadow(self) -> bool:
        wrapper = self._wrapper
        # where samples are counted, a rank without any counts nothing
        reducer = wrapper._reducer  # noqa: SLF001 - its continuation
        counts = self._by_all and reducer.weight is None
        return reducer.help_others(1.0 if counts else 0.0)

    def main_hook(self) -> None:
        self.shadow()

    def refusal(self) -> str | None:
        return syncs_in_forward(self._wrapper.module)

    def post_hook(self, is_last_joiner: bool) -> None:  # noqa: ARG002 - who worked last is known
        """Those that joined early have not taken the last steps: the model of one that has is everybody's."""
        wrapper = self._wrapper
        root, group = wrapper._workers[0], wrapper.process_group  # noqa: SLF001
        with torch.no_grad():
            for record in wrapper._table:  # noqa: SLF001
                group.broadcast(record.param.detach(), root)
            wrapper._buffers_of_all.broadcast(root)  # noqa: SLF001
        wrapper._workers = list(range(group.size))  # noqa: SLF001
