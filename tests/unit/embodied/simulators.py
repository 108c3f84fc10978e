"""Simulators for tests, whose every transition is known."""

import os
import time
from types import SimpleNamespace

import numpy as np


class Scripted:
    """Observation (seed, step); reward 1 + step; ends after `ends[seed % len(ends)]` steps: terminated where the number is positive."""

    action_space = SimpleNamespace(low=-1.0, high=1.0, dtype=np.float32, shape=())

    def __init__(self, ends=(3, -4), fault=None, fault_at=2, fault_seeds=()):
        self.ends, self.fault, self.fault_at, self.fault_seeds = ends, fault, fault_at, fault_seeds

    def reset(self, seed=None):
        self.seed, self.made = seed, 0
        return self.observation(), {}

    def observation(self):
        return np.array([self.seed, self.made], np.float64)

    def step(self, action):
        self.made += 1
        reward = float(self.made)
        if self.seed in self.fault_seeds and self.made == self.fault_at:
            if self.fault == "raise":
                raise RuntimeError("broken")
            if self.fault == "exit":
                os._exit(3)
            if self.fault == "hang":
                time.sleep(3600)
            if self.fault == "nan":
                reward = float("nan")
            if self.fault == "text":
                reward = "much"
            if self.fault == "shape":
                return np.zeros(5), 1.0, False, False, {}
        end = self.ends[self.seed % len(self.ends)]
        done = self.made >= abs(end)
        return self.observation(), reward, done and end > 0, done and end < 0, {"success": self.made == 2}

    def close(self):
        pass
