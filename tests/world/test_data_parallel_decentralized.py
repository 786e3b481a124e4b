"""Training without a centre: the mean is kept, ranks agree in the end, and the loss is that of everybody's."""

from __future__ import annotations

import math
import os
import signal
from typing import Any

import pytest
import torch
from torch import nn

from braid.comm import Group
from braid.data_parallel import (
    ADPSGD,
    DPSGD,
    DistributedDataParallel,
    Mixing,
    PushSum,
    adasum,
    adasum_hook,
)
from braid.errors import ConfigError, MismatchError, PeerLostError, StaleError
from braid.testing.pool import RankDiedError

PUSH = ((0.5, 0.0, 0.25), (0.5, 0.5, 0.0), (0.0, 0.5, 0.75))  # columns sum to 1, rows do not


def _params(rank: int, dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(rank)
    shapes = ((5, 3), (4,))
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    params = [nn.Parameter(x.to(dtype)) for x in drawn]
    return [*params, nn.Parameter(torch.full((2,), float(rank)))]


def _set(params: list[nn.Parameter], values: list[nn.Parameter]) -> None:
    with torch.no_grad():
        for param, value in zip(params, values, strict=True):
            param.copy_(value)


def _mean(params: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [
        torch.stack([x.double() for x in column]).mean(0) for column in zip(*params, strict=True)
    ]


def _mixed(group: Group, make: Any, steps: int) -> tuple[list[torch.Tensor], list[float], Any]:
    params = _params(0)
    method = make(params, group)
    _set(params, _params(group.rank))
    distances = [method.consensus_distance()]
    for _ in range(steps):
        method.mix()
        distances.append(method.consensus_distance())
    found = [
        (e.seq, group.context.events.ring.name(e.kind)) for e in group.context.events.tail(999)
    ]
    return (
        [p.detach().clone() for p in params],
        distances,
        [f for f in found if "consensus" in f[1]],
    )


def _ring(params: Any, group: Group) -> DPSGD:
    return DPSGD(params, Mixing.ring(group.size), group)


def _complete(params: Any, group: Group) -> DPSGD:
    return DPSGD(params, Mixing.complete(group.size), group)


def _one_peer(params: Any, group: Group) -> DPSGD:
    return DPSGD(params, Mixing.one_peer(group.size), group)


def _push(params: Any, group: Group) -> PushSum:
    mixing = Mixing.of([PUSH]) if group.size == 3 else Mixing.exponential(group.size)
    return PushSum(params, mixing, group)


@pytest.mark.parametrize("make", [_ring, _complete, _one_peer], ids=lambda make: make.__name__)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_mixing_keeps_the_mean_and_brings_ranks_together(world, size, make):
    told = world(size, _mixed, make, 6)
    torch.testing.assert_close(
        _mean([values for values, _, _ in told]), _mean([_params(r) for r in range(size)])
    )
    if make is _complete:  # all add the same numbers in the same order
        for values, _, _ in told:
            assert all(map(torch.equal, values, told[0][0]))
    distances = told[0][1]
    assert all(found == distances for _, found, _ in told)
    gap = Mixing.ring(size).spectral_gap() if make is _ring else 1.0
    if make is not _one_peer or size in {1, 2, 4}:  # those reach the exact mean in a turn
        assert distances[6] <= (1 - gap) ** 6 * distances[0] + 1e-6
    assert distances[6] <= 0.05 * distances[0]


def _in_16_bits(group: Group, make: Any) -> list[torch.Tensor]:
    params = _params(0, torch.bfloat16)
    method = make(params, group)
    _set(params, _params(group.rank, torch.bfloat16))
    method.mix()
    return [p.detach() for p in params]


def _push_to_one(params: Any, group: Group) -> PushSum:
    return PushSum(params, Mixing.one_peer(group.size), group)


@pytest.mark.parametrize("make", [_complete, _push_to_one], ids=["dpsgd", "push-sum"])
def test_parameters_of_16_bits_are_mixed_in_32_and_rounded_once(world, make):
    given = [_params(rank, torch.bfloat16) for rank in range(4)]
    for rank, found in enumerate(world(4, _in_16_bits, make)):
        mixing = Mixing.complete(4) if make is _complete else Mixing.one_peer(4)
        for x, column in zip(found, zip(*given, strict=True), strict=True):
            weights = mixing.at(0)[rank]
            mean = sum(w * g.detach().double() for w, g in zip(weights, column, strict=True))
            torch.testing.assert_close(x, mean.to(x.dtype), rtol=0, atol=0)


def test_push_sum_finds_the_mean_although_rows_do_not_sum_to_one(world):
    told = world(3, _mixed, _push, 40)
    for values, _, _ in told:
        torch.testing.assert_close(
            [v.double() for v in values],
            _mean([_params(r) for r in range(3)]),
            rtol=1e-5,
            atol=1e-5,
        )


def _close(group: Group, dtype: torch.dtype) -> float:
    param = nn.Parameter(torch.zeros(1, dtype=dtype))
    method = _complete([param], group)
    with torch.no_grad():
        param.add_(1 + group.rank * (2**-7 if param.is_floating_point() else 2**-7 * 1j))
    return method.consensus_distance()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_the_consensus_distance_may_be_less_than_16_bits_can_tell(world, dtype):
    assert world(2, _close, dtype) == [2**-8] * 2


def test_the_consensus_distance_is_an_event_of_few_names(world):
    (_, distances, events), *_ = world(2, _mixed, _complete, 1)
    above = math.ceil(math.log2(distances[0]))
    assert events[0] == (0, f"consensus distance under 2^{above}")
    assert events[1] == (1, "consensus distance 0.0") or events[1][1].startswith(
        "consensus distance under 2^-"
    )


# Training.


def _target(rank: int) -> torch.Tensor:
    return torch.randn(6, generator=torch.Generator().manual_seed(50 + rank))


def _train(group: Group, kind: str, steps: int, dtype: torch.dtype) -> list[float]:
    """Each rank pulls towards a target of its own; together they find the mean of targets."""
    param = nn.Parameter(torch.zeros(6, dtype=dtype))
    optimizer = torch.optim.SGD([param], lr=0.2)
    makers = {
        "ring": lambda: DPSGD([param], Mixing.ring(group.size), group),
        "one_peer": lambda: DPSGD([param], Mixing.one_peer(group.size), group),
        "push": lambda: PushSum([param], Mixing.exponential(group.size), group),
        "directed": lambda: PushSum([param], Mixing.of([PUSH]), group),
    }
    method = makers[kind]()
    for step in range(steps):
        for options in optimizer.param_groups:
            options["lr"] = 0.5 / (1 + 0.2 * step)
        optimizer.zero_grad()
        (param.float() - _target(group.rank)).square().sum().mul(0.5).backward()
        optimizer.step()
        method.mix()
    return param.tolist()


@pytest.mark.parametrize("kind", ["ring", "one_peer", "push", "directed"])
def test_ranks_find_the_minimum_of_the_sum_of_their_losses(world, kind):
    size = 3 if kind == "directed" else 4
    best = torch.stack([_target(rank) for rank in range(size)]).mean(0)
    for found in world(size, _train, kind, 150, torch.float32):
        torch.testing.assert_close(torch.tensor(found), best, rtol=0, atol=0.06)


def _on_a_complete_graph(group: Group) -> list[float]:
    param = nn.Parameter(torch.zeros(6))
    method = DPSGD([param], Mixing.complete(group.size), group)
    optimizer = torch.optim.SGD([param], lr=0.01)
    for _ in range(5):
        optimizer.zero_grad()
        (param - _target(group.rank)).pow(4).sum().backward()
        optimizer.step()
        method.mix()
    return param.tolist()


def test_a_complete_graph_trains_as_averaged_gradients_do(world):
    """x - lr g averaged is what one process gets from the mean of g, up to rounding."""

    param = nn.Parameter(torch.zeros(6))
    optimizer = torch.optim.SGD([param], lr=0.01)
    for _ in range(5):
        optimizer.zero_grad()
        (sum((param - _target(r)).pow(4).sum() for r in range(3)) / 3).backward()
        optimizer.step()
    for found in world(3, _on_a_complete_graph):
        torch.testing.assert_close(torch.tensor(found), param.detach())


def _paused(group: Group, make: Any, pause: int) -> list[float]:
    """Made anew after `pause` steps."""
    param = nn.Parameter(torch.zeros(6))
    method = make([param], group)
    for step in range(5):
        if step == pause:
            value, state = param.detach().clone(), method.state_dict()
            method = make([param], group)
            method.load_state_dict(state)
            with torch.no_grad():
                param.copy_(value)
        with torch.no_grad():
            param.add_(_target(group.rank))
        method.mix()
    return [*param.tolist(), getattr(method, "weight", 1.0)]


@pytest.mark.parametrize(("make", "size"), [(_push, 3), (_one_peer, 4)])
def test_mixing_goes_on_from_its_state(world, make, size):
    told = world(size, _paused, make, 3)
    assert told == world(size, _paused, make, -1)
    assert sum(found[-1] for found in told) == pytest.approx(size)


def _refused(group: Group, case: str) -> str:
    calls = {
        "size": lambda: DPSGD(_params(0), Mixing.ring(5), group),
        "rows": lambda: DPSGD(_params(0), Mixing.of([PUSH]), group),
        "columns": lambda: PushSum(_params(0), Mixing("bad", ((PUSH[0],) * 3,)), group),
        "matrix": lambda: DPSGD(_params(0), [[0.5, 0.5], [0.5, 0.5]], group),
        "name": lambda: PushSum(_params(0), "ring", group),
        "integers": lambda: adasum([torch.ones(2, dtype=torch.int32)], group),
    }
    try:
        calls[case]()
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("size", "is for 5 ranks, but the group has 3"),
        ("rows", "use PushSum"),
        ("columns", "columns that sum to 1"),
        ("matrix", "Mixing.of([matrix]), or Mixing.ring(group.size)"),
        ("name", "mixing of PushSum must be a Mixing, got 'ring'"),
        ("integers", "got torch.int32"),
    ],
)
def test_what_does_not_fit_is_refused(world, case, words):
    assert all(words in text for text in world(3, _refused, case))


