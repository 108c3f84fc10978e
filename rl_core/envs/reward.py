"""The environment `reward`: a user function scores the completions: f(prompts, completions, **columns) -> list of rewards.

`prompts` and `completions` are lists of B texts. The columns are the keys of the rows' metadata (the columns of the data file), each a list
of length B with None for rows without the key, and `messages`, the logs as lists of {role, content}. A function without `**columns` gets only
the columns that it names. `arguments` of the options are passed unchanged. A reward is a number, None (not applicable: the sample is masked),
or a mapping or object with `reward`, `parts` (numbers by name, which are reported as metrics and which `gdpo` compares one by one) and
`explanation` (a text that is kept with the sample).
"""

import inspect
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from pydantic import Field

from rl_core.api.errors import ConfigError, RolloutDataFailure
from rl_core.api.records import EnvironmentInterface, EnvironmentReturn
from rl_core.api.rewards import explanation_of
from rl_core.api.user_code import describe
from rl_core.envs.base import EnvConfig, Log, last_assistant_text, parse_config, prompt_text, single_turn_return
from rl_core.envs.registry import load_reward
from rl_core.envs.scores import check_rewards

Metadata = Sequence[dict[str, Any] | None]
PASSED = ("prompts", "completions")
"""What a reward function gets by position."""


NO_TOKENS = "completions are texts, and no token ids are passed; tokenize the text, or give the parameter a default"
NO_TRAINER = "the trainer is not passed; remove it, or give it a default"
LOGGED = 'return {"reward": ..., "parts": {NAME: NUMBER}} to log numbers, and remove it'
FOREIGN_ARGUMENTS: Mapping[str, str] = {
    **dict.fromkeys(("completion_ids", "completions_ids", "prompt_ids", "prompts_ids"), NO_TOKENS),
    **dict.fromkeys(("trainer_state", "trainer"), NO_TRAINER),
    **dict.fromkeys(("log_extra", "log_metric"), LOGGED),
    **dict.fromkeys(
        PASSED, "prompts and completions are the first two parameters, passed by position; move them to the front"
    ),
    **dict.fromkeys(
        ("solution_str", "extra_info"),
        "a call scores a list of completions; begin with (prompts, completions, ground_truth, ...)",
    ),
}
"""Parameters of reward functions of TRL and verl that are not passed here -> way out."""


class RewardConfig(EnvConfig):
    """Options of `reward`."""

    reward: str = Field(min_length=1)
    """`module:function` or a registered reward; `env.reward` in a job."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of every call in addition to the columns, such as the `pattern` of `format`."""


