"""Actors and learners: over nodes that are threads, and as programs of processes."""

from __future__ import annotations

import re
from concurrent import futures
from pathlib import Path

import pytest
import torch
from rl_worlds import Corridor, Net
from torch import nn

from braid.cli.commands.roles import Roles
from braid.errors import CommTimeout, ConfigError, PeerLostError
from braid.rpc import RRef, rl, rpc_sync
from braid.rpc.current import acting_for
from braid.rpc.outcomes import RpcError
from braid.rpc.rl.losses import a3c_loss, impala_loss, join_unrolls
from example_runs import run_example
from rpc_nodes import nodes

OPTIONS = rl.LossOptions(discount=0.9)


def net_of(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def actor_of(policy: rl.Policy, number: int = 0, environments: int = 2) -> rl.Actor:
    worlds = [Corridor() for _ in range(environments)]
    return rl.Actor(worlds, policy, unroll_length=6, seed=number)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.5)


def test_an_unroll_has_the_steps_of_its_environments():
    class Scripted:
        version = 0

        def decide(self, _):
            self.version += 1
            return rl.Decision(torch.tensor([1, 0]), torch.zeros(2), self.version)

        def load(self, weights):
            del weights

    worlds = [Corridor(), Corridor(limit=3)]
    unroll = rl.Actor(worlds, Scripted(), unroll_length=6, seed=0).unroll()
    places = unroll.observations.argmax(-1).T.tolist()
    assert places == [[0, 1, 2, 3, 0, 1, 2], [0, 0, 0, 0, 0, 0, 0]]
    assert unroll.rewards.T.tolist() == [[0, 0, 0, 1, 0, 0], [0] * 6]
    assert unroll.terminated.nonzero().tolist() == [[3, 0]]
    assert unroll.truncated.nonzero().tolist() == [[2, 1], [5, 1]]
    assert unroll.last_observations.argmax(-1).tolist() == [0, 0]
    assert unroll.returns == (0.0, 1.0, 0.0)
    assert unroll.version == 1
    assert unroll.num_steps == 12


def test_last_observations_stay_with_their_episodes_when_unrolls_are_joined():
    """A truncated episode's value is that of its own last state, wherever it stands in a batch."""
    unrolls = [actor_of(rl.LocalPolicy(net_of(0), n), n, 3).unroll() for n in range(4)]
    for _ in range(2):
        unrolls += [actor_of(rl.LocalPolicy(net_of(1), 7), 0, 2).unroll()]
    net = net_of(2)
    for loss in (a3c_loss, impala_loss):
        parts = [loss(net, each, OPTIONS) * each.num_steps for each in unrolls]
        total = sum(each.num_steps for each in unrolls)
        torch.testing.assert_close(
            loss(net, join_unrolls(unrolls), OPTIONS), torch.stack(parts).sum() / total
        )


def test_actions_that_are_not_permitted_have_no_gradient_and_no_nan():
    class Masked(Net):
        def forward(self, x):
            logits, values = super().forward(x)
            return torch.cat([logits, torch.full_like(logits[..., :1], -torch.inf)], -1), values

    torch.manual_seed(0)
    net = Masked()
    unroll = actor_of(rl.LocalPolicy(net, 0)).unroll()
    impala_loss(net, unroll, OPTIONS).backward()
    assert unroll.actions.max() < 2
    assert all(p.grad.isfinite().all() for p in net.parameters())


# -- learners


def play_gradients(learner: RRef, number: int) -> None:
    rl.play_a3c(learner.rpc_sync(0), actor_of(rl.LocalPolicy(Net(), number), number), OPTIONS)


def play_unrolls(learner: RRef, number: int) -> None:
    rl.play_impala(learner.rpc_async(0), actor_of(rl.LocalPolicy(Net(), number), number))


def play_served(learner: RRef, number: int, server: RRef) -> None:
    rl.play_impala(learner.rpc_async(0), actor_of(rl.ServedPolicy(server), number))


def play_and_fail(learner: RRef, number: int) -> None:
    del learner, number
    msg = "the joystick is broken"
    raise OSError(msg)


def wait_for_ever(learner: RRef, number: int) -> None:
    while learner.rpc_sync(0).weights() is not None:
        pass


def two_actors(count: int = 3):
    return nodes(count, allowed_modules=["test_rl"])


def knows_the_way(net: nn.Module) -> bool:
    """Whether the policy goes right at each place."""
    return bool((net(torch.eye(5))[0].argmax(-1)[:4] == 1).all())


