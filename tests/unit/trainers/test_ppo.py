"""The trainer `rl` without ranks: policies and PPO, config, environments and rollouts."""

import copy
import io
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from hpcdist.config.loading import load_config
from hpcdist.config.schema import Config
from hpcdist.config.training_schema import OptimConfig
from hpcdist.errors import ConfigError
from hpcdist.rank.training_loop import build_optimizer
from hpcdist.trainers.rl import RlConfig
from hpcdist.trainers.rl.environments import (
    Environments,
    Floats,
    Problem,
    Separate,
    Vectorized,
    greedy_returns,
    make_environments,
)
from hpcdist.trainers.rl.observers import Collector, Rollout
from hpcdist.trainers.rl.policy import Actor, Policy, log_prob
from hpcdist.trainers.rl.train import GAE_LAMBDA, VALUE_COEF, gae, train_step

# --- Policies and PPO, compared with direct implementations of their definitions.


HOST = torch.device("cpu")


@pytest.mark.parametrize(("activation", "hidden"), [("tanh", []), ("relu", [16, 8])])
def test_actor_computes_the_outputs_of_the_policy(activation: Any, hidden: list[int]) -> None:
    policy = Policy(RlConfig(hidden_sizes=hidden, activation=activation), 3, 2, is_discrete=False)
    observations = torch.randn(100, 3)
    actor = Actor(policy.actor_state(), activation)
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(actor(observations.numpy())), policy(observations))


def rollout_of(name: str = "ShortCartPole-v0", num_steps: int = 64) -> tuple[Policy, Rollout]:
    torch.manual_seed(0)
    problem = Problem.of(name)
    cfg = RlConfig(hidden_sizes=[8])
    policy = Policy(cfg, problem.num_inputs, problem.num_outputs, is_discrete=problem.is_discrete)
    collector = Collector(problem, 6, seed=0, index=0)
    log_std = policy.log_std.detach() if policy.log_std is not None else None
    rollouts = [collector.collect(number, num_steps, Actor(policy.actor_state()), log_std) for number in range(2)]
    return policy, rollouts[1]  # the second begins in the middle of episodes


def test_advantages_bootstrap_only_after_a_truncation() -> None:
    _, rollout = rollout_of()
    assert rollout.terminated.any()
    assert (rollout.truncated & ~rollout.terminated).any()
    assert not rollout.valid[0].all() or not rollout.valid.all()
    values = np.random.default_rng(0).normal(size=(65, 6)).astype(np.float32)
    found = gae(rollout, values, 0.9)
    for env in range(6):
        for first in range(64):
            if not rollout.valid[first, env]:
                continue
            # Definition: discounted sum of TD errors until the end of the episode or of the rollout.
            expected = 0.0
            for t in range(first, 64):
                after = 0.0 if rollout.terminated[t, env] else 0.9 * values[t + 1, env]
                td_error = float(rollout.rewards[t, env]) + after - values[t, env]
                expected += (0.9 * GAE_LAMBDA) ** (t - first) * td_error
                if rollout.terminated[t, env] or rollout.truncated[t, env]:
                    break
            assert abs(found[first, env] - expected) < 1e-4


@pytest.mark.parametrize("name", ["ShortCartPole-v0", "Pendulum-v1"])
def test_one_epoch_of_one_minibatch_is_the_policy_gradient(name: str) -> None:
    """A2C: at the policy that acted, the gradient of the clipped surrogate is that of log p times the advantage."""
    policy, rollout = rollout_of(name)
    plain = copy.deepcopy(policy)
    rl = RlConfig(update_epochs=1, num_minibatches=1, entropy_coef=0.3)
    cfg = Config(sections={"rl": rl}, optim=OptimConfig(name="sgd", lr=1.0, momentum=0.0))
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    sums = train_step(policy, optimizer, rollout, cfg, HOST)
    assert sums["num_minibatches"] == 1
    assert abs(sums["losses"][3]) < 1e-5, "the policy is the one that acted"

    valid = rollout.valid
    values = plain.value(rollout.observations)
    gains = torch.from_numpy(gae(rollout, values.detach().numpy(), rl.gamma))[valid]
    targets = gains + values[:-1][valid].detach()
    weights = (gains - gains.mean()) / (gains.std(correction=0) + 1e-8)
    outputs = plain(rollout.observations[:-1][valid])
    distribution: torch.distributions.Distribution = torch.distributions.Categorical(logits=outputs)
    if plain.log_std is not None:
        normal = torch.distributions.Normal(outputs, plain.log_std.exp())
        distribution = torch.distributions.Independent(normal, 1)
    loss = -(distribution.log_prob(rollout.actions[valid]) * weights).mean() - 0.3 * distribution.entropy().mean()
    (loss + VALUE_COEF * (values[:-1][valid] - targets).square().mean()).backward()
    for (key, found), expected in zip(policy.named_parameters(), plain.parameters(), strict=True):
        assert found.grad is not None
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-3, atol=1e-5, msg=key)


def test_clipping_limits_the_change_of_an_update() -> None:
    policy, rollout = rollout_of()
    cfg = Config(sections={"rl": RlConfig(update_epochs=30, num_minibatches=2)}, optim=OptimConfig(lr=3e-3))
    sums = train_step(policy, build_optimizer(policy.parameters(), cfg.optim), rollout, cfg, HOST)
    assert sums["num_minibatches"] == 60
    with torch.no_grad():
        found, _ = log_prob(policy(rollout.observations[:-1]), rollout.actions, None)
    ratio = (found - rollout.log_probs)[rollout.valid].exp()
    assert ratio.std() > 0.01, "the policy has changed"
    assert ((ratio > 0.6) & (ratio < 1.6)).all(), "thirty epochs stay near the clip range"


