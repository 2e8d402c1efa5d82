"""Environments, rollouts and greedy episodes."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from hpcdist.errors import ConfigError
from hpcdist.trainers.rl import environments
from hpcdist.trainers.rl.environments import (
    Environments,
    Floats,
    Problem,
    Separate,
    Vectorized,
    greedy_returns,
    make_environments,
)
from hpcdist.trainers.rl.observers import Collector, Rollout, _per_episode, random_numbers
from hpcdist.trainers.rl.policy import Actor, Policy, log_prob


class Corridor(gymnasium.Env[Floats, int]):
    """Count steps: the reward of a step is its number; action 5 ends the episode after at least `length` steps."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2, start=5)

    def __init__(self, length: int = 3) -> None:
        self.length = length

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Floats, dict[str, Any]]:
        super().reset(seed=seed)
        self.count, self.noise = 0, self.np_random.normal()
        return self._observation(), {}

    def step(self, action: int) -> tuple[Floats, float, bool, bool, dict[str, Any]]:
        assert action in (5, 6), action
        self.count += 1
        self.noise += self.np_random.normal()
        return self._observation(), float(self.count), action == 5 and self.count >= self.length, False, {}

    def _observation(self) -> Floats:
        return np.array([self.count, self.noise], np.float32)


@pytest.fixture(autouse=True)
def corridor() -> Iterator[None]:
    gymnasium.register("Corridor-v0", entry_point=Corridor, max_episode_steps=6)
    gymnasium.register("Endless-v0", entry_point=Corridor)
    yield
    del gymnasium.registry["Corridor-v0"], gymnasium.registry["Endless-v0"]


def never_end(observations: Floats) -> Floats:
    """Return outputs of a policy that always selects the second action."""
    return np.tile(np.array([-1e6, 1e6], np.float32), (len(observations), 1))


def end_soon(observations: Floats) -> Floats:
    return -never_end(observations)


# --- environments


def test_problem_has_the_properties_of_its_environment() -> None:
    cartpole = Problem.of("CartPole-v1", {})
    assert (cartpole.num_inputs, cartpole.num_outputs, cartpole.is_discrete) == (4, 2, True)
    assert (cartpole.reward_threshold, cartpole.time_limit) == (475.0, 500)
    assert Problem.of("CartPole-v1", {}, max_episode_steps=50).time_limit == 50
    pendulum = Problem.of("Pendulum-v1", {"g": 5.0})
    assert (pendulum.num_outputs, pendulum.is_discrete) == (1, False)
    # Actions are scaled from the unit box to the environment's box and clipped.
    assert pendulum.to_env(np.array([[-3.0], [0.5], [1.0]])).tolist() == [[-2.0], [1.0], [2.0]]
    assert Problem.of("Corridor-v0", {}).greedy(np.array([[1, 0], [0, 1]], np.float32)).tolist() == [5, 6]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoSuchThing-v0", "rl.env_id=NoSuchThing-v0 cannot be created: Environment `NoSuchThing` doesn't exist"),
        ("no_such_module:Thing-v0", "cannot be created: No module named 'no_such_module'"),
        ("FrozenLake-v1", r"observation space Discrete\(16\): trainer rl supports a Box with one axis"),
        ("Endless-v0", "has no time limit: set rl.max_episode_steps"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_unsupported_environments_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Problem.of(name, {})


def test_unknown_options_and_unsupported_actions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"CartPole-v1 cannot be created: .*unexpected keyword argument 'gravity'"):
        Problem.of("CartPole-v1", {"gravity": 3})
    monkeypatch.setattr(Corridor, "action_space", spaces.MultiBinary(2))
    with pytest.raises(ConfigError, match=r"action space MultiBinary\(2\): trainer rl supports Discrete and a Box"):
        Problem.of("Corridor-v0", {})


