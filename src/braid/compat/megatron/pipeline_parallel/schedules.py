"""`megatron.core.pipeline_parallel.schedules`: forwards and backwards of all micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import nn

from braid.compat.megatron import parallel_state
from braid.compat.megatron.failure import UnsupportedError, UsageError
from braid.compat.megatron.groups import braid_group
from braid.compat.megatron.model_parallel_config import check_served
from braid.compat.megatron.pipeline_parallel.p2p_communication import (
    P2PCommunicator,
    is_single_shape,
)
from braid.compat.megatron.pipeline_parallel.schedule_run import ScheduleCall, ScheduleRun
from braid.compat.megatron.pipeline_parallel.steps import LossScaling
from braid.compat.megatron.process_groups_config import ProcessGroupCollection
from braid.compat.megatron.utils import get_model_config, timed
from braid.errors import raise_all
from braid.programs.schedule.pipeline import forward_only as forward_program
from braid.programs.schedule.pipeline import interleaved, looped, one_f_one_b

__all__ = [
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
    "get_forward_backward_func",
    "get_tensor_shapes",
]

Iterators = Iterator[Any] | Sequence[Iterator[Any] | None] | None
Models = nn.Module | Sequence[nn.Module]
Shape = Sequence[int]
AdjustShapes = Callable[[list[Shape], list[Shape]], tuple[list[Shape], list[Shape]]]


def get_forward_backward_func(
    pp_size: int | None = None, vp_size: int | None = None
) -> Callable[..., list[Any]]:
    """Return the schedule for a number of pipeline ranks and of chunks per rank.

    Args:
        pp_size: Number of pipeline ranks.
        vp_size: Number of chunks per rank; None without interleaving. If both arguments are None,
            the numbers of `parallel_state` are used.

    Returns:
        A function with keyword arguments; see `forward_backward_pipelining_without_interleaving`.
    """
    if pp_size is None and vp_size is None:
        pp_size = parallel_state.get_pipeline_model_parallel_world_size()
        vp_size = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    if pp_size is None or pp_size <= 1:
        return forward_backward_no_pipelining
    if vp_size is not None:
        return forward_backward_pipelining_with_interleaving
    return forward_backward_pipelining_without_interleaving


def get_tensor_shapes(
    *,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None,
    config: Any,
    tp_group: Any,
    cp_group: Any,
) -> list[Shape]:
    """Return the shapes of the tensors between stages, which is one shape."""
    length = (seq_length if decoder_seq_length is None else decoder_seq_length) // cp_group.size()
    if config.sequence_parallel:
        length //= tp_group.size()
    hidden_size = getattr(config, "hidden_size", None)
    if hidden_size is None:
        msg = (
            f"{type(config).__name__} has no hidden_size, which is the last dim of tensors between "
            "stages: add the field to a subclass of ModelParallelConfig"
        )
        raise UsageError(msg)
    return [(length, micro_batch_size, hidden_size)]


def forward_backward_no_pipelining(
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Iterators,
    model: Models,
    num_microbatches: int,
    seq_length: int,  # noqa: ARG001 - has no effect in Megatron either
    micro_batch_size: int,  # noqa: ARG001
    decoder_seq_length: int | None = None,  # noqa: ARG001
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: AdjustShapes | None = None,
    p2p_communicator: P2PCommunicator | None = None,  # noqa: ARG001
    pg_collection: ProcessGroupCollection | None = None,
    force_all_reduce: bool | None = False,
) -> list[Any]:
    """Run forward and backward of all micro-batches on a whole model.

    See `forward_backward_pipelining_without_interleaving` for the arguments.
    """
    _check_one_chunk("non-pipeline-parallel", model, data_iterator)
    if adjust_tensor_shapes_fn is not None:
        msg = (
            "adjust_tensor_shapes_fn is not supported for non-pipeline-parallel schedule: leave it "
            "out"
        )
        raise UnsupportedError(msg)
    models = _listed(model)
    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    return _run(
        forward_step_func,
        _listed(data_iterator),
        models,
        ((), ()),
        num_microbatches,
        collect_non_loss_data=collect_non_loss_data,
        forward_only=forward_only,
        first_val_step=first_val_step,
        communicator=P2PCommunicator(groups.pp, get_model_config(models[0])),
        groups=groups,
        force_all_reduce=bool(force_all_reduce),
    )


def forward_backward_pipelining_without_interleaving(
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Iterators,
    model: Models,
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: AdjustShapes | None = None,
    p2p_communicator: P2PCommunicator | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    force_all_reduce: bool | None = False,
) -> list[Any]:
    """Run 1F1B with one stage of the model on each rank.

    Args:
        forward_step_func: Function of a data iterator and a model that returns the output, and a
            function of the output that returns (loss, reported), (loss, num_tokens, reported) or,
            with `collect_non_loss_data` and called with `non_loss_data=True`, any data.
        data_iterator: Iterator over micro-batches, or a list with one.
        model: Model with `config` and `set_input_tensor`, or a list with one.
        num_microbatches: Number of micro-batches.
        seq_length: Number of positions of a micro-batch.
        micro_batch_size: Number of sequences of a micro-batch.
        decoder_seq_length: Overrides `seq_length`.
        forward_only: Whether to skip backwards.
        collect_non_loss_data: Whether to return data of the function instead of losses.
        first_val_step: Whether this is the first step of a validation.
        adjust_tensor_shapes_fn: Function of the lists of received and sent shapes that returns new
            lists.
        p2p_communicator: Messages between stages; needs `pg_collection`.
        pg_collection: Groups of the model; the groups of `parallel_state` when None.
        force_all_reduce: Passed to `config.finalize_model_grads_func`.

    Returns:
        The values that loss functions reported, by micro-batch; empty except on the last stage.

    Raises:
        UsageError: An argument is wrong; also a ValueError, RuntimeError and AssertionError.

    Cost: 2 m messages of a stage's output per pair of neighbors, for m micro-batches.
    """
    _check_one_chunk("non-interleaved pipeline-parallel", model, data_iterator)
    models = _listed(model)
    config = get_model_config(models[0])
    if config.overlap_p2p_comm:
        msg = (
            "Non-interleaved pipeline parallelism does not support overlapping p2p communication: "
            "set overlap_p2p_comm=False"
        )
        raise UsageError(msg)
    communicator, groups = _groups_of(p2p_communicator, pg_collection, config)
    shapes = partial(
        get_tensor_shapes,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        decoder_seq_length=decoder_seq_length,
        config=config,
        tp_group=groups.tp,
        cp_group=groups.cp,
    )
    received, sent = shapes(), shapes()
    if adjust_tensor_shapes_fn is not None:
        received, sent = adjust_tensor_shapes_fn(received, sent)
        if not (len(received) == len(sent) == 1 and is_single_shape(sent[0])):
            msg = (
                f"adjust_tensor_shapes_fn returned the shapes {received} and {sent}: only one "
                "tensor between stages is supported, so return one shape in each list"
            )
            raise UnsupportedError(msg)
    return _run(
        forward_step_func,
        _listed(data_iterator),
        models,
        (received[0], sent[0]),
        num_microbatches,
        collect_non_loss_data=collect_non_loss_data,
        forward_only=forward_only,
        first_val_step=first_val_step,
        communicator=communicator,
        groups=groups,
        force_all_reduce=bool(force_all_reduce),
    )


def forward_backward_pipelining_with_interleaving(
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Iterators,
    model: Models,
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: AdjustShapes | None = None,
    p2p_communicator: P2PCommunicator | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    force_all_reduce: bool | None = False,
) -> list[Any]:
    """Run interleaved 1F1B: `model` and `data_iterator` are lists with one entry per chunk.

    See `forward_backward_pipelining_without_interleaving` for the arguments. The length of a
    sequence is `seq_length` always, as in Megatron.
    """
    del decoder_seq_length
    _check_chunks(model, data_iterator, adjust_tensor_shapes_fn)
    models = _listed(model)
    config = get_model_config(models[0])
    if config.overlap_p2p_comm and config.batch_p2p_comm:
        msg = "Can not use both overlap_p2p_comm and batch_p2p_comm: set one of them to False"
        raise UsageError(msg)
    communicator, groups = _groups_of(p2p_communicator, pg_collection, config)
    _check_rounds(num_microbatches, config, communicator.group.size, len(models))
    (shape,) = get_tensor_shapes(
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        decoder_seq_length=None,
        config=config,
        tp_group=groups.tp,
        cp_group=groups.cp,
    )
    return _run(
        forward_step_func,
        _listed(data_iterator),
        models,
        (shape, shape),
        num_microbatches,
        collect_non_loss_data=collect_non_loss_data,
        forward_only=forward_only,
        first_val_step=first_val_step,
        communicator=communicator,
        groups=groups,
        force_all_reduce=bool(force_all_reduce),
    )


def _run(
    step: Callable[..., Any],
    iterators: list[Any],
    chunks: list[nn.Module],
    shapes: tuple[Shape, Shape],
    num_microbatches: int,
    *,
    collect_non_loss_data: bool,
    forward_only: bool,
    first_val_step: bool | None,
    communicator: P2PCommunicator,
    groups: ProcessGroupCollection,
    force_all_reduce: bool,
) -> list[Any]:
    """Run the program of the arguments; then finalize gradients by the program's function."""
    config = get_model_config(chunks[0])
    check_served(config)
    options = LossScaling(num_microbatches, groups.cp.size(), collect_non_loss_data)
    communicator.device = next((p.device for p in chunks[0].parameters()), communicator.device)
    size, num_chunks = communicator.group.size, len(chunks)
    if forward_only:
        placement = looped(size, num_chunks)
        program = forward_program(size, num_microbatches, placement)
    elif num_chunks > 1:
        program = interleaved(
            size,
            num_microbatches,
            num_chunks,
            round_size=config.microbatch_group_size_per_vp_stage,
        )
    else:
        program = one_f_one_b(size, num_microbatches)
    call = ScheduleCall(
        step, iterators, chunks, config, options, forward_only, first_val_step, *shapes
    )
    with timed(config, "forward-backward", log_level=1):
        waiting = [braid_group(group) for group in (groups.pp, groups.tp, groups.dp_cp)]
        run = ScheduleRun(program, call, communicator, waiting)
        run.run()
        if config.finalize_model_grads_func is not None and not forward_only:
            per_token = getattr(config, "calculate_per_token_loss", False)
            config.finalize_model_grads_func(
                chunks,
                run.num_tokens if per_token else None,
                pg_collection=groups,
                force_all_reduce=force_all_reduce,
            )
    return run.collected


