"""The environment `reasoning_gym`: scores one completion with the function of its reasoning-gym task, which returns a number in [0, 1].

The metadata of a row has its task and entry (`rl_core.data.reasoning_gym.generate_entries`; the data reference `reasoning-gym://task` puts
them under `metadata`), so that one environment serves any mixture of tasks.
"""

import re
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from rl_core.api.errors import ConfigError, RolloutDataFailure
from rl_core.api.records import EnvironmentInterface, EnvironmentReturn
from rl_core.api.user_code import describe
from rl_core.data.reasoning_gym import Scorer, scorer, task_names
from rl_core.envs.base import EnvConfig, Log, last_assistant_text, parse_config, single_turn_return
from rl_core.envs.cpu_time import CpuLimitReached, cpu_limit


class ReasoningGymConfig(EnvConfig):
    """Options of `reasoning_gym`."""

    answer_tag: str | None = None
    """The answer is the text in the last <tag>...</tag>, and missing if there is none; null = the whole completion."""
    min_score: float | None = None
    """Scores below it become 0 (some tasks give a little for any text); null = the task's score as it is."""
    cpu_seconds: float = Field(5.0, gt=0)
    """CPU time for scoring one answer; beyond it the answer counts as missing (some tasks evaluate what is written)."""


class ReasoningGymEnvironment(EnvironmentInterface):
    """Scores the last assistant text of each log and ends the episode."""

    config_model = ReasoningGymConfig

    def __init__(self, cfg: Any = None) -> None:
        self.config = parse_config(ReasoningGymConfig, cfg)
        task_names()
        tag = self.config.answer_tag
        self._tag = None if tag is None else re.compile(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", re.DOTALL)

    def step(
        self, message_log_batch: Sequence[Log], metadata_batch: Sequence[dict[str, Any] | None]
    ) -> EnvironmentReturn:
        """Return rewards [B]. Raises RolloutDataFailure for metadata without an entry and for one that cannot be scored."""
        answers = [self._answer(last_assistant_text(log)) for log in message_log_batch]
        rewards = [
            self._score(row, answer, metadata)
            for row, (answer, metadata) in enumerate(zip(answers, metadata_batch, strict=True))
        ]
        return single_turn_return(rewards, metadata_batch, answers)

    def _answer(self, completion: str) -> str | None:
        if self._tag is None:
            return completion.strip() or None
        matches = self._tag.findall(completion)
        return matches[-1].strip() if matches else None

    def _score(self, row: int, answer: str | None, metadata: dict[str, Any] | None) -> float:
        problem = _problem(metadata)
        if problem is None:
            raise RolloutDataFailure(
                f"environment reasoning_gym, row {row}: metadata must hold task and entry, got keys "
                f"{sorted(metadata or {})}; take the prompts from reasoning-gym://TASK?size=N"
            )
        try:
            score = self._scored(scorer(problem["task"], problem.get("config")), answer, problem["entry"])
        except ConfigError as error:
            raise RolloutDataFailure(f"environment reasoning_gym, row {row}: {error}") from error
        except Exception as error:  # Any of the library's 100 scorers may raise anything.
            raise RolloutDataFailure(
                f"environment reasoning_gym, row {row}: the scorer of {problem['task']} failed on {answer!r}: {describe(error)}"
            ) from error
        min_score = self.config.min_score
        return 0.0 if min_score is not None and score < min_score else score

    def _scored(self, score: Scorer, answer: str | None, entry: dict[str, Any]) -> float:
        """Return the score of `answer`. An answer that the scorer fails on is scored as missing.

        Some scorers parse the answer as a number or a dict and raise for other text, or evaluate it for ever: that is a wrong answer. If the
        entry's own answer cannot be scored either, the entry is at fault and this raises.
        """
        try:
            with cpu_limit(self.config.cpu_seconds):
                return float(score(answer, entry))
        except (CpuLimitReached, Exception):  # noqa: BLE001 - 100 scorers of a library
            score(entry.get("answer"), entry)
            return float(score(None, entry))


def _problem(metadata: dict[str, Any] | None) -> dict[str, Any] | None:
    for candidate in (metadata, (metadata or {}).get("metadata")):
        if isinstance(candidate, dict) and "task" in candidate and "entry" in candidate:
            return candidate
    return None
