"""Gymnasium environments, many at a time, whose state can be saved. Know nothing of ranks.

Where an episode has ended, the next step resets instead of stepping (gymnasium's `NEXT_STEP`): its reward is 0, its
action goes nowhere, and it is no transition to learn from. The observation before it is the episode's true last one,
which is what a truncated episode is bootstrapped from.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from torch import Tensor

from hpcdist.errors import ConfigError

log = logging.getLogger(__name__)
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What an environment asks of a policy. Make it with `Problem.of`."""

    name: str
    options: Mapping[str, Any]
    num_inputs: int
    num_outputs: int  #: choices, or numbers in an action
    is_discrete: bool
    first_action: int  #: of a discrete space, mostly 0
    low: Floats  #: of a box space, [num_outputs]
    high: Floats
    reward_threshold: float | None
    time_limit: int  #: steps of an episode at most
    is_drawable: bool

    @classmethod
    def of(cls, name: str, options: Mapping[str, Any], max_episode_steps: int | None = None) -> Problem:
        """Look at the environment once. Raises ConfigError for one that is not there or not of this kind."""
        options = dict(options)
        if max_episode_steps is not None:
            options["max_episode_steps"] = max_episode_steps
        try:
            with gymnasium.make(name, **options) as env:
                observed, acts, spec = env.observation_space, env.action_space, env.spec
                modes = env.metadata.get("render_modes") or ()
        except (gymnasium.error.Error, ModuleNotFoundError, TypeError) as error:
            raise ConfigError([f"rl.env_id={name} cannot be made: {' '.join(str(error).split())}"]) from error
        assert spec is not None
        if not isinstance(observed, spaces.Box) or len(observed.shape) != 1:
            raise ConfigError([f"rl.env_id={name} observes {observed}: trainer rl takes vectors, a Box with one axis"])
        is_box = isinstance(acts, spaces.Box) and len(acts.shape) == 1
        if not is_box and not isinstance(acts, spaces.Discrete):
            raise ConfigError([f"rl.env_id={name} acts in {acts}: trainer rl takes Discrete, or a Box with one axis"])
        if spec.max_episode_steps is None:
            raise ConfigError([f"rl.env_id={name} has no time limit of its own: set rl.max_episode_steps"])
        none = np.zeros(0, np.float32)
        return cls(
            name=name,
            options=options,
            num_inputs=observed.shape[0],
            num_outputs=acts.shape[0] if isinstance(acts, spaces.Box) else int(acts.n),  # type: ignore[attr-defined]
            is_discrete=not is_box,
            first_action=0 if is_box else int(acts.start),  # type: ignore[attr-defined]
            low=acts.low.astype(np.float32) if isinstance(acts, spaces.Box) else none,
            high=acts.high.astype(np.float32) if isinstance(acts, spaces.Box) else none,
            reward_threshold=spec.reward_threshold,
            time_limit=spec.max_episode_steps,
            is_drawable="rgb_array" in modes,
        )

    def to_env(self, chosen: NDArray[Any]) -> NDArray[Any]:
        """Actions in the environment's units, from int64 [n] or from floats [n, num_outputs] in the unit box.

        Where a box is unbounded, its unit is 1.
        """
        if self.is_discrete:
            return chosen + self.first_action if self.first_action else chosen
        bounded = np.isfinite(self.low) & np.isfinite(self.high)
        half = np.where(bounded, (self.high - self.low) / 2, np.float32(1))
        centre = np.where(bounded, (self.high + self.low) / 2, np.float32(0))
        scaled: NDArray[Any] = np.clip(centre + half * chosen, self.low, self.high)
        return scaled

    def greedy(self, outputs: Floats) -> NDArray[Any]:
        """The best action by what a policy says, [n, num_outputs], in the environment's units."""
        return self.to_env(outputs.argmax(axis=1) if self.is_discrete else outputs)


class Step(NamedTuple):
    """One step of n environments."""

    observations: Floats  #: [n, num_inputs]
    rewards: NDArray[np.floating[Any]]  #: [n]
    terminated: Bools
    truncated: Bools


class Environments(Protocol):
    """n environments that step together."""

    num_envs: int
    #: [n, num_inputs], what the next action answers to.
    observations: Floats
    #: Whose episode has ended, so that the next step resets.
    over: Bools

    def begin(self, rng: np.random.Generator) -> None:
        """Take all random numbers from here on from `rng`."""

    def reset(self) -> None:
        """Begin new episodes everywhere."""

    def step(self, actions: NDArray[Any], skip: Bools | None = None) -> Step:
        """Act everywhere, in the environment's own units; those in `skip` need not be stepped any more."""

    def state(self) -> dict[str, Any]:
        """All that `load_state` needs, but for the random numbers: call `begin` after it. Tensors and lists."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where `state` was taken, in environments of the same problem and number."""


def make_environments(problem: Problem, num_envs: int, rng: np.random.Generator) -> Environments:
    """n environments after a reset: in the environment's own vectorised form where its state can be saved."""
    envs: Environments | None = None
    if gymnasium.spec(problem.name).vector_entry_point is not None:
        try:
            envs = Vectorized(problem, num_envs)
        except (ImportError, gymnasium.error.Error, _NotSaveable) as error:
            log.info("%s is stepped one by one, not in its vectorised form: %s", problem.name, error)
    envs = envs or Separate(problem, num_envs)
    envs.begin(rng)
    envs.reset()
    return envs


