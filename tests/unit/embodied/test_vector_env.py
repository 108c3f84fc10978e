"""GymnasiumVectorEnv on a simulator whose transitions are known: ends, chunks, resting simulators, and simulators that fail."""

import numpy as np
import pytest

from rl_core.api.errors import RolloutDataFailure
from rl_core.envs.gymnasium import GymnasiumVectorEnv
from rl_core.messages.embodied import SimulatorSettings
from tests.unit.embodied.simulators import Stumbling

SCRIPTED = "tests.unit.embodied.simulators:Scripted"


def env(count, *, vectorization="sync", auto_reset=True, step_seconds=60.0, **kwargs):
    return GymnasiumVectorEnv(
        SCRIPTED,
        count,
        auto_reset=auto_reset,
        vectorization=vectorization,
        seed_of=lambda index, episode: index + 10 * episode,
        step_seconds=step_seconds,
        **kwargs,
    )


def test_an_end_gives_the_exact_final_observation_and_the_first_of_the_next_episode():
    made = env(2)
    made.reset()
    for _ in range(2):
        output = made.step(np.zeros(2))
        assert not output.dones.any() and output.final_obs is None
    output = made.step(np.zeros(2))
    assert output.terminations.tolist() == [[True], [False]] and not output.truncations.any()
    assert output.final_obs["states"].tolist() == [[0, 3], [1, 3]]
    assert output.obs["states"].tolist() == [[10, 0], [1, 3]]
    assert output.final_info == [{"slot": 0, "return": 6.0, "length": 3, "success_once": True, "success_at_end": False}]
    output = made.step(np.zeros(2))
    assert output.truncations.tolist() == [[False], [True]] and not output.terminations.any()
    assert output.final_obs["states"][1].tolist() == [1, 4]


@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_a_chunk_ends_with_the_episode_and_reports_its_end_in_the_last_column(width):
    made, truth = env(2), []
    made.reset()
    for slot, end in ((0, 3), (1, 4)):
        step = 0
        rows = []
        for _ in range(4):
            rewards, done = [], False
            while len(rewards) < width and not done:
                step += 1
                rewards.append(float(step))
                done = step == end
            rows.append((rewards + [0.0] * (width - len(rewards)), len(rewards), done))
            step = 0 if done else step
        truth.append((slot, rows))
    for turn in range(4):
        output = made.chunk_step(np.zeros((2, width)))
        for slot, rows in truth:
            rewards, steps, done = rows[turn]
            assert output.rewards[slot].tolist() == rewards
            assert output.sub_steps[slot] == steps
            assert output.dones[slot].tolist() == [False] * (width - 1) + [done]


def test_without_auto_reset_a_simulator_rests_with_reward_0_and_is_done():
    made = env(2, auto_reset=False)
    made.reset()
    first = made.chunk_step(np.zeros((2, 4)))
    assert first.dones.tolist() == [[False, False, True, False], [False, False, False, True]]
    second = made.chunk_step(np.zeros((2, 4)))
    assert made.all_resting and second.rewards.sum() == 0 and second.final_info is None
    assert second.obs["states"].tolist() == [[0, 3], [1, 4]] and second.sub_steps.tolist() == [0, 0]


def endless(count, *, auto_reset, **kwargs):
    settings = SimulatorSettings(id=SCRIPTED, kwargs=kwargs, auto_reset=auto_reset, ignore_terminations=True)
    return GymnasiumVectorEnv(
        SCRIPTED, count, auto_reset=auto_reset, settings=settings, seed_of=lambda index, episode: index + 10 * episode
    )


@pytest.mark.parametrize("auto_reset", [True, False])
def test_a_terminated_episode_goes_on_until_it_is_truncated(auto_reset):
    made = endless(2, auto_reset=auto_reset, ends=(3, 3), limit=5)
    made.reset()
    outputs = [made.step(np.zeros(2)) for _ in range(5)]
    assert not any(output.dones.any() or output.final_info for output in outputs[:-1])
    last = outputs[-1]
    assert (
        last.truncations.all() and not last.terminations.any() and last.final_obs["states"].tolist() == [[0, 5], [1, 5]]
    )
    assert [(info["return"], info["length"], info["success_once"]) for info in last.final_info] == [(15.0, 5, True)] * 2
    assert made.all_resting != auto_reset
    assert made.step(np.zeros(2)).dones.all() != auto_reset


def test_without_auto_reset_episodes_that_are_not_truncated_together_are_an_error():
    made = endless(3, auto_reset=False, ends=(1, -4, -5))
    made.reset()
    for _ in range(3):
        made.step(np.zeros(3))
    with pytest.raises(
        RolloutDataFailure, match="ignoreTerminations and without autoReset, got 1 of 3; give the simul"
    ):
        made.step(np.zeros(3))


def test_a_simulator_that_was_replaced_need_not_be_truncated_with_the_others():
    made = endless(3, auto_reset=False, ends=(-4,), faults=[None, "raise"])
    made.reset()
    outputs = [made.step(np.zeros(3)) for _ in range(6)]
    assert outputs[1].lost.tolist() == [False, True, False]
    assert [output.dones[:, 0].tolist() for output in outputs[2:]] == [
        [False] * 3,
        *[[True, False, True]] * 2,
        [True] * 3,
    ]
    made.reset()
    assert not made.step(np.zeros(3)).dones.any()


