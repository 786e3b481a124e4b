"""The search over splits: estimates against simulations, memory, sensitivity, files."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.errors import ConfigError
from braid.plan.costs import Axis, MicrobatchCost, Origin
from braid.plan.described import DescribedMachines
from braid.plan.exports import exports
from braid.plan.failures import Failures, time_to_solution
from braid.plan.pipedream import PipeDreamPlan
from braid.plan.plan_file import Plan, Prediction, read_plan
from braid.plan.search import (
    Estimator,
    Split,
    Training,
    find_splits,
    flips,
    program_of,
    reasons,
    rescore,
    splits,
    timeline_of,
)
from braid.plan.search.split import held
from braid.plan.tables import best_of_kinds, comparison, infeasible, ranking_table
from braid.programs.schedule import validate
from braid.programs.schedule.known import RULES
from braid.programs.schedule.pipeline import SCHEDULES, TRAINING, VersionRule, from_csv, most_held
from braid.programs.topology import (
    DEVICES,
    Cluster,
    Device,
    Efficiency,
    Level,
    flat,
    from_toml,
    to_toml,
)

FREE = Efficiency(operation_s=0.0, message_s=0.0, transfer_s=0.0)


class Layers:
    """A model of given layers, whose costs grow with the rows."""

    origin: Origin = "estimated"
    spread: float = 0.0
    model = "layers"
    tensor_sizes = sequence_sizes = expert_sizes = (1,)
    left_out = ()

    def __init__(self, costs: Sequence[MicrobatchCost]) -> None:
        self._costs = costs

    @property
    def num_layers(self) -> int:
        return len(self._costs)

    def layers(self, rows: float, tensor: int) -> Sequence[MicrobatchCost]:
        del tensor
        return [
            c._replace(
                forward_s=rows * c.forward_s,
                input_s=rows * c.input_s,
                weight_s=rows * c.weight_s,
                saved_bytes=rows * c.saved_bytes,
                output_bytes=rows * c.output_bytes,
                kv_bytes=rows * c.kv_bytes,
                routed_bytes=rows * c.routed_bytes,
                split_s=rows * c.split_s,
            )
            for c in self._costs
        ]


def even(count: int, split_s: float = 0.0) -> Layers:
    costs = [1e-3, 1e-3, 1e-3, 4e6, 1e3, 1e6]
    return Layers([MicrobatchCost(*costs, (i,), split_s=split_s) for i in range(count)])


def machines(
    num_ranks: int, *, memory_bytes: float = math.inf, bytes_per_s: float = 1e15
) -> DescribedMachines:
    device = Device(
        name="d",
        flops_per_s={"fp32": 1e12},
        bytes_per_s=1e15,
        memory_bytes=memory_bytes,
        overlap=0.0,
        efficiency=FREE,
    )
    return DescribedMachines(flat(num_ranks, 0.0, bytes_per_s), device)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "interleaved", "breadth_first"])
@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("split_s", [0.0, 1e-3])
def test_closed_forms_of_even_stages_are_what_the_simulator_takes(
    schedule: str, p: int, split_s: float
) -> None:
    estimator = Estimator(even(2 * p, split_s), machines(p), Training(4 * p))
    split = Split(pp=p, microbatches=4 * p, schedule=schedule)
    closed = estimator.estimate(split)
    simulated = rescore(estimator, closed)
    assert simulated.simulated
    # the first stage has no inputs that need gradients, which a split backward gains from
    assert simulated.seconds == pytest.approx(closed.seconds, rel=0.06)
    assert simulated.seconds <= closed.seconds * (1 + 1e-9)


def test_a_backward_in_two_parts_costs_more_where_inputs_need_gradients() -> None:
    def seconds(schedule: str, split_s: float) -> float:
        estimator = Estimator(even(2, split_s), machines(2), Training(4))
        estimate = estimator.estimate(Split(pp=2, microbatches=4, schedule=schedule))
        first = estimator.stages(estimate.split)[1][0]
        assert first.split_s == 0.0  # its inputs need no gradients
        return rescore(estimator, estimate).seconds

    assert seconds("1f1b", 2e-3) == seconds("1f1b", 0.0)
    assert seconds("zb_h1", 2e-3) == pytest.approx(seconds("zb_h1", 0.0) + 4 * 2e-3)


def test_every_split_has_a_valid_program_and_uses_all_ranks() -> None:
    seen = set()
    for split in splits(4, 8, 8, (1, 2)):
        assert split.num_ranks == 4
        assert 8 % (split.dp * split.microbatches) == 0
        if split.pp > 1:
            assert not validate(program_of(split), RULES), split
        seen.add((split.schedule if split.pp > 1 else "", split.tp, bool(split.strategy)))
    assert {name for name, *_ in seen} == {"", *TRAINING, "breadth_first:4", "interleaved:4"}
    assert any(servers for *_, servers in seen)


@given(
    st.lists(st.floats(0.1, 10.0), min_size=3, max_size=12),
    st.integers(1, 3),
)
def test_the_best_split_is_no_slower_than_any_balance_of_its_pipeline(
    seconds: list[float], p: int
) -> None:
    model = Layers([MicrobatchCost(s, s, s, 1.0, 1.0, 1.0, (i,)) for i, s in enumerate(seconds)])
    estimator = Estimator(model, machines(p), Training(4))
    sizes, stages = estimator.stages(Split(pp=p, microbatches=4))
    assert sum(sizes) == len(seconds)
    heaviest = max(stage.seconds for stage in stages)
    cuts = itertools.combinations(range(1, len(seconds)), p - 1)
    oracle = min(
        max(3 * 1 * math.fsum(seconds[a:b]) for a, b in itertools.pairwise((0, *cut, len(seconds))))
        for cut in cuts
    )
    assert heaviest == pytest.approx(oracle, rel=1e-4)


@given(
    st.lists(
        st.tuples(st.floats(1e-4, 1e-2), st.floats(1e5, 1e8), st.floats(1e3, 1e7)),
        min_size=2,
        max_size=8,
    ),
    st.sampled_from([1, 2, 3, 4]),
    st.floats(1e7, 1e10),
)
def test_what_fits_is_within_the_limit_and_nothing_is_faster_than_the_first(
    layers: list[tuple[float, float, float]], num_ranks: int, memory_bytes: float
) -> None:
    model = Layers(
        [
            MicrobatchCost(s, s, s, saved, saved / 10, params, (i,))
            for i, (s, saved, params) in enumerate(layers)
        ]
    )
    ranking = find_splits(
        model, machines(num_ranks, memory_bytes=memory_bytes, bytes_per_s=1e9), Training(12)
    )
    for estimate in ranking.fitting:
        assert estimate.memory.nbytes <= memory_bytes
        assert ranking.best.seconds <= estimate.seconds * 1.01  # alike within three digits
    for estimate in ranking.too_large:
        assert estimate.memory.nbytes > memory_bytes
    if not ranking.fitting:
        with pytest.raises(ConfigError, match=r"does not fit on .* ranks .* Use more ranks"):
            _ = ranking.best


@pytest.mark.parametrize("schedule", [s for s in TRAINING if s not in {"zb_h1", "zb_h2", "zbv"}])
def test_activations_under_way_are_those_of_the_program(schedule: str) -> None:
    for m in (1, 3, 40):
        if schedule.startswith("v_"):
            continue
        assert held(schedule, 4, m) == tuple(most_held(SCHEDULES[schedule](4, m)))


def test_a_split_backward_holds_gradients_between_its_parts() -> None:
    plain = most_held(SCHEDULES["zb_h1"](2, 4))
    assert held("zb_h1", 2, 4) >= tuple(plain)
    assert max(held("zb_h1", 2, 4)) > max(plain)


def test_recomputation_saves_memory_and_costs_a_forward() -> None:
    estimator = Estimator(even(4), machines(2), Training(8))
    plain = estimator.estimate(Split(pp=2, microbatches=4))
    again = estimator.estimate(Split(pp=2, microbatches=4, recompute="always"))
    assert again.memory.activations < plain.memory.activations
    assert again.time.compute_s == pytest.approx(4 / 3 * plain.time.compute_s)


@pytest.mark.parametrize(
    ("shard", "parts"),
    [(0, (1.0, 1.0, 2.0)), (1, (1.0, 1.0, 0.5)), (2, (1.0, 0.25, 0.5)), (3, (0.25, 0.25, 0.5))],
)
def test_zero_divides_states_gradients_and_parameters(shard: int, parts: tuple[float, ...]) -> None:
    estimator = Estimator(even(4), machines(4), Training(8))
    whole = 4e6
    memory = estimator.estimate(Split(dp=4, shard=shard)).memory
    assert memory[:3] == pytest.approx([whole * part for part in parts])
    # micro-batches accumulate whole gradients, beside the memory of their sums
    memory = estimator.estimate(Split(dp=4, shard=shard, microbatches=2)).memory
    assert memory.gradients == pytest.approx(whole * (parts[1] + (shard > 0)))


def test_sequences_and_experts_are_divided_where_the_engines_allow_it() -> None:
    made = list(splits(8, 8, 4, sequence_sizes=(1, 2), expert_sizes=(1, 2), asynchronous=True))
    assert {split.num_ranks for split in made} == {8}
    assert {split.mesh for split in made if split.shard} >= {"dp=4,cp=2", "pp=2,dp=2,cp=2"}
    assert {split.mesh for split in made if split.ep > 1 and split.shard == 1} == {
        *("dp=4,ep=2", "pp=1,dp=4,ep=2", "dp=2,cp=2,ep=2", "pp=1,dp=2,cp=2,ep=2")
    }  # a pipeline does not shard experts
    assert not any(split.cp * split.ep > 1 for split in made if split.versions or split.strategy)
    assert all(split.cp == split.ep == 1 for split in splits(8, 8, 4))
    assert str(Split(dp=2, cp=2, tp=2, shard=1)) == "dp=2,cp=2,tp=2 zero1"


def test_a_divided_sequence_sends_keys_and_values_around_a_ring() -> None:
    costs = [MicrobatchCost(1e-3, 1e-3, 1e-3, 4e6, 1e3, 1e6, (i,), kv_bytes=8e6) for i in range(4)]
    estimator = Estimator(Layers(costs), machines(2, bytes_per_s=1e9), Training(1))
    whole, half = (estimator.estimate(Split(cp=cp)) for cp in (1, 2))
    assert half.memory.activations == whole.memory.activations / 2
    assert half.time.compute_s == pytest.approx(whole.time.compute_s / 2)
    # of each layer, 4 MB in forward, and in backward again with their gradients
    assert half.time.tensor_s == pytest.approx(4 * 3 * 4e6 / 1e9)
    assert half.time.gradient_s == pytest.approx(4e6 / 1e9)  # ranks of a ring have the same layers
    again = estimator.time(Split(cp=2, recompute="always"))
    assert again.tensor_s == pytest.approx(4 * 4 * 4e6 / 1e9)
    assert estimator.level_bytes(Split(cp=2)) == {"switch": 4 * 3 * 4e6 + 4e6}
    assert estimator.memory(Split(cp=2, shard=3)).parameters == whole.memory.parameters / 2


def test_divided_experts_send_tokens_and_keep_their_part() -> None:
    cost = MicrobatchCost(1e-3, 1e-3, 1e-3, 4e6, 1e3, 5e6, (0,), routed_bytes=2e6, expert_bytes=4e6)
    estimator = Estimator(Layers([cost]), machines(4, bytes_per_s=1e9), Training(4))
    split = Split(dp=2, ep=2)
    estimate = estimator.estimate(split)
    assert estimate.memory[:3] == pytest.approx([3e6, 3e6, 6e6])
    # two exchanges in forward and two in backward, half of the tokens each
    assert estimate.time.tensor_s == pytest.approx(4 * 1e6 / 1e9)
    # all ranks have the same 1 MB, two have the same experts of 2 MB
    assert estimate.time.gradient_s == pytest.approx((2 * 0.75 * 1e6 + 2e6) / 1e9, rel=1e-3)
    sharded = estimator.memory(Split(dp=2, ep=2, shard=2))  # experts are not sharded further
    assert sharded[:3] == pytest.approx([3e6, 1e6 + 0.25e6 + 2e6, 2 * (0.25e6 + 2e6)])


def test_rings_of_neighbours_share_the_link_of_their_host() -> None:
    levels = [
        Level(name="host", size=4, latency_s=0.0, bytes_per_s=100e9),
        Level(name="rack", size=2, latency_s=0.0, bytes_per_s=10e9),
    ]
    own = DescribedMachines(Cluster(levels), DEVICES["a100-40gb"])
    tensor = own.level_bytes(Axis(2, 1), 8.0)
    assert tensor == {"host": 8.0}
    data = own.level_bytes(Axis(4, 2), 12.0)  # four ranks, two rings over each host's link
    assert data == {"host": 12.0, "rack": 24.0}
    inside = own.collective_s("all_reduce", Axis(4, 1), 1e9)
    across = own.collective_s("all_reduce", Axis(4, 2), 1e9)
    assert across == pytest.approx(20 * inside, rel=0.01)  # ten times slower, shared by two


def hosts_of(size: int, count: int, *, full_duplex: bool = True) -> DescribedMachines:
    """Return hosts whose links are a hundred times slower than those inside."""
    levels = [
        Level(name="host", size=size, latency_s=0.0, bytes_per_s=100e9),
        Level(name="rack", size=count, latency_s=0.0, bytes_per_s=1e9, full_duplex=full_duplex),
    ]
    device = dataclasses.replace(DEVICES["a100-40gb"], efficiency=FREE)
    return DescribedMachines(Cluster(levels), device)


def test_a_row_of_stages_has_the_price_of_its_slowest_hop() -> None:
    own = hosts_of(4, 2)
    assert own.message_s(Axis(4, 1), 1e9) == pytest.approx(0.01)
    assert own.message_s(Axis(8, 1), 1e9) == pytest.approx(1.0)  # 3 -> 4 leaves the host
    assert own.message_s(Axis(4, 2), 1e9) == pytest.approx(2.0)  # of two rows at once
    assert hosts_of(4, 2, full_duplex=False).message_s(Axis(8, 1), 1e9) == pytest.approx(2.0)


def test_groups_that_straddle_a_host_use_its_link() -> None:
    own = hosts_of(4, 3)  # groups of three: 0 1 2 | 3 4 5, of which 3 is on the first host
    assert set(own.level_bytes(Axis(2, 1), 1.0)) == {"host"}
    assert own.level_bytes(Axis(3, 1), 1.0) == {"host": 1.0, "rack": 2.0}


def test_a_parameter_server_sends_from_each_rank_to_the_servers_of_other_hosts() -> None:
    own = hosts_of(4, 2)
    # four ranks of a host push half of 1 GB over its link of 1 GB/s, and pull as much
    assert own.collective_s("push_pull", Axis(8, 1), 1e9) == pytest.approx(4.0, rel=1e-3)
    assert own.collective_s("push_pull", Axis(4, 1), 1e9) == pytest.approx(2 * 0.75 / 100, rel=0.1)


def test_parameters_in_parts_are_gathered_around_each_use() -> None:
    estimator = Estimator(even(4), machines(2, bytes_per_s=1e9), Training(8))
    times = [
        estimator.time(Split(dp=2, shard=shard, microbatches=m)).gradient_s
        for shard, m in ((0, 1), (1, 1), (3, 1), (3, 4))
    ]
    half_s = 2e6 / 1e9  # that a rank sends to scatter or to gather
    assert times == pytest.approx([2 * half_s, 2 * half_s, 3 * half_s, 9 * half_s])
    assert estimator.level_bytes(Split(dp=2, shard=3, microbatches=4)) == {"switch": 9 * 2e6}


def test_replicas_pay_for_one_sum_of_gradients() -> None:
    own = DescribedMachines(flat(2, 1e-3, 1e9), machines(2).device)  # with a latency
    estimator = Estimator(even(4), own, Training(8))
    once_s = own.collective_s("all_reduce", Axis(2, 1), 4e6)
    assert estimator.time(Split(dp=2)).gradient_s == once_s


def test_a_backward_hides_no_gather_that_follows_the_optimizer() -> None:
    device = dataclasses.replace(machines(2).device, overlap=1.0)
    slow = DescribedMachines(flat(2, 0.0, 1e9), device)
    estimator = Estimator(even(4), slow, Training(8))
    assert estimator.time(Split(dp=2)).gradient_s == 0.0
    assert estimator.time(Split(dp=2, shard=1)).gradient_s == pytest.approx(2e6 / 1e9)
    assert estimator.time(Split(dp=2, shard=3)).gradient_s == 0.0


def test_a_memory_that_is_too_small_is_explained_and_said_to_flip() -> None:
    # replicas do not fit; a pipeline does
    ranking = find_splits(even(4), machines(2, memory_bytes=9e6), Training(2), num_simulated=4)
    assert all(e.split.dp == 1 or e.split.shard for e in ranking.fitting)
    lines = list(infeasible(ranking))
    assert lines
    assert all("GB of 0.009 GB" in line for line in lines)


def test_slow_links_make_a_pipeline_better_than_replicas() -> None:
    model = Layers([MicrobatchCost(1e-3, 1e-3, 1e-3, 1.0, 1e3, 1e7, (i,)) for i in range(8)])
    ranking = find_splits(model, machines(2, bytes_per_s=1e11), Training(16))
    assert ranking.best.split.dp == 2
    changes = {flip.change: flip.estimate.split for flip in flips(ranking)}
    slower = next(split for change, split in changes.items() if "links" in change)
    assert slower.pp == 2
    assert any("takes" in line for line in reasons(ranking))
    slow = find_splits(model, machines(2, bytes_per_s=1e8), Training(16))
    assert slow.best.split.pp == 2


def test_ten_thousand_devices_take_seconds_on_paper() -> None:
    levels = [
        Level(name="host", size=8, latency_s=1e-6, bytes_per_s=300e9),
        Level(name="hall", size=1250, latency_s=1e-5, bytes_per_s=50e9),
    ]
    own = DescribedMachines(Cluster(levels), DEVICES["a100-80gb"])
    ranking = find_splits(even(26), own, Training(20_000), num_simulated=2)
    assert ranking.best.split.num_ranks == 10_000


def test_a_batch_that_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a batch of 3 rows .* exactly 7 ranks"):
        find_splits(even(2), machines(7), Training(3))


def test_a_table_from_a_busy_host_says_how_sure_it_is() -> None:
    layers = even(4)
    layers.spread = 0.3
    caption = str(ranking_table(find_splits(layers, machines(2), Training(4)), 3).caption)
    assert "varied by ±30% while they were measured" in caption


def test_tables_and_pictures_show_each_kind_of_split() -> None:
    ranking = find_splits(even(8), machines(4, bytes_per_s=1e9), Training(16))
    kinds = best_of_kinds(ranking)
    assert {"data parallel", "pipeline", "pipeline x data parallel", "ZeRO-1"} <= set(kinds)
    assert "parameter server" in kinds
    drawn = comparison(ranking)
    assert drawn.startswith("<svg")
    assert all(kind in drawn for kind in kinds)
    assert len(ranking_table(ranking, 3, steps=100).columns) == 9
    assert "not sure" not in str(ranking_table(ranking, 3).caption)
    estimator = ranking.estimator
    split = kinds["pipeline"].split
    assert timeline_of(estimator, split).seconds > 0


def test_failures_lengthen_a_training_and_checkpoints_are_worth_it() -> None:
    often = Failures(rank_mean_hours=24.0, checkpoint_s=10.0, recovery_s=60.0)
    few, many = (time_to_solution(1e6, n, often) for n in (1, 64))
    assert 1e6 < few.seconds < many.seconds
    assert many.failures > 64 * few.failures * 0.9
    assert many.interval_s < few.interval_s
    for interval_s in (many.interval_s / 4, many.interval_s * 4):
        worse = time_to_solution(1e6, 64, often, interval_s=interval_s)
        assert worse.seconds > many.seconds
    with pytest.raises(ConfigError, match="leaves no time for work"):
        time_to_solution(1e6, 100_000, often)
    with pytest.raises(ConfigError, match="must be positive"):
        Failures(rank_mean_hours=-1.0)


def test_a_plan_is_read_as_it_was_written(tmp_path: object) -> None:
    from pathlib import Path

    file = Path(str(tmp_path)) / "plan.json"
    estimator = Estimator(even(8), machines(4), Training(16))
    split = Split(pp=2, dp=2, microbatches=4, schedule="interleaved", shard=1)
    plan = Plan.of(estimator, estimator.estimate(split), context=32)
    plan.write(file)
    read = read_plan(file)
    assert read == plan
    assert isinstance(read, Plan)
    assert read.split == split
    PipeDreamPlan(replicas=(1, 1), balance=(2, 2)).write(file)
    assert isinstance(read_plan(file), PipeDreamPlan)
    for text, problem in (
        ("{}", "is not a plan"),
        (
            '{"kind": "split", "batch": 4, "ranks": 3, "mesh": "pp=2"}',
            "has 2 ranks, but ranks is 3",
        ),
        (
            '{"kind": "split", "batch": 3, "ranks": 4, "mesh": "dp=2,ep=2"}',
            "cannot be divided by 4 replicas",
        ),
        (
            '{"kind": "split", "batch": 4, "ranks": 4, "mesh": "pp=2,cp=2", "versions": "stash"}',
            "works only with pipeline parallelism alone",
        ),
        ('{"kind": "split", "batch": 0, "ranks": 3}', "is not a plan"),
        ('{"kind": "other"}', "is not a plan"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=problem):
            read_plan(file)
    with pytest.raises(ConfigError, match="cannot read"):
        read_plan(file.with_name("missing.json"))


def test_a_plan_is_exported_for_other_systems() -> None:
    estimator = Estimator(even(8), machines(4), Training(16))
    split = Split(pp=2, dp=2, microbatches=4, recompute="always")
    plan = Plan.of(estimator, estimator.estimate(split))
    files = exports(plan, [f"layer{i}" for i in range(8)])
    assert files["torchgpipe.py"] == (
        'model = GPipe(model, balance=[4, 4], chunks=4, checkpoint="always")\n'
    )
    assert '"layer4": SplitPoint.BEGINNING' in files["torch_pipelining.py"]
    assert "Schedule1F1B(stage, n_microbatches=4)" in files["torch_pipelining.py"]
    assert files["megatron.txt"].startswith(
        "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 --micro-batch-size 2 "
    )


def test_what_another_system_does_not_have_is_said() -> None:
    estimator = Estimator(even(8), machines(4), Training(16))
    names = [f"layer{i}" for i in range(8)]
    vee = Split(pp=2, dp=2, microbatches=4, schedule="v_half")
    files = exports(Plan.of(estimator, estimator.estimate(vee)), names)
    assert "torchgpipe.py" not in files  # which has one stage on each device
    assert "_load_csv" in files["torch_pipelining.py"]
    program = from_csv(files["schedule.csv"])
    assert (program.num_ranks, program.header.num_units) == (2, 4)
    assert "Megatron has no v_half" in files["megatron.txt"]
    whole = Split(dp=4, shard=3)
    files = exports(Plan.of(estimator, estimator.estimate(whole)), names)
    assert set(files) == {"megatron.txt"}
    assert "divides states of the optimizer only" in files["megatron.txt"]


def test_more_stages_on_each_rank_make_the_bubble_shorter() -> None:
    estimator = Estimator(even(16), machines(2), Training(8))
    times = {
        name: rescore(estimator, estimator.estimate(Split(pp=2, microbatches=4, schedule=name)))
        for name in ("1f1b", "interleaved", "interleaved:4")
    }
    whole_s = 8 * 8 * 3e-3  # of the layers of a rank, for all rows
    bubbles = [round(e.seconds / whole_s - 1, 3) for e in times.values()]
    assert bubbles == pytest.approx([1 / 4, 1 / 8, 1 / 16], abs=0.03)
    assert times["interleaved:4"].split.num_stages == 8


@pytest.mark.parametrize(("versions", "m"), [("stash", 1), ("2bw", 4)])
def test_an_asynchronous_pipeline_has_no_bubble_and_keeps_versions(
    versions: VersionRule, m: int
) -> None:
    estimator = Estimator(even(4), machines(2), Training(8))
    split = Split(pp=2, versions=versions, microbatches=m)
    closed = estimator.estimate(split)
    simulated = rescore(estimator, closed)
    assert simulated.simulated
    assert closed.seconds == pytest.approx(8 * 2 * 3e-3, rel=1e-6)
    assert simulated.seconds == pytest.approx(closed.seconds, rel=1e-6)
    assert closed.memory.parameters == 2 * 2e6  # of two layers, in two versions
    assert not [s for s in splits(2, 8, 4) if s.versions]
    asked = find_splits(even(4), machines(2), Training(8), asynchronous=True)
    assert {"stash", "2bw"} <= {e.split.versions for e in asked.fitting}
    plan = Plan.of(estimator, closed)
    assert plan.split == split
    assert str(split).endswith("(1 stale)")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"microbatches": 2}, "add pp=1 to the mesh"),
        ({"mesh": "pp=2,dp=2", "balance": (1, 2, 3)}, "balance has 3 numbers"),
        ({"schedule": "interleaved:x"}, "unknown schedule 'interleaved:x'"),
        ({"schedule": "nope"}, "unknown schedule 'nope'"),
        ({"mesh": "pp=2,dp=2", "balance": (8, 0)}, "at least one layer for each stage"),
        ({"dtype": "foo"}, "dtype must be one of fp32"),
        (
            {"mesh": "pp=2,dp=2", "balance": (4, 4), "versions": "stash"},
            "with pipeline parallelism alone",
        ),
        ({"mesh": "pp=4", "balance": (2,) * 4, "versions": "2bw"}, "at least 4 micro-batches"),
        ({"mesh": "pp=4", "balance": (2,) * 4, "strategy": "ps"}, "has replicas only"),
        ({"batch": 6, "mesh": "pp=1,dp=4"}, "a batch of 6 rows cannot be divided by 4 replicas"),
        ({"predicted": Prediction(seconds=1.0, parts={"lunch_s": 1.0}, memory={})}, "lunch_s"),
    ],
)
def test_a_plan_that_was_changed_and_does_not_fit_is_refused(
    tmp_path: Path, changes: dict[str, object], problem: str
) -> None:
    estimator = Estimator(even(8), machines(4), Training(16))
    plan = Plan.of(estimator, estimator.estimate(Split(dp=4)))
    msgspec.structs.replace(plan, **changes).write(tmp_path / "plan.json")
    with pytest.raises(ConfigError, match=problem):
        read_plan(tmp_path / "plan.json")


CLUSTER = """
[[level]]
name = "host"
size = 8
latency_s = 3e-6
bytes_per_s = 300e9