def _pairs(params: Any, group: Group) -> ADPSGD:
    return ADPSGD(params, group)


def _refused_before_all_else(group: Group) -> list[int]:
    """Rank 0 alone is wrong, and says so without a message."""
    if not group.rank:
        with pytest.raises(ConfigError):
            DPSGD(_params(0), "ring", group)
    return group.all_gather(torch.tensor([group.rank])).tolist()


def test_what_is_no_mixing_is_refused_before_anything_is_sent(world):
    assert world(2, _refused_before_all_else) == [[0, 1]] * 2


KEEPS = [[0.9, 0.1], [0.1, 0.9]]
HALVES = [[0.5, 0.5], [0.5, 0.5]]
PARTED: dict[str, list[Any]] = {
    "weights": [lambda p, g: DPSGD(p, Mixing.of([HALVES if g.rank else KEEPS]), g)],
    "graphs": [_ring, _one_peer],
    "methods": [_one_peer, _push_to_one],
    "pairs": [_pairs, _one_peer],
    "sizes": [_ring, lambda p, g: DPSGD(p, Mixing.ring(5), g)],
}


def _parted(group: Group, case: str) -> str:
    made = PARTED[case]
    with pytest.raises(MismatchError) as caught:
        made[group.rank % len(made)](_params(0), group)
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("weights", ["weights='"]),
        (
            "graphs",
            ["mixing=Mixing('ring', 4 ranks, 1 in a turn)", "Mixing('one_peer', 4 ranks, 2"],
        ),
        ("methods", ["method='DPSGD'", "method='PushSum'"]),
        ("pairs", ["method='ADPSGD'", "rank 0  (none)"]),
        ("sizes", ["Mixing('ring', 4 ranks", "Mixing('ring', 5 ranks"]),
    ],
)
def test_ranks_that_would_not_mix_alike_are_told_when_it_is_made(world, case, words):
    for text in world(2 if case == "weights" else 4, _parted, case):
        assert "arguments differ between ranks" in text
        assert all(word in text for word in words)


