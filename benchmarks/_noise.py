"""A simulator of images of random bytes, in a module of its own: its processes import nothing else."""

import gymnasium
import numpy as np

LENGTH = 50


class Noise(gymnasium.Env):
    """Images of random bytes; episodes of LENGTH steps."""

    action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, side):
        self.images = np.random.default_rng(0).integers(0, 256, (LENGTH + 1, side, side, 3), np.uint8)
        self.observation_space = gymnasium.spaces.Box(0, 255, (side, side, 3), np.uint8)

    def reset(self, *, seed=None, options=None):
        self.made = 0
        return self.images[0], {}

    def step(self, action):
        self.made += 1
        return self.images[self.made], 0.0, False, self.made == LENGTH, {}
