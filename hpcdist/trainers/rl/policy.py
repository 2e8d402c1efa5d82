"""Policy and value networks for vector observations: in torch for learning, in NumPy for acting."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (the name everyone uses)
from numpy.typing import NDArray
from torch import Tensor, nn

from hpcdist.trainers.rl import RlConfig

Floats = NDArray[np.float32]


class Policy(nn.Module):
    """Separate networks for actions (`actor`) and state values (`critic`).

    `forward` takes observations [n, num_inputs] and returns the logits of discrete actions [n, num_outputs], or the
    means of box actions, scaled to -1 to 1; `log_std` holds the logarithms of their standard deviations.
    """

    def __init__(self, cfg: RlConfig, num_inputs: int, num_outputs: int, *, is_discrete: bool) -> None:
        super().__init__()
        # A small gain makes all actions about equally likely at first, which matters most (arXiv:2006.05990).
        self.activation = cfg.activation
        self.actor = _mlp(num_inputs, cfg.hidden_sizes, num_outputs, cfg.activation, last_gain=0.01)
        self.critic = _mlp(num_inputs, cfg.hidden_sizes, 1, cfg.activation, last_gain=1.0)
        self.log_std = None if is_discrete else nn.Parameter(torch.zeros(num_outputs))

    def forward(self, observations: Tensor) -> Tensor:
        """Return logits or means of actions [n, num_outputs] for observations [n, num_inputs]."""
        actions: Tensor = self.actor(observations)
        return actions

    def outputs_and_values(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs of `forward` and the value of each observation [n]."""
        return self.forward(observations), self.value(observations)

    def value(self, observations: Tensor) -> Tensor:
        """Return the value of each observation [n]."""
        value: Tensor = self.critic(observations).squeeze(-1)
        return value

    def actor_state(self) -> dict[str, Tensor]:
        """Return the part of the state dict that `Actor` needs, as a copy on the CPU that learning does not change."""
        state = {}
        for name, tensor in self.state_dict().items():
            if name.startswith(("actor.", "log_std")):
                state[name] = tensor.to("cpu", copy=True)
        return state


def log_prob(outputs: Tensor, actions: Tensor, log_std: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the log-probability (or log-density) of each action [n], and the entropy: [n], or one for box actions.

    Actions are int64 [n]; with `log_std` float [n, num_outputs], before clipping to -1 to 1. torch.distributions are
    not used: building one costs more than a step of CartPole.
    """
    if log_std is None:
        log_probs = F.log_softmax(outputs, dim=-1)
        chosen = log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
        entropies = -(log_probs.exp() * log_probs).sum(dim=-1)
        return chosen, entropies
    squares = ((actions - outputs) * torch.exp(-log_std)) ** 2
    constant = 0.5 * math.log(2 * math.pi)
    densities = (-0.5 * squares - log_std - constant).sum(dim=-1)
    entropy = (log_std + constant + 0.5).sum()
    return densities, entropy


def _mlp(
    num_inputs: int, hidden: Sequence[int], num_outputs: int, activation: str, *, last_gain: float
) -> nn.Sequential:
    """Return linear layers with an activation after each but the last, with orthogonal weights."""
    activation_type: type[nn.Module] = nn.Tanh
    if activation == "relu":
        activation_type = nn.ReLU
    sizes = [num_inputs, *hidden, num_outputs]
    gains = [math.sqrt(2)] * len(hidden) + [last_gain]
    layers: list[nn.Module] = []
    for (size, next_size), gain in zip(pairwise(sizes), gains, strict=True):
        layer = nn.Linear(size, next_size)
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
        layers += [layer, activation_type()]
    return nn.Sequential(*layers[:-1])


class Actor:
    """`Policy.forward` in NumPy, from `Policy.actor_state`: several times faster than torch for small batches."""

    def __init__(self, state: Mapping[str, Tensor], activation: str = "tanh") -> None:
        self._is_relu = activation == "relu"
        self._layers: list[tuple[Floats, Floats]] = []
        for name, weight in state.items():
            layer, _, kind = name.rpartition(".")
            if kind == "weight":
                bias = state[f"{layer}.bias"]
                self._layers.append((np.ascontiguousarray(weight.numpy().T), bias.numpy()))

    def __call__(self, observations: Floats) -> Floats:
        """Return logits or means [n, num_outputs] for observations [n, num_inputs]."""
        x = observations
        for weight, bias in self._layers[:-1]:
            x = x @ weight
            x += bias
            if self._is_relu:
                np.maximum(x, 0, out=x)
            else:
                np.tanh(x, out=x)
        weight, bias = self._layers[-1]
        outputs: Floats = x @ weight
        outputs += bias
        return outputs
