"""Vectors of gymnasium environments with a state that can be saved.

After the end of an episode the next step resets the environment (gymnasium's `NEXT_STEP`): its reward is 0, its
action is ignored, and it is not a transition to learn from. The observation before it is the last one of the episode;
a truncated episode is bootstrapped from it.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeAlias

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
#: Seeds of gymnasium's environments are less than this number.
SEED_LIMIT = 2**31
#: Steps that are repeated to check that a restored state is complete: enough for the ends of some episodes.
NUM_CHECK_STEPS = 30


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Properties of an environment that determine the policy. Create it with `Problem.of`."""

    name: str  #: its id in gymnasium's registry, with the version and without `module:`
    source: str  #: the package that its class is from
    num_inputs: int
    num_outputs: int  #: number of choices, or length of an action
    is_discrete: bool
    first_action: int  #: of a discrete space, usually 0
    low: Floats  #: of a box space, [num_outputs]
    high: Floats
    reward_threshold: float | None

    @classmethod
    def of(cls, name: str) -> Self:
        """Inspect an environment; `name` may be `module:Name-v0`, which imports the module that registers it.

        Raises ConfigError if it cannot be made or has unsupported spaces.
        """
        observation_space: Any
        action_space: Any
        if name.count(":") > 1:
            raise ConfigError(f"rl.env_id={name} has more than one colon: write module:Name-v0")
        try:
            with gymnasium.make(name) as env:
                observation_space, action_space, spec = env.observation_space, env.action_space, env.spec
                source = type(env.unwrapped).__module__.partition(".")[0]
        except (gymnasium.error.Error, ModuleNotFoundError, TypeError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"rl.env_id={name} cannot be created: {reason}") from error
        assert spec is not None
        is_discrete = isinstance(action_space, spaces.Discrete)
        mistake = ""
        if not _is_vector(observation_space):
            mistake = f"the observation space {observation_space}: trainer rl supports a Box with one axis"
        elif not is_discrete and not _is_vector(action_space):
            mistake = f"the action space {action_space}: trainer rl supports Discrete and a Box with one axis"
        elif spec.max_episode_steps is None:
            mistake = "no time limit: register it with max_episode_steps"
        if mistake:
            raise ConfigError(f"rl.env_id={name} has {mistake}")
        if is_discrete:
            num_outputs = int(action_space.n)
            first_action = int(action_space.start)
            low = high = np.zeros(0, np.float32)
        else:
            num_outputs = action_space.shape[0]
            first_action = 0
            low = action_space.low.astype(np.float32)
            high = action_space.high.astype(np.float32)
        return cls(
            name=spec.id,
            source=source,
            num_inputs=observation_space.shape[0],
            num_outputs=num_outputs,
            is_discrete=is_discrete,
            first_action=first_action,
            low=low,
            high=high,
            reward_threshold=spec.reward_threshold,
        )

    def to_env(self, chosen: NDArray[Any]) -> NDArray[Any]:
        """Return actions, int64 [n] or floats [n, num_outputs] from -1 to 1, in the environment's units.

        An unbounded dimension is unchanged.
        """
        if self.is_discrete:
            if self.first_action == 0:
                return chosen  # without a copy
            return chosen + self.first_action
        bounded = np.isfinite(self.low) & np.isfinite(self.high)
        half = np.where(bounded, (self.high - self.low) / 2, np.float32(1))
        centre = np.where(bounded, (self.high + self.low) / 2, np.float32(0))
        scaled: NDArray[Any] = np.clip(centre + half * chosen, self.low, self.high)
        return scaled


def _is_vector(space: gymnasium.Space[Any]) -> bool:
    """Return whether a space is a Box with one axis."""
    return isinstance(space, spaces.Box) and len(space.shape) == 1


class Step(NamedTuple):
    """Result of one step of n environments."""

    observations: Floats  #: [n, num_inputs]
    rewards: NDArray[np.floating[Any]]  #: [n]
    terminated: Bools
    truncated: Bools


def make_environments(problem: Problem, num_envs: int, rng: np.random.Generator) -> "Environments":
    """Return n environments after a reset: their own vectorised form, if its state can be saved, or a loop."""
    envs: Environments | None = None
    if gymnasium.spec(problem.name).vector_entry_point is not None:
        try:
            envs = Vectorized(problem, num_envs)
        except (ImportError, gymnasium.error.Error, _NotSaveable) as error:
            log.info("%s is stepped in a loop, not in its vectorised form: %s", problem.name, error)
    if envs is None:
        envs = Separate(problem, num_envs)
    envs.begin(rng)
    envs.reset()
    return envs


class _NotSaveable(Exception):
    """The state of an environment's vectorised form cannot be saved; the message is the reason."""


