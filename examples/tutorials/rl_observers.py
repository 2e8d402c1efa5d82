"""Reinforcement learning by RPC: observers play CartPole, an agent chooses their actions and learns from all of them.

    python rl_observers.py                 # starts an agent and two observers itself
    hpcdist run tutorial_rl_observers      # or as a Slurm job: hpcdist submit tutorial_rl_observers --cluster SITE

Read it beside https://docs.pytorch.org/tutorials/intermediate/rpc_tutorial.html (first part). The agent is rank 0. It
starts an episode on each observer by RPC, and in it the observer asks the agent for each action: nested RPC, through a
remote reference (RRef) to the agent. After the episodes the agent makes one step of REINFORCE.
"""

from __future__ import annotations

import argparse
import os
import time

import gymnasium
import torch
from torch import Tensor, nn
from torch.distributed import rpc

import hpcdist

NUM_OBSERVERS = 2
GAMMA = 0.99


class Policy(nn.Module):
    """Probabilities of the two actions in a state of four numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(4, 128)
        self.dropout = nn.Dropout(0.6)
        self.output = nn.Linear(128, 2)

    def forward(self, states: Tensor) -> Tensor:
        return torch.softmax(self.output(torch.relu(self.dropout(self.hidden(states)))), dim=1)


class Observer:
    """Owns an environment, on a rank of its own."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.environment = gymnasium.make("CartPole-v1")
        self.environment.reset(seed=index)

    def run_episode(self, agent: rpc.RRef[Agent]) -> int:
        """Play an episode with the actions of the agent. Returns its number of steps."""
        state, _ = self.environment.reset()
        num_steps = 0
        is_over = False
        while not is_over:
            action = agent.rpc_sync().select_action(self.index, torch.from_numpy(state))
            state, reward, terminated, truncated, _ = self.environment.step(action)
            agent.rpc_sync().report_reward(self.index, float(reward))
            num_steps += 1
            is_over = terminated or truncated
        return num_steps


class Agent:
    def __init__(self, names: list[str]) -> None:
        self.own_reference = rpc.RRef(self)
        self.observers = [rpc.remote(name, Observer, (index,)) for index, name in enumerate(names)]
        self.policy = Policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=1e-2)
        self.log_probabilities: list[list[Tensor]] = [[] for _ in names]
        self.rewards: list[list[float]] = [[] for _ in names]

    def select_action(self, index: int, state: Tensor) -> int:
        """Called by an observer for its state."""
        choice = torch.distributions.Categorical(self.policy(state.unsqueeze(0)))
        action = choice.sample()
        self.log_probabilities[index].append(choice.log_prob(action))
        return int(action.item())

    def report_reward(self, index: int, reward: float) -> None:
        self.rewards[index].append(reward)

    def run_episodes(self) -> list[int]:
        """Run an episode on each observer at the same time. Returns their numbers of steps."""
        futures = [observer.rpc_async().run_episode(self.own_reference) for observer in self.observers]
        return torch.futures.wait_all(futures)

    def learn(self) -> None:
        """Raise the probability of actions that more reward than the mean has followed (REINFORCE)."""
        returns: list[float] = []
        for rewards in self.rewards:
            discounted: list[float] = []
            for reward in reversed(rewards):
                discounted.append(reward + GAMMA * (discounted[-1] if discounted else 0.0))
            returns += reversed(discounted)
        weights = torch.tensor(returns)
        weights = (weights - weights.mean()) / (weights.std() + 1e-7)
        log_probabilities = torch.cat([value for values in self.log_probabilities for value in values])
        self.optimizer.zero_grad()
        (-log_probabilities * weights).sum().backward()
        self.optimizer.step()
        self.log_probabilities = [[] for _ in self.rewards]
        self.rewards = [[] for _ in self.rewards]


def lead(names: list[str], num_rounds: int) -> None:
    """Run rounds of episodes on the agent's rank, and save the policy."""
    agent = Agent(names)
    mean = 10.0
    num_steps = 0
    began = time.perf_counter()
    for step in range(1, num_rounds + 1):
        lengths = agent.run_episodes()
        agent.learn()
        num_steps += sum(lengths)
        mean = 0.95 * mean + 0.05 * sum(lengths) / len(lengths)
        hpcdist.log({"train/mean_return": mean, "train/best_return": max(lengths)}, step)
        if step % 20 == 0 or step == num_rounds:
            speed = num_steps / (time.perf_counter() - began)
            print(f"round {step}: mean return {mean:.1f}, {speed:.0f} environment steps/s", flush=True)
    torch.save(agent.policy.state_dict(), hpcdist.checkpoint_dir() / "policy.pt")


def run(rank: int, world_size: int, num_rounds: int) -> None:
    torch.manual_seed(rank)
    torch.set_num_threads(1)
    observers = [f"observer{index}" for index in range(world_size - 1)]
    rpc.init_rpc(["agent", *observers][rank], rank=rank, world_size=world_size)
    if rank == 0:
        lead(observers, num_rounds)
    rpc.shutdown()  # observers answer calls until the agent is here, too


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    if "RANK" in os.environ:  # started by torchrun or hpcdist
        run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), arguments.rounds)
    else:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")
        num_processes = NUM_OBSERVERS + 1
        torch.multiprocessing.spawn(run, (num_processes, arguments.rounds), nprocs=num_processes)
