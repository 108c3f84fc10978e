"""An id of MuJoCo beside a plain loop of gymnasium: the time limit, final observations, chunks, and seeds."""

import gymnasium
import numpy as np
import pytest

from rl_core.envs.gymnasium import GymnasiumVectorEnv

ID, LIMIT, SEEDS = "InvertedPendulum-v5", 1000, [3, 4]
GAINS = np.array([0.6, 9.0, 0.9, 1.3])
"""Of position, angle and their velocities: with this force the pole stays upright."""


def plain(seed, *, upright=True):
    """Return observations, actions and rewards of an episode in a plain loop, and whether it was terminated and truncated."""
    env = gymnasium.make(ID)
    observations, actions, rewards, ended, cut = [env.reset(seed=seed)[0]], [], [], False, False
    while not (ended or cut):
        force = np.clip(observations[-1] @ GAINS, -3, 3) if upright else 1.0
        actions.append(np.array([force], np.float32))
        observation, reward, ended, cut, _ = env.step(actions[-1])
        observations.append(observation)
        rewards.append(reward)
    env.close()
    return np.array(observations, np.float32), np.array(actions), np.array(rewards, np.float32), ended, cut


def first_observation(seed):
    return plain(seed, upright=False)[0][0]


@pytest.fixture(scope="module")
def truth():
    episodes = [plain(seed) for seed in SEEDS]
    assert [(len(rewards), ended, cut) for _, _, rewards, ended, cut in episodes] == [(LIMIT, False, True)] * 2
    return [np.stack(parts) for parts in list(zip(*episodes, strict=True))[:3]]


@pytest.mark.parametrize(("chunk", "vectorization"), [(1, "sync"), (7, "sync"), (7, "process")])
def test_an_episode_is_truncated_at_its_limit_with_its_exact_final_observation(truth, chunk, vectorization):
    observations, actions, rewards = truth
    padded = np.concatenate([actions, np.zeros((2, chunk, 1), np.float32)], axis=1)
    env = GymnasiumVectorEnv(
        ID, 2, vectorization=vectorization, seed_of=lambda index, episode: SEEDS[index] + 10 * episode
    )
    try:
        output = env.reset()
        for begin in range(0, LIMIT, chunk):
            assert np.array_equal(output.obs["states"], observations[:, begin])
            output = env.chunk_step(padded[:, begin : begin + chunk])
            made = min(chunk, LIMIT - begin)
            assert output.sub_steps.tolist() == [made] * 2
            assert np.array_equal(output.rewards[:, :made], rewards[:, begin : begin + made])
            assert not output.rewards[:, made:].any()
            assert output.dones.any() == (begin + chunk >= LIMIT)
        assert output.truncations[:, -1].all() and not output.terminations.any()
        assert np.array_equal(output.final_obs["states"], observations[:, -1])
        assert np.array_equal(output.obs["states"], [first_observation(seed + 10) for seed in SEEDS])
        assert [info["length"] for info in output.final_info] == [LIMIT] * 2
    finally:
        env.close()


def test_a_pole_that_falls_terminates_and_the_same_seed_falls_alike(truth):
    fallen = plain(SEEDS[0], upright=False)
    assert fallen[3] and not fallen[4]
    env = GymnasiumVectorEnv(ID, 2)
    for _ in range(2):
        output = env.reset([SEEDS[0], SEEDS[0]])
        for observation in fallen[0][:-1]:
            assert np.array_equal(output.obs["states"], [observation] * 2) and output.final_obs is None
            output = env.step(np.ones((2, 1), np.float32))
        assert output.terminations.all() and not output.truncations.any()
        assert np.array_equal(output.final_obs["states"], [fallen[0][-1]] * 2)
    env.close()