class Vectorized:
    """An environment's own vectorised form, such as CartPole's, which steps all environments at once in NumPy.

    Its state consists of its arrays and numbers; the constructor checks that this state is complete.
    """

    def __init__(self, problem: Problem, num_envs: int) -> None:
        self.num_envs = num_envs
        self._env = gymnasium.make_vec(problem.name, num_envs=num_envs, vectorization_mode="vector_entry_point")
        if self._env.metadata.get("autoreset_mode") != AutoresetMode.NEXT_STEP:
            raise _NotSaveable("its autoreset mode is not NEXT_STEP")
        self._inner: Any = self._env.unwrapped
        self.reset()
        # Steps from a restored state must repeat exactly.
        actions = self._env.action_space.sample()
        self.step(actions)
        state = self.state()
        first_run = self._steps_from(state, actions)
        second_run = self._steps_from(state, actions)
        if not np.array_equal(first_run, second_run):
            raise _NotSaveable("its state has more than arrays and numbers")

    def _steps_from(self, state: Mapping[str, Any], actions: NDArray[Any]) -> NDArray[Any]:
        """Return the results of some steps from a state, as one array."""
        self.load_state(state)
        self.begin(np.random.default_rng(0))
        parts = []
        for _ in range(NUM_CHECK_STEPS):
            parts += [np.ravel(part) for part in self.step(actions)]
        return np.concatenate(parts)

    def begin(self, rng: np.random.Generator) -> None:
        """Draw all random numbers of the environments from `rng`."""
        self._inner.np_random = rng

    def reset(self) -> None:
        """Begin new episodes in all environments."""
        rng = self._inner.np_random
        self.observations, _ = self._env.reset(seed=int(rng.integers(SEED_LIMIT)))
        self._inner.np_random = rng  # reset has replaced it
        self.over = np.zeros(self.num_envs, np.bool_)

    def step(self, actions: NDArray[Any], skip: Bools | None = None) -> Step:
        """Step with actions in the environment's units. Environments in `skip` may be left out."""
        step = Step(*self._env.step(actions)[:4])
        self.observations = step.observations
        self.over = step.terminated | step.truncated
        return step

    def state(self) -> dict[str, Any]:
        """Return the state for `load_state` as tensors and lists, without the generator: call `begin` after loading."""
        kinds = np.ndarray | np.generic | bool | int | float
        values = {name: _to_tensor(value) for name, value in vars(self._inner).items() if isinstance(value, kinds)}
        return {"env": values, "observations": _to_tensor(self.observations), "over": _to_tensor(self.over)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state`."""
        for name, value in state["env"].items():
            setattr(self._inner, name, _to_array(value))
        self.observations = _to_array(state["observations"])
        self.over = _to_array(state["over"])


class Separate:
    """Environments that are stepped in a Python loop, with the methods of `Vectorized`.

    The internal state of an environment is unknown, so each episode starts from a seed and the actions of the current
    episodes are kept: repeating them restores the state.
    """

    def __init__(self, problem: Problem, num_envs: int) -> None:
        self.num_envs = num_envs
        self._envs = [gymnasium.make(problem.name) for _ in range(num_envs)]
        self._rng = np.random.default_rng(0)
        self._seeds = [0] * num_envs
        self._actions: list[list[Any]] = [[] for _ in range(num_envs)]
        self.observations = np.zeros((num_envs, problem.num_inputs), np.float32)
        self.over = np.zeros(num_envs, np.bool_)

    def begin(self, rng: np.random.Generator) -> None:
        """Draw the seeds of episodes from `rng`."""
        self._rng = rng

    def reset(self) -> None:
        """Begin new episodes in all environments."""
        for index in range(self.num_envs):
            self._reset(index, int(self._rng.integers(SEED_LIMIT)))
        self.over[:] = False

    def _reset(self, index: int, seed: int) -> None:
        self._seeds[index] = seed
        self._actions[index] = []
        self.observations[index], _ = self._envs[index].reset(seed=seed)

    def step(self, actions: NDArray[Any], skip: Bools | None = None) -> Step:
        """Step with actions in the environment's units. Environments in `skip` are left out."""
        self.observations = self.observations.copy()
        rewards = np.zeros(self.num_envs)
        terminated = np.zeros(self.num_envs, np.bool_)
        truncated = np.zeros(self.num_envs, np.bool_)
        for index, env in enumerate(self._envs):
            if skip is not None and skip[index]:
                continue
            if self.over[index]:
                self._reset(index, int(self._rng.integers(SEED_LIMIT)))
                continue
            action = actions[index]
            self._actions[index].append(action)
            self.observations[index], rewards[index], terminated[index], truncated[index], _ = env.step(action)
        self.over = terminated | truncated
        return Step(self.observations, rewards, terminated, truncated)

    def state(self) -> dict[str, Any]:
        """Return seed and actions of each current episode, for `load_state`; call `begin` after loading."""
        actions = [torch.from_numpy(np.array(played)) for played in self._actions]
        return {"seeds": list(self._seeds), "actions": actions, "over": _to_tensor(self.over)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state`, by repeating the actions."""
        for index, (env, seed, played) in enumerate(zip(self._envs, state["seeds"], state["actions"], strict=True)):
            self._reset(index, seed)
            for action in played.numpy():
                self.observations[index] = env.step(action)[0]
                self._actions[index].append(action)
        self.over = _to_array(state["over"])


Environments: TypeAlias = Vectorized | Separate
"""n environments that are stepped together.

`observations` [n, num_inputs] are the input of the next action. `over` [n] holds whether an episode has ended, so that
the next step resets its environment.
"""


def _to_tensor(value: Any) -> Any:
    """Return a copy that `torch.load(weights_only=True)` accepts."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, np.generic):
        return value.item()
    return value


def _to_array(value: Any) -> Any:
    """Return a copy of the value that `_to_tensor` was given."""
    if isinstance(value, Tensor):
        return value.numpy().copy()
    return value


def greedy_returns(
    problem: Problem, envs: Environments, act: Callable[[Floats], Floats], alive: Callable[[], None] = lambda: None
) -> NDArray[np.float64]:
    """Play one full greedy episode in each environment; return their returns, [n]. `alive` is called each step."""
    envs.reset()
    returns = np.zeros(envs.num_envs)
    over = np.zeros(envs.num_envs, np.bool_)
    while not over.all():
        actions: NDArray[Any] = act(envs.observations)
        if problem.is_discrete:
            actions = actions.argmax(axis=1)
        step = envs.step(problem.to_env(actions), skip=over)
        returns += np.where(over, 0.0, step.rewards)
        over |= step.terminated | step.truncated
        alive()
    return returns
