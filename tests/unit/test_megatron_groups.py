"""Megatron's groups: which ranks are in which, and what is refused, without any process."""

from __future__ import annotations

from itertools import permutations, product
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from braid.compat.megatron import HyperCommGrid, mpu, parallel_state
from braid.compat.megatron.failure import GroupNotInitializedError, UsageError
from braid.compat.megatron.group_plan import Parallelism
from braid.compat.megatron.rank_generator import hierarchical_ranks
from braid.compat.megatron.tensor_parallel import param_is_not_tensor_parallel_duplicate
from braid.errors import BraidError

RankGenerator = parallel_state.RankGenerator
masked_groups = parallel_state.generate_masked_orthogonal_rank_groups
KINDS = ("tp", "cp", "ep", "dp", "pp")


def enumerated(order: list[str], sizes: dict[str, int], along: set[str]) -> list[list[int]]:
    """Groups by definition: number all places, the leftmost kind fastest; sort them by the other kinds."""
    groups: dict[tuple[int, ...], list[int]] = {}
    places = product(*(range(sizes[kind]) for kind in reversed(order)))
    for rank, place in enumerate(places):
        at = dict(zip(reversed(order), place, strict=True))
        groups.setdefault(tuple(at[k] for k in reversed(order) if k not in along), []).append(rank)
    return [groups[key] for key in sorted(groups)]


@given(
    sizes=st.fixed_dictionaries({kind: st.integers(1, 3) for kind in KINDS}),
    order=st.sampled_from([*permutations(KINDS)]),
    along=st.sets(st.sampled_from(KINDS), min_size=1),
    offset=st.integers(0, 4),
)
def test_a_rank_generator_has_the_groups_of_the_definition(sizes, order, along, offset):
    assume(sizes["ep"] == 1 or sizes["cp"] == 1)
    generator = RankGenerator(**sizes, order="-".join(order), rank_offset=offset)
    expected = enumerated(list(order), sizes, along)
    assert generator.get_ranks("-".join(along)) == [[r + offset for r in g] for g in expected]
    assert generator.world_size == sum(map(len, expected))
    mask = generator.get_mask(generator.order, "-".join(along))
    assert masked_groups(generator.world_size, generator.ordered_size, mask) == expected


@given(
    shape=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    chosen=st.sets(st.integers(0, 3), min_size=1),
    offset=st.integers(0, 3),
)
def test_a_grid_has_the_groups_of_the_definition(shape, chosen, offset):
    names = ["a", "b", "c", "d"][: len(shape)]
    along = {names[index] for index in chosen if index < len(names)}
    assume(along)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "100")
        grid = HyperCommGrid(shape, names, rank_offset=offset)
    expected = enumerated(names, dict(zip(names, shape, strict=True)), along)
    assert grid.get_rank_enum(sorted(along)) == [[r + offset for r in g] for g in expected]


