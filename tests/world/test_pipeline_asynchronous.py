"""Asynchronous pipelines train as one process with the same staleness does, bit by bit."""

from __future__ import annotations

from collections import Counter, OrderedDict
from functools import partial

import pytest
import torch
from torch import nn

from braid.comm import Group
from braid.comm.autograd import MATMULS
from braid.errors import CommError, ConfigError
from braid.launch.observe.timeline import read_timelines
from braid.launch.observe.weight_versions import version_rows
from braid.parallel.graph import capture
from braid.parallel.pipeline.asynchronous import AsynchronousPipeline, Emulation, stale_lr_scale
from braid.programs.schedule.pipeline import asynchronous, staleness

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.01)


def layers() -> nn.Sequential:
    with torch.device("meta"):  # ranks on threads share the default generator
        model = nn.Sequential(
            nn.Linear(6, 8),
            nn.BatchNorm1d(8),
            nn.Tanh(),
            nn.Linear(8, 8),
            nn.LayerNorm(8),
            nn.Dropout(0.2),
            nn.ReLU(inplace=True),
            nn.Linear(8, 3),
        )
    model.to_empty(device="cpu")
    model[1].reset_running_stats()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.uniform_(-0.5, 0.5, generator=generator)
    return model


def microbatches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = [2 + i % 3 for i in range(count)]
    return [
        (torch.randn(n, 6, generator=generator), torch.randint(0, 3, (n,), generator=generator))
        for n in rows
    ]


def lower(pipeline):
    """Rates that fall from step to step, and begin lower where gradients are old."""

    def before_step(number, optimizer) -> None:
        scale = stale_lr_scale(pipeline.age, number, 6)
        optimizer.param_groups[0]["lr"] = 0.05 / (1 + number) * scale

    return before_step


def _train(group: Group, counts, rounds, options):
    options = {"make_optimizer": SGD, **options}
    pipeline = AsynchronousPipeline(layers(), group=group, replicas=counts, **options)
    before_step = lower(pipeline)
    losses = [
        pipeline.train_on(
            iter(microbatches(n)),
            count=n,
            loss=nn.functional.cross_entropy,
            before_step=before_step,
        )
        for n in rounds
    ]
    state = {name: x.clone() for name, x in pipeline.state_dict().items()}
    is_first = group.rank == sum(counts[: pipeline.stage])
    return torch.cat(losses), state, is_first, pipeline.staleness, pipeline.most_live


def emulated(counts, rounds, options):
    model = layers()
    options = {"make_optimizer": SGD, **options}
    for name in ("recompute", "recompute_policy"):
        options.pop(name, None)
    emulation = Emulation(model, replicas=counts, **options)
    before_step = lower(emulation)
    losses = [
        emulation.train_on(
            microbatches(n), loss=nn.functional.cross_entropy, before_step=before_step
        )
        for n in rounds
    ]
    return torch.cat(losses), model.state_dict()


@pytest.mark.parametrize(
    ("counts", "rounds", "options"),
    [
        ((1,), [3], {}),
        ((1, 1), [6, 1, 3], {}),
        ((1, 1), [6], {"make_optimizer": ADAMW}),
        ((1, 1), [5, 4], {"recompute": "always"}),
        ((1, 1), [5, 4], {"recompute": "always", "recompute_policy": MATMULS}),
        ((1, 1, 1), [7], {}),
        ((1, 1, 1), [7, 2], {"versions": "vertical_sync"}),
        ((1, 1, 1), [9, 4], {"versions": "2bw", "every": 3}),
        ((1, 1), [7], {"every": 2}),
        ((2, 1), [7], {}),
        ((1, 2), [6], {"balance": (3, 5)}),
        ((3, 1), [7], {"every": 2}),
        ((2, 2), [8], {"versions": "2bw", "every": 2}),
        ((2, 2), [9], {"versions": "vertical_sync"}),
        ((3, 1), [1], {}),
        ((2, 1), [7, 1], {}),
    ],
)
def test_training_has_the_bits_of_one_process_with_the_same_staleness(
    world, counts, rounds, options
):
    expected, state = emulated(counts, rounds, options)
    found, ages = {}, []
    for losses, own, is_first, own_ages, _ in world(sum(counts), _train, counts, rounds, options):
        assert torch.equal(losses, expected)
        if is_first:
            found |= own
            ages.append(Counter())
        ages[-1] += own_ages
    rule = {name: options[name] for name in ("versions", "every") if name in options}
    programs = [asynchronous(counts, n, **rule) for n in rounds]
    for stage, measured in enumerate(ages):
        assert measured == sum((staleness(one)[stage] for one in programs), Counter())
    assert found.keys() == state.keys()
    different = [name for name in state if not torch.equal(found[name], state[name])]
    assert not different