def _unfrozen(group: Group, make: Any) -> str:
    params = [nn.Parameter(torch.ones(n), requires_grad=n != 3) for n in (2, 3)]
    method = make([{"params": params}], group)
    method.mix()
    params[1].requires_grad_(True)
    try:
        method.mix()
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("make", [_ring, _push, _pairs], ids=lambda make: make.__name__)
def test_parameters_that_would_never_be_mixed_are_refused(world, make):
    assert "of shapes (3,) have been unfrozen" in world(1, _unfrozen, make)[0]


# AD-PSGD.


def _asynchronous(group: Group, steps: list[int]) -> tuple[list[float], float, str]:
    param = nn.Parameter(torch.zeros(6, dtype=torch.float64))
    other = nn.Parameter(torch.zeros(70_000))  # more than is sent at once
    said = ""
    with ADPSGD([param, other], group, seed=3) as method:
        with torch.no_grad():
            param.copy_(_target(group.rank))
            other.fill_(group.rank)
        for _ in range(steps[group.rank]):
            method.mix()
    try:
        method.mix()
    except StaleError as error:
        said = str(error)
    assert bool((other == other[0]).all())
    return param.tolist(), method.consensus_distance(), said


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_pairs_keep_the_mean_however_many_steps_each_rank_takes(world, size):
    steps = [12, 3, 7, 20, 1][:size]
    told = world(size, _asynchronous, steps)
    mean = torch.tensor([found for found, _, _ in told], dtype=torch.float64).mean(0)
    expected = torch.stack([_target(r).double() for r in range(size)]).mean(0)
    torch.testing.assert_close(mean, expected)
    assert all("mix() was called after finish()" in said for _, _, said in told)
    if size == 2:
        assert told[0][0] == told[1][0]