def test_names_that_are_left_out_of_the_order_come_last():
    generator = RankGenerator(tp=2, ep=1, dp=2, pp=2, cp=1, order="TP-pp-dp")
    assert generator.order == "tp-pp-dp-cp-ep"
    assert generator.ordered_size == [2, 2, 2, 1, 1]
    assert generator.get_ranks("dp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert generator.get_mask("tp-dp-pp", "tp-pp") == [True, False, True]


def test_the_groups_of_the_documentation():
    """16 ranks, tensor parallel by 2, pipelines of 4: the docstring of initialize_model_parallel."""
    plan = Parallelism(world_size=16, tp=2, pp=4).groups()
    assert plan["dp"] == [[a + b, a + b + 2] for a in range(0, 16, 4) for b in range(2)]
    assert plan["tp"] == [[i, i + 1] for i in range(0, 16, 2)]
    assert plan["pp"] == [[i, i + 4, i + 8, i + 12] for i in range(4)]
    assert plan["embd"] == [[i, i + 12] for i in range(4)]
    assert plan["pos_embd"] == [[0], [1], [2], [3]]
    assert plan["mp"][0] == [0, 1, 4, 5, 8, 9, 12, 13]
    assert [sorted(ranks) for ranks in plan["intra_dist_opt"]] == [list(range(16))]


def test_experts_have_groups_of_their_own():
    plan = Parallelism(world_size=8, tp=2, ep=4, expert_tp=1).groups()
    assert plan["ep"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert plan["ep_tp"] == [[rank] for rank in range(8)]
    assert plan["ep_dp"] == [[rank, rank + 4] for rank in range(4)]
    assert plan["tp"] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_levels_of_a_hierarchy():
    """16 ranks in levels of 2, 2 and 4: the docstring of create_hierarchical_groups."""
    levels = hierarchical_ranks(range(16), [2, 2, 4])
    assert levels[0] == [[i, i + 1] for i in range(0, 16, 2)]
    assert levels[1] == [[i + j, i + j + 2] for i in range(0, 16, 4) for j in range(2)]
    assert levels[2] == [[i, i + 4, i + 8, i + 12] for i in range(4)]
    plan = Parallelism(world_size=8, cp=4, hierarchical_cp=(2, 2), hybrid_cp=True).groups()
    assert plan["hcp1"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert plan["hybrid2"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert plan["hybrid4"] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_copies_of_a_sharded_optimizer():
    plan = Parallelism(world_size=8, tp=2, instances=2).groups()
    assert plan["intra_dp_cp"] == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert plan["intra_ep_dp"] == plan["intra_dp_cp"]
    assert plan["inter_ep_dp"] == [[0, 4], [2, 6], [1, 5], [3, 7]]
    assert plan["intra_dist_opt"] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@given(world=st.integers(1, 24), tp=st.integers(1, 4), pp=st.integers(1, 3), ep=st.integers(1, 3))
def test_every_rank_is_in_one_group_of_each_kind(world, tp, pp, ep):
    try:
        plan = Parallelism(world_size=world, tp=tp, pp=pp, ep=ep).groups()
    except UsageError:
        assert world % (tp * pp) or world % (tp * pp * ep)
        return
    for kind, groups in plan.items():
        ranks = sorted(rank for group in groups for rank in group)
        assert ranks == sorted(set(ranks))
        assert kind in {"embd", "pos_embd"} or ranks == list(range(world))


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"tp": 3}, ["world_size 8 is not divisible by tensor", "3 x 1 x 1 = 3"]),
        (
            {"tp": 0, "pp": "2"},
            ["tensor_model_parallel_size must be", "pipeline_model_parallel_size must be"],
        ),
        ({"tp": 3, "ep": 5, "virtual_pp": 2}, ["= 3", "= 15", "at least 2, got 1"]),
        ({"cp": 4, "hierarchical_cp": (2, 4)}, ["[2, 4] must have the product", "4"]),
        ({"instances": 3}, ["=3 does not divide the 8 ranks of data", "of expert data"]),
        ({"order": "tp-tp-dp"}, ["tp comes twice"]),
        ({"tp": 2, "order": "dp-pp"}, ["tp has 2 ranks, but is not in the order"]),
        ({"tp": 2, "ep": 4, "pp": 2, "expert_tp": 1, "order": "tp-cp-ep-pp-dp"}, ["put pp last"]),
        ({"pp": 2, "embedding_ranks": lambda _: [99]}, ["get_embedding_ranks must return"]),
    ],
)
def test_sizes_that_do_not_fit_are_named(options, texts):
    with pytest.raises(UsageError) as error:
        Parallelism(world_size=8, **options).groups()
    assert all(text in str(error.value) for text in texts), str(error.value)


