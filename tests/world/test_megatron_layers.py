"""Megatron's tensor_parallel on ranks: a program, layers and mappings compute what one process does."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_program import train_step
from torch.nn import functional
from torch_jobs import run
from training import said_by

from braid.compat.megatron import ModelParallelConfig, parallel_state, tensor_parallel
from braid.compat.megatron.failure import UnsupportedError, UsageError
from braid.parallel.tensor_parallel import Slicing, clip_grad_norm_

TOLERANCES = [(torch.float32, 1e-6), (torch.float64, 1e-13)]


WAYS = [  # dtype, sequence parallel, recompute
    *((dtype, sequence, False) for dtype, _ in TOLERANCES for sequence in (False, True)),
    (torch.float64, True, True),
]


def _steps() -> list[Any]:
    size = dist.get_world_size()
    return [
        train_step(size, sequence and size > 1, dtype, again) for dtype, sequence, again in WAYS
    ]


@pytest.mark.procs
def test_a_program_has_the_loss_and_gradients_of_one_rank(pool, tmp_path):
    (single,) = run(pool, tmp_path, 1, _steps)
    for size in (2, 3, 4):
        for results in run(pool, tmp_path, size, _steps):
            for (loss, grads), (expected_loss, expected), (dtype, *_) in zip(
                results, single, WAYS, strict=True
            ):
                tolerance = dict(TOLERANCES)[dtype]
                largest = max(grad.abs().max() for grad in expected.values())
                assert abs(loss - expected_loss) <= tolerance * expected_loss
                assert grads.keys() == expected.keys()
                for name, grad in grads.items():
                    assert (grad - expected[name]).abs().max() <= tolerance * largest, name


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def normal(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.init.normal_(x, generator=torch.Generator().manual_seed(x.numel()))


def gap(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def _layers(stride: int, gather: bool, dtype: torch.dtype) -> Any:
    """Column and row layers, each against the product with the whole weight."""
    size = dist.get_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    config = ModelParallelConfig(use_cpu_initialization=True, params_dtype=dtype)
    column = tensor_parallel.ColumnParallelLinear(
        8,
        24,
        config=config,
        init_method=normal,
        gather_output=gather,
        stride=stride,
        keep_master_weight_for_test=True,
    )
    weight = column.master_weight.clone().requires_grad_()
    with torch.no_grad():
        column.bias.copy_(Slicing(0, stride).part_of(drawn(24, dtype=dtype), rank, size))
    x, own_x = (drawn(5, 3, 8, dtype=dtype).requires_grad_() for _ in range(2))
    y, no_bias = column(own_x)
    whole = functional.linear(x, weight, drawn(24, dtype=dtype))
    parts = Slicing(2, stride)
    if gather:  # as Megatron: parts of ranks one after the other
        whole = torch.cat([parts.part_of(whole, r, size) for r in range(size)], -1)
        (y * drawn(24, dtype=dtype)).sum().backward()
    else:
        scale = drawn(24, dtype=dtype)
        scale = torch.cat([Slicing(0, stride).part_of(scale, r, size) for r in range(size)])
        (y * scale.chunk(size)[rank]).sum().backward()
        (whole * drawn(24, dtype=dtype)).sum().backward()
    pairs = [] if gather else [(own_x.grad, x.grad)]
    if gather:
        (whole * drawn(24, dtype=dtype)).sum().backward()
        pairs += [(y, whole), (own_x.grad, x.grad)]
    else:
        pairs += [(y, parts.part_of(whole, rank, size))]
    pairs.append((column.weight.grad, Slicing(0, stride).part_of(weight.grad, rank, size)))
    row = tensor_parallel.RowParallelLinear(
        24,
        8,
        config=config,
        init_method=normal,
        bias=True,
        input_is_parallel=False,
        skip_bias_add=gather,
        keep_master_weight_for_test=True,
    )
    z, own_z = (drawn(5, 3, 24, dtype=dtype).requires_grad_() for _ in range(2))
    weight = row.master_weight.clone().requires_grad_()
    out, bias = row(own_z)
    functional.linear(z, weight).square().sum().backward()
    out.square().sum().backward()
    pairs += [(out, functional.linear(z, weight)), (own_z.grad, z.grad)]
    pairs.append((row.weight.grad, weight.grad.chunk(size, 1)[rank]))
    facts = [
        no_bias is None,
        (bias is row.bias) == gather,
        column.weight.partition_stride == stride,
        row.weight.partition_dim == 1,
        column.bias.tensor_model_parallel,
        not hasattr(row.bias, "tensor_model_parallel"),
        "_extra_state" in column.state_dict(),
    ]
    column.load_state_dict({"weight": column.weight, "bias": column.bias})
    return max(gap(*pair) for pair in pairs), facts, repr(column)


def _all_layers() -> Any:
    parallel_state.initialize_model_parallel(dist.get_world_size())
    results = [
        (tolerance, *_layers(stride, gather, dtype))
        for dtype, tolerance in TOLERANCES
        for stride in (1, 2)
        for gather in (False, True)
    ]
    parallel_state.destroy_model_parallel()
    return results


@pytest.mark.procs
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_column_and_row_layers_are_products_with_the_whole_weight(pool, tmp_path, size):
    for results in run(pool, tmp_path, size, _all_layers):
        assert len(results) == 8
        for tolerance, largest, facts, text in results:
            assert largest <= tolerance
            assert all(facts)
            assert text == (
                f"ColumnParallelLinear(in_features=8, out_features=24, bias=True, TP={size})"
            )


def _mappings() -> Any:
    size = dist.get_world_size()
    parallel_state.initialize_model_parallel(size)
    rank = parallel_state.get_tensor_model_parallel_rank()
    group = parallel_state.get_tensor_model_parallel_group()
    x = drawn(12, 4, 12)
    rows, columns = x.chunk(size)[rank], x.chunk(size, -1)[rank]
    scales = [drawn(12, 4, 12, seed=seed) for seed in range(1, size + 1)]
    total = torch.stack(scales).sum(0)

    def both(function: Any, start: torch.Tensor, scale: torch.Tensor) -> tuple[Any, Any]:
        leaf = start.clone().requires_grad_()
        y = function(leaf)
        (y * scale).sum().backward()
        assert y.is_contiguous(), function
        return y.detach(), leaf.grad

    scale, t = scales[rank], tensor_parallel
    terms = x * (rank + 1)
    factor = size * (size + 1) // 2
    uneven = [12 - (size - 1), *[1] * (size - 1)]
    uneven_rows = x.split(uneven)[rank]
    cases = [
        (both(t.copy_to_tensor_model_parallel_region, x, scale), (x, total)),
        (both(t.reduce_from_tensor_model_parallel_region, terms, scale), (x * factor, scale)),
        (
            both(t.scatter_to_tensor_model_parallel_region, x, total.chunk(size, -1)[rank]),
            (columns, total),
        ),
        (
            both(t.gather_from_tensor_model_parallel_region, columns, total),
            (x, total.chunk(size, -1)[rank]),
        ),
        (both(t.scatter_to_sequence_parallel_region, x, total.chunk(size)[rank]), (rows, total)),
        (both(t.gather_from_sequence_parallel_region, rows, scale), (x, total.chunk(size)[rank])),
        (
            both(lambda v: t.gather_from_sequence_parallel_region(v, False), rows, total),
            (x, total.chunk(size)[rank]),
        ),
        (
            both(t.reduce_scatter_to_sequence_parallel_region, terms, total.chunk(size)[rank]),
            (rows * factor, total),
        ),
        (
            both(t.all_gather_last_dim_from_tensor_parallel_region, columns, scale),
            (x, total.chunk(size, -1)[rank]),
        ),
        (
            both(
                t.reduce_scatter_last_dim_to_tensor_parallel_region,
                terms,
                total.chunk(size, -1)[rank],
            ),
            (columns * factor, total),
        ),
        (
            both(
                lambda v: t.gather_from_sequence_parallel_region(v, output_split_sizes=uneven),
                uneven_rows,
                scale,
            ),
            (x, total.split(uneven)[rank]),
        ),
        (
            both(
                lambda v: t.reduce_scatter_to_sequence_parallel_region(v, input_split_sizes=uneven),
                terms,
                total.split(uneven)[rank],
            ),
            (uneven_rows * factor, total),
        ),
        (
            both(
                lambda v: t.all_to_all_hp2sp(t.all_to_all_sp2hp(v)),
                rows,
                total.chunk(size)[rank].reshape(-1, 12),
            ),
            (rows.reshape(-1, 12), total.chunk(size)[rank]),
        ),
        (
            both(lambda v: t.all_to_all(group, v), x, total),
            (torch.cat([rows] * size), None),
        ),
    ]
    hidden = t.all_to_all_sp2hp(rows)
    shapes = hidden.shape == (48, 12 // size) and torch.equal(
        hidden, x.reshape(48, 12).chunk(size, -1)[rank]
    )
    widths = [rank + 1] * size
    sent = (
        t.all_to_all(group, x[: sum(widths)], list(range(1, size + 1)), widths)
        if size < 4
        else None
    )
    shapes &= sent is None or sent.shape[0] == factor
    for same in (
        t.gather_from_tensor_model_parallel_region,
        partial(t.gather_from_sequence_parallel_region, output_split_sizes=[len(x)]),
        partial(t.reduce_scatter_to_sequence_parallel_region, input_split_sizes=[len(x)]),
    ):
        shapes &= size > 1 or same(x) is x
    chunk = t.split_tensor_into_1d_equal_chunks(x, new_buffer=True)
    shapes &= torch.equal(t.gather_split_1d_tensor(chunk).view_as(x), x)
    shapes &= chunk.data_ptr() != t.split_tensor_into_1d_equal_chunks(x).data_ptr()
    gaps = [
        max(gap(y, want), 0.0 if grad is None else gap(own, grad))
        for (y, own), (want, grad) in cases
    ]
    parallel_state.destroy_model_parallel()
    return gaps, shapes


@pytest.mark.procs
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_mappings_and_their_gradients_are_those_of_their_names(pool, tmp_path, size):
    for gaps, shapes in run(pool, tmp_path, size, _mappings):
        assert max(gaps) <= 1e-13, gaps
        assert shapes


def _cross_entropies() -> float:
    parallel_state.initialize_model_parallel(dist.get_world_size())
    largest = max(_cross_entropy(smoothing) for smoothing in (0.0, 0.3))
    parallel_state.destroy_model_parallel()
    return largest


def _cross_entropy(smoothing: float) -> float:
    size = dist.get_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    logits = drawn(6, 2, 12).requires_grad_()
    target = torch.randint(12, (6, 2), generator=torch.Generator().manual_seed(2))
    share = torch.full((6, 2, 12), smoothing / 11, dtype=torch.float64)
    share.scatter_(-1, target.unsqueeze(-1), 1 - smoothing)
    expected = -(share * logits.log_softmax(-1)).sum(-1)
    expected.sum().backward()
    part = logits.detach().chunk(size, -1)[rank].clone().requires_grad_()
    loss = tensor_parallel.vocab_parallel_cross_entropy(part, target, smoothing)
    loss.sum().backward()
    return max(gap(loss, expected), gap(part.grad, logits.grad.chunk(size, -1)[rank]))


@pytest.mark.procs
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_loss_spreads_smoothing_over_the_other_classes_of_all_ranks(pool, tmp_path, size):
    assert max(run(pool, tmp_path, size, _cross_entropies)) <= 1e-13


def _random() -> Any:
    size = dist.get_world_size()
    parallel_state.initialize_model_parallel(size)
    tensor_parallel.model_parallel_cuda_manual_seed(5)
    tracker = tensor_parallel.get_cuda_rng_tracker()
    alike = torch.rand(4)
    with tracker.fork():
        own = torch.rand(4)
        with tracker.fork("data-parallel-rng"):
            nested = torch.rand(1)
        own = torch.cat([own, nested, torch.rand(1)])
    after = torch.rand(4)
    with tracker.fork():
        later = torch.rand(4)
    with tracker.fork(tensor_parallel.get_expert_parallel_rng_tracker_name()):
        expert = torch.rand(1)
    config = ModelParallelConfig(params_dtype=torch.float64)  # each rank draws its own part
    layer = tensor_parallel.ColumnParallelLinear(
        4, 4 * size, config=config, init_method=torch.nn.init.normal_
    )
    texts = [
        said_by(lambda: tracker.fork("nothing").__enter__(), UsageError),
        said_by(lambda: tracker.add("new", 5), UsageError),
        said_by(
            lambda: tensor_parallel.get_cuda_rng_tracker(use_te_rng_tracker=True), UnsupportedError
        ),
    ]
    parallel_state.destroy_model_parallel()
    return alike, own, after, later, expert, layer.weight.detach(), texts


@pytest.mark.procs
def test_ranks_draw_alike_outside_of_fork_and_differently_inside(pool, tmp_path):
    first, second = run(pool, tmp_path, 2, _random)
    torch.manual_seed(5)
    default = torch.rand(8)
    for alike, _, after, *_, texts in (first, second):
        assert torch.equal(torch.cat([alike, after]), default)
        assert "call model_parallel_cuda_manual_seed" in texts[0]
        assert "seed 5 already exists" in texts[1]
        assert "Transformer Engine" in texts[2]
    for rank, (_, own, _, later, expert, *_) in enumerate((first, second)):
        generator = torch.Generator().manual_seed(5 + 2718 + rank)
        stream = torch.rand(9, generator=generator)
        assert torch.equal(torch.cat([own[:4], own[5:], later]), stream)
        assert torch.equal(own[4:5], torch.rand(1, generator=torch.Generator().manual_seed(5)))
        seed = 5 + 1024
        assert torch.equal(
            expert, torch.rand(1, generator=torch.Generator().manual_seed(seed + rank))
        )
    assert not torch.equal(first[5], second[5])


def _recomputed(distribute: bool) -> Any:
    """Dropout inside and outside of fork, with and without recomputation."""
    size = dist.get_world_size()
    parallel_state.initialize_model_parallel(size)
    weight = drawn(8, 8)
    seen = []

    def function(x: torch.Tensor, factor: float) -> torch.Tensor:
        seen.append(tensor_parallel.random.is_checkpointing())
        x = functional.dropout(x @ weight, 0.5)
        with tensor_parallel.get_cuda_rng_tracker().fork():
            own = functional.dropout(tensor_parallel.copy_to_tensor_model_parallel_region(x), 0.5)
        return tensor_parallel.reduce_from_tensor_model_parallel_region(own.sin() * factor)

    results = []
    for recompute in (False, True):
        tensor_parallel.model_parallel_cuda_manual_seed(3)
        x = drawn(4, 8).requires_grad_()
        if recompute:
            y = tensor_parallel.checkpoint(function, distribute, x, 2.0)
        else:
            y = function(x, 2.0)
        with tensor_parallel.get_cuda_rng_tracker().fork():
            between = torch.rand(2)
        (grad,) = torch.autograd.grad(y.square().sum(), x)
        with tensor_parallel.get_cuda_rng_tracker().fork():
            after = torch.rand(2)
        results.append([y.detach(), grad, between, after, torch.rand(2)])
    parallel_state.destroy_model_parallel()
    return all(map(torch.equal, *results)), seen


@pytest.mark.procs
@pytest.mark.parametrize(("size", "distribute"), [(1, False), (2, False), (2, True), (4, True)])
def test_recomputation_draws_the_same_numbers_of_every_state(pool, tmp_path, size, distribute):
    for same, seen in run(pool, tmp_path, size, _recomputed, distribute):
        assert same
        assert seen == [False, True, True]


def _refusals() -> list[str]:
    parallel_state.initialize_model_parallel(dist.get_world_size())
    t, config = tensor_parallel, ModelParallelConfig(use_cpu_initialization=True)
    sequence = ModelParallelConfig(
        use_cpu_initialization=True, sequence_parallel=True, tensor_model_parallel_size=2
    )

    def column(inputs: int, outputs: int, **options: Any) -> t.ColumnParallelLinear:
        return t.ColumnParallelLinear(inputs, outputs, config=config, init_method=normal, **options)

    def row(inputs: int, *, config: Any = config, parallel: bool = True, **options: Any) -> Any:
        return t.RowParallelLinear(
            inputs,
            4,
            config=config,
            init_method=normal,
            bias=False,
            input_is_parallel=parallel,
            skip_bias_add=False,
            **options,
        )

    x = torch.ones(3, 5)
    data = {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.int64)}
    fused = ModelParallelConfig()
    fused.gradient_accumulation_fusion = True
    calls = [
        lambda: column(4, 5),
        lambda: row(5),
        lambda: row(4)(torch.ones(2, 4)),
        lambda: row(4, config=sequence, parallel=False),
        lambda: row(4, is_expert=True),
        lambda: column(4, 4, skip_weight_param_allocation=True)(torch.ones(2, 4)),
        lambda: column(4, 4)(torch.ones(2, 4), weight=torch.ones(4, 4)),
        lambda: column(4, 4, grad_output_buffer=[]),
        lambda: column(4, 4).sharded_state_dict(),
        lambda: t.ColumnParallelLinear(4, 4, config=fused, init_method=normal),
        lambda: t.VocabParallelEmbedding(5, 4, config=config, init_method=normal),
        *(
            lambda n=n, options=options: t.VocabParallelEmbedding(
                4, 4, config=ModelParallelConfig(**options), init_method=normal
            )(torch.tensor([n]))
            for n in (4, -1)
            for options in (
                {"use_cpu_initialization": True},
                {"use_cpu_initialization": True, "deterministic_mode": True},
            )
        ),
        lambda: t.scatter_to_tensor_model_parallel_region(x),
        lambda: t.scatter_to_sequence_parallel_region(x),
        lambda: t.split_tensor_along_last_dim(x, 2),
        lambda: t.broadcast_data(["a", "b", "c"], data, torch.float32),
        lambda: t.vocab_parallel_cross_entropy(torch.ones(2, 2), torch.zeros(2), 0.9),
        lambda: t.set_tensor_model_parallel_attributes(column(4, 4).weight, True, 0, 1),
        lambda: column(4, 4, tp_group=dist.new_group([0, 1], backend="gloo")),
    ]
    texts = [said_by(call, Exception) for call in calls]
    parallel_state.destroy_model_parallel()
    return texts


REFUSED = [
    "output_size 5 is not divisible by 2 tensor parallel ranks",
    "input_size 5 is not divisible by 2 tensor parallel ranks",
    "2 of 4 inputs on this rank, got 4",
    "needs input_is_parallel=True",
    "is_expert=True needs skip_bias_add=True",
    "pass weight=",
    "supplied weight's shape is (4, 4), not (2, 4)",
    "grad_output_buffer are not supported",
    "braid.save",
    "gradient_accumulation_fusion=True: leave it False",
    "num_embeddings 5 is not divisible by 2",
    *["IndexError: index"] * 4,
    "5 is not divisible by 2",
    "3 is not divisible by 2",
    "5 is not divisible by 2",
    "'c' is missing; 'b' has dtype torch.int64",
    "label_smoothing must be at least 0 and below 0.75 with 4 classes, got 0.9",
    "has the attributes tensor_model_parallel",
    "backend='braid'",
]


@pytest.mark.procs
def test_wrong_use_is_named_alike_on_all_ranks(pool, tmp_path):
    first, second = run(pool, tmp_path, 2, _refusals)
    assert first == second
    assert len(first) == len(REFUSED)
    for text, expected in zip(first, REFUSED, strict=True):
        assert expected in text


def _attributes() -> Any:
    parallel_state.initialize_model_parallel(2)
    t = tensor_parallel
    layer = t.RowParallelLinear(
        4,
        4,
        config=ModelParallelConfig(use_cpu_initialization=True),
        init_method=normal,
        bias=True,
        input_is_parallel=True,
        skip_bias_add=False,
    )
    copied = torch.nn.Parameter(torch.empty(2))
    t.copy_tensor_model_parallel_attributes(copied, layer.weight)
    t.set_defaults_if_not_set_tensor_model_parallel_attributes(layer.bias)
    layer.weight.grad, layer.bias.grad = torch.ones(4, 2), torch.ones(4)
    norm = clip_grad_norm_(layer, 1e9, layer.group)
    facts = [
        copied.partition_dim,
        layer.bias.partition_dim,
        layer.bias.partition_stride,
        layer.bias.sequence_parallel,
        layer.weight.allreduce,
        norm.item() ** 2,
        [t.param_is_not_tensor_parallel_duplicate(p) for p in layer.parameters()],
        t.VocabUtility.vocab_range_from_global_vocab_size(10, 1, 2),
    ]
    parallel_state.destroy_model_parallel()
    return facts


@pytest.mark.procs
def test_parameters_say_how_they_are_divided_to_both_systems(pool, tmp_path):
    for rank, facts in enumerate(run(pool, tmp_path, 2, _attributes)):
        *most, counts, vocabulary = facts
        assert most == [1, -1, 1, False, True, pytest.approx(16 + 4)]
        assert counts == [True, rank == 0]
        assert vocabulary == (5, 10)
