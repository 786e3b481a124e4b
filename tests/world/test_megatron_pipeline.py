"""Megatron's schedules, data parallelism and optimizer on ranks: losses and gradients of one process."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import megatron_gpt as gpt
import pytest
import torch
from torch_jobs import run

from braid.compat.megatron import parallel_state, tensor_parallel
from braid.compat.megatron.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from braid.compat.megatron.pipeline_parallel import P2PCommunicator

NUMBERS = list(range(4))
Grads = dict[str, torch.Tensor]


def config_of(tp: int = 1, pp: int = 1, vp: int | None = None, **options: Any) -> gpt.GPTConfig:
    """Initialize groups; return a configuration of them."""
    parallel_state.initialize_model_parallel(tp, pp, virtual_pipeline_model_parallel_size=vp)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    options = {"params_dtype": torch.float64, "pipeline_dtype": torch.float64} | options
    return gpt.GPTConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vp,
        use_cpu_initialization=True,
        **options,
    )


def whole(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The gradient of a parameter over all tensor parallel ranks."""
    group = parallel_state.get_tensor_model_parallel_group()
    if not getattr(param, "tensor_model_parallel", False) or group.size() == 1:
        return grad.clone()
    grads = [torch.empty_like(grad) for _ in range(group.size())]
    torch.distributed.all_gather(grads, grad.contiguous(), group=group)
    return torch.cat(grads, dim=param.partition_dim)


def by_hand(loss: Any = gpt.mean_loss) -> tuple[list[float], Grads]:
    """Losses and gradients of a plain loop in one process."""
    (model,) = gpt.parts(config_of())
    losses, tokens = [], 0
    for number in NUMBERS:
        value, *counts, reported = loss(model(**gpt.batch(number)))
        tokens += sum(counts)
        (value if counts else value / len(NUMBERS)).backward()
        losses.append(reported)
    parallel_state.destroy_model_parallel()
    scale = 1 / int(tokens) if tokens else 1
    return losses, {name: p.grad * scale for name, p in model.named_parameters()}


def trained(
    tp: int, pp: int, vp: int | None, ddp: dict[str, Any], loss: Any, options: dict[str, Any]
) -> tuple[list[float], Grads]:
    """Losses and whole gradients of a rank after one batch."""
    config = config_of(tp, pp, vp, **options)
    ddp_config = DistributedDataParallelConfig(**ddp)
    chunks = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(gpt.parts(config, vp or 1))
    ]
    config.finalize_model_grads_func = finalize_model_grads
    if ddp_config.overlap_grad_reduce:
        config.no_sync_func = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = config.no_sync_func if vp else config.no_sync_func[0]
        config.grad_sync_func = [chunk.start_grad_sync for chunk in chunks]
        config.grad_sync_func = config.grad_sync_func if vp else config.grad_sync_func[0]
    rank = parallel_state.get_data_parallel_rank()
    numbers = NUMBERS[rank :: parallel_state.get_data_parallel_world_size()]
    losses: list[float] = []
    for chunk in chunks:
        chunk.zero_grad_buffer()
    losses = gpt.run_schedule(
        chunks, numbers, forward_step_func=partial(gpt.forward_step, loss=loss)
    )
    grads = {
        name: whole(param, param.main_grad)
        for chunk in chunks
        for name, param in chunk.module.named_parameters()
    }
    parallel_state.destroy_model_parallel()
    return losses, grads