def _groups_of(
    communicator: P2PCommunicator | None, groups: ProcessGroupCollection | None, config: Any
) -> tuple[P2PCommunicator, ProcessGroupCollection]:
    if communicator is None and groups is None:
        groups = ProcessGroupCollection.use_mpu_process_groups()
        return P2PCommunicator(groups.pp, config), groups
    if communicator is None or groups is None:
        msg = (
            "Invalid combination of p2p_communicator, pg_collection: provide none or provide all "
            "the process groups"
        )
        raise UsageError(msg)
    return communicator, groups


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | nn.ModuleList) else [value]


def _check_one_chunk(name: str, model: Models, data_iterator: Iterators) -> None:
    for what, value in (("models", model), ("data iterators", data_iterator)):
        if len(_listed(value)) != 1:
            msg = (
                f"{name} schedule does not support model chunking: pass one of {what}, got "
                f"{len(_listed(value))}; for several chunks pass "
                "virtual_pipeline_model_parallel_size to initialize_model_parallel"
            )
            raise UsageError(msg)


def _check_chunks(model: Models, data_iterator: Iterators, adjust: AdjustShapes | None) -> None:
    """Raise UsageError with all problems of the lists of an interleaved schedule."""
    problems = []
    models = list(model) if isinstance(model, list) else None
    if models is None:
        problems.append("interleaved pipeline parallelism expected model chunking: pass a list")
    elif not all(isinstance(chunk, nn.Module) for chunk in models):
        problems.append("invalid model chunking: pass a list of modules")
    if not isinstance(data_iterator, list):
        problems.append(
            "interleaved pipeline parallelism expected each model chunk to have a data iterator: "
            "pass a list"
        )
    elif models is not None and len(data_iterator) != len(models):
        problems.append(
            f"interleaved pipeline parallelism expected each model chunk to have a data iterator: "
            f"got {len(data_iterator)} iterators for {len(models)} chunks"
        )
    if adjust is not None:
        problems.append(
            "adjust_tensor_shapes_fn is not supported for interleaved pipeline parallelism: leave "
            "it out"
        )
    raise_all(problems, UsageError)


def _check_rounds(num_microbatches: int, config: Any, size: int, num_chunks: int) -> None:
    """Raise UsageError unless micro-batches can be divided into rounds on these chunks."""
    problems = []
    expected = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    if expected is not None and num_chunks != expected:
        problems.append(
            f"this rank has {num_chunks} model chunks, but virtual_pipeline_model_parallel_size is "
            f"{expected}: pass {expected} chunks on every rank"
        )
    group = config.microbatch_group_size_per_vp_stage
    if group > num_microbatches or group < size:
        problems.append(
            "The number of contiguous micro-batches in a virtual pipeline stage should range in "
            f"[PP={size} , M={num_microbatches}], got {group}: set "
            "microbatch_group_size_per_vp_stage, or change the number of micro-batches"
        )
    elif 0 < num_microbatches % group < size:
        problems.append(
            "The remainder of M (the total micro-batches) divided by N (number of contiguous "
            "micro-batches in a virtual pipeline stage) should be 0, or larger than or equal to "
            f"the pipeline-parallel size, but it is {num_microbatches % group}: M is "
            f"{num_microbatches}, N is {group}"
        )
    raise_all(problems, UsageError)