def _asynchronously_trained(group: Group) -> list[float]:
    """Each rank knows a part of the solution only."""
    param = nn.Parameter(torch.zeros(6, dtype=torch.float64))
    known = torch.tensor([float(i % group.size == group.rank) for i in range(6)])
    with ADPSGD([param], group) as method:
        while method.num_mixed < 100 if method.active else method.num_asking:
            with torch.no_grad():
                param.sub_(0.5 * known * (param - _target(0)))
            method.mix()
    return param.tolist()


@pytest.mark.parametrize("size", [2, 4])
def test_pairs_find_the_solution_of_which_each_rank_knows_a_part(world, size):
    for found in world(size, _asynchronously_trained):
        torch.testing.assert_close(torch.tensor(found), _target(0), rtol=0, atol=1e-3)


def _loses_one(group: Group, victim: int) -> str:
    method = ADPSGD([nn.Parameter(torch.zeros(4))], group)
    try:
        while method.active or method.num_asking:
            if group.rank == victim and method.num_mixed == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            method.mix()
    except PeerLostError as error:
        return str(error)
    return ""


@pytest.mark.procs
@pytest.mark.parametrize("victim", [0, 1])
def test_a_lost_rank_is_named_by_who_waits_for_it(pool, victim):
    with pytest.raises(RankDiedError) as caught:
        pool.run(2, _loses_one, victim)
    assert caught.value.answers[1 - victim].result.startswith(f"rank {victim} (pid ")


# Adasum.