LOSSES = {"mean": gpt.mean_loss, "tokens": gpt.token_loss}
OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 2000}
TOKENS = {"calculate_per_token_loss": True}
WAYS = {  # tensor, pipeline, data and virtual size, options of gradients and of the configuration
    "pp=2": (1, 2, 1, None, {}, {}),
    "pp=4": (1, 4, 1, None, {"check_for_nan_in_grad": True}, {"variable_seq_lengths": True}),
    "pp=2,dp=2": (1, 2, 2, None, OVERLAP, {}),
    "pp=2,tp=2": (2, 2, 1, None, {}, {"sequence_parallel": True}),
    "pp=2,vp=2": (1, 2, 1, 2, {}, {"deallocate_pipeline_outputs": True}),
    "pp=2,vp=2,dp=2": (1, 2, 2, 2, OVERLAP | {"average_in_collective": True}, {}),
    "pp=1,dp=2": (1, 1, 2, None, OVERLAP | {"bucket_size": 500}, {}),
    "pp=2,dp=2, by tokens": (1, 2, 2, None, {}, TOKENS),
    "pp=2,vp=2, rounds of 4": (1, 2, 1, 2, {}, {"microbatch_group_size_per_vp_stage": 4}),
}


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """Results of plain loops in one process, by loss; filled by the first test that needs them."""
    return {}


@pytest.mark.procs
@pytest.mark.parametrize("way", WAYS)
def test_losses_and_gradients_are_those_of_one_process(pool, tmp_path, expected, way):
    tp, pp, dp, vp, ddp, options = WAYS[way]
    name = "tokens" if options == TOKENS else "mean"
    if name not in expected:
        (expected[name],) = run(pool, tmp_path, 1, by_hand, LOSSES[name])
    losses, grads = expected[name]
    results = run(pool, tmp_path, tp * pp * dp, trained, tp, pp, vp, ddp, LOSSES[name], options)
    found: set[str] = set()
    for rank, (reported, parts) in enumerate(results):
        replica = rank // tp % dp
        wanted = losses[replica::dp] if rank >= tp * dp * (pp - 1) else []
        assert reported == (pytest.approx(wanted, rel=1e-14) if tp > 1 else wanted)
        found |= set(parts)
        for key, grad in parts.items():
            # backwards of a stage have the order of one process, so only sums over ranks differ
            if tp == dp == 1 and key != "word_embeddings.weight":
                assert torch.equal(grad, grads[key]), key
            largest = grads[key].abs().max()
            assert (grad - grads[key]).abs().max() <= 1e-13 * largest, key
    assert found == set(grads)


def _dtype(output: torch.Tensor, *, non_loss_data: bool) -> torch.dtype | None:
    return output.dtype if non_loss_data else None


def _validated(vp: int | None) -> tuple[list[Any], list[Any], list[Any]]:
    """What a rank gets from forwards alone, from outputs, and by the function for other data."""
    config = config_of(1, 2, vp)
    chunks = gpt.parts(config, vp or 1)
    calls = (
        {},
        {"forward_step_func": partial(gpt.forward_step, loss=None)},
        {
            "forward_step_func": partial(gpt.forward_step, loss=_dtype),
            "collect_non_loss_data": True,
        },
    )
    losses, outputs, data = (
        gpt.run_schedule(chunks, NUMBERS, forward_only=True, first_val_step=True, **call)
        for call in calls
    )
    assert all(param.grad is None for chunk in chunks for param in chunk.parameters())
    parallel_state.destroy_model_parallel()
    return losses, [output.mean().item() for output in outputs], data


@pytest.mark.procs
def test_forwards_alone_have_the_losses_of_one_process(pool, tmp_path):
    ((losses, _),) = run(pool, tmp_path, 1, by_hand)
    for vp in (None, 2):
        first, last = run(pool, tmp_path, 2, _validated, vp)
        assert first == ([], [], [])
        assert last == (losses, losses, [torch.float64] * len(NUMBERS))


def _mistake(vp: int | None, options: dict[str, Any], more: dict[str, Any]) -> list[str]:
    """The errors of a call, as types and text."""
    config = config_of(1, 2, vp, **more)
    chunks = gpt.parts(config, vp or 1)
    options = dict(options)
    chunks = chunks[: options.pop("chunks", len(chunks))]
    try:
        gpt.run_schedule(chunks, options.pop("numbers", NUMBERS), **options)
    except RuntimeError as error:
        return [*(kind.__name__ for kind in type(error).__mro__), str(error)]
    finally:
        parallel_state.destroy_model_parallel()
    return []


def _two_shapes(received: list[Any], sent: list[Any]) -> tuple[list[Any], list[Any]]:
    return received * 2, sent * 2


