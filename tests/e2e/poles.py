"""A CartPole for tests that kills the process it runs in, once, in the middle of an episode."""

import os
import signal
from pathlib import Path

from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.wrappers import TimeLimit

LAST_STEP, AT_STEP = 40, 6


class Fragile(TimeLimit):
    """The first simulator that finds the file `armed` in `folder` as it makes its sixth step renames it to `died` and dies."""

    def __init__(self, folder):
        super().__init__(CartPoleEnv(), LAST_STEP)
        self.folder = Path(folder)

    def step(self, action):
        if self._elapsed_steps == AT_STEP:
            try:
                (self.folder / "armed").rename(self.folder / "died")
            except FileNotFoundError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)