def test_staleness_and_live_versions_are_those_of_the_paper(world):
    for stage, (_, _, _, ages, live) in enumerate(world(3, _train, (1, 1, 1), [12], {})):
        age = 2 - stage
        assert max(ages) == age
        assert ages[age] == 12 - age
        assert live == age + 1
    options = {"versions": "2bw", "every": 3}
    for _, _, _, ages, live in world(3, _train, (1, 1, 1), [12], options):
        assert ages == {0: 3, 1: 9}
        assert live <= 2


@pytest.mark.parametrize(
    ("counts", "options", "ages"),
    [
        ((1, 1, 1), {}, [2, 1, 0]),
        ((1, 1, 1), {"versions": "vertical_sync"}, [2, 2, 2]),
        ((2, 2), {"versions": "2bw", "every": 2}, [1, 1]),
        ((3, 1), {"every": 2}, [1, 0]),
    ],
)
def test_a_stage_knows_the_age_of_its_gradients(world, counts, options, ages):
    emulation = Emulation(layers(), SGD, replicas=counts, **options)
    for emulation.stage, age in enumerate(ages):
        assert emulation.age == age
    of_ranks = [age for age, own in zip(ages, counts, strict=True) for _ in range(own)]
    assert world(sum(counts), _age, counts, options) == of_ranks


def _age(group: Group, counts, options) -> int:
    pipeline = AsynchronousPipeline(layers(), SGD, group=group, replicas=counts, **options)
    return pipeline.age


def _record(group: Group, counts):
    _, _, _, ages, live = _train(group, counts, [9], {})
    return version_rows(read_timelines([group.context.events.ring])), ages, live