MISTAKES = {  # virtual size, arguments, options, words of the error
    "shape": (None, {"seq_length": 7}, {}, "expects [7, 2, 24] (seq_length, micro_batch_size"),
    "dtype": (None, {}, {"pipeline_dtype": torch.float32}, "set config.pipeline_dtype to"),
    "overlap": (None, {}, {"overlap_p2p_comm": True}, "does not support overlapping p2p"),
    "chunks": (2, {"chunks": 1}, {}, "this rank has 1 model chunks"),
    "remainder": (2, {"numbers": [0, 1, 2]}, {}, "The remainder of M"),
    "few": (2, {"numbers": [0]}, {}, "should range in [PP=2 , M=1]"),
    "iterators": (2, {"data_iterator": iter(())}, {}, "each model chunk to have a data iterator"),
    "adjusted": (None, {"adjust_tensor_shapes_fn": _two_shapes}, {}, "only one tensor"),
}


@pytest.mark.procs
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_call_has_an_error_of_megatrons_types_on_every_rank(pool, tmp_path, mistake):
    vp, arguments, options, words = MISTAKES[mistake]
    errors = run(pool, tmp_path, 2, _mistake, vp, arguments, options)
    for *kinds, text in errors:
        assert words in text
        assert "RuntimeError" in kinds
    assert {"AssertionError", "ValueError"} <= set(errors[0])


def _fails_on_rank_0() -> str:
    config = config_of(2, 2)

    def step(data_iterator: Any, model: Any) -> Any:
        if torch.distributed.get_rank() == 0:
            raise LookupError("bad sample")
        return gpt.forward_step(data_iterator, model)

    with pytest.raises((LookupError, RuntimeError)) as error:
        gpt.run_schedule(gpt.parts(config), NUMBERS, forward_step_func=step)
    parallel_state.destroy_model_parallel()
    return str(error.value)


@pytest.mark.procs
def test_the_error_of_a_rank_ends_the_step_on_all_ranks(pool, tmp_path):
    first, *others = run(pool, tmp_path, 4, _fails_on_rank_0)
    assert first == "bad sample"
    words = "rank 0 stopped in a pipeline schedule: LookupError: bad sample"
    assert all(words in text for text in others)


class Timers:
    """Megatron's timers: records levels and barriers of timers that are started and stopped."""

    def __init__(self) -> None:
        self.running: list[str] = []
        self.levels: dict[str, tuple[int | None, bool]] = {}

    def __call__(self, name: str, log_level: int | None = None) -> Any:
        self.name, self.level = name, log_level
        return self

    def start(self, barrier: bool = False) -> None:
        self.running.append(self.name)
        self.levels[self.name] = self.level, barrier

    def stop(self) -> None:
        self.running.remove(self.name)


def _functions(vp: int | None) -> Any:
    """What the functions of a configuration are called with, and gradients with a scaled loss."""
    timers = Timers()
    config = config_of(
        1, 2, vp, timers=timers, num_microbatches_with_partial_activation_checkpoints=1
    )
    config.grad_scale_func = lambda loss: 4 * loss
    chunks = gpt.parts(config, vp or 1)
    started: list[int] = []
    if vp:
        config.param_sync_func = [lambda _, i=i: started.append(i) for i in range(vp)]
    recomputed: list[bool] = []
    outputs: list[weakref.ref[torch.Tensor]] = []

    def step(data_iterator: Any, model: Any, recompute: bool) -> Any:
        assert all(output() is None for output in outputs)  # freed, as they have been sent
        recomputed.append(recompute)
        output, loss = gpt.forward_step(data_iterator, model)
        outputs.append(weakref.ref(output))
        return output, loss

    gpt.run_schedule(chunks, NUMBERS, forward_step_func=step)
    assert not timers.running
    grads = {name: p.grad.clone() for chunk in chunks for name, p in chunk.named_parameters()}
    config.enable_autocast, config.autocast_dtype = True, torch.bfloat16
    types: list[torch.dtype] = []

    def cast(data_iterator: Any, model: Any, recompute: bool) -> Any:
        types.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
        return step(data_iterator, model, recompute)

    gpt.run_schedule(chunks, NUMBERS, forward_step_func=cast)
    parallel_state.destroy_model_parallel()
    return timers.levels, started, recomputed[: len(NUMBERS) * len(chunks)], set(types), grads


