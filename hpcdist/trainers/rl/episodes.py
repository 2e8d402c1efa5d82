"""Full greedy episodes: returns of a policy, their plot, and an episode as an animation."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from hpcdist.trainers.rl.environments import Environments, Floats, Problem

#: Pixels of the longer side of a GIF, and its maximum frames per second, which is the limit of most viewers.
GIF_SIZE = 300
GIF_FPS = 25


def greedy_returns(
    problem: Problem, envs: Environments, act: Callable[[Floats], Floats], alive: Callable[[], None] = lambda: None
) -> NDArray[np.float64]:
    """Play one full greedy episode in each environment; return their returns, [n].

    Args:
        act: returns a policy's outputs [n, num_outputs] for observations [n, num_inputs].
        alive: called after every step, since steps may be slow.
    """
    envs.reset()
    returns = np.zeros(envs.num_envs)
    over = np.zeros(envs.num_envs, np.bool_)
    while not over.all():
        step = envs.step(problem.greedy(act(envs.observations)), skip=over)
        returns += np.where(over, 0.0, step.rewards)
        over |= step.terminated | step.truncated
        alive()
    return returns


def greedy_gif(problem: Problem, act: Callable[[Floats], Floats], seed: int) -> bytes:
    """Return one greedy episode as an animated GIF.

    Raises gymnasium.error.Error or ImportError if the environment cannot be rendered.
    """
    from PIL import Image

    if not problem.is_drawable:
        raise gymnasium.error.UnsupportedMode("it has no render mode rgb_array")

    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # without it pygame needs a display
    frames, frames_per_s = [], GIF_FPS
    with gymnasium.make(problem.name, render_mode="rgb_array", **problem.options) as env:
        frames_per_s = env.metadata.get("render_fps", GIF_FPS)
        every = max(1, round(frames_per_s / GIF_FPS))
        observation, _ = env.reset(seed=seed)
        for number in range(problem.time_limit):
            if number % every == 0:
                picture: Any = env.render()
                image = Image.fromarray(picture)
                image.thumbnail((GIF_SIZE, GIF_SIZE))
                frames.append(image.quantize(32))
            action = problem.greedy(act(np.asarray(observation, np.float32)[None]))[0]
            observation, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                break
    file = io.BytesIO()
    frames[0].save(
        file, format="GIF", save_all=True, append_images=frames[1:], duration=1000 * every / frames_per_s, loop=0
    )
    return file.getvalue()


def returns_plot(problem: Problem, history: Sequence[tuple[int, float, float, float]], last: Sequence[float]) -> bytes:
    """Return a PNG with the returns of all evaluations and a histogram of those of the last one.

    Args:
        history: environment steps and mean, smallest and largest return of each evaluation.
        last: returns of the episodes of the last evaluation.
    """
    from matplotlib.figure import Figure  # pyplot keeps global state and needs a display

    steps, means, lows, highs = np.array(history).T
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    curve, histogram = figure.subplots(1, 2, width_ratios=(2, 1))
    curve.fill_between(steps, lows, highs, alpha=0.2, label="smallest to largest")
    curve.plot(steps, means, marker=".", label="mean")
    if problem.reward_threshold is not None:
        curve.axhline(problem.reward_threshold, color="grey", linestyle="--", label="solved")
    curve.set(xlabel="environment steps", ylabel="return of a greedy episode", title=problem.name)
    curve.legend()
    histogram.hist(last, bins=min(20, len(last)))
    histogram.set(xlabel="return", ylabel="episodes", title="last evaluation")
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=120)
    return file.getvalue()