def play(envs: Environments, problem: Problem, num_steps: int) -> list[np.ndarray[Any, Any]]:
    """Return the results of steps with random actions, drawn from the generator of the environments."""
    rng = np.random.default_rng(3)
    envs.begin(rng)
    shape = (num_steps, envs.num_envs)
    chosen = rng.integers(2, size=shape) if problem.is_discrete else rng.normal(size=(*shape, problem.num_outputs))
    steps = [envs.step(problem.to_env(actions)) for actions in chosen]
    return [part.copy() for step in steps for part in (*step, envs.over)]


@pytest.mark.parametrize("name", ["CartPole-v1", "Acrobot-v1", "Pendulum-v1", "Corridor-v0"])
def test_environments_continue_exactly_from_a_saved_state(name: str) -> None:
    problem = Problem.of(name, {}, 60 if name != "Corridor-v0" else None)
    kind = Vectorized if name == "CartPole-v1" else Separate
    envs = make_environments(problem, 5, np.random.default_rng(1))
    assert isinstance(envs, kind)
    play(envs, problem, 40)
    buffer = io.BytesIO()
    torch.save(envs.state(), buffer)
    expected = play(envs, problem, 70)
    buffer.seek(0)
    others = make_environments(problem, 5, np.random.default_rng(2))
    others.load_state(torch.load(buffer, weights_only=True))
    for found, wanted in zip(play(others, problem, 70), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_vectorised_form_with_hidden_state_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(environments, "_is_array_or_number", lambda value: isinstance(value, int))
    envs = make_environments(Problem.of("CartPole-v1", {}), 2, np.random.default_rng(0))
    assert isinstance(envs, Separate)
    assert "stepped in a loop, not in its vectorised form: its state has more than arrays and numbers" in caplog.text


def test_vectorised_and_separate_environments_step_equally() -> None:
    problem = Problem.of("CartPole-v1", {}, max_episode_steps=20)
    vectorized, separate = Vectorized(problem, 4), Separate(problem, 4)
    for envs in (vectorized, separate):
        envs.begin(np.random.default_rng(0))
        envs.reset()
    rng = np.random.default_rng(5)
    num_ends = 0
    for _ in range(200):
        # Initial states differ. From equal states all steps that are transitions must be equal.
        vectorized._inner.state[:] = np.array([env.unwrapped.state for env in separate._envs]).T  # type: ignore[attr-defined]
        actions = rng.integers(2, size=4)
        resets = separate.over
        np.testing.assert_array_equal(resets, vectorized.over)
        ours, expected = vectorized.step(actions), separate.step(actions)
        for a, b in zip(ours, expected, strict=True):
            np.testing.assert_allclose(a[~resets], b[~resets], rtol=1e-5)
        assert not ours.rewards[resets].any()
        assert not expected.rewards[resets].any()
        num_ends += int(separate.over.sum())
    assert num_ends > 20


# --- rollouts


def test_rollout_marks_resets_as_invalid_and_keeps_last_observations() -> None:
    problem = Problem.of("Corridor-v0", {})
    collector = Collector(problem, 2, seed=0, index=0)
    first = collector.collect(0, 5, end_soon)
    # Three steps, the reset, and the first step of the next episode.
    assert first.valid[:, 0].tolist() == [True, True, True, False, True]
    assert first.terminated[:, 0].tolist() == [False, False, True, False, False]
    assert first.rewards[:, 0].tolist() == [1, 2, 3, 0, 1]
    assert first.observations[:, 0, 0].tolist() == [0, 1, 2, 3, 0, 1]
    assert first.returns.tolist() == [6.0, 6.0]
    # The episode and its return continue in the next rollout; the time limit of six steps truncates it.
    second = collector.collect(1, 8, never_end)
    assert second.observations[:, 1, 0].tolist() == [1, 2, 3, 4, 5, 6, 0, 1, 2]
    assert second.truncated[:, 1].tolist() == [False] * 4 + [True] + [False] * 3
    assert not second.terminated.any()
    assert second.returns.tolist() == [21.0, 21.0]


def test_return_of_an_episode_has_its_own_rewards_only() -> None:
    """In the tutorial of PyTorch the rewards of an observer's episode are added to those of the next one."""
    rng = np.random.default_rng(0)
    rewards, ends = rng.integers(-5, 6, size=(300, 7)).astype(np.float64), rng.random((300, 7)) < 0.05
    expected = []
    running = np.zeros(7)
    for env in range(7):
        total = 0.0
        for t in range(300):
            total += rewards[t, env]
            if ends[t, env]:
                expected.append(total)
                total = 0.0
        running[env] = total
    found, left = _per_episode(np.cumsum(rewards, axis=0), ends)
    assert found.tolist() == expected
    assert left.tolist() == running.tolist()
    # In pieces, each with the unfinished sums of the piece before.
    left, pieces = np.zeros(7), []
    for piece in range(0, 300, 25):
        part, left = _per_episode(left + np.cumsum(rewards[piece : piece + 25], axis=0), ends[piece : piece + 25])
        pieces += part.tolist()
    assert sorted(pieces) == sorted(expected)
    # Joined rollouts keep the returns of each observer.
    zeros = torch.zeros(1, 1)
    one, two = (Rollout(*[zeros] * 7, torch.tensor([value])) for value in (3.0, 4.0))
    assert Rollout.join([one, two]).returns.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_actions_are_samples_of_the_distribution_of_the_policy(name: str) -> None:
    problem = Problem.of(name, {})
    policy = Policy(
        num_inputs=problem.num_inputs, num_outputs=problem.num_outputs, hidden=[8], is_discrete=problem.is_discrete
    )
    torch.nn.init.normal_(policy.actor[-1].weight, std=2.0)  # type: ignore[arg-type]
    collector = Collector(problem, 100, seed=0, index=0)
    with torch.no_grad():
        if policy.log_std is not None:
            policy.log_std.fill_(-0.5)
        rollout = collector.collect(0, 100, Actor(policy.actor_state()), policy.log_std)
        outputs = policy(rollout.observations[:-1])
        expected, entropy = log_prob(outputs, rollout.actions, policy.log_std)
        torch.testing.assert_close(rollout.log_probs, expected, rtol=1e-3, atol=1e-4)
        # The mean of -log p is the entropy only if the actions have the probabilities of the policy.
        assert abs(-rollout.log_probs.mean() - entropy.mean()) < 0.02
        if policy.log_std is not None:
            deviations = (rollout.actions - outputs) / policy.log_std.exp()
            assert abs(deviations.mean()) < 0.04
            assert abs(deviations.std() - 1) < 0.04


def test_collector_repeats_a_rollout_from_its_saved_state() -> None:
    problem = Problem.of("CartPole-v1", {})
    collector = Collector(problem, 3, seed=0, index=1)
    collector.collect(0, 50, end_soon)
    state = collector.state()
    expected = collector.collect(1, 50, end_soon)
    again = Collector(problem, 3, seed=0, index=1)
    again.load_state(state)
    assert all(torch.equal(a, b) for a, b in zip(again.collect(1, 50, end_soon), expected, strict=True))
    other = Collector(problem, 3, seed=0, index=2)
    other.load_state(state)
    assert not torch.equal(other.collect(1, 50, end_soon).observations, expected.observations)


# --- episodes


def test_greedy_returns_are_of_one_full_episode_per_environment() -> None:
    problem = Problem.of("Corridor-v0", {})
    envs = make_environments(problem, 3, random_numbers(0, 1))
    envs.step(np.array([6, 6, 6]))  # an unfinished episode is not counted
    for _ in range(2):
        assert greedy_returns(problem, envs, never_end).tolist() == [21.0] * 3
    assert greedy_returns(problem, envs, end_soon).tolist() == [6.0] * 3
    cartpole = Problem.of("CartPole-v1", {})
    carts = make_environments(cartpole, 50, random_numbers(0, 1))
    carts.begin(np.random.default_rng(7))
    found = greedy_returns(cartpole, carts, never_end)
    carts.begin(np.random.default_rng(7))
    carts.reset()
    ends = np.array([carts.step(np.ones(50, np.int64)).terminated for _ in range(20)])
    assert found.tolist() == (1 + ends.argmax(axis=0)).tolist()
    assert len(set(found)) > 1
