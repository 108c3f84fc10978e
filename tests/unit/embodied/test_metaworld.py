"""A task of Meta-World: the seed chooses the episode, and observations are those of the simulator as float32."""

import numpy as np

from rl_core.envs.gymnasium import GymnasiumVectorEnv

ACTIONS = np.random.default_rng(0).uniform(-1, 1, (8, 4)).astype(np.float32)


def test_the_same_seed_gives_the_same_episode_in_any_simulator():
    env = GymnasiumVectorEnv("Meta-World/reach-v3", 2)

    def episode(seeds):
        outputs = [env.reset(seeds), *(env.step(np.stack([action, action])) for action in ACTIONS)]
        return np.stack([output.obs["states"] for output in outputs], axis=1)

    first = episode([7, 8])
    assert first.dtype == np.float32 and first.shape == (2, 9, 39)
    swapped, again = episode([8, 57]), episode([7, 8])
    assert np.array_equal(again, first)
    # There are 50 arrangements: 57 is that of 7, which the other simulator shows as well.
    assert np.array_equal(swapped[0], first[1]) and np.array_equal(swapped[1], first[0])
    assert not np.array_equal(first[0, 0], first[1, 0])
    env.close()
