"""Three programs in the form of torch's examples: agents with observers, and a batching server.

Each program has a function of a rank, which the processes of the program call. The first node
returns whether the program has given what one process gives, or whether it has learned.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from torch import nn, optim
from torch.distributions import Categorical
from torch.nn import functional
from torch_rpc_names import rpc

NUM_STEPS, GAMMA = 16, 0.2


class SignEnvironment:
    """Environment with the interface of gymnasium: action 1 if the state's first number is positive."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)

    def reset(self) -> np.ndarray[Any, Any]:
        self.state = self.random.standard_normal(2)
        return self.state

    def step(self, action: int) -> tuple[np.ndarray[Any, Any], Any, bool, dict[str, Any]]:
        reward = np.float64(action == (self.state[0] > 0))
        return self.reset(), reward, False, {}


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.affine1, self.affine2 = nn.Linear(2, 16), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.softmax(self.affine2(functional.relu(self.affine1(x))), dim=-1)


def _losses(log_probs: list[Any], rewards: list[float]) -> list[torch.Tensor]:
    total, returns = 0.0, []
    for reward in reversed(rewards):
        total = reward + GAMMA * total
        returns.insert(0, total)
    values = torch.tensor(returns)
    values = (values - values.mean()) / (values.std() + 1e-6)
    return [-log_prob * value for log_prob, value in zip(log_probs, values, strict=True)]


# -- rl: observers ask the agent for each action


def _call_method(method: Any, rref: Any, *args: Any, **kwargs: Any) -> Any:
    return method(rref.local_value(), *args, **kwargs)


def _remote_method(method: Any, rref: Any, *args: Any, **kwargs: Any) -> Any:
    return rpc.rpc_sync(rref.owner(), _call_method, args=[method, rref, *args], kwargs=kwargs)


class Observer:
    def __init__(self) -> None:
        self.id = rpc.get_worker_info().id
        self.env = SignEnvironment()

    def run_episode(self, agent_rref: Any, n_steps: int) -> None:
        state = self.env.reset()
        for _ in range(n_steps):
            action = _remote_method(Agent.select_action, agent_rref, self.id, state)
            state, reward, _, _ = self.env.step(action)
            _remote_method(Agent.report_reward, agent_rref, self.id, reward)


class Agent:
    def __init__(self, names: list[str]) -> None:
        self.agent_rref = rpc.RRef(self)
        self.policy = Policy()
        self.optimizer = optim.Adam(self.policy.parameters(), lr=5e-2)
        self.ob_rrefs, self.rewards, self.saved_log_probs = [], {}, {}
        for name in names:
            ob_info = rpc.get_worker_info(name)
            self.ob_rrefs.append(rpc.remote(ob_info, Observer))
            self.rewards[ob_info.id], self.saved_log_probs[ob_info.id] = [], []

    def select_action(self, ob_id: int, state: np.ndarray[Any, Any]) -> int:
        m = Categorical(self.policy(torch.from_numpy(state).float().unsqueeze(0)))
        action = m.sample()
        self.saved_log_probs[ob_id].append(m.log_prob(action))
        return action.item()

    def report_reward(self, ob_id: int, reward: Any) -> None:
        self.rewards[ob_id].append(reward)

    def run_episode(self, n_steps: int) -> None:
        futs = [
            rpc.rpc_async(
                ob_rref.owner(),
                _call_method,
                args=(Observer.run_episode, ob_rref, self.agent_rref, n_steps),
            )
            for ob_rref in self.ob_rrefs
        ]
        for fut in futs:
            fut.wait()

    def finish_episode(self) -> float:
        mean = float(np.mean([np.mean(rewards) for rewards in self.rewards.values()]))
        losses: list[torch.Tensor] = []
        for ob_id, rewards in self.rewards.items():
            losses += _losses(self.saved_log_probs[ob_id], rewards)
            self.rewards[ob_id], self.saved_log_probs[ob_id] = [], []
        self.optimizer.zero_grad()
        torch.cat(losses).sum().backward()
        self.optimizer.step()
        return mean


def rl(rank: int) -> bool:
    """Learn in node 0 what nodes 1 and 2 observe; world size 3."""
    result = True
    if rank == 0:
        rpc.init_rpc("agent", rank=rank, world_size=3)
        agent = Agent(["observer1", "observer2"])
        means = []
        for _ in range(25):
            agent.run_episode(NUM_STEPS)
            means.append(agent.finish_episode())
        result = sum(means[-5:]) / 5 > 0.75
    else:
        rpc.init_rpc(f"observer{rank}", rank=rank, world_size=3)
    rpc.shutdown()
    return result


# -- batch/parameter_server: a step once all trainers have sent gradients; the answer is the model


class BatchUpdateParameterServer:
    def __init__(self, batch_update_size: int) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
        self.lock = threading.Lock()
        self.future_model: torch.futures.Future[nn.Module] = torch.futures.Future()
        self.batch_update_size = batch_update_size
        self.curr_update_size = 0
        self.optimizer = optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p)

    def get_model(self) -> nn.Module:
        return self.model

    @staticmethod
    @rpc.functions.async_execution
    def update_and_fetch_model(ps_rref: Any, grads: list[torch.Tensor]) -> Any:
        self = ps_rref.local_value()
        with self.lock:
            self.curr_update_size += 1
            for p, g in zip(self.model.parameters(), grads, strict=True):
                p.grad += g
            fut = self.future_model
            if self.curr_update_size >= self.batch_update_size:
                for p in self.model.parameters():
                    p.grad /= self.batch_update_size
                self.curr_update_size = 0
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=False)
                fut.set_result(self.model)
                self.future_model = torch.futures.Future()
        return fut


