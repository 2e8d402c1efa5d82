"""Policies and PPO, compared with direct implementations of their definitions."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor

from hpcdist.config.schema import Config, OptimConfig
from hpcdist.rank.training_loop import build_optimizer
from hpcdist.trainers.rl import RlConfig
from hpcdist.trainers.rl.environments import Problem
from hpcdist.trainers.rl.observers import Collector, Rollout
from hpcdist.trainers.rl.policy import Actor, Policy, log_prob
from hpcdist.trainers.rl.train import advantages, learn

HOST = torch.device("cpu")


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("hidden", [[], [16], [16, 8]])
def test_actor_computes_the_outputs_of_the_policy(activation: str, normalize: bool, hidden: list[int]) -> None:
    policy = Policy(
        num_inputs=3, num_outputs=2, hidden=hidden, is_discrete=False, activation=activation, normalize=normalize
    )
    observations = 5 + 3 * torch.randn(50, 3)
    if normalize:
        policy.observe(observations)
    actor = Actor(policy.actor_state(), activation)
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(actor(observations.numpy())), policy(observations))
        torch.testing.assert_close(policy.both(observations)[1], policy.value(observations))


def test_observe_keeps_mean_and_variance_of_all_observations() -> None:
    policy = Policy(num_inputs=2, num_outputs=1, hidden=[], is_discrete=True, normalize=True)
    batches = [torch.randn(size, 2) * 4 + 7 for size in (3, 100, 20)]
    for batch in batches:
        policy.observe(batch)
    observations = torch.cat(batches)
    torch.testing.assert_close(policy.observed_mean, observations.mean(dim=0))
    torch.testing.assert_close(policy.observed_var, observations.var(dim=0, correction=0))
    assert policy.observed_count == 123


def test_log_prob_equals_the_distributions_of_torch() -> None:
    outputs = torch.randn(9, 4)
    choices, actions, log_std = torch.randint(4, (9,)), torch.randn(9, 4), torch.randn(4)
    categorical = torch.distributions.Categorical(logits=outputs)
    found, entropy = log_prob(outputs, choices, None)
    torch.testing.assert_close(found, categorical.log_prob(choices))
    torch.testing.assert_close(entropy, categorical.entropy())
    normal = torch.distributions.Independent(torch.distributions.Normal(outputs, log_std.exp()), 1)
    found, entropy = log_prob(outputs, actions, log_std)
    torch.testing.assert_close(found, normal.log_prob(actions))
    torch.testing.assert_close(entropy.expand(9), normal.entropy())


def rollout_of(name: str = "CartPole-v1", num_steps: int = 64, limit: int | None = 25) -> tuple[Policy, Rollout]:
    torch.manual_seed(0)
    problem = Problem.of(name, {}, limit)
    policy = Policy(
        num_inputs=problem.num_inputs, num_outputs=problem.num_outputs, hidden=[8], is_discrete=problem.is_discrete
    )
    collector = Collector(problem, 6, seed=0, index=0)
    log_std = policy.log_std.detach() if policy.log_std is not None else None
    rollouts = [collector.collect(number, num_steps, Actor(policy.actor_state()), log_std) for number in range(2)]
    return policy, rollouts[1]  # the second begins in the middle of episodes


def test_advantages_end_with_the_episode_and_bootstrap_after_a_truncation() -> None:
    _, rollout = rollout_of()
    assert rollout.terminated.any()
    assert (rollout.truncated & ~rollout.terminated).any()
    assert not rollout.valid[0].all() or not rollout.valid.all()
    values = np.random.default_rng(0).normal(size=(65, 6)).astype(np.float32)
    found = advantages(rollout, values, 0.9, 0.8)
    for env in range(6):
        for first in range(64):
            if not rollout.valid[first, env]:
                continue
            # Definition: discounted sum of TD errors until the end of the episode or of the rollout.
            expected = 0.0
            for t in range(first, 64):
                after = 0.0 if rollout.terminated[t, env] else 0.9 * values[t + 1, env]
                td_error = float(rollout.rewards[t, env]) + after - values[t, env]
                expected += (0.9 * 0.8) ** (t - first) * td_error
                if rollout.terminated[t, env] or rollout.truncated[t, env]:
                    break
            assert abs(found[first, env] - expected) < 1e-4


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_one_epoch_of_one_minibatch_is_the_policy_gradient(name: str) -> None:
    """A2C: at the policy that acted, the gradient of the clipped surrogate is that of log p times the advantage."""
    policy, rollout = rollout_of(name)
    plain = copy.deepcopy(policy)
    rl = RlConfig(update_epochs=1, num_minibatches=1, value_coef=0.7, entropy_coef=0.3)
    cfg = Config(sections={"rl": rl}, optim=OptimConfig(name="sgd", lr=1.0, momentum=0.0))
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    sums, num_steps = learn(policy, optimizer, rollout, cfg, HOST)
    assert num_steps == 1
    assert abs(sums[3]) < 1e-5, "the policy is the one that acted"

    valid = rollout.valid
    values = plain.value(rollout.observations)
    gains = torch.from_numpy(advantages(rollout, values.detach().numpy(), rl.gamma, rl.gae_lambda))[valid]
    targets = gains + values[:-1][valid].detach()
    weights = (gains - gains.mean()) / (gains.std(correction=0) + 1e-8)
    if plain.log_std is None:
        distribution: torch.distributions.Distribution = torch.distributions.Categorical(
            logits=plain(rollout.observations[:-1][valid])
        )
    else:
        normal = torch.distributions.Normal(plain(rollout.observations[:-1][valid]), plain.log_std.exp())
        distribution = torch.distributions.Independent(normal, 1)
    loss = -(distribution.log_prob(rollout.actions[valid]) * weights).mean() - 0.3 * distribution.entropy().mean()
    (loss + 0.7 * (values[:-1][valid] - targets).square().mean()).backward()
    for (key, found), expected in zip(policy.named_parameters(), plain.parameters(), strict=True):
        assert found.grad is not None
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-3, atol=1e-5, msg=key)


def test_update_changes_every_weight() -> None:
    """With parameters of another copy of the model in the optimizer, the weights would not change."""
    policy, rollout = rollout_of("Pendulum-v1")
    before = copy.deepcopy(policy.state_dict())
    cfg = Config(sections={"rl": RlConfig()}, optim=OptimConfig(lr=1e-2, max_grad_norm=0.5))
    learn(policy, build_optimizer(policy.parameters(), cfg.optim), rollout, cfg, HOST)
    assert [key for key, value in policy.state_dict().items() if torch.equal(value, before[key])] == []


def test_invalid_steps_have_no_effect_on_the_update() -> None:
    policy, rollout = rollout_of()
    changed = {name: getattr(rollout, name).clone() for name in ("actions", "log_probs", "rewards")}
    for tensor in changed.values():
        tensor[~rollout.valid] = 1
    assert not rollout.valid.all()

    def updated(data: Rollout) -> list[Tensor]:
        torch.manual_seed(1)
        ours = copy.deepcopy(policy)
        learn(ours, build_optimizer(ours.parameters(), OptimConfig()), data, Config(sections={"rl": RlConfig()}), HOST)
        return list(ours.parameters())

    for one, other in zip(updated(rollout), updated(rollout._replace(**changed)), strict=True):
        assert torch.equal(one, other)


def test_clipping_limits_the_change_of_an_update() -> None:
    policy, rollout = rollout_of()
    cfg = Config(sections={"rl": RlConfig(update_epochs=30, num_minibatches=2)}, optim=OptimConfig(lr=3e-3))
    _, num_steps = learn(policy, build_optimizer(policy.parameters(), cfg.optim), rollout, cfg, HOST)
    assert num_steps == 60
    with torch.no_grad():
        found, _ = log_prob(policy(rollout.observations[:-1]), rollout.actions, None)
    ratio = (found - rollout.log_probs)[rollout.valid].exp()
    assert ratio.std() > 0.01, "the policy has changed"
    assert ((ratio > 0.6) & (ratio < 1.6)).all(), "thirty epochs stay near the clip range"
