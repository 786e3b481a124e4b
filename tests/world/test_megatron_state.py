"""Megatron's parallel_state on ranks: torch's functions and braid's work on the same groups."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch_jobs import run
from training import said_by

from braid.compat.megatron import HyperCommGrid
from braid.compat.megatron import parallel_state as mpu
from braid.compat.megatron.failure import UnsupportedError, UsageError
from braid.compat.megatron.groups import braid_group

GETTERS = {
    "tp": mpu.get_tensor_model_parallel_group,
    "pp": mpu.get_pipeline_model_parallel_group,
    "dp": mpu.get_data_parallel_group,
    "cp": mpu.get_context_parallel_group,
    "tp-pp": mpu.get_model_parallel_group,
    "tp-dp": mpu.get_tensor_and_data_parallel_group,
    "tp-cp": mpu.get_tensor_and_context_parallel_group,
    "dp-cp": lambda: mpu.get_data_parallel_group(with_context_parallel=True),
}


def _sums(order: str, sizes: dict[str, int]) -> Any:
    """The sum of ranks in each group: by torch's function and by braid's."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mpu.initialize_model_parallel(
        sizes.get("tp", 1),
        sizes.get("pp", 1),
        context_parallel_size=sizes.get("cp", 1),
        order=order,
    )
    rest = sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("cp", 1)
    generator = mpu.RankGenerator(
        sizes.get("tp", 1), 1, world // rest, sizes.get("pp", 1), sizes.get("cp", 1), order
    )
    right = mpu.is_initialized() and mpu.model_parallel_is_initialized()
    for token, getter in GETTERS.items():
        members = next(g for g in generator.get_ranks(token) if rank in g)
        group = getter()
        x = torch.tensor([float(rank)])
        dist.all_reduce(x, group=group)
        y = braid_group(group).all_reduce(torch.tensor([float(rank)]))
        right &= x.item() == y.item() == sum(members)
        right &= dist.get_process_group_ranks(group) == members
    pipeline = next(g for g in generator.get_ranks("pp") if rank in g)
    at = pipeline.index(rank)
    right &= mpu.get_pipeline_model_parallel_first_rank() == pipeline[0]
    right &= mpu.get_pipeline_model_parallel_last_rank() == pipeline[-1]
    right &= mpu.get_pipeline_model_parallel_next_rank() == pipeline[(at + 1) % len(pipeline)]
    right &= mpu.get_pipeline_model_parallel_prev_rank() == pipeline[at - 1]
    right &= mpu.is_pipeline_first_stage() == (at == 0)
    right &= mpu.is_pipeline_last_stage() == (at == len(pipeline) - 1)
    right &= mpu.is_rank_in_embedding_group() == (rank in (pipeline[0], pipeline[-1]))
    right &= mpu.is_rank_in_position_embedding_group() == (at == 0)
    summary = [
        mpu.get_tensor_model_parallel_rank(),
        mpu.get_data_parallel_rank(),
        mpu.get_context_parallel_rank(),
        mpu.get_pipeline_model_parallel_rank(),
    ]
    right &= mpu.get_all_ranks() == "_".join(map(str, [*summary, 0]))
    right &= (
        mpu.get_tensor_model_parallel_src_rank()
        == dist.get_process_group_ranks(mpu.get_tensor_model_parallel_group())[0]
    )
    mpu.destroy_model_parallel()
    return right and not mpu.is_initialized()


@pytest.mark.procs
@pytest.mark.parametrize(
    ("size", "order", "sizes"),
    [
        (1, "tp-cp-ep-dp-pp", {}),
        (2, "tp-cp-ep-dp-pp", {"tp": 2}),
        (3, "tp-cp-ep-dp-pp", {"pp": 3}),
        (4, "tp-cp-ep-dp-pp", {"tp": 2, "pp": 2}),
        (4, "tp-pp-dp", {"tp": 2}),
        (4, "tp-dp-cp-pp", {"cp": 2, "pp": 2}),
    ],
)
@pytest.mark.parametrize("backend", ["braid", "gloo"])
def test_groups_are_those_of_the_rank_generator(pool, tmp_path, size, order, sizes, backend):
    """Whatever the backend of the default group is."""
    assert all(run(pool, tmp_path, size, _sums, order, sizes, backend=backend))


