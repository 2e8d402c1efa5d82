"""An environment of a user's own, registered when this module is imported."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

LENGTH = 5


class Corridor(gymnasium.Env[Any, Any]):
    """Walk to the right end of a corridor; each step costs 1."""

    observation_space = spaces.Box(0, LENGTH, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.place = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.place = max(0, self.place + (1 if action else -1))
        return self._observe(), -1.0, self.place >= LENGTH, False, {}

    def _observe(self) -> Any:
        return np.array([self.place], np.float32)


gymnasium.register("Corridor-v0", entry_point=Corridor, max_episode_steps=20)  # type: ignore[arg-type]  # a class works