def test_ages_and_versions_are_in_the_recording_of_each_rank(world):
    for rank, (rows, ages, live) in enumerate(world(3, _record, (2, 1))):
        (row,) = rows
        assert (row.stage, row.num_gradients) == (rank // 2, ages.total())
        assert (row.max_age, row.max_versions) == (max(ages), live)
        assert row.mean_age == sum(age * n for age, n in ages.items()) / ages.total()


def test_staleness_matters():
    stale, _ = emulated((1, 1, 1), [9], {})
    fresh, _ = emulated((1,), [9], {})
    assert torch.equal(stale[0], fresh[0])
    assert not torch.equal(stale[3:], fresh[3:])


def _fail(group: Group):
    def loss(output, target):
        if len(target) == 4:
            raise ArithmeticError("no loss")
        return nn.functional.cross_entropy(output, target)

    pipeline = AsynchronousPipeline(layers(), SGD, group=group)
    pipeline.train_on(microbatches(6), loss=loss)


def _too_few(group: Group):
    pipeline = AsynchronousPipeline(layers(), SGD, group=group)
    pipeline.train_on(microbatches(2), loss=nn.functional.cross_entropy, count=3)


def _text(group: Group, train) -> str:
    with pytest.raises((CommError, ArithmeticError, ConfigError)) as raised:
        train(group)
    return str(raised.value)


@pytest.mark.parametrize(
    ("train", "text"),
    [(_fail, "no loss"), (_too_few, "the iterator ended after 2 of 3 micro-batches")],
)
def test_a_failure_is_named_on_all_ranks(world, train, text):
    for own in world(2, _text, train):
        assert text in own


def _refused(group: Group) -> list[str]:
    shared = layers()
    shared[3].weight = nn.Parameter(torch.ones(8, 8))
    shared[7].weight = shared[3].weight
    tries = [
        lambda: AsynchronousPipeline(shared, SGD, group=group, balance=(5, 3)),
        lambda: AsynchronousPipeline(layers(), SGD, group=group, replicas=(2, 1)),
        lambda: AsynchronousPipeline(layers(), SGD, group=group, versions="2bw"),
        lambda: AsynchronousPipeline(layers(), SGD, group=group, versions="none"),
        lambda: AsynchronousPipeline(layers(), SGD, group=group, balance=(7, 2)),
        lambda: AsynchronousPipeline(layers(), SGD, group=group).train_on(
            iter(microbatches(2)), loss=nn.functional.cross_entropy
        ),
        lambda: AsynchronousPipeline(layers(), SGD, group=group).train_on(
            microbatches(2 + group.rank), loss=nn.functional.cross_entropy
        ),
        lambda: AsynchronousPipeline(layers(), SGD, group=group)(torch.ones(1)),
        lambda: AsynchronousPipeline(
            [nn.Tanh(), nn.Tanh(), *layers()], SGD, group=group, balance=(2, 8)
        ),
        lambda: AsynchronousPipeline(
            nn.Sequential(OrderedDict(optimizer=nn.Tanh(), own=layers())), SGD, group=group
        ),
    ]
    return [_text(group, lambda _, call=call: call()) for call in tries]


def test_mistakes_are_named(world):
    for texts in world(2, _refused):
        words = [
            "share a parameter, 3.weight and 7.weight",
            "3 ranks, but the group has 2",
            "every to be at least 2 micro-batches",
            "versions must be one of stash, vertical_sync, 2bw, got 'none'",
            "balance must be 2 numbers",
            "has no length",
            "micro-batches, or none, [2, 3]",
            "cannot be called",
            "stage 0 has no parameters to train",
            "layers cannot have the names optimizer",
        ]
        assert [word in text for word, text in zip(words, texts, strict=True)] == [True] * 10, texts


def _evaluate(group: Group, counts, rows) -> float:
    pipeline = AsynchronousPipeline(layers(), SGD, group=group, replicas=counts).eval()
    batch, target = (x[:rows] for x in microbatches(3)[2])
    return pipeline.evaluate(batch, target, loss=nn.functional.cross_entropy).item()


@pytest.mark.parametrize(("counts", "rows"), [((1, 1), 4), ((2, 1), 4), ((2, 1), 1)])
def test_evaluation(world, counts, rows):
    batch, target = (x[:rows] for x in microbatches(3)[2])
    expected = nn.functional.cross_entropy(layers().eval()(batch), target).item()
    assert world(sum(counts), _evaluate, counts, rows) == [pytest.approx(expected)] * sum(counts)


class Skipping(nn.Module):
    """A model that is no row of layers: its input is used again at the end."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))
        self.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.uniform_(-0.5, 0.5, generator=generator)
        self.second.weight.requires_grad = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        return (self.third(torch.tanh(self.second(hidden))) + hidden * x)[:, :3]


def _train_captured(group: Group):
    model = Skipping()
    graph = capture(model, torch.ones(4, 6))
    pipeline = AsynchronousPipeline(graph, SGD, group=group)
    losses = pipeline.train_on(microbatches(5), loss=nn.functional.cross_entropy)
    return losses, {name: x.clone() for name, x in pipeline.state_dict().items()}


def test_a_captured_model_with_skips_and_frozen_weights(world):
    model, states, losses = Skipping(), [], []
    stages = ([*model.first.parameters(), *model.second.parameters()], model.third.parameters())
    optimizers = [SGD(params) for params in stages]
    for i, (x, target) in enumerate(microbatches(5)):
        old = Skipping()
        old.load_state_dict(model.state_dict())
        states.append({name: value.clone() for name, value in model.state_dict().items()})
        stale = states[max(0, i - 1)]  # stage 0 is one step behind
        of_stage_0 = {name: x for name, x in stale.items() if not name.startswith("third")}
        old.load_state_dict(of_stage_0, strict=False)
        loss = nn.functional.cross_entropy(old(x), target)
        loss.backward()
        losses.append(loss.item())
        for param, source in zip(model.parameters(), old.parameters(), strict=True):
            param.grad = source.grad
        for optimizer in optimizers:
            optimizer.step()
    own: dict[str, torch.Tensor] = {}
    for values, state in world(2, _train_captured):
        torch.testing.assert_close(values, torch.tensor(losses, dtype=torch.float64))
        own |= state
    torch.testing.assert_close(own, dict(model.state_dict()))
    assert torch.equal(own["second.weight"], Skipping().second.weight)


def _loads_the_state_of_rank_0(group: Group) -> str:
    model = nn.Sequential(
        *(nn.utils.skip_init(nn.Linear, 4, 4) for _ in range(2))  # ranks share the generator
    )
    for param in model.parameters():
        param.data.fill_(0.1)
    pipeline = AsynchronousPipeline(model, SGD, group=group)
    data = [(torch.ones(2, 4), torch.ones(2, 4))] * 4
    pipeline.train_on(iter(data), count=4, loss=nn.functional.mse_loss)
    state = group.objects.broadcast(pipeline.optimizer.state_dict(), allow_pickle=True)
    try:
        pipeline.optimizer.load_state_dict(state)
    except ConfigError as exc:
        return str(exc)
    return ""


def test_a_state_of_another_stage_is_refused(world):
    first, second = world(2, _loads_the_state_of_rank_0)
    assert not first
    assert "has the part 'pipeline stage 0 of 2' of a model, but this rank" in second
