"""Pipeline over the devices of one process; it is called like any other module.

    model = braid.parallel.pipeline.DevicePipeline(layers, ["cuda:0", "cuda:1"], balance=[3, 2],
                                          num_microbatches=8)
    loss = criterion(model(x), target)      # forwards of all micro-batches; the output is one batch
    loss.backward()                         # backwards; gradients are in .grad

The forward runs the first half of a GPipe program, with one thread per device. Its result belongs
to one autograd function; the backward of this function runs the second half. Copies between devices
run on separate streams. If all devices are `cpu`, stages run on threads.

The backward waits for the backwards of the stages, which torch runs on one thread per GPU. So it
must not run on such a thread itself. Two functions ensure this:

    batch ─▶ _Stages ─▶ empty tensor on the CPU ─▶ _Outputs ─▶ outputs on the last device
             backward on the calling thread        backward on the thread of the last device

Gradients are added to `.grad` when the backwards of the stages end: call `backward()`, because
`torch.autograd.grad` of parameters does not return them.

Source: Y. Huang et al., GPipe, NeurIPS 2019; C. Kim et al., torchgpipe (2020).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
from torch import nn

from braid.comm.autograd import phony
from braid.comm.autograd.nested import flatten, map_tensors, unflatten
from braid.comm.autograd.recompute_policy import RecomputePolicy
from braid.comm.autograd.streams import Stream, current_stream, default_stream, wait_stream
from braid.errors import ConfigError, raise_all
from braid.parallel.pipeline.cutting import edges_of, layers_of, noting
from braid.parallel.pipeline.deferred_batch_norm import DeferredBatchNorm, commit_batch_norms
from braid.parallel.pipeline.executor import Executor
from braid.parallel.pipeline.local_carrier import ActionSpan, LocalCarrier, LocalWire
from braid.parallel.pipeline.microbatches import gather, num_rows, scatter, sizes_of
from braid.parallel.pipeline.recomputing import check_recompute_policy
from braid.parallel.pipeline.stage import Layer, Stage
from braid.parallel.pipeline.workers import Workers
from braid.programs.schedule.pipeline import RECOMPUTE_MODES, forward_only, gpipe, with_recompute
from braid.runtime.seeding import Draws
from braid.runtime.torch_internals import own_modules, own_parameters

__all__ = ["DevicePipeline"]

Tensors = tuple[torch.Tensor, ...]
Result = TypeVar("Result")


class DevicePipeline(nn.Module):
    """Module that runs a list of layers on several devices of one process, on micro-batches.

    Args:
        layers: The model. Layers are moved to their devices.
        devices: Devices, one per stage; additional devices are not used.
        balance: Number of layers on each device.
        num_microbatches: Number of micro-batches of a batch; fewer if it has fewer rows.
        recompute: Micro-batches whose layers run again in backward: `always`, `except_last` or
            `never`.
        recompute_policy: Policy of results that are kept and not computed again, or a list of
            operators with kept results, such as matrix products; see
            `braid.comm.autograd.recompute_policy`.
        deferred_batch_norm: Whether running statistics are updated once per batch; see
            `DeferredBatchNorm`.

    Attributes:
        partitions: Layers of each stage, under their names.
        balance, devices: Arguments.
        num_microbatches, recompute, recompute_policy: Arguments; they may be changed between
            batches.
        spans: List to which the next forward and backward add an `ActionSpan` per action; None to
            record nothing.

    Raises:
        ConfigError: The balance does not match the layers, or there are too few devices.
        TypeError: A stashed tensor is popped by no later layer, or a popped one was not stashed.
    """

    def __init__(
        self,
        layers: nn.Sequential,
        devices: Sequence[torch.device | str | int],
        *,
        balance: Sequence[int],
        num_microbatches: int = 1,
        recompute: str = "except_last",
        recompute_policy: RecomputePolicy | None = None,
        deferred_batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self.balance = list(balance)
        self.num_microbatches = num_microbatches
        self.recompute, self.recompute_policy = recompute, recompute_policy
        self.spans: list[ActionSpan] | None = None
        self.devices = [_device_of(device) for device in devices][: len(self.balance)]
        self._check(len(layers))
        if deferred_batch_norm:
            layers = DeferredBatchNorm.convert_deferred_batch_norm(layers, None)
        named = layers_of(layers)
        ends = list(accumulate(self.balance, initial=0))
        parts = [_Partition(OrderedDict(named[begin:end])) for begin, end in pairwise(ends)]
        self._tied = _separate(parts, self.devices)
        moved = [part.to(device) for part, device in zip(parts, self.devices, strict=True)]
        self.partitions = nn.ModuleList(moved)
        self._edges = edges_of(self._parts())
        self._workers = Workers(len(self.balance))

    def forward(self, batch: Any) -> Any:
        """Return the output of a batch, on the last device.

        Args:
            batch: Containers of tensors that are split along dim 0; moved to the first device.

        Raises:
            ConfigError: The batch has no rows.
            Exception: First exception of a layer, in any stage.
        """
        if not self.balance:
            return batch
        batch = map_tensors(batch, lambda x: x.to(self.devices[0]))
        sizes, batches = self._scatter(batch)
        if not sizes:
            msg = "a batch of 0 rows cannot be split into micro-batches: leave it out"
            raise ConfigError(msg)
        trains = torch.is_grad_enabled()
        run = _BatchRun(self, sizes, trains=trains)
        pairs = [flatten(part) for part in batches]
        tensors = [x for _, part_tensors in pairs for x in part_tensors]
        run.trees = [tree for tree, _ in pairs]
        run.counts = [len(part_tensors) for _, part_tensors in pairs]
        if trains:
            link = _Stages.apply(run, phony(torch.device("cpu"), True), *tensors)  # type: ignore[no-untyped-call]
            outputs = _Outputs.apply(run, link)  # type: ignore[no-untyped-call]
        else:
            outputs = run.forward(tensors)
        commit_batch_norms(self)
        rest = iter(outputs)
        parts = [unflatten(tree, [next(rest) for _ in range(count)]) for tree, count in run.results]
        return self._gather(parts)

    def _scatter(self, batch: Any) -> tuple[list[int], list[Any]]:
        """Return the numbers of rows of the micro-batches, and the micro-batches."""
        sizes = self._sizes_of(num_rows(batch))
        return sizes, scatter(batch, sizes)

    def _gather(self, outputs: list[Any]) -> Any:
        """Return the outputs of micro-batches as the output of the batch."""
        return gather(outputs)

    def _sizes_of(self, rows: int) -> list[int]:
        """Return the sizes of micro-batches."""
        return sizes_of(rows, self.num_microbatches)

    def _check(self, num_layers: int) -> None:
        problems = []
        if sum(self.balance) != num_layers or min(self.balance, default=1) < 1:
            problems.append(
                f"balance must be numbers of at least 1 that add up to the {num_layers} layers, "
                f"got {self.balance}, which add up to {sum(self.balance)}"
            )
        if len(self.devices) < len(self.balance):
            problems.append(
                f"{len(self.balance)} stages need one device each, got {len(self.devices)} "
                "devices: pass more devices, or a shorter balance"
            )
        if self.num_microbatches < 1:
            problems.append(
                f"the number of micro-batches must be at least 1, got {self.num_microbatches}"
            )
        if self.recompute not in RECOMPUTE_MODES:
            problems.append(
                f"recompute must be one of {', '.join(RECOMPUTE_MODES)}, got {self.recompute!r}"
            )
        with noting(problems):
            check_recompute_policy(self.recompute_policy, self.recompute)
        raise_all(problems)

    def _parts(self) -> list[list[Layer]]:
        return [
            [Layer(name, layer) for name, layer in own_modules(part).items() if layer is not None]
            for part in self.partitions
        ]


# partition, and the run of its layers in this thread; several threads may call the same model
_LAYERS: ContextVar[tuple[nn.Module | None, Any]] = ContextVar("layers", default=(None, None))


class _Partition(nn.Sequential):
    """Layers of one stage; the stage calls them one by one, inside of the partition's hooks."""

    def run(self, layers: Callable[[Any], Any], value: Any) -> Any:
        """Call this module, with its hooks, so that its forward is the run of the layers."""
        token = _LAYERS.set((self, layers))
        try:
            return self(value)
        finally:
            _LAYERS.reset(token)

    def forward(self, value: Any) -> Any:
        """Return the output of the layers."""
        partition, run = _LAYERS.get()
        layers: Callable[[Any], Any] = super().forward if partition is not self else run
        return layers(value)


