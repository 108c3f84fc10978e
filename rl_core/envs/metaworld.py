"""Tasks of Meta-World with the interface of `gymnasium.Env`: `env.options.id: Meta-World/reach-v3`.

An environment of Meta-World ignores the seed of `reset`. Here the seed of an episode chooses one of the 50 arrangements of the task, so
that the same seed gives the same episode.
"""

from typing import Any

import gymnasium
import numpy as np

ARRANGEMENTS = 0
"""Seed from which Meta-World draws the arrangements of a task: the same in every process."""


class MetaWorld(gymnasium.Env):  # type: ignore[misc]
    """One task of Meta-World, such as reach-v3: states of 39 numbers, actions of 4 in [-1, 1], 500 steps."""

    def __init__(self, task: str, render_mode: str | None = None) -> None:
        """Build the task. `render_mode` rgb_array allows `render`. Raises ValueError for a task that Meta-World does not have."""
        import metaworld

        suite: Any = metaworld.MT1(task, seed=ARRANGEMENTS)  # type: ignore[no-untyped-call]
        self._arrangements = suite.train_tasks
        self._env = suite.train_classes[task](render_mode=render_mode)
        self._env.set_task(self._arrangements[0])
        shape = self._env.observation_space.shape
        # Some observations are outside the space that the task declares.
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, shape, np.float32)
        self.action_space, self.render_mode, self.metadata = self._env.action_space, render_mode, self._env.metadata
        if render_mode is not None:
            quality = self._env.model.vis.quality
            # Rendering without shadows and antialiasing is five times as fast.
            quality.shadowsize = quality.offsamples = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin an episode in the arrangement that `seed` selects; None keeps the current one."""
        if seed is not None:
            self._env.set_task(self._arrangements[seed % len(self._arrangements)])
        observation, info = self._env.reset()
        return observation.astype(np.float32), info

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Step with one action; `info["success"]` says whether the task is solved."""
        observation, reward, terminated, truncated, info = self._env.step(action)
        return observation.astype(np.float32), float(reward), bool(terminated), bool(truncated), info

    def render(self) -> Any:
        """Return an image of the scene."""
        return self._env.render()

    def close(self) -> None:
        """Release the simulator."""
        self._env.close()
