"""The environment `reward_model`: a group of the job scores the completions.

It calls `score` of a member with the rows of a step, `{messages, columns, explain: true}` each, and gets one result per row: a number, or a
mapping with `score` and `explanation`, a text that is kept with the sample, or with `error` for a row that has no score.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from rl_core.api.errors import RolloutDataFailure, shown
from rl_core.api.records import EnvironmentInterface, EnvironmentReturn
from rl_core.api.rewards import explanation_of
from rl_core.envs.base import EnvConfig, Log, parse_config, single_turn_return
from rl_core.envs.member_calls import call_member
from rl_core.envs.scores import check_scores


class MemberScoresConfig(EnvConfig):
    """Options of `reward_model`."""

    group: str = Field(min_length=1)
    """Name of the group in spec.groups that scores; it names env in its callers."""
    on_failure: Literal["fail", "mask"] = "fail"
    """A row that the group cannot score, such as one that is too long. fail: its sample fails with RolloutDataFailure;
    mask: the sample is left out of the loss."""


class MemberScoresEnvironment(EnvironmentInterface):
    """Scores one turn with the members of a group. A failure never becomes a reward."""

    config_model = MemberScoresConfig

    def __init__(self, cfg: Any = None) -> None:
        self.config = parse_config(MemberScoresConfig, cfg)

    def step(
        self, message_log_batch: Sequence[Log], metadata_batch: Sequence[dict[str, Any] | None]
    ) -> EnvironmentReturn:
        """Return rewards [B]. Raises RolloutDataFailure for a row without a score, unless `onFailure` is mask."""
        rows = [
            {
                "messages": [{"role": message["role"], "content": message["content"]} for message in log],
                "columns": metadata or {},
                "explain": True,
            }
            for log, metadata in zip(message_log_batch, metadata_batch, strict=True)
        ]
        results = call_member(self.config.group, "score", rows)
        if not isinstance(results, list) or len(results) != len(rows):
            raise RolloutDataFailure(
                f"{self.config.group}.score must return a list of {len(rows)} results, got {shown(results)}; correct it"
            )
        rewards = check_scores(list(map(self._reward, results)), len(rows), what=f"group {self.config.group}")
        explanations = [explanation_of(result) if isinstance(result, Mapping) else None for result in results]
        return single_turn_return(rewards, metadata_batch, explanations=explanations)

    def _reward(self, result: Any) -> Any:
        if not isinstance(result, Mapping):
            return result
        if "score" in result:
            return result["score"]
        if self.config.on_failure == "mask":
            return None
        raise RolloutDataFailure(f"group {self.config.group} has no score for a completion: {result.get('error')}")