def _hooks_of(partition: nn.Module) -> Callable[[Callable[[Any], Any], Any], Any] | None:
    """Return the function that runs layers inside of a partition's hooks."""
    return partition.run if isinstance(partition, _Partition) else None


class _BatchRun:
    """Forward of a batch and its backward.

    Attributes:
        trees: Micro-batches with placeholders instead of tensors.
        counts: Number of tensors of each micro-batch.
        results: Outputs with placeholders instead of tensors, and their numbers of tensors.
        outputs: Tensors of the outputs, until they are returned.
        output_grads: Gradients of the outputs, with the stream that computes each.
    """

    def __init__(self, owner: DevicePipeline, sizes: list[int], *, trains: bool) -> None:
        size = len(owner.balance)
        self.trees: list[Any] = []
        self.counts: list[int] = []
        self.results: list[tuple[Any, int]] = []
        self.outputs: Tensors = ()
        self.output_grads: list[tuple[torch.Tensor, Stream]] = []
        self._devices = [d for d in dict.fromkeys(owner.devices) if d.type == "cuda"]
        self._workers = owner._workers  # noqa: SLF001 - one class in two parts
        self._tied = owner._tied  # noqa: SLF001
        self._needs_grad: list[list[bool]] = []
        self._is_done = False
        wire = LocalWire(owner.devices, records=owner.spans is not None)
        if wire.spans is not None:
            owner.spans = wire.spans
        program = (gpipe if trains else forward_only)(size, len(sizes))
        if trains and owner.training:
            program = with_recompute(program, owner.recompute)
        # a new seed for each forward, drawn from torch's generator
        seed = int(torch.randint(2**62, (), device="cpu")) if owner.training else 0
        ends = accumulate(sizes, initial=0)
        self._draws = [Draws(seed, 0, range(*pair)) for pair in pairwise(ends)]
        edges, policy = owner._edges, owner.recompute_policy  # noqa: SLF001
        self._executors = [
            Executor(
                program,
                LocalCarrier(wire, rank),
                {rank: Stage(rank, part, edges, policy=policy, around=_hooks_of(partition))},
            )
            for rank, (part, partition) in enumerate(
                zip(owner._parts(), owner.partitions, strict=True)  # noqa: SLF001
            )
        ]

    def forward(self, tensors: Sequence[torch.Tensor]) -> Tensors:
        rest = iter(tensors)
        batches = [
            unflatten(tree, [next(rest) for _ in range(count)])
            for tree, count in zip(self.trees, self.counts, strict=True)
        ]
        jobs = [
            partial(executor.run_forwards, batches, self._draws.__getitem__)
            for executor in self._executors
        ]
        outputs = self._work(jobs)[-1]
        flat = [flatten(outputs[i]) for i in sorted(outputs)]
        self.results = [(tree, len(output_tensors)) for tree, output_tensors in flat]
        self._needs_grad = [[x.requires_grad for x in output_tensors] for _, output_tensors in flat]
        return tuple(x.detach() for _, output_tensors in flat for x in output_tensors)

    def needs_grad(self) -> list[bool]:
        """Return whether each output requires a gradient."""
        return [needs for flags in self._needs_grad for needs in flags]

    def _work(self, jobs: Sequence[Callable[[], Result]]) -> list[Result]:
        """Run jobs on the default streams, ordered before and after the caller's own work."""
        for device in self._devices:
            wait_stream(default_stream(device), current_stream(device))
        results = self._workers.run([partial(self._in_context, job) for job in jobs])
        for device in self._devices:
            wait_stream(current_stream(device), default_stream(device))
        return results

    def _in_context(self, job: Callable[[], Result]) -> Result:
        """Run a job on a thread with a CUDA context, because some libraries warn without one."""
        for device in self._devices:
            torch.cuda.current_stream(device).query()  # a thread's first call makes its context
        return job()

    def backward(self) -> list[torch.Tensor]:
        """Return the gradients of the batch's tensors that require one, in order."""
        if self._is_done:
            msg = (
                "backward through this output of a DevicePipeline has run already, and freed its "
                "saved tensors: call the model again (retain_graph has no effect on it)"
            )
            raise ConfigError(msg)
        self._is_done = True
        earlier = {p: p.grad for copies in self._tied for p in copies}
        for param in earlier:
            param.grad = None
        for grad, stream in self.output_grads:
            wait_stream(current_stream(grad.device), stream)
        rest = iter([grad for grad, _ in self.output_grads])
        self.output_grads = []
        by_microbatch = []
        for flags in self._needs_grad:
            pairs = [(next(rest), needs) for needs in flags]
            by_microbatch.append([grad for grad, needs in pairs if needs])
        with torch.enable_grad():
            jobs = [partial(e.run_backwards, by_microbatch) for e in self._executors]
            first = self._work(jobs)[0]
        self._add_up(earlier)
        return [grad for i in sorted(first) for grad in first[i]]

    def _add_up(self, earlier: Mapping[nn.Parameter, torch.Tensor | None]) -> None:
        """Set the gradient of each copy of a shared parameter to the sum over all copies."""
        for copies in self._tied:
            grads = [p.grad for p in copies if p.grad is not None]
            if not grads:
                continue
            total = grads[0].clone()
            for other in grads[1:]:
                total += other.to(total.device)
            for param in copies:
                param.grad = total.to(param.device, copy=True)
        for param, grad in earlier.items():
            if grad is not None:
                param.grad = grad if param.grad is None else grad.add_(param.grad)