class Kept:
    """A policy that keeps the weights of all versions."""

    def __init__(self) -> None:
        self.by_version: dict[int, dict[str, torch.Tensor]] = {}

    def load(self, weights: rl.Weights) -> None:
        self.by_version[weights.version] = weights.state


def test_gradients_over_calls_give_the_weights_of_one_process():
    """One actor waits for each update, so that both runs have the same order."""
    kept, over_calls = Kept(), Kept()
    net = net_of(3)
    local = rl.A3CLearner(net, sgd(net), serving=[kept])
    actor = actor_of(rl.LocalPolicy(Net(), 0))
    local.join("here")
    with futures.ThreadPoolExecutor() as pool:
        playing = pool.submit(rl.play_a3c, local, actor, OPTIONS)
        while local.statistics.version < 20:
            local.step(30)
        local.stop()
        playing.result(30)
    with two_actors(2) as agents, acting_for(agents[0]):
        net = net_of(3)
        learner = rl.A3CLearner(net, sgd(net), serving=[over_calls])
        end = rl.lead(learner, ["w1"], play_gradients, is_over=lambda now: now.version >= 20)
    assert end.lags == {0: end.version}
    for version in range(1, 21):
        for name, value in kept.by_version[version].items():
            assert torch.equal(value, over_calls.by_version[version][name])


@pytest.mark.parametrize("algorithm", ["a3c", "impala", "replayed", "served"])
def test_two_actors_teach_the_way_through_a_corridor(algorithm):
    with two_actors() as agents, acting_for(agents[0]):
        net = net_of(0)
        server = rl.PolicyServer(net_of(0), max_size=2, seed=1)
        if algorithm == "a3c":
            learner: rl.Learner = rl.A3CLearner(net, sgd(net))
        else:
            replay = rl.Replay(8, seed=0) if algorithm == "replayed" else None
            again = 2 if replay else 0
            learner = rl.ImpalaLearner(
                net,
                sgd(net),
                OPTIONS,
                batch_size=2,
                replay=replay,
                num_replayed=again,
                serving=[server],
            )
        play = {"a3c": play_gradients, "served": play_served}.get(algorithm, play_unrolls)
        args = (RRef(server),) if algorithm == "served" else ()
        end = rl.lead(
            learner,
            ["w1", "w2"],
            play,
            args,
            is_over=lambda now: now.version > 3000 or (now.version > 50 and knows_the_way(net)),
            timeout_s=30,
        )
    assert knows_the_way(net)
    assert end.episodes > 0
    assert end.lost == ()
    assert sum(end.lags.values()) * 12 == end.steps
    if algorithm == "served":
        assert (
            0 < server.num_batches < sum(end.lags.values()) * 6 + 24
        )  # some were answered at once


def decide(server: RRef, observations: torch.Tensor) -> rl.Decision:
    return rl.ServedPolicy(server).decide(observations)


def test_a_served_policy_decides_as_the_module_does():
    net, observations = net_of(4), torch.eye(5)
    with two_actors(2) as agents, acting_for(agents[0]):
        server = rl.PolicyServer(net_of(4), max_size=1, seed=5)
        server.load(rl.weights_of(net, 9))
        served = rpc_sync("w1", decide, (RRef(server), observations))
    generator = torch.Generator().manual_seed(5)
    actions = torch.multinomial(net(observations)[0].softmax(-1), 1, generator=generator)
    assert torch.equal(served.actions, actions.squeeze(-1))
    assert served.version == 9


def test_an_exception_of_an_actor_ends_the_training_with_its_text():
    with (
        two_actors(2) as agents,
        acting_for(agents[0]),
        pytest.raises(OSError, match="the joystick is broken"),
    ):
        rl.lead(rl.A3CLearner(net := net_of(0), sgd(net)), ["w1"], play_and_fail, is_over=is_never)


def test_an_exception_is_raised_though_other_actors_play_on():
    learner = rl.ImpalaLearner(net := net_of(0), sgd(net), OPTIONS)
    learner.join("plays")
    learner.join("fails")
    actor = actor_of(rl.LocalPolicy(net_of(0), 0))
    learner.add(actor.unroll())
    learner.leave("fails", OSError("the joystick is broken"))
    with pytest.raises(OSError, match="the joystick is broken"):
        learner.step()


def test_a_policy_plays_with_the_first_weights_of_its_learner():
    learner = rl.A3CLearner(net := net_of(0), sgd(net))
    policy = rl.LocalPolicy(net_of(1), 0)
    policy.load(learner.weights())
    assert all(map(torch.equal, policy.module.parameters(), net.parameters()))
    policy.load(learner.weights(0))  # has no tensors