def _sum(group: Group, vectors: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    own = [x.clone() for x in vectors[group.rank]]
    adasum(own, group)
    return own


def _adasum_by_hand(vectors: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    def pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        dot = (a * b.conj()).sum().real
        return (1 - dot / (2 * a.abs().square().sum())) * a + (
            1 - dot / (2 * b.abs().square().sum())
        ) * b

    power = 1 << (len(vectors).bit_length() - 1)
    level = [
        [pair(a, b) for a, b in zip(row, vectors[r + power], strict=True)]
        if r + power < len(vectors)
        else row
        for r, row in enumerate(vectors[:power])
    ]
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=True)
        level = [[pair(a, b) for a, b in zip(one, two, strict=True)] for one, two in pairs]
    return level[0]


def _vectors(size: int, dtype: torch.dtype = torch.float64) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.complex128 if dtype.is_complex else torch.float64
    return [
        [torch.randn(s, generator=generator, dtype=drawn).to(dtype) for s in ((4, 3), (5,))]
        for _ in range(size)
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8])
def test_adasum_is_the_tree_of_its_formula_for_any_number_of_ranks(world, size, dtype):
    vectors = _vectors(size, dtype)
    told = world(size, _sum, vectors)
    for found in told:
        assert all(torch.equal(a, b) for a, b in zip(found, told[0], strict=True))
    torch.testing.assert_close(told[0], _adasum_by_hand(vectors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [3, 4])
def test_adasum_of_equal_tensors_is_the_tensor(world, size, dtype):
    vectors = [_vectors(1, dtype)[0]] * size
    for found in world(size, _sum, vectors):
        torch.testing.assert_close(found, vectors[0])


@pytest.mark.parametrize("size", [3, 4])
def test_adasum_of_orthogonal_tensors_is_their_sum_whatever_the_order(world, size):
    vectors = [[torch.eye(4)[rank] * (rank + 2), torch.zeros(2)] for rank in range(size)]
    expected = [sum(v[0] for v in vectors), torch.zeros(2)]
    for order in (vectors, vectors[::-1]):
        for found in world(size, _sum, order):
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_adasum_takes_products_that_32_bits_cannot_hold(world):
    vectors = [[torch.tensor([1e25, 2e25])]] * 2
    for found in world(2, _sum, vectors):
        torch.testing.assert_close(found, vectors[0])


def test_adasum_of_two_does_not_depend_on_their_order(world):
    vectors = _vectors(2)
    torch.testing.assert_close(world(2, _sum, vectors), world(2, _sum, vectors[::-1]))


def _hooked(group: Group, cap_mb: float) -> list[torch.Tensor]:
    model = nn.Module()
    model.a = nn.Parameter(torch.zeros(4, 3, dtype=torch.float64))
    model.b = nn.Parameter(torch.zeros(5, dtype=torch.float64))
    a, b = _vectors(3)[group.rank]
    model.forward = lambda scale: scale * ((model.a * a).sum() + (model.b * b).sum())
    wrapped = DistributedDataParallel(model, process_group=group, bucket_cap_mb=cap_mb)
    wrapped.register_comm_hook(None, adasum_hook)
    wrapped(1.0).backward()
    return [model.a.grad.clone(), model.b.grad.clone()]


def _complex(group: Group) -> list[complex]:
    weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    model = nn.Module()
    model.weight = weight
    given = torch.tensor([1.0 + 0j, 1j] if group.rank else [0j, 1.0 + 0j])
    model.forward = lambda: (weight * given.conj()).sum().real
    wrapped = DistributedDataParallel(model, process_group=group)
    wrapped.register_comm_hook(None, adasum_hook)
    wrapped().backward()
    return weight.grad.tolist()


def test_complex_gradients_are_vectors_of_their_parts(world):
    """Those of the two ranks are orthogonal."""
    assert world(2, _complex) == [[1.0 + 0j, 1.0 + 1j]] * 2


@pytest.mark.parametrize("cap_mb", [25.0, 1e-5], ids=["one bucket", "many buckets"])
def test_gradients_are_summed_by_adasum_tensor_by_tensor(world, cap_mb):
    for found in world(3, _hooked, cap_mb):
        torch.testing.assert_close(found, _adasum_by_hand(_vectors(3)))