class _Stages(torch.autograd.Function):
    """Autograd function of all stages; its backward also adds gradients of parameters."""

    @staticmethod
    def forward(ctx: Any, run: _BatchRun, _nothing: torch.Tensor, *tensors: torch.Tensor) -> Any:
        ctx.run = run
        ctx.needs = [x.requires_grad for x in tensors]
        with torch.enable_grad():
            run.outputs = run.forward(tensors)
        return torch.empty(0, device="cpu")

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _nothing: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input_grads = iter(ctx.run.backward())
        return None, None, *[next(input_grads) if needs else None for needs in ctx.needs]


class _Outputs(torch.autograd.Function):
    """Autograd function from the empty tensor that represents the stages to their outputs."""

    @staticmethod
    def forward(ctx: Any, run: _BatchRun, _nothing: torch.Tensor) -> Tensors:
        ctx.run = run
        outputs, run.outputs = run.outputs, ()
        needs = run.needs_grad()
        ctx.mark_non_differentiable(
            *[x for x, wanted in zip(outputs, needs, strict=True) if not wanted]
        )
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, torch.Tensor]:
        ctx.run.output_grads = [(grad, current_stream(grad.device)) for grad in grads]
        return None, torch.empty(0, device="cpu")


def _separate(
    parts: Sequence[nn.Module], devices: Sequence[torch.device]
) -> list[list[nn.Parameter]]:
    """Give each device a separate copy of parameters that parts share; return the copies.

    Call it before parts are moved, because moving a module moves its parameters in place.
    """
    copies: dict[nn.Parameter, dict[torch.device, nn.Parameter]] = {}
    for part, device in zip(parts, devices, strict=True):
        for module in part.modules():
            for name, param in own_parameters(module).items():
                if param is None:
                    continue
                device_copies = copies.setdefault(param, {})
                if device not in device_copies:
                    copy = nn.Parameter(param.detach().clone(), param.requires_grad)
                    device_copies[device] = copy if device_copies else param
                own_parameters(module)[name] = device_copies[device]
    return [
        list(device_copies.values()) for device_copies in copies.values() if len(device_copies) > 1
    ]


def _device_of(device: torch.device | str | int) -> torch.device:
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
