"""A CartPole for tests that kills the process it runs in, once, in the middle of an episode."""

import os
import signal
from pathlib import Path

from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.wrappers import TimeLimit

LAST_STEP, AT_STEP, AT_EPISODE = 40, 6, 10


class Fragile(TimeLimit):
    """From its tenth episode on, the simulator that first finds the file `armed` in `folder` renames it to `died` and dies.

    No simulator of a validation has as many episodes.
    """

    def __init__(self, folder):
        super().__init__(CartPoleEnv(), LAST_STEP)
        self.folder, self.episodes = Path(folder), 0
        (self.folder / f"shared-memory-{os.stat('/dev/shm').st_dev}").touch()  # tells on which hosts simulators were

    def reset(self, **options):
        self.episodes += 1
        return super().reset(**options)

    def step(self, action):
        if self._elapsed_steps == AT_STEP and self.episodes >= AT_EPISODE:
            try:
                (self.folder / "armed").rename(self.folder / "died")
            except FileNotFoundError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)
