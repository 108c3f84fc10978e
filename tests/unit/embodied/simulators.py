"""Simulators for tests, whose every transition is known."""

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np


class Scripted:
    """Observation (seed, step); reward = step; ends after `ends[seed % len(ends)]` steps: terminated where the number is positive.

    Above 0 `limit` is the number of steps after which an episode is truncated anyway.

    `faults[seed]` happens at step `fault_at` of the episode of that seed, "hang in reset" as the episode begins. With "shape from reset" and
    "name from reset" all observations of the episode have another shape or name. A person acts at step `person_at` of each episode.
    """

    action_space = SimpleNamespace(low=-1.0, high=1.0, dtype=np.float32, shape=())

    def __init__(self, ends=(3, -4), faults=(), fault_at=2, person_at=0, person_numbers=1, limit=0):
        self.ends, self.faults, self.fault_at = ends, faults, fault_at
        self.person_at, self.person_numbers, self.limit = person_at, person_numbers, limit

    def reset(self, seed=None):
        self.seed, self.made = seed, 0
        self.fault = self.faults[seed] if seed < len(self.faults) else None
        if self.fault == "hang in reset":
            time.sleep(3600)
        return self.observation(), {}

    def observation(self):
        states = np.array([self.seed, self.made], np.float64)
        if self.fault == "shape from reset":
            return np.zeros(5)
        return {"other": states} if self.fault == "name from reset" else states

    def step(self, action):
        self.made += 1
        reward = float(self.made)
        if self.made == self.fault_at:
            if self.fault == "raise":
                raise RuntimeError("broken")
            if self.fault == "exit":
                os._exit(3)
            if self.fault == "segfault":
                os.kill(os.getpid(), signal.SIGSEGV)
            if self.fault == "hang":
                time.sleep(3600)
            if self.fault == "leak":
                self.leaked = [bytearray(2**30) for _ in range(8)]
            if self.fault == "nan":
                reward = float("nan")
            if self.fault == "text":
                reward = "much"
            if self.fault == "nan observation":
                return self.observation() * np.nan, 1.0, False, False, {}
            if self.fault == "shape":
                return np.zeros(5), 1.0, False, False, {}
        end = self.ends[self.seed % len(self.ends)]
        done = self.made >= abs(end)
        info = {"success": self.made == 2}
        if self.made == self.person_at:
            info["intervene_action"] = [self.made + 0.25] * self.person_numbers
        return self.observation(), reward, done and end > 0, (done and end < 0) or self.made == self.limit, info

    def render(self):
        """Return a gray image, which tells how many steps the episode has."""
        return np.full((300, 480, 3), 20 * self.made, np.uint8)

    def close(self):
        pass


class Echo(Scripted):
    """A `Scripted` whose reward tells the action, and whose first number of an observation is small enough for float32."""

    def observation(self):
        return np.array([self.seed % 1000, self.made], np.float32)

    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, reward + float(action), *rest


FAULTY_SEEDS = 4
"""Of so many seeds an episode of `Faulty` fails."""


class Faulty(Echo):
    """An `Echo` whose episodes of every fourth seed fail by `fault` at step `fault_at`."""

    def __init__(self, ends, fault, fault_at):
        super().__init__(ends, fault_at=fault_at)
        self.kind = fault

    def reset(self, seed=None):
        answer = super().reset(seed)
        self.fault = self.kind if seed % FAULTY_SEEDS == 0 else None
        return answer


class Stumbling(Scripted):
    """A `Scripted` whose resets with an odd seed fail in the first simulator that makes one, and which counts the open simulators."""

    open = 0

    def __init__(self, folder, **arguments):
        super().__init__(**arguments)
        self.folder = Path(folder)
        type(self).open += 1

    def reset(self, seed=None):
        if seed % 2:
            try:
                (self.folder / str(seed)).mkdir()
            except FileExistsError:
                return super().reset(seed)
            raise RuntimeError("stumbled")
        return super().reset(seed)

    def close(self):
        type(self).open -= 1
        raise RuntimeError("nothing to close")


class Picture(Echo):
    """An `Echo` that also shows an image, whose pixels are (seed, step, 0) of the observation."""

    SIDE = 16

    def observation(self):
        states = super().observation()
        return {"states": states, "pixels": picture(states)}


class Bare(Picture):
    """A `Picture` that shows nothing but the image."""

    def observation(self):
        return super().observation()["pixels"]


def picture(states):
    """Return the image [side, side, 3] of bytes that goes with states."""
    seed, made = (int(number) for number in states)
    return np.full((Picture.SIDE, Picture.SIDE, 3), (seed % 256, made, 0), np.uint8)
