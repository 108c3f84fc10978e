"""Environments by name, user classes by reference, and errors a user can act on."""

import sys
import types

import pytest

from rl_core.api.env import BUILT_IN_TYPES
from rl_core.api.errors import ConfigError
from rl_core.api.records import EnvironmentReturn
from rl_core.envs.base import EnvConfig
from rl_core.envs.math import MathEnvironment
from rl_core.envs.registry import BUILT_IN, known_envs, load_reward, make_env, register_env


class Echo:
    """An environment without options."""

    def step(self, message_log_batch, metadata_batch):
        return EnvironmentReturn([], [], None, [], [], None)


class Optioned(Echo):
    def __init__(self, options):
        self.options = options


class Broken(Echo):
    def __init__(self, options):
        raise OSError("no such dictionary")


class LevelConfig(EnvConfig):
    start_level: int = 1


class Checked(Optioned):
    config_model = LevelConfig


@pytest.fixture
def user(monkeypatch):
    module = types.ModuleType("user_envs")
    module.__dict__.update(Echo=Echo, Optioned=Optioned, Broken=Broken, Checked=Checked, not_a_class=len, number=3)
    monkeypatch.setitem(sys.modules, "user_envs", module)
    return module


def test_built_in_names_make_their_environment():
    assert isinstance(make_env("math", {"comparator": "exact"}), MathEnvironment)
    assert {"math", "reasoning_gym", "reward"} <= set(known_envs())


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"env\.type: must be one of agent, .*math, .*reward.* got 'maths'"):
        make_env("maths")


def test_a_misspelled_name_gets_the_nearest_one():
    with pytest.raises(ConfigError, match=r"got 'rewards'; .* \(did you mean reward\?\)$"):
        make_env("rewards")
    with pytest.raises(ConfigError, match=r"got 'exacts' \(did you mean exact\?\)$"):
        load_reward("exacts")


def test_the_schema_suggests_the_built_in_names():
    assert sorted(BUILT_IN_TYPES) == sorted(BUILT_IN)


def test_user_classes_get_their_options(user):
    assert isinstance(make_env("user_envs:Echo"), Echo)
    assert make_env("user_envs:Optioned", {"level": 3}).options == {"level": 3}


def test_options_are_checked_by_the_config_model(user):
    assert make_env("user_envs:Checked", {"startLevel": 3}).options.start_level == 3
    with pytest.raises(ConfigError, match=r"env\.options\.level: unknown field, got 3; known fields are startLevel"):
        make_env("user_envs:Checked", {"level": 3})


@pytest.mark.parametrize(
    ("reference", "options", "text"),
    [
        ("user_envs:Echo", {"a": 1}, r"takes no options, got \['a'\]"),
        ("user_envs:Broken", {}, "could not be built: OSError: no such dictionary"),
        ("user_envs:Missing", {}, "has no 'Missing'; it defines Broken, Checked, Echo"),
        ("user_envs:not_a_class", {}, "must name a class with a method step"),
        ("user_nowhere:Echo", {}, "'user_nowhere', which was not found; put user_nowhere.py beside the job file"),
        (":Echo", {}, "must have the form module:name"),
    ],
)
def test_a_class_that_cannot_be_built_is_a_config_error_with_the_way_out(user, reference, options, text):
    with pytest.raises(ConfigError, match=text):
        make_env(reference, options)


def test_registered_classes_are_known_and_names_are_unique(monkeypatch):
    monkeypatch.setattr("rl_core.envs.registry._registered", {})
    register_env("echo")(Optioned)
    assert make_env("echo", {"a": 1}).options == {"a": 1}
    register_env("echo")(Optioned)
    with pytest.raises(ValueError, match="got 'echo', which is taken"):
        register_env("echo")(Echo)
    with pytest.raises(ValueError, match="got 'math', which is taken"):
        register_env("math")(Echo)


def test_load_reward_refuses_what_cannot_be_called(user):
    assert load_reward("user_envs:not_a_class") is len
    with pytest.raises(ConfigError, match=r"env\.reward: must name a function, got 'user_envs:number'"):
        load_reward("user_envs:number")