def test_actors_end_when_another_one_is_not_there():
    net = net_of(0)
    learner = rl.ImpalaLearner(net, sgd(net), OPTIONS)
    with two_actors(2) as agents, acting_for(agents[0]):
        with pytest.raises(RpcError, match="node 'nobody' does not exist"):
            rl.lead(learner, ["w1", "nobody"], play_unrolls, is_over=is_never)
        assert learner.wait_for_actors(0) == []


def is_never(now: rl.Statistics) -> bool:
    del now
    return False


def test_training_goes_on_without_a_lost_actor_and_ends_without_any():
    learner = rl.A3CLearner(net := net_of(0), sgd(net))
    for name in ("left", "right"):
        learner.join(name)
    learner.leave("left", PeerLostError("its process is gone"))
    actor = actor_of(rl.LocalPolicy(net_of(0), 0))
    unroll = actor.unroll()
    gradients = [torch.ones_like(p) for p in net.parameters()]
    weights = learner.apply(gradients, unroll.version, unroll.num_steps, unroll.returns)
    assert weights.version == 1
    assert learner.statistics.lost == ("left",)
    learner.leave("right", PeerLostError("its process is gone"))
    with pytest.raises(
        PeerLostError, match="all actors were lost, at version 1 of the weights: lost left, right"
    ):
        learner.step()


def test_an_actor_that_has_ended_is_not_missing_though_its_process_was_lost_before():
    learner = rl.A3CLearner(net := net_of(0), sgd(net))
    learner.join("w1")
    learner.leave("w1", PeerLostError("its process is gone"))
    assert learner.missing == ["w1"]
    learner.join("w1")  # a new process
    assert learner.missing == []
    learner.leave("w1")
    assert learner.missing == []


def play_when_called_again(learner: RRef, number: int) -> None:
    if not learner.rpc_sync().statistics_of_losses():
        msg = "its process is gone"
        raise PeerLostError(msg)
    play_unrolls(learner, number)


class LosesItsActor(rl.ImpalaLearner):
    def statistics_of_losses(self) -> int:
        return len(self.statistics.lost)


@pytest.mark.parametrize("restarts", ["0", "1"])
def test_training_waits_for_a_new_process_if_all_actors_are_lost(monkeypatch, restarts):
    monkeypatch.setenv("BRAID_RESTARTS", restarts)
    learner = LosesItsActor(net := net_of(0), sgd(net), OPTIONS, batch_size=1)

    def lead() -> rl.Statistics:
        is_over = lambda now: now.version >= 2  # noqa: E731
        return rl.lead(learner, ["w1"], play_when_called_again, is_over=is_over, timeout_s=30)

    with two_actors(2) as agents, acting_for(agents[0]):
        if restarts == "0":
            with pytest.raises(PeerLostError, match="all actors were lost"):
                lead()
        else:
            assert lead().lost == ("w1",)


def test_actors_that_send_nothing_are_named_at_the_deadline():
    net = net_of(0)
    learner = rl.ImpalaLearner(net, sgd(net))
    with (
        two_actors() as agents,
        acting_for(agents[0]),
        pytest.raises(CommTimeout, match=r"within 0\.2 s from w1, w2"),
    ):
        rl.lead(learner, ["w1", "w2"], wait_for_ever, is_over=is_never, timeout_s=0.2)


def test_answers_wait_while_too_many_unrolls_do():
    learner = rl.ImpalaLearner(net := net_of(0), sgd(net), OPTIONS, batch_size=1, capacity=2)
    actor = actor_of(rl.LocalPolicy(net_of(0), 0))
    answers = [learner.add(actor.unroll()) for _ in range(4)]
    assert [each.done() for each in answers] == [True, True, False, False]
    assert answers[0].wait() == rl.Weights(0, {})  # those it has already
    learner.step()
    assert [each.done() for each in answers] == [True, True, False, False]
    learner.step()
    assert [each.wait().version for each in answers] == [0, 0, 2, 2]
    waiting = [learner.add(actor.unroll()) for _ in range(3)]
    learner.stop()
    assert waiting[-1].wait() is None
    assert learner.weights() is None
    assert learner.statistics.lags == {0: 1, 1: 1}


def test_a_replay_keeps_the_newest_unrolls_and_draws_all_of_them():
    actor = actor_of(rl.LocalPolicy(net_of(0), 0))
    unrolls = [actor.unroll()._replace(version=number) for number in range(5)]
    replay = rl.Replay(3, seed=0)
    assert replay.sample(2) == []
    for each in unrolls:
        replay.add(each)
    assert len(replay) == 3
    assert {each.version for each in replay.sample(100)} == {2, 3, 4}