@pytest.mark.parametrize("fault", ["raise", "nan", "nan observation", "text", "shape"])
def test_a_simulator_that_fails_loses_its_own_episode_only(fault):
    made = env(3, faults=[None, fault])
    made.reset()
    made.step(np.zeros(3))
    output = made.step(np.zeros(3))
    assert output.lost.tolist() == [False, True, False]
    assert output.rewards.tolist() == [[2.0], [0.0], [2.0]] and output.sub_steps.tolist() == [1, 0, 1]
    assert output.dones.tolist() == [[False], [True], [False]] and output.final_info is None
    assert output.obs["states"][1].tolist() == [11, 0]


@pytest.mark.parametrize("fault", ["shape from reset", "name from reset"])
def test_a_simulator_whose_observations_are_unlike_those_of_the_others_is_replaced(fault):
    made = env(3, faults=[None, fault, None])
    assert made.reset().obs["states"].tolist() == [[0, 0], [11, 0], [2, 0]]
    assert made.step(np.zeros(3)).lost is None
    every = env(3, faults=[None, *[fault] * 100])
    with pytest.raises(RolloutDataFailure, match="5 failures in a row in slot 1.*the same shapes.*states"):
        every.reset()


@pytest.mark.parametrize("vectorization", ["sync", "process"])
@pytest.mark.parametrize("given", [None, [1, 1, 1]])
def test_a_simulator_that_fails_in_its_first_reset_begins_with_the_seed_of_its_group(tmp_path, vectorization, given):
    made = GymnasiumVectorEnv(
        "tests.unit.embodied.simulators:Stumbling",
        3,
        auto_reset=False,
        vectorization=vectorization,
        seed_of=lambda index, episode: 1 + 2 * episode,
        folder=str(tmp_path),
    )
    try:
        assert made.reset(given).obs["states"].tolist() == [[1, 0]] * 3
    finally:
        made.close()


def test_simulators_of_this_process_are_closed_when_they_are_replaced(tmp_path):
    Stumbling.open = 0
    made = GymnasiumVectorEnv("tests.unit.embodied.simulators:Stumbling", 2, folder=str(tmp_path))
    made.reset([1, 3])
    assert Stumbling.open == 2
    made.close()
    assert Stumbling.open == 0


def test_processes_that_fail_in_every_way_are_replaced_and_the_others_go_on():
    faults = [None, "raise", "exit", "segfault", "hang", "nan", "text", "shape", None, None]
    count = len(faults)
    # Slot 9 begins the seed 19 after its first episode, which hangs; another seed follows.
    made = env(count, vectorization="process", step_seconds=2.0, faults=[*faults, *[None] * 9, "hang in reset"])
    try:
        before = made._slots.pids
        made.reset()
        made.step(np.zeros(count))
        output = made.step(np.zeros(count))
        broken = [fault is not None for fault in faults]
        assert output.lost.tolist() == broken
        assert output.rewards[:, 0].tolist() == [0.0 if fault else 2.0 for fault in faults]
        assert [new != old for new, old in zip(made._slots.pids, before, strict=True)] == broken
        assert output.obs["states"][:, 1].tolist() == [0 if fault else 2 for fault in faults]
        output = made.step(np.zeros(count))  # those with an even seed end
        assert output.lost is None and output.rewards[:, 0].tolist() == [1.0 if fault else 3.0 for fault in faults]
        output = made.step(np.zeros(count))
        assert output.lost.tolist() == [False] * 9 + [True]
        assert output.obs["states"][9].tolist() == [29, 0]
    finally:
        made.close()


def test_a_simulator_that_takes_more_memory_than_its_limit_loses_its_own_episode_only():
    kwargs = {"faults": [None, "leak"]}
    settings = SimulatorSettings(id=SCRIPTED, kwargs=kwargs, auto_reset=True, memory_bytes=4 * 2**30)
    made = env(2, vectorization="process", settings=settings)
    try:
        made.reset()
        made.step(np.zeros(2))
        assert made.step(np.zeros(2)).lost.tolist() == [False, True]
        assert made.step(np.zeros(2)).lost is None
    finally:
        made.close()


def test_a_simulator_that_always_fails_ends_the_run_with_its_cause():
    made = env(1, faults=["raise"] * 100, fault_at=1)
    made.reset()
    with pytest.raises(RolloutDataFailure, match="5 failures in a row in slot 0.*broken"):
        for _ in range(20):
            made.step(np.zeros(1))


def test_simulators_of_which_none_makes_its_first_action_end_the_run_at_once():
    made = env(3, faults=["raise"] * 100, fault_at=1)
    made.reset()
    built = list(made._slots._simulators)
    with pytest.raises(RolloutDataFailure, match="the first one of all 3: .*broken"):
        made.step(np.zeros(3))
    assert made._slots._simulators == built, "none was built again"


@pytest.mark.parametrize("vectorization", ["sync", "process"])
def test_the_action_of_a_person_is_reported_in_the_form_of_the_policys(vectorization):
    made = env(2, vectorization=vectorization, person_at=2)
    try:
        made.reset()
        output = made.chunk_step(np.ones((2, 3), np.float32))
        assert output.intervene_flags.tolist() == [[False, True, False]] * 2
        assert output.intervene_actions.tolist() == [[0.0, 2.25, 0.0]] * 2
        assert made.chunk_step(np.ones((2, 1), np.float32)).intervene_flags is None
    finally:
        made.close()


def test_an_action_of_a_person_in_another_form_is_refused():
    made = env(1, person_at=1, person_numbers=2)
    made.reset()
    with pytest.raises(
        RolloutDataFailure, match=r"info\['intervene_action'\] must have the 1 numbers of an action, got 2"
    ):
        for _ in range(6):
            made.step(np.zeros(1, np.float32))
