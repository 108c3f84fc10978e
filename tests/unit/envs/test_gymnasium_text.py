"""`gymnasium_text`: an episode of texts is that of a plain loop over the simulator, whatever process makes its steps."""

import gymnasium
import numpy as np
import pytest

from rl_core.api.errors import ConfigError, RolloutDataFailure
from rl_core.envs import gymnasium_text
from rl_core.envs.registry import make_env

WORDS = ["left", "down", "right", "up"]


def action(text, space):
    return WORDS.index(text) if text in WORDS else None


def push(text, space):
    return np.array([float(text)], space.dtype) if text else None


def describe(observation, info):
    return f"{np.asarray(observation).tolist()} {sorted(info)}"


def number(observation, info):
    return 3


def options(**further):
    here = __name__
    return {
        "id": "FrozenLake-v1",
        "kwargs": {"is_slippery": True},
        "action": f"{here}:action",
        "observation": f"{here}:describe",
        **further,
    }


def pendulum():
    return options(id="Pendulum-v1", kwargs={}, action=f"{__name__}:push")


def log(text):
    return [{"role": "user", "content": "play"}, {"role": "assistant", "content": text}]


def turn(env, texts, metadata):
    answer = env.step([log(text) for text in texts], metadata)
    observations = [entry["content"] for entry in answer.observations]
    return observations, answer.metadata, np.asarray(answer.rewards).tolist(), np.asarray(answer.terminateds).tolist()


def plain(config, seed, actions):
    """Return (observation, reward, end) of each step by the simulator alone, up to its end."""
    simulator = gymnasium.make(config["id"], **config["kwargs"])
    simulator.reset(seed=seed)
    steps = []
    for made in actions:
        observation, reward, terminated, truncated, info = simulator.step(made)
        steps.append((describe(observation, info), pytest.approx(reward), terminated or truncated))
        if steps[-1][2]:
            break
    return steps


@pytest.mark.parametrize("kept", [64, 1], ids=["kept", "rebuilt"])
@pytest.mark.parametrize("kind", ["lake", "pendulum"])
def test_episodes_side_by_side_are_those_of_a_plain_loop(kind, kept, monkeypatch):
    monkeypatch.setattr(gymnasium_text, "KEPT", kept)
    config, random = (options() if kind == "lake" else pendulum()), np.random.default_rng(0)
    env, seeds = make_env("gymnasium_text", config), [3, 3, 4, 9]
    if kind == "lake":
        texts = [[WORDS[index] for index in random.integers(4, size=200)] for _ in seeds]
        actions = [[WORDS.index(text) for text in row] for row in texts]
    else:
        texts = [[f"{force:.3f}" for force in random.uniform(-2, 2, size=12)] for _ in seeds]
        actions = [[np.array([float(text)], np.float32) for text in row] for row in texts]
    expected = [plain(config, seed, row) for seed, row in zip(seeds, actions, strict=True)]
    states, seen = [{"seed": seed} for seed in seeds], [[] for _ in seeds]
    for step in range(max(map(len, expected))):
        rows = [row for row in range(len(seeds)) if step < len(expected[row])]
        answer = turn(env, [texts[row][step] for row in rows], [states[row] for row in rows])
        for row, observation, state, reward, end in zip(rows, *answer, strict=True):
            states[row] = state
            seen[row].append((observation, reward, end))
    assert seen == expected


def test_a_step_that_is_made_again_gives_the_same_in_this_process_and_in_another():
    env, state = make_env("gymnasium_text", options()), {"seed": 5}
    for text in ("right", "right", "down"):
        first = turn(env, [text], [state])
        assert turn(env, [text], [state]) == first
        assert turn(make_env("gymnasium_text", options()), [text], [state]) == first
        state = first[1][0]


def test_a_text_without_an_action_makes_no_step_and_shows_the_same_again():
    env = make_env("gymnasium_text", options(invalidReward=-0.1))
    (before,), (state,), _, _ = turn(env, ["down"], [{"seed": 1}])
    (shown,), (after,), (reward,), (end,) = turn(env, ["I think that I go down"], [state])
    assert (shown, after, reward, end) == (before, state, pytest.approx(-0.1), False)
    assert turn(env, ["down"], [after]) == turn(make_env("gymnasium_text", options()), ["down"], [state])


@pytest.mark.parametrize(
    ("further", "metadata", "text", "problem"),
    [
        ({}, {}, "down", "column seed must be a whole number"),
        ({}, {"seed": "1"}, "down", "got '1'"),
        ({"action": f"{__name__}:push"}, {"seed": 1}, "1.5", r"must return an action of Discrete\(4\) or None"),
        ({"observation": f"{__name__}:number"}, {"seed": 1}, "down", "must return a text, got int"),
    ],
    ids=["no seed", "seed as text", "another space", "no text"],
)
def test_what_breaks_the_interface_fails_the_row_by_name(further, metadata, text, problem):
    env = make_env("gymnasium_text", options(**further))
    with pytest.raises(RolloutDataFailure, match=problem):
        turn(env, [text], [metadata])


@pytest.mark.parametrize(
    ("further", "problem"),
    [
        ({"id": "NoLake-v1"}, r"env\.options\.id: NoLake-v1 could not be built"),
        ({"action": "no_module:action"}, r"env\.options\.action"),
        ({"action": f"{__name__}:WORDS"}, r"env\.options\.action: must name a function"),
        ({"observe": "x:y"}, r"env\.options\.observe: unknown field"),
    ],
    ids=["id", "module", "no function", "unknown"],
)
def test_wrong_options_are_refused_by_name(further, problem):
    with pytest.raises(ConfigError, match=problem):
        make_env("gymnasium_text", options(**further))
