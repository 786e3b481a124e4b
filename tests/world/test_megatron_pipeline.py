"""Megatron's schedules, data parallelism and optimizer on ranks: losses and gradients of one process."""

from __future__ import annotations

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