def test_wrong_arguments_of_generators_and_grids_are_named(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    for make, text in (
        (lambda: RankGenerator(1, 2, 1, 1, 2, "tp-cp-ep-dp-pp"), "ep=2 and cp=2"),
        (lambda: RankGenerator(2, 1, 2, 1, 1, "tp-dp").get_ranks("xp"), "xp is not in the order"),
        (lambda: masked_groups(4, [2, 3], [True]), "2 entries, but mask has 1"),
        (lambda: masked_groups(4, [2, 3], [True, False]), "6 ranks, but world_size is 4"),
        (lambda: HyperCommGrid([2, 2], ["a"]), "needs 2 different dim_names"),
        (
            lambda: HyperCommGrid([2, 4], ["a", "b"], rank_offset=1),
            "needs 9 ranks, but the job has 4",
        ),
        (lambda: HyperCommGrid([2], ["a"], rank_offset=-1), "must not be negative"),
        (lambda: HyperCommGrid([2, 2], ["a", "b"]).get_rank_enum("c"), "unknown dim c"),
    ):
        with pytest.raises(UsageError, match=text) as error:
            make()
        assert isinstance(error.value, RuntimeError)
        assert isinstance(error.value, AssertionError)
    with pytest.raises(KeyError, match=r"call create_pg\('a'\) first"):
        HyperCommGrid([2, 2], ["a", "b"]).get_pg("a")


def test_a_view_is_another_shape_of_the_ranks_of_a_grid(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "9")
    grid = HyperCommGrid([2, 2, 2], ["tp", "cp", "pp"], rank_offset=1)
    grid.register_view("experts", [1, 4, 2], ["expt_tp", "ep", "pp"], shared_dims=["pp"])
    assert grid.get_rank_enum("ep", view="experts") == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert grid.get_rank_enum("pp", view="experts") == grid.get_rank_enum("pp")
    for arguments, text in (
        (("experts", [8], ["a"]), "exists: use another name"),
        (("other", [4], ["a"]), "has 4 ranks, but the grid has 8"),
        (("other", [8], ["a", "b"]), "needs 1 different dim_names"),
        (("other", [2, 4], ["tp", "ep"], ["ep"]), "must be different dims of the grid and the"),
        (("other", [4, 2], ["ep", "tp"], ["tp"]), r"\['tp'\] have ranks \[\[1, 5\]"),
        (
            ("other", [2, 2, 2], ["tp", "pp", "cp"], ["tp", "cp"]),
            r"\['cp'\] have ranks \[\[1, 5\]",
        ),
    ):
        with pytest.raises(UsageError, match=text) as error:
            grid.register_view(*arguments)
        assert isinstance(error.value, ValueError)
    with pytest.raises(KeyError, match="unknown view 'other': the grid has base, experts"):
        grid.get_rank_enum("ep", view="other")


@pytest.mark.parametrize(("allreduce", "expected"), [(True, False), (False, True)])
def test_duplicates_of_experts_are_counted_by_their_own_group(allreduce, expected):
    def group(rank):
        return SimpleNamespace(rank=lambda: rank)

    param = torch.nn.Parameter(torch.zeros(1))
    param.allreduce = allreduce
    is_first = param_is_not_tensor_parallel_duplicate(param, group(1), expert_tp_group=group(0))
    assert is_first is expected


GETTERS = [
    name
    for name in parallel_state.__all__
    if name.startswith("get_") and ("group" in name or "src_rank" in name or "tensor_model" in name)
]


@pytest.mark.parametrize("name", [n for n in GETTERS if "hybrid" not in n and "modulo" not in n])
def test_a_getter_before_initialization_says_what_to_call(name):
    ask = getattr(mpu, name)
    if name in {"get_expert_tensor_parallel_rank", "get_expert_tensor_parallel_world_size"}:
        assert ask() is None
        return
    with pytest.raises(AssertionError, match=r"call parallel_state\.initialize_model_parallel"):
        ask()


def test_without_torch_distributed_initialization_says_so():
    with pytest.raises(AssertionError, match=r"init_process_group\('braid'\)") as error:
        mpu.initialize_model_parallel(1)
    assert isinstance(error.value, GroupNotInitializedError)
    assert isinstance(error.value, BraidError)
    assert not mpu.is_initialized()
    assert not mpu.model_parallel_is_initialized()
    assert mpu.get_data_parallel_world_size() == mpu.get_data_parallel_rank() == 0
    assert mpu.get_tensor_model_parallel_group(check_initialized=False) is None
    with pytest.raises(AssertionError, match="memory buffer"):
        mpu.get_global_memory_buffer()


def test_values_can_be_set_before_there_are_groups():
    try:
        mpu.set_tensor_model_parallel_world_size(8)
        mpu.set_tensor_model_parallel_rank(3)
        mpu.set_pipeline_model_parallel_world_size(4)
        mpu.set_pipeline_model_parallel_rank(3)
        mpu.set_expert_model_parallel_world_size(2)
        mpu.set_expert_model_parallel_rank(1)
        mpu.set_data_parallel_rank(5)
        mpu.set_virtual_pipeline_model_parallel_world_size(2)
        assert mpu.get_tensor_model_parallel_world_size() == 8
        assert mpu.get_tensor_model_parallel_rank() == 3
        assert mpu.get_expert_tensor_parallel_world_size() == 8
        assert mpu.get_expert_model_parallel_world_size() == 2
        assert mpu.get_data_parallel_rank() == 5
        assert mpu.is_pipeline_last_stage()
        assert mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=1)
        assert not mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=0)
        assert not mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=0)
        with pytest.raises(AssertionError, match="pass vp_stage from 0 to"):
            mpu.is_pipeline_first_stage(ignore_virtual=False)
    finally:
        mpu.destroy_model_parallel()
    with pytest.raises(AssertionError):
        mpu.get_tensor_model_parallel_rank()


def test_what_is_not_there_is_named():
    with pytest.raises(AttributeError, match="no options of NCCL"):
        mpu.get_nccl_options  # noqa: B018
    with pytest.raises(AttributeError, match="groups are not variables of the module"):
        mpu._TENSOR_MODEL_PARALLEL_GROUP  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        mpu.nothing  # noqa: B018
