"""Reinforcement learning as in PyTorch's tutorial: one RPC per action and one RPC per reward.

An implementation of https://docs.pytorch.org/tutorials/intermediate/rpc_tutorial.html: REINFORCE with a 4-128-2 policy
and dropout 0.6. Every observer runs an episode, then the agent updates once. Errors of the tutorial are corrected,
because this does not affect the speed: returns are separate for each observer, the discount is 0.99, and episodes are
not truncated.

    python baselines/rl.py SECONDS [--observers 2]

The last line is JSON: steps per second, best mean return, and seconds until solved.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
import warnings

import gymnasium
import torch
from torch import Tensor, nn
from torch.distributed import rpc
from torch.multiprocessing.spawn import spawn

#: CartPole-v1 is solved when the mean return of this number of episodes reaches this threshold.
THRESHOLD, NUM_EPISODES = 475.0, 100


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.affine1 = nn.Linear(4, 128)
        self.dropout = nn.Dropout(p=0.6)
        self.affine2 = nn.Linear(128, 2)

    def forward(self, state: Tensor) -> Tensor:
        return torch.softmax(self.affine2(torch.relu(self.dropout(self.affine1(state)))), dim=1)


class Observer:
    def __init__(self, index: int) -> None:
        self.index = index
        self.env = gymnasium.make("CartPole-v1")
        self.env.reset(seed=index)

    def run_episode(self) -> int:
        state, _ = self.env.reset()
        num_steps, over = 0, False
        while not over:
            action = rpc.rpc_sync("agent", select_action, (self.index, torch.from_numpy(state)))
            state, reward, terminated, truncated, _ = self.env.step(action)
            rpc.rpc_sync("agent", report_reward, (self.index, float(reward)))
            num_steps, over = num_steps + 1, terminated or truncated
        return num_steps


class Agent:
    def __init__(self, num_observers: int) -> None:
        self.policy = Policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=1e-2)
        self.log_probs: list[list[Tensor]] = [[] for _ in range(num_observers)]
        self.rewards: list[list[float]] = [[] for _ in range(num_observers)]

    def select_action(self, index: int, state: Tensor) -> int:
        choice = torch.distributions.Categorical(self.policy(state.unsqueeze(0)))
        action = choice.sample()
        self.log_probs[index].append(choice.log_prob(action))
        return int(action.item())

    def finish_episode(self) -> None:
        returns = []
        for rewards in self.rewards:
            total, own = 0.0, []
            for reward in reversed(rewards):
                total = reward + 0.99 * total
                own.append(total)
            returns += own[::-1]
        weights = torch.tensor(returns)
        weights = (weights - weights.mean()) / (weights.std() + 1e-7)
        log_probs = torch.cat([log_prob for own in self.log_probs for log_prob in own])
        self.optimizer.zero_grad()
        (-log_probs * weights).sum().backward()
        self.optimizer.step()
        self.log_probs = [[] for _ in self.log_probs]
        self.rewards = [[] for _ in self.rewards]


agent: Agent
observer: Observer


def select_action(index: int, state: Tensor) -> int:
    return agent.select_action(index, state)


def report_reward(index: int, reward: float) -> None:
    agent.rewards[index].append(reward)


def run_episode() -> int:
    return observer.run_episode()


def lead(seconds: float, num_observers: int) -> dict[str, float | None]:
    num_steps, solved_s, best = 0, None, 0.0
    recent: list[int] = []
    names = [f"observer{index}" for index in range(num_observers)]
    began = time.perf_counter()
    while (elapsed := time.perf_counter() - began) < seconds:
        lengths = [future.wait() for future in [rpc.rpc_async(name, run_episode) for name in names]]
        agent.finish_episode()
        num_steps += sum(lengths)
        recent = [*recent, *lengths][-NUM_EPISODES:]
        mean = sum(recent) / len(recent)
        best = max(best, mean)
        if solved_s is None and len(recent) == NUM_EPISODES and mean >= THRESHOLD:
            solved_s = time.perf_counter() - began
    return {"steps_per_s": num_steps / elapsed, "best_mean_return": best, "solved_s": solved_s}


def run(rank: int, folder: str, seconds: float, num_observers: int) -> None:
    global agent, observer
    warnings.simplefilter("ignore")  # torch's own warnings
    torch.manual_seed(rank)
    if rank == 0:
        agent = Agent(num_observers)
    else:
        observer = Observer(rank - 1)
    rpc.init_rpc(
        f"observer{rank - 1}" if rank else "agent",
        rank=rank,
        world_size=num_observers + 1,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/meet"),
    )
    if rank == 0:
        print(json.dumps(lead(seconds, num_observers)), flush=True)
    rpc.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--observers", type=int, default=2)
    arguments = parser.parse_args()
    os.environ |= {"TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        spawn(run, (folder, arguments.seconds, arguments.observers), nprocs=arguments.observers + 1)


if __name__ == "__main__":
    main()
