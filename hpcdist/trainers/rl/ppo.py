"""Proximal policy optimisation (https://arxiv.org/abs/1707.06347) with generalised advantage estimation."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from hpcdist.config.schema import Config
from hpcdist.trainers.rl.policy import Floats, Policy, log_prob
from hpcdist.trainers.rl.rollouts import Rollout
from hpcdist.trainers.rl.schema import RlConfig


def learn(
    policy: Policy, optimizer: torch.optim.Optimizer, rollout: Rollout, cfg: Config, device: torch.device
) -> tuple[Tensor, int]:
    """Update the policy by PPO's clipped surrogate objective; one epoch of one minibatch is A2C.

    Returns:
        Sums over optimizer steps of policy loss, value loss, entropy and KL divergence from the policy that acted, [4]
        on `device`, and the number of optimizer steps.
    """
    rl = cfg.section(RlConfig)
    with torch.no_grad():
        values = policy.value(rollout.observations.to(device)).cpu()
    gains = torch.from_numpy(advantages(rollout, values.numpy(), rl.gamma, rl.gae_lambda))
    valid = rollout.valid
    gains, values = gains[valid], values[:-1][valid]
    targets = (gains + values).to(device)
    gains = ((gains - gains.mean()) / (gains.std(correction=0) + 1e-8)).to(device)
    further = (rollout.observations[:-1][valid], rollout.actions[valid], rollout.log_probs[valid])
    data = (gains, targets, *(tensor.to(device) for tensor in further))
    parameters = list(policy.parameters())
    sums, num_steps = torch.zeros(4, device=device), 0
    for _ in range(rl.update_epochs):
        order = torch.randperm(len(gains)).to(
            device
        )  # drawn on the CPU, so that it does not depend on the kind of device
        for gain, target, observations, actions, acted in zip(
            *(tensor[order].chunk(rl.num_minibatches) for tensor in data), strict=True
        ):
            outputs, estimates = policy.both(observations)
            log_probs, entropies = log_prob(outputs, actions, policy.log_std)
            change = log_probs - acted
            ratio = change.exp()
            policy_loss = -torch.minimum(ratio * gain, ratio.clamp(1 - rl.clip_range, 1 + rl.clip_range) * gain).mean()
            value_loss = nn.functional.mse_loss(estimates, target)
            entropy = entropies.mean()
            optimizer.zero_grad()
            (policy_loss + rl.value_coef * value_loss - rl.entropy_coef * entropy).backward()
            if cfg.optim.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(parameters, cfg.optim.max_grad_norm)
            optimizer.step()
            sums += torch.stack((policy_loss, value_loss, entropy, -change.mean())).detach()
            num_steps += 1
    return sums, num_steps


def advantages(rollout: Rollout, values: Floats, discount: float, gae_lambda: float) -> Floats:
    """Return the advantage of each action [T, n] by generalised advantage estimation.

    The value after the end of a terminated episode is zero, after a truncated one that of its last observation. Sums
    do not cross the end of an episode. The result of a step that is not valid is undefined.

    Args:
        values: of all observations, [T + 1, n].
    """
    rewards, terminated = rollout.rewards.numpy(), rollout.terminated.numpy()
    delta = rewards + discount * values[1:] * ~terminated - values[:-1]
    carries = np.float32(discount * gae_lambda) * ~(terminated | rollout.truncated.numpy())
    for t in range(len(delta) - 2, -1, -1):
        delta[t] += carries[t] * delta[t + 1]
    return cast(Floats, delta)
