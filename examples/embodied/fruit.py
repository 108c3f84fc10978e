"""A simulator for pixels and language: move a hand on a table to the fruit that the instruction names.

The table is an image of 16 x 16 pixels: an apple is red, a pear is green, the hand is white. Nothing else tells where they are.
"""

import gymnasium
import numpy as np

SIDE = 16
FRUITS = {"apple": (255, 0, 0), "pear": (0, 255, 0)}
WORDS = {"reach": 2, "the": 3, "apple": 4, "pear": 5}
"""Ids of the words of an instruction, below those of the action tokens."""
REACHED, STRIDE = 0.25, 0.5


class Fruit(gymnasium.Env):
    """Action: how far the hand moves, two numbers in [-1, 1]. Reward: minus the distance to the named fruit."""

    action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, fruits=("apple",), length=4):
        self.fruits, self.length = list(fruits), length
        self.observation_space = gymnasium.spaces.Dict(
            {
                "pixels": gymnasium.spaces.Box(0, 255, (SIDE, SIDE, 3), np.uint8),
                "instruction": gymnasium.spaces.Box(0, len(WORDS) + 2, (3,), np.int64),
            }
        )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.places = {fruit: self.np_random.uniform(-0.9, 0.9, 2) for fruit in self.fruits}
        self.wanted = self.fruits[self.np_random.integers(len(self.fruits))]
        self.hand, self.made = np.zeros(2), 0
        return self.observation(), {}

    def observation(self):
        words = [WORDS[word] for word in ("reach", "the", self.wanted)]
        return {"pixels": self.render(), "instruction": np.array(words, np.int64)}

    def render(self):
        image = np.zeros((SIDE, SIDE, 3), np.uint8)
        for place, color in [(self.places[fruit], FRUITS[fruit]) for fruit in self.fruits] + [(self.hand, (255,) * 3)]:
            row, column = ((place + 1) / 2 * (SIDE - 2)).round().astype(int)
            image[row : row + 2, column : column + 2] = color
        return image

    def step(self, action):
        self.hand = np.clip(self.hand + STRIDE * np.clip(action, -1, 1), -1, 1)
        self.made += 1
        distance = float(np.linalg.norm(self.hand - self.places[self.wanted]))
        return self.observation(), -distance, False, self.made >= self.length, {"success": distance < REACHED}