@pytest.mark.procs
def test_functions_of_the_configuration_are_called(pool, tmp_path):
    ((_, expected),) = run(pool, tmp_path, 1, by_hand)
    # the window of forwards before their backwards: 2 and 1 without chunks, 5 and 3 with chunks
    windows = {None: (2, 1), 2: (5, 3)}
    for vp, sizes in windows.items():
        for size, result in zip(sizes, run(pool, tmp_path, 2, _functions, vp), strict=True):
            levels, started, recomputed, types, grads = result
            assert levels["forward-backward"] == (1, True)
            assert levels["forward-compute"] == levels["backward-compute"] == (2, False)
            assert started == ([0, 1, 0, 1] if vp else [])
            assert recomputed == [n % size >= 1 for n in range(len(recomputed))]
            assert types == {torch.bfloat16}
            for name in set(grads) - {"word_embeddings.weight"}:
                assert torch.equal(grads[name], 4 * expected[name])


def _messages() -> list[Any]:
    """Everything that a rank of two receives; each call has a counterpart on the other rank."""
    config = config_of(1, 2)
    group = parallel_state.get_pipeline_model_parallel_group()
    p2p, rank = P2PCommunicator(group, config), group.rank()
    assert (p2p.next_rank, p2p.prev_rank) == (1 - rank, 1 - rank)
    shape, received = (2, 300, 100), []  # more than a message that is sent without a receiver
    x, y = (torch.full(shape, n + 10.0 * rank, dtype=torch.float64) for n in (1, 2))
    if rank == 0:
        p2p.send_forward(x, is_last_stage=False)
        received += [p2p.recv_backward(shape, is_last_stage=False)]
        received += p2p.send_forward_recv_backward([x], [shape], is_last_stage=False)
        assert p2p.recv_forward([shape], is_first_stage=True) == [None]
    else:
        received += p2p.recv_forward([shape], is_first_stage=False)
        p2p.send_backward(y, is_first_stage=False)
        received += [p2p.send_backward_recv_forward(y, shape, is_first_stage=False)]
        assert p2p.send_forward_recv_backward(x, shape, is_last_stage=True) is None
    received += [p2p.send_forward_recv_forward(x, True, shape)]
    tensor, works = p2p.send_backward_recv_backward(y, True, shape, overlap_p2p_comm=True)
    for work in works:
        work.wait()
    received += [tensor, *p2p.send_forward_backward_recv_forward_backward(x, y, True, True, shape)]
    config.variable_seq_lengths = True
    received += [p2p.send_forward_recv_forward(x[:, : 3 + rank], True, None)]
    config.variable_seq_lengths, config.pipeline_dtype = False, None
    for dtype, words in ((None, "pipeline_dtype must be"), (torch.float64, "tensor_shape must be")):
        config.pipeline_dtype = dtype
        with pytest.raises(RuntimeError, match=words):
            p2p.recv_forward([None], is_first_stage=False)
    parallel_state.destroy_model_parallel()
    return [(tuple(t.shape), t.unique().tolist(), t.requires_grad) for t in received]


@pytest.mark.procs
def test_neighbors_exchange_outputs_and_gradients(pool, tmp_path):
    first, second = run(pool, tmp_path, 2, _messages)
    shape = (2, 300, 100)
    assert first == [
        *((shape, [n], True) for n in (12.0, 12.0, 11.0, 12.0, 11.0, 12.0)),
        ((2, 4, 100), [11.0], True),
    ]
    assert second == [
        *((shape, [n], True) for n in (1.0, 1.0, 1.0, 2.0, 1.0, 2.0)),
        ((2, 3, 100), [1.0], True),
    ]