def test_choices_out_of_range_are_refused():
    net = net_of(0)
    wrong = [
        (lambda: rl.LossOptions(discount=1.5), "discount and lambda_ must be between 0 and 1"),
        (lambda: rl.Replay(0, 0), "must be at least 1 unroll, got 0"),
        (
            lambda: rl.ImpalaLearner(net, sgd(net), batch_size=3, capacity=2),
            "capacity at least batch_size",
        ),
        (lambda: rl.ImpalaLearner(net, sgd(net), num_replayed=1), "pass replay=Replay"),
        (lambda: rl.A3CLearner(net, sgd(net), max_grad_norm=0), "must be positive, got 0"),
        (lambda: rl.Actor([], rl.LocalPolicy(net, 0), unroll_length=1, seed=0), "0 environments"),
        (lambda: rl.make_environment("NoSuch-v1"), "cannot make the environment 'NoSuch-v1'"),
        (
            lambda: rl.A3CLearner(net, sgd(net)).apply([torch.zeros(2)], 0, 1, ()),
            r"parameters of shapes \[\(2,\)\], but the learner's",
        ),
        (
            lambda: rl.lead(rl.A3CLearner(net, sgd(net)), [], play_unrolls, is_over=is_never),
            "--role actor:2",
        ),
    ]
    for make, text in wrong:
        with pytest.raises(ConfigError, match=text):
            make()


def test_ranks_of_an_expendable_role_may_die():
    roles = Roles(role=("learner:1", "actor:2"), expendable_role=("actor",))
    assert roles.num_ranks(None) == 3
    assert roles.expendable == {1, 2}
    assert Roles(role=("learner:1", "actor:2")).expendable == frozenset()
    with pytest.raises(ConfigError, match="add --role player:COUNT"):
        Roles(role=("a:1",), expendable_role=("player",)).num_ranks(None)
    with pytest.raises(ConfigError, match="add --role a:COUNT"):
        Roles(expendable_role=("a",)).num_ranks(2)


# -- programs

ROLES = ("--role", "learner:1", "--role", "actor:2", "--expendable-role", "actor")


@pytest.mark.launcher
def test_a_killed_actor_costs_its_unfinished_unroll_only(tmp_path):
    shown = run_example(str(Path(__file__).with_name("rl_job.py")), tmp_path / "run", *ROLES)
    assert "lost ('actor:1',), learned from 40 unrolls or more: True" in shown
    assert "2 whole unrolls of actor:1" in shown


@pytest.mark.launcher
def test_a_new_process_plays_instead_of_a_killed_actor(tmp_path):
    job = str(Path(__file__).with_name("rl_job.py"))
    shown = run_example(job, tmp_path / "run", *ROLES, "--restarts", "1", script=("again",))
    assert "lost ('actor:1',), learned from 40 unrolls or more: True" in shown
    whole = re.search(r"(\d+) whole unrolls of actor:1", shown)
    assert whole is not None
    assert int(whole.group(1)) > 2
    assert "a new process began with newer weights: True" in shown


@pytest.mark.launcher
def test_two_learners_lead_their_actors_and_have_the_same_weights(tmp_path):
    job = str(Path(__file__).with_name("rl_learners_job.py"))
    shown = run_example(job, tmp_path / "run", "--role", "learner:2", "--role", "actor:2")
    assert "both ended at version 20 or later: True, with the same weights: True" in shown


@pytest.mark.launcher
@pytest.mark.proof
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("actors", [2, 4])
@pytest.mark.parametrize("algorithm", ["impala", "a3c"])
def test_actors_solve_the_pole(tmp_path, algorithm, actors, seed):
    shown = run_example(
        "rl_cartpole.py",
        tmp_path / "run",
        *("--role", "learner:1", "--role", f"actor:{actors}"),
        script=("--algorithm", algorithm, "--seed", str(seed)),
        timeout_s=600,
    )
    assert f"by {algorithm}" in shown
    *_, (last, new) = re.findall(r"the last 100 episodes ([\d.]+), new ([\d.]+)", shown)
    assert min(float(last), float(new)) >= 475


@pytest.mark.launcher
@pytest.mark.proof
def test_the_league_teaches_not_to_lose(tmp_path):
    shown = run_example("rl_league.py", tmp_path / "run", *ROLES, timeout_s=600)
    *_, last = re.findall(r"RandomPlayer .*", shown)
    won, _, lost, _, drawn, _ = map(int, re.findall(r"\d+", last))
    assert won >= 180
    assert lost <= 5
    assert drawn >= 140  # of 200 games that nobody can win