def _life() -> Any:
    rank = dist.get_rank()
    texts = []
    mpu.initialize_model_parallel(
        1,
        4,
        2,
        num_distributed_optimizer_instances=1,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=1,
    )
    middle = [mpu.get_embedding_group(check_initialized=False) is None]
    if rank == 1:
        texts.append(said_by(mpu.get_embedding_group, AssertionError))
    texts.append(said_by(mpu.get_data_parallel_group_gloo, AssertionError))
    texts.append(said_by(lambda: mpu.initialize_model_parallel(1), AssertionError))
    virtual = [
        mpu.get_virtual_pipeline_model_parallel_world_size(),
        mpu.get_virtual_pipeline_model_parallel_rank(),
        mpu.is_rank_in_embedding_group(ignore_virtual=False, vp_stage=1),
    ]
    mpu.set_tensor_model_parallel_rank(7)
    old = mpu.get_pipeline_model_parallel_group()
    mpu.destroy_model_parallel()
    texts.append(said_by(lambda: braid_group(old), UsageError))
    mpu.initialize_model_parallel(
        2,
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=1,
        num_distributed_optimizer_instances=2,
        create_all_gather_group=True,
    )
    own = [
        mpu.get_tensor_model_parallel_rank() == rank % 2,
        mpu.get_expert_model_parallel_rank() == rank % 2,
        mpu.get_expert_tensor_parallel_world_size() == 1,
        mpu.get_expert_data_parallel_world_size(),
        mpu.get_data_parallel_group_gloo() is mpu.get_data_parallel_group(),
        mpu.has_separate_all_gather_group(),
        mpu.get_data_parallel_group(True, independent_all_gather=True)
        is not mpu.get_data_parallel_group(True),
        mpu.get_data_parallel_world_size(True, partial_data_parallel=True),
        mpu.get_inter_distributed_optimizer_instance_group().size(),
        mpu.get_intra_distributed_optimizer_instance_group().size(),
    ]
    mpu.update_pg_timeout(timedelta(seconds=30))
    buffer = mpu.get_global_memory_buffer()
    first = buffer.get_tensor((2, 3), torch.float32, "gather")
    same = buffer.get_tensor((6,), torch.float32, "gather").data_ptr() == first.data_ptr()
    mpu.destroy_model_parallel()
    return middle, texts, virtual, own, same


@pytest.mark.procs
def test_groups_are_made_destroyed_and_made_again(pool, tmp_path):
    results = run(pool, tmp_path, 4, _life)
    assert [middle[0] for middle, *_ in results] == [False, True, True, False]
    assert "this rank's stage has no embedding" in results[1][1][0]
    for rank, (_, texts, virtual, own, same) in enumerate(results):
        gloo, twice, ended = texts[-3:]
        assert "create_gloo_process_groups=False" in gloo
        assert "call destroy_model_parallel()" in twice
        assert "has been destroyed" in ended
        assert virtual == [2, 0, rank == 3]
        assert own == [True, True, True, 2, True, True, True, 1, 2, 2]
        assert same


def _left_open(first: bool) -> Any:
    """A program that ends torch.distributed, and with it all groups, without a word to this face."""
    mpu.initialize_model_parallel(2)
    x = torch.ones(1)
    dist.all_reduce(x, group=mpu.get_tensor_model_parallel_group())
    if not first:
        mpu.destroy_model_parallel()
    return x.item(), mpu.is_initialized()


@pytest.mark.procs
def test_groups_that_torch_has_destroyed_are_made_again(pool, tmp_path):
    assert run(pool, tmp_path, 2, _left_open, True) == [(2.0, True)] * 2
    assert run(pool, tmp_path, 2, _left_open, False) == [(2.0, False)] * 2


def _refused() -> list[str]:
    return [
        said_by(
            lambda: mpu.initialize_model_parallel(
                use_sharp=True,
                nccl_communicator_config_path="a.yaml",
                pipeline_model_parallel_comm_backend="ucc",
                high_priority_stream_groups=["dp"],
            ),
            UnsupportedError,
        ),
        said_by(lambda: mpu.initialize_model_parallel(3), RuntimeError),
        said_by(lambda: mpu.create_group([0, 1], pg_options=object()), UnsupportedError),
        said_by(lambda: mpu.create_group([0, 1], backend="mpi"), UnsupportedError),
        said_by(lambda: mpu.initialize_model_parallel(distributed_timeout_minutes=0), UsageError),
        said_by(lambda: braid_group(dist.new_group([0, 1], backend="gloo")), UsageError),
        said_by(mpu.get_tensor_model_parallel_group, AssertionError),
    ]


