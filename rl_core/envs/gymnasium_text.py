"""The environment `gymnasium_text`: a language model acts in a simulator with the interface of `gymnasium.Env`, one step per turn.

Two functions of the user translate: `action` reads an action from a completion, `observation` describes an observation as text. The data has a
column `seed`, with which the episode of a row begins; its prompt describes the first observation.

The metadata of a row keeps the actions of its episode. A process that does not have the simulator of an episode resets one with the same seed
and makes these actions again, so an episode survives the loss of a process, and a step that is called twice gives the same result.
"""

import json
import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import Field

from rl_core.api.errors import RolloutDataFailure
from rl_core.api.records import EnvironmentInterface, EnvironmentReturn
from rl_core.api.user_code import import_function
from rl_core.envs.base import EnvConfig, Log, bool_array, float_array, last_assistant_text, parse_config
from rl_core.envs.simulator import make_simulator
from rl_core.messages.embodied import SimulatorSettings

ACTIONS = "gymnasium_actions"
"""Key of the metadata: the actions made so far."""
KEPT = 64
"""Simulators of open episodes that a process keeps. The episodes of others are rebuilt from their actions."""


class GymnasiumTextConfig(EnvConfig):
    """Options of `gymnasium_text`."""

    id: str = Field(min_length=1)
    """An id of gymnasium, `Meta-World/` and a task, or `module:Class`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the simulator."""
    action: str = Field(min_length=1)
    """`module:function(text, space)`: returns the action of a completion, in the form of the action space, or None if it has none."""
    observation: str = Field(min_length=1)
    """`module:function(observation, info)`: returns the text that the model reads next."""
    invalid_reward: float = Field(0.0, allow_inf_nan=False)
    """Reward of a completion without an action. No step is made, and the model reads the same observation again."""


class GymnasiumTextEnvironment(EnvironmentInterface):
    """Steps a simulator once per turn. The reward of a turn is the reward of the step."""

    config_model = GymnasiumTextConfig

    def __init__(self, cfg: Any = None) -> None:
        """Build a simulator. Raises ConfigError when it cannot be built and for functions that cannot be imported."""
        self.config = parse_config(GymnasiumTextConfig, cfg)
        self._action, self._observation = (
            import_function(getattr(self.config, name), field=f"env.options.{name}")
            for name in ("action", "observation")
        )
        self._open: OrderedDict[str, _Episode] = OrderedDict()
        """Episodes by their seed and the actions so far."""
        self._idle = [self._make()]
        """Simulators that no episode uses."""

    def step(
        self, message_log_batch: Sequence[Log], metadata_batch: Sequence[dict[str, Any] | None]
    ) -> EnvironmentReturn:
        """Return observations, rewards [B] and ends [B]. Raises RolloutDataFailure for a row without a seed and for answers of the simulator
        that break the interface of gymnasium."""
        rows = [
            self._turn(row, last_assistant_text(log), dict(metadata or {}))
            for row, (log, metadata) in enumerate(zip(message_log_batch, metadata_batch, strict=True))
        ]
        texts, metadata, rewards, terminateds, answers = (list(column) for column in zip(*rows, strict=True))
        return EnvironmentReturn(
            observations=[{"role": "user", "content": text} for text in texts],
            metadata=metadata,
            next_stop_strings=None,
            rewards=float_array(rewards),
            terminateds=bool_array(terminateds),
            answers=answers,
        )

    def close(self) -> None:
        """Close the simulators."""
        for simulator in (*self._idle, *(episode.simulator for episode in self._open.values())):
            simulator.close()
        self._idle.clear()
        self._open.clear()

    def _turn(
        self, row: int, text: str, metadata: dict[str, Any]
    ) -> tuple[str, dict[str, Any], float, bool, str | None]:
        """Return the next observation as text, the metadata, the reward, whether the episode is over, and the action as text."""
        seed, actions = metadata.get("seed"), list(metadata.get(ACTIONS, ()))
        if type(seed) is not int or seed < 0:
            raise RolloutDataFailure(
                f"environment gymnasium_text, row {row}: column seed must be a whole number of 0 or more, got {seed!r}; add it to the data"
            )
        episode = self._open.pop(_key(seed, actions), None) or self._rebuilt(seed, actions)
        action = self._action(text, episode.simulator.action_space)
        if action is None:
            self._keep(seed, actions, episode)
            return self._text(episode), metadata, self.config.invalid_reward, False, None
        actions.append(np.asarray(action).tolist())
        reward, done = episode.make(actions[-1])
        observation = self._text(episode)
        if done:
            self._idle.append(episode.simulator)
        else:
            self._keep(seed, actions, episode)
        return observation, {**metadata, ACTIONS: actions}, reward, done, str(actions[-1])

    def _text(self, episode: "_Episode") -> str:
        text = self._observation(episode.observation, episode.info)
        if not isinstance(text, str):
            raise RolloutDataFailure(
                f"environment gymnasium_text: env.options.observation must return a text, got {type(text).__name__}; correct the function"
            )
        return text

    def _keep(self, seed: int, actions: list[Any], episode: "_Episode") -> None:
        """Keep the simulator of an episode for its next step."""
        while len(self._open) >= KEPT:
            self._idle.append(self._open.popitem(last=False)[1].simulator)
        self._open[_key(seed, actions)] = episode

    def _rebuilt(self, seed: int, actions: list[Any]) -> "_Episode":
        """Reset a simulator with `seed`, make `actions` again, and return the episode."""
        episode = _Episode(self._idle.pop() if self._idle else self._make(), seed)
        for action in actions:
            episode.make(action)
        return episode

    def _make(self) -> Any:
        name = self.config.id
        return make_simulator(
            SimulatorSettings(id=name, kwargs=self.config.kwargs, auto_reset=False, label=f"simulator {name}")
        )


class _Episode:
    """A simulator and its last observation."""

    def __init__(self, simulator: Any, seed: int) -> None:
        self.simulator = simulator
        self.observation, self.info = simulator.reset(seed=seed)

    def make(self, action: Any) -> tuple[float, bool]:
        """Step the simulator with an action. Returns the reward and whether the episode has ended."""
        space = self.simulator.action_space
        is_discrete = type(space).__name__ == "Discrete"
        native = action if is_discrete else np.asarray(action, getattr(space, "dtype", None))
        if not space.contains(native):
            raise RolloutDataFailure(
                f"environment gymnasium_text: env.options.action must return an action of {space} or None, got {action!r}; correct the function"
            )
        self.observation, reward, terminated, truncated, self.info = self.simulator.step(native)
        if not math.isfinite(reward):
            raise RolloutDataFailure(
                f"environment gymnasium_text: the reward of a step must be a finite number, got {reward!r}; correct the simulator"
            )
        return float(reward), bool(terminated or truncated)


def _key(seed: int, actions: list[Any]) -> str:
    return json.dumps([seed, actions])