class _NotSaveable(Exception):
    pass


class Vectorized:
    """An environment's own vectorised form, such as CartPole's, which steps all at once in NumPy.

    Its state is taken to be its arrays and numbers. Whether that is all of it is tried out once, on the spot.
    """

    def __init__(self, problem: Problem, num_envs: int) -> None:
        self.num_envs = num_envs
        self._env = gymnasium.make_vec(
            problem.name, num_envs=num_envs, vectorization_mode="vector_entry_point", **problem.options
        )
        if self._env.metadata.get("autoreset_mode") != AutoresetMode.NEXT_STEP:
            raise _NotSaveable("it does not reset in the step after an episode's end")
        self._inner: Any = self._env.unwrapped
        self.reset()
        self._try_out()

    def begin(self, rng: np.random.Generator) -> None:
        self._inner.np_random = rng

    def reset(self) -> None:
        before = self._inner.np_random
        seed = int(before.integers(2**31))
        self.observations, _ = self._env.reset(seed=seed)
        self._inner.np_random = before
        self.over = np.zeros(self.num_envs, np.bool_)

    def step(self, actions: NDArray[Any], skip: Bools | None = None) -> Step:
        step = Step(*self._env.step(actions)[:4])
        self.observations = step.observations
        self.over = step.terminated | step.truncated
        return step

    def state(self) -> dict[str, Any]:
        values = {name: _plain(value) for name, value in vars(self._inner).items() if _is_plain(value)}
        return {"env": values, "observations": _plain(self.observations), "over": _plain(self.over)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        for name, value in state["env"].items():
            setattr(self._inner, name, _array(value))
        self.observations, self.over = _array(state["observations"]), _array(state["over"])

    def _try_out(self) -> None:
        """Step on, go back, step on again: raises _NotSaveable where that is not the same."""
        actions = self._env.action_space.sample()
        self.step(actions)
        state, ends = self.state(), []
        for _ in range(2):
            self.load_state(state)
            self.begin(np.random.default_rng(0))
            steps = [self.step(actions) for _ in range(30)]
            ends.append(np.concatenate([np.ravel(part) for step in steps for part in step]))
        if not np.array_equal(ends[0], ends[1]):
            raise _NotSaveable("its state is more than its arrays and numbers")


class Separate:
    """One environment after the other, in Python.

    What an environment keeps inside is its own affair. So each episode is begun with a seed, and the actions of the
    running episodes are kept: playing them again leads to the same state.
    """

    def __init__(self, problem: Problem, num_envs: int) -> None:
        self.num_envs = num_envs
        self._envs = [gymnasium.make(problem.name, **problem.options) for _ in range(num_envs)]
        self._rng = np.random.default_rng(0)
        self._seeds = [0] * num_envs
        self._actions: list[list[Any]] = [[] for _ in range(num_envs)]
        self.observations = np.zeros((num_envs, problem.num_inputs), np.float32)
        self.over = np.zeros(num_envs, np.bool_)

    def begin(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def reset(self) -> None:
        for index in range(self.num_envs):
            self._reset(index, int(self._rng.integers(2**31)))
        self.over[:] = False

    def _reset(self, index: int, seed: int) -> None:
        self._seeds[index] = seed
        self._actions[index] = []
        self.observations[index], _ = self._envs[index].reset(seed=seed)

    def step(self, actions: NDArray[Any], skip: Bools | None = None) -> Step:
        self.observations = self.observations.copy()
        rewards = np.zeros(self.num_envs)
        terminated, truncated = np.zeros(self.num_envs, np.bool_), np.zeros(self.num_envs, np.bool_)
        for index, env in enumerate(self._envs):
            if skip is not None and skip[index]:
                continue
            if self.over[index]:
                self._reset(index, int(self._rng.integers(2**31)))
                continue
            action = actions[index]
            self._actions[index].append(action)
            self.observations[index], rewards[index], terminated[index], truncated[index], _ = env.step(action)
        self.over = terminated | truncated
        return Step(self.observations, rewards, terminated, truncated)

    def state(self) -> dict[str, Any]:
        actions = [torch.from_numpy(np.array(played)) for played in self._actions]
        return {"seeds": list(self._seeds), "actions": actions, "over": _plain(self.over)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        for index, (env, seed, played) in enumerate(zip(self._envs, state["seeds"], state["actions"], strict=True)):
            self._reset(index, seed)
            for action in played.numpy():
                self.observations[index] = env.step(action)[0]
                self._actions[index].append(action)
        self.over = _array(state["over"])


def _is_plain(value: Any) -> bool:
    return isinstance(value, np.ndarray | np.generic | bool | int | float)


def _plain(value: Any) -> Any:
    """A copy that `torch.load(weights_only=True)` reads."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    return value.item() if isinstance(value, np.generic) else value


def _array(value: Any) -> Any:
    return value.numpy().copy() if isinstance(value, Tensor) else value