[device]
name = "a100-40gb"
memory_bytes = 10e9
efficiency = { flops = 0.5 }
"""


def test_a_cluster_file_names_a_device_and_changes_it() -> None:
    cluster = from_toml(CLUSTER)
    assert cluster.device is not None
    assert cluster.device.memory_bytes == 10e9
    assert cluster.device.efficiency.flops == 0.5
    assert cluster.device.bytes_per_s == DEVICES["a100-40gb"].bytes_per_s
    assert from_toml(to_toml(cluster)) == cluster


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('name = "abacus"', "not in the table"),
        ('name = "a100-40gb"\nmemory_bytes = -1.0', "positive numbers"),
        ('name = "a100-40gb"\noverlap = 2.0', "positive numbers"),
        ('name = "a100-40gb"\nefficiency = { speed = 1.0 }', "efficiency has no speed"),
        ('name = "a100-40gb"\nefficiency = { flops = 0.0 }', "positive numbers"),
        ('name = "a100-40gb"\ncolour = "red"', "TOML"),
    ],
)
def test_a_device_that_is_not_one_is_refused(line: str, problem: str) -> None:
    text = CLUSTER.partition("[device]")[0] + "[device]\n" + line
    with pytest.raises(ConfigError, match=problem):
        from_toml(text)


def test_ranks_that_wait_leave_their_core_to_others() -> None:
    class Shared(DescribedMachines):
        ranks_per_core = 2.0

    alone = machines(4)
    shared = Shared(alone.cluster, alone.device)
    pipeline, replicas = Split(pp=4, microbatches=4), Split(dp=4)
    plain, both = (Estimator(even(4), own, Training(4)) for own in (alone, shared))
    assert both.time(replicas).compute_s == plain.time(replicas).compute_s
    work_s = plain.time(pipeline).compute_s
    for estimate in (both.estimate(pipeline), rescore(both, both.estimate(pipeline))):
        assert estimate.seconds == pytest.approx(work_s, rel=0.01)  # bubbles are filled