# --- Validation of configs of `trainer: rl`.


def test_roles_and_sizes_are_validated() -> None:
    config = load_config("rl_cartpole")
    assert config.roles == {"agent": 1, "observer": 2}
    with pytest.raises(ConfigError, match="needs one agent, then observers, got agent: 2, observer: 2"):
        load_config("rl_cartpole", ["roles.agent=2"])
    with pytest.raises(ValueError, match="hidden_sizes must hold sizes >= 1, got 0"):
        RlConfig(hidden_sizes=[64, 0])


# --- Environments, rollouts and greedy episodes.


class Corridor(gymnasium.Env[Floats, Any]):
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
def environments() -> Iterator[None]:
    create: Any = Corridor  # gymnasium accepts a class, but its type does not
    gymnasium.register("Corridor-v0", entry_point=create, max_episode_steps=6)
    gymnasium.register("Endless-v0", entry_point=create)
    cartpole = gymnasium.spec("CartPole-v1")
    gymnasium.register(
        "ShortCartPole-v0", cartpole.entry_point, max_episode_steps=25, vector_entry_point=cartpole.vector_entry_point
    )
    yield
    for name in ("Corridor-v0", "Endless-v0", "ShortCartPole-v0"):
        del gymnasium.registry[name]


def never_end(observations: Floats) -> Floats:
    """Return outputs of a policy that always selects the second action."""
    return np.tile(np.array([-1e6, 1e6], np.float32), (len(observations), 1))


def end_soon(observations: Floats) -> Floats:
    return -never_end(observations)


def test_problem_has_the_properties_of_its_environment() -> None:
    cartpole = Problem.of("CartPole-v1")
    assert (cartpole.num_inputs, cartpole.num_outputs, cartpole.is_discrete) == (4, 2, True)
    assert cartpole.reward_threshold == 475.0
    pendulum = Problem.of("Pendulum-v1")
    assert (pendulum.num_outputs, pendulum.is_discrete) == (1, False)
    # Actions are scaled from the unit box to the environment's box and clipped.
    assert pendulum.to_env(np.array([[-3.0], [0.5], [1.0]])).tolist() == [[-2.0], [1.0], [2.0]]
    assert Problem.of("Corridor-v0").to_env(np.array([0, 1])).tolist() == [5, 6]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoSuchThing-v0", "rl.env_id=NoSuchThing-v0 cannot be created: Environment `NoSuchThing` doesn't exist"),
        ("Corridor-v0", r"action space MultiBinary\(2\): trainer rl supports Discrete and a Box"),
        ("FrozenLake-v1", r"observation space Discrete\(16\): trainer rl supports a Box with one axis"),
        ("Endless-v0", "has no time limit: register it with max_episode_steps"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_unsupported_environments_are_refused(name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "Corridor-v0":
        monkeypatch.setattr(Corridor, "action_space", spaces.MultiBinary(2))
    with pytest.raises(ConfigError, match=message):
        Problem.of(name)


def play(envs: Environments, problem: Problem, num_steps: int) -> list[np.ndarray[Any, Any]]:
    """Return the results of steps with random actions, drawn from the generator of the environments."""
    rng = np.random.default_rng(3)
    envs.begin(rng)
    shape = (num_steps, envs.num_envs)
    chosen = rng.integers(2, size=shape) if problem.is_discrete else rng.normal(size=(*shape, problem.num_outputs))
    steps = [envs.step(problem.to_env(actions)) for actions in chosen]
    return [part.copy() for step in steps for part in (*step, envs.over)]


@pytest.mark.parametrize("name", ["ShortCartPole-v0", "Pendulum-v1", "Corridor-v0"])
def test_environments_continue_exactly_from_a_saved_state(name: str) -> None:
    problem = Problem.of(name)
    kind = Vectorized if name == "ShortCartPole-v0" else Separate
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


def test_vectorised_and_separate_environments_step_equally() -> None:
    problem = Problem.of("ShortCartPole-v0")
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
        arrays: Iterator[tuple[Any, Any]] = zip(ours, expected, strict=True)
        for a, b in arrays:
            np.testing.assert_allclose(a[~resets], b[~resets], rtol=1e-5)
        assert not ours.rewards[resets].any()
        assert not expected.rewards[resets].any()
        num_ends += int(separate.over.sum())
    assert num_ends > 20


def test_rollout_marks_resets_and_keeps_last_observations() -> None:
    problem = Problem.of("Corridor-v0")
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


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_actions_are_samples_of_the_distribution_of_the_policy(name: str) -> None:
    problem = Problem.of(name)
    cfg = RlConfig(hidden_sizes=[8])
    policy = Policy(cfg, problem.num_inputs, problem.num_outputs, is_discrete=problem.is_discrete)
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


def test_greedy_returns_are_of_one_full_episode_per_environment() -> None:
    problem = Problem.of("Corridor-v0")
    envs = make_environments(problem, 3, np.random.default_rng([0, 1]))
    envs.step(np.array([6, 6, 6]))  # an unfinished episode is not counted
    for _ in range(2):
        assert greedy_returns(problem, envs, never_end).tolist() == [21.0] * 3
    assert greedy_returns(problem, envs, end_soon).tolist() == [6.0] * 3
