"""CartPole whose step costs a millisecond of processor time, as that of a physics simulator does."""

import time

from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.wrappers import TimeLimit


class SlowCartPole(TimeLimit):
    """CartPole-v1 with `milliseconds` of processor time added to each step."""

    def __init__(self, milliseconds=1.0):
        super().__init__(CartPoleEnv(), 500)
        self.seconds = milliseconds / 1e3

    def step(self, action):
        end = time.thread_time() + self.seconds
        answer = super().step(action)
        while time.thread_time() < end:
            pass
        return answer