class RewardEnvironment(EnvironmentInterface):
    """Scores one turn with a user function. An exception, a NaN or a wrong length raises RolloutDataFailure and never becomes 0."""

    config_model = RewardConfig

    def __init__(self, cfg: Any = None) -> None:
        self.config = parse_config(RewardConfig, cfg)
        self._function = load_reward(self.config.reward)
        self._parameters, self._takes_any = _named_parameters(self._function)
        self._by_position = _first_two(self._function)
        _check_order(self._by_position, self.config.reward)
        unknown = sorted(set(self.config.arguments) - set(self._parameters))
        if unknown and not self._takes_any:
            raise ConfigError(
                f"env.options.arguments: must be parameters of {self.config.reward} after the first two, got {', '.join(unknown)}; "
                f"it has {', '.join(self._parameters) or 'none'}"
            )

    def step(
        self, message_log_batch: Sequence[Log], metadata_batch: Metadata
    ) -> EnvironmentReturn | Awaitable[EnvironmentReturn]:
        """Return rewards [B], or an awaitable of them when the function is asynchronous."""
        completions = [last_assistant_text(log) for log in message_log_batch]
        prompts = [prompt_text(log) for log in message_log_batch]
        columns = self._columns(message_log_batch, metadata_batch)
        try:
            scores = self._function(prompts, completions, **columns)
        except Exception as error:  # User code may raise anything.
            raise self._failure(error) from error
        if inspect.isawaitable(scores):
            return self._await_scores(scores, metadata_batch)
        return self._answer(scores, metadata_batch)

    async def _await_scores(self, scores: Awaitable[Any], metadata_batch: Metadata) -> EnvironmentReturn:
        try:
            result = await scores
        except Exception as error:  # User code may raise anything.
            raise self._failure(error) from error
        return self._answer(result, metadata_batch)

    def _answer(self, scores: Any, metadata_batch: Metadata) -> EnvironmentReturn:
        rewards = check_rewards(scores, len(metadata_batch), what=f"reward {self.config.reward}")
        return single_turn_return(rewards, metadata_batch, explanations=[explanation_of(score) for score in scores])

    def _columns(self, logs: Sequence[Log], metadata_batch: Metadata) -> dict[str, list[Any]]:
        names = list(dict.fromkeys(key for metadata in metadata_batch for key in metadata or ()))
        columns = {name: [(metadata or {}).get(name) for metadata in metadata_batch] for name in names}
        columns["messages"] = [
            [{"role": message["role"], "content": message["content"]} for message in log] for log in logs
        ]
        columns |= self.config.arguments
        reserved = [name for name in self._by_position if name in columns and name not in PASSED]
        if reserved:
            raise RolloutDataFailure(
                f"env.reward: the first two parameters get prompts and completions, got {self.config.reward}({', '.join(self._by_position)}), and "
                f"{reserved[0]} is a column of the data; begin its parameters with prompts, completions"
            )
        missing = [name for name, required in self._parameters.items() if required and name not in columns]
        if missing and (way_out := FOREIGN_ARGUMENTS.get(missing[0])):
            raise RolloutDataFailure(
                f"env.reward: parameters must be prompts, completions and columns of the data, got {missing[0]!r} in {self.config.reward}; {way_out}"
            )
        if missing:
            raise RolloutDataFailure(
                f"reward {self.config.reward} needs the column {missing[0]!r}, got columns {sorted(columns)}; "
                "add it to the data, set it in env.options.arguments or give the parameter a default"
            )
        if self._takes_any:
            return {name: column for name, column in columns.items() if name not in PASSED}
        return {name: columns[name] for name in self._parameters if name in columns}

    def _failure(self, error: Exception) -> RolloutDataFailure:
        if isinstance(error, RolloutDataFailure):
            return error
        return RolloutDataFailure(
            f"reward {self.config.reward} must return a score, it raised {describe(error)}; {_way_out(error)}"
        )


def _way_out(error: Exception) -> str:
    """Return a hint on how to correct `error`. If the function indexes completions as TRL's lists of messages, the hint shows the right form."""
    if isinstance(error, TypeError) and "string indices" in str(error):
        return 'write completion for completion[0]["content"]: completions and prompts are texts, the column `messages` has {role, content}'
    return "correct it"


def _first_two(function: Any) -> list[str]:
    """Return the names of the first two parameters, which get prompts and completions by position; empty where Python does not know them."""
    try:
        parameters = list(inspect.signature(function).parameters.values())[: len(PASSED)]
        return [
            f"**{parameter.name}" if parameter.kind is parameter.VAR_KEYWORD else parameter.name
            for parameter in parameters
        ]
    except (TypeError, ValueError):
        return []


def _check_order(by_position: list[str], name: str) -> None:
    """Raise ConfigError for a function with the two first parameters in the wrong order: they are passed by position."""
    first, second = [*by_position, "", ""][:2]
    if "solution_str" in (first, second):
        raise ConfigError(
            f"env.reward: must score a list of completions, got {name}({', '.join(by_position)}, ...) in the form of verl; write "
            "(prompts, completions, ground_truth) and return [compute_score(None, text, truth) for text, truth in zip(completions, ground_truth)]"
        )
    if first == "completions" or second == "prompts":
        missing = [parameter for parameter in PASSED if parameter not in (first, second)]
        way_out = f"add {' and '.join(missing)}" if missing else "reorder its parameters"
        raise ConfigError(
            f"env.reward: must take (prompts, completions, ...) in this order, got {name}({', '.join(by_position)}); {way_out}"
        )


def _named_parameters(function: Any) -> tuple[dict[str, bool], bool]:
    """Return the columns that `function` names, with whether each is required, and whether it accepts any other column."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return {}, True
    keywords = [p for p in parameters[2:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return {parameter.name: parameter.default is parameter.empty for parameter in keywords}, takes_any