@pytest.mark.procs
def test_what_cannot_be_served_is_named_on_all_ranks(pool, tmp_path):
    first, second = run(pool, tmp_path, 2, _refused)
    assert first == second
    options, sizes, nccl, backend, timeout, foreign, before = first
    for name in ("use_sharp", "nccl_communicator", "comm_backend='ucc'", "['dp']"):
        assert name in options
    assert "world_size 2 is not divisible by" in sizes
    assert "NCCL's environment variables" in nccl
    assert "backend 'mpi' cannot be used" in backend
    assert "must be more than 0" in timeout
    assert "backend='braid'" in foreign
    assert "call parallel_state.initialize_model_parallel" in before


def _differing() -> Any:
    rank = dist.get_rank()
    text = said_by(
        lambda: mpu.initialize_model_parallel(
            1 if rank == 2 else 3,
            order="tp-dp-pp" if rank else "tp-pp-dp",
            get_embedding_ranks=_chosen,
        ),
        UsageError,
    )
    mpu.initialize_model_parallel(3)  # which works afterwards
    if dist.get_backend() == "gloo":  # whose shared memory would end with these groups
        mpu.destroy_model_parallel()
        return text, ""
    if rank == 1:
        mpu.destroy_model_parallel()
    again = said_by(lambda: mpu.initialize_model_parallel(3), UsageError)
    if rank != 1:
        mpu.destroy_model_parallel()
    return text, again


def _chosen(ranks: list[int]) -> list[int]:
    return ranks[:1]


@pytest.mark.procs
@pytest.mark.parametrize("backend", ["braid", "gloo"])
def test_ranks_that_pass_different_arguments_all_learn_which(pool, tmp_path, backend):
    results = run(pool, tmp_path, 3, _differing, backend=backend)
    assert results == [results[0]] * 3
    text, again = results[0]
    assert "tensor_model_parallel_size is 3 on ranks 0, 1 and 1 on rank 2" in text
    assert "order is 'tp-pp-dp' on rank 0 and 'tp-dp-pp' on ranks 1, 2" in text
    assert "get_embedding_ranks" not in text
    if backend == "braid":
        assert "groups already is True on ranks 0, 2 and False on rank 1" in again


def _grid() -> Any:
    grid = HyperCommGrid([2, 2], ["tp", "dp"])
    tp, both = grid.create_pg("tp"), grid.create_pg(["dp", "tp"], group_desc="all")
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x, group=tp)
    advice = [
        ("call get_pg(['dp', 'tp']) for", said_by(lambda: grid.create_pg(["dp", "tp"]), KeyError)),
        ("call create_pg('dp') first", said_by(lambda: grid.get_pg("dp"), KeyError)),
    ]
    grid.register_view("experts", [1, 4], ["tp_of_experts", "ep"])
    grid.register_view("cut", [2, 2], ["tp", "expt_dp"], ["tp"])
    call = partial(grid.get_pg, "ep", view="experts")
    advice.append(("call create_pg('ep', view='experts') first", said_by(call, KeyError)))
    experts = grid.create_pg("ep", view="experts")
    call = partial(grid.create_pg, "ep", view="experts")
    advice.append(("call get_pg('ep', view='experts') for", said_by(call, KeyError)))
    views = [
        grid.get_pg("ep", view="experts") is experts is not both,
        grid.get_pg("tp", view="cut") is tp,
        dist.get_process_group_ranks(experts) == [0, 1, 2, 3],
    ]
    same = grid.get_pg("tp") is tp, grid.get_pg(["tp", "dp"]) is both
    grid.destroy()
    views.append("call create_pg('tp') first" in said_by(lambda: grid.get_pg("tp"), KeyError))
    return x.item(), *same, advice, views


@pytest.mark.procs
def test_a_grid_makes_groups_along_its_dims(pool, tmp_path):
    results = run(pool, tmp_path, 4, _grid)
    assert [x for x, *_ in results] == [1, 1, 5, 5]
    for _, tp, both, advice, views in results:
        assert views == [True] * 4
        assert tp
        assert both
        assert all(words in text for words, text in advice), advice