def _batches(name: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(int(name[-1]))
    return [(torch.rand(6, 3), torch.rand(6, 2)) for _ in range(4)]


class Trainer:
    def __init__(self, ps_rref: Any) -> None:
        self.ps_rref, self.loss_fn = ps_rref, nn.MSELoss()

    def train(self) -> None:
        m = self.ps_rref.rpc_sync().get_model().cpu()
        for inputs, labels in _batches(rpc.get_worker_info().name):
            self.loss_fn(m(inputs), labels).backward()
            m = rpc.rpc_sync(
                self.ps_rref.owner(),
                BatchUpdateParameterServer.update_and_fetch_model,
                args=(self.ps_rref, [p.grad for p in m.cpu().parameters()]),
            ).cpu()


def run_trainer(ps_rref: Any) -> None:
    Trainer(ps_rref).train()


def batch_parameter_server(rank: int) -> bool:
    """Train in nodes 1 and 2, served by node 0; world size 3."""
    result = True
    if rank == 0:
        rpc.init_rpc("ps", rank=rank, world_size=3)
        trainers = ["trainer1", "trainer2"]
        server = BatchUpdateParameterServer(2)
        ps_rref = rpc.RRef(server)
        torch.futures.wait_all(
            [rpc.rpc_async(name, run_trainer, args=(ps_rref,)) for name in trainers]
        )
        alone = BatchUpdateParameterServer(2)
        for batches in zip(*map(_batches, trainers), strict=True):
            alone.optimizer.zero_grad()
            for inputs, labels in batches:
                (functional.mse_loss(alone.model(inputs), labels) / 2).backward()
            alone.optimizer.step()
        pairs = zip(server.model.parameters(), alone.model.parameters(), strict=True)
        result = all(torch.allclose(a, b, atol=1e-5) for a, b in pairs)
    else:
        rpc.init_rpc(f"trainer{rank}", rank=rank, world_size=3)
    rpc.shutdown()
    return result


# -- batch/reinforce: one forward pass for the states of all observers


class BatchObserver:
    def __init__(self) -> None:
        self.id = rpc.get_worker_info().id - 1
        self.env = SignEnvironment()
        self.select_action = BatchAgent.select_action_batch

    def run_episode(self, agent_rref: Any, n_steps: int) -> list[Any]:
        state, ep_reward = self.env.reset(), 0.0
        rewards = torch.zeros(n_steps)
        for step in range(n_steps):
            args = (agent_rref, self.id, torch.tensor(state).float())
            action = rpc.rpc_sync(agent_rref.owner(), self.select_action, args=args)
            state, reward, _, _ = self.env.step(action)
            rewards[step] = reward
            ep_reward += reward
        return [rewards, ep_reward]


class BatchAgent:
    def __init__(self, names: list[str]) -> None:
        self.agent_rref = rpc.RRef(self)
        self.policy = Policy()
        self.optimizer = optim.Adam(self.policy.parameters(), lr=5e-2)
        self.ob_rrefs = [rpc.remote(rpc.get_worker_info(name), BatchObserver) for name in names]
        self.states = torch.zeros(len(names), 2)
        self.saved_log_probs: list[torch.Tensor] = []
        self.future_actions: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self.lock = threading.Lock()
        self.pending_states = len(names)

    @staticmethod
    @rpc.functions.async_execution
    def select_action_batch(agent_rref: Any, ob_id: int, state: torch.Tensor) -> Any:
        self = agent_rref.local_value()
        self.states[ob_id].copy_(state)
        future_action = self.future_actions.then(lambda actions: actions.wait()[ob_id].item())
        with self.lock:
            self.pending_states -= 1
            if self.pending_states == 0:
                self.pending_states = len(self.ob_rrefs)
                m = Categorical(self.policy(self.states.clone()))
                actions = m.sample()
                self.saved_log_probs.append(m.log_prob(actions))
                future_actions = self.future_actions
                self.future_actions = torch.futures.Future()
                future_actions.set_result(actions.cpu())
        return future_action

    def run_episode(self, n_steps: int) -> float:
        futs = [
            ob_rref.rpc_async().run_episode(self.agent_rref, n_steps) for ob_rref in self.ob_rrefs
        ]
        rets = torch.futures.wait_all(futs)
        rewards = torch.stack([ret[0] for ret in rets]).t()
        ep_rewards = sum(ret[1] for ret in rets) / len(rets)
        log_probs = torch.stack(self.saved_log_probs)
        losses = [
            loss
            for ob_id in range(len(rets))
            for loss in _losses(list(log_probs[:, ob_id]), rewards[:, ob_id].tolist())
        ]
        self.saved_log_probs = []
        self.optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        self.optimizer.step()
        return float(ep_rewards) / n_steps


def batch_reinforce(rank: int) -> bool:
    """Learn in node 0 what nodes 1 and 2 observe; world size 3."""
    result = True
    if rank == 0:
        rpc.init_rpc("agent", rank=rank, world_size=3)
        agent = BatchAgent(["observer1", "observer2"])
        means = [agent.run_episode(NUM_STEPS) for _ in range(25)]
        result = sum(means[-5:]) / 5 > 0.75
    else:
        rpc.init_rpc(f"observer{rank}", rank=rank, world_size=3)
    rpc.shutdown()
    return result
