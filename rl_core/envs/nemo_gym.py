"""The environment `nemo_gym`: the agents and tools of NeMo-Gym servers run the episodes and score them.

A sample is one row, sent to `/run` of the agent that it names. The agent calls the model through `ModelRelay`, so that the sample's tokens
are recorded in its session as those of any other program.
"""

import logging
import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from rl_core.api.bounds import Pattern, Port
from rl_core.api.errors import shown
from rl_core.envs.base import parse_config
from rl_core.envs.model_relay import ModelRelay, session_of_row
from rl_core.envs.programs import ProgramConfig, ProgramEnvironment, RunFailed, ScoredRun
from rl_core.messages.agents import MODEL_NAME
from rl_core.nemo_gym.answers import GymProtocolFailure, RowFailure, is_masked
from rl_core.nemo_gym.client import NemoGymEnvironment

logger = logging.getLogger(__name__)
READY_POLL_SECONDS = 1.0
"""Delay between questions whether the servers have started."""


class NemoGymConfig(ProgramConfig):
    """Options of `nemo_gym`."""

    head: Annotated[
        str,
        Pattern(
            regex=r"https?://[^/?#\s]+",
            rule="an address of the form http://HOST:PORT",
            way_out="name the head server so",
        ),
    ]
    """Address of the head server of the NeMo-Gym servers, as seen from env pods."""
    model_host: str = Field("127.0.0.1", min_length=1, max_length=253)
    """Address at which env pods offer the model to the servers; 0.0.0.0 = all of a pod's addresses, for servers on other machines."""
    model_port: Port = 7707
    """Port at which env pods offer the model; the model URL of the servers is http://HOST:PORT/v1."""
    row_attempts: int = Field(3, ge=1, le=100)
    """How often a row is sent, in total, while the servers fail to answer it."""


class NemoGymPrograms(ProgramEnvironment):
    """Runs each row on the agent that it names."""

    config_model = NemoGymConfig

    def __init__(self, cfg: Any = None) -> None:
        """Offer the model to the servers. Raises ConfigError if the address cannot be used."""
        self.config = parse_config(NemoGymConfig, cfg)
        super().__init__(f"NeMo-Gym at {self.config.head}")
        self.runs = self.config.row_attempts
        self.relay = ModelRelay(self.config.model_host, self.config.model_port, model=MODEL_NAME)
        # Each try is a run with a session of its own, so that the client must not repeat a row by itself.
        self._client = NemoGymEnvironment(self.config.head, tries=1, row_seconds=None)
        self.unready = "they were not asked yet"

    async def call(self, row: dict[str, Any], *, base_url: str, api_key: str, model: str) -> ScoredRun:
        """Return the reward of the episode and its tokens as the servers saw them. Raises RunFailed if the servers did not answer."""
        agent = row.get("agent_ref")
        if not isinstance(agent, Mapping) or not isinstance(agent.get("name"), str):
            raise ValueError(f"agent_ref of a row must have the name of an agent, got {shown(agent)}; correct the data")
        await self._until_ready()
        request = session_of_row({"_ng_task_index": 0, "_ng_rollout_index": 0, **row, "_rowidx": 0}, base_url, api_key)
        answer = await self._client.run_row(request)
        if isinstance(answer, RowFailure):
            self.unready = await self._client.not_ready()  # servers that have ended may be started again
            raise RunFailed(answer.reason)
        return scored(answer)

    async def aclose(self) -> None:
        """Stop offering the model and close all connections."""
        self.relay.close()
        await self._client.close()

    async def _until_ready(self) -> None:
        """Wait for the servers to have started, as long as the row has time."""
        while self.unready:
            previous, self.unready = self.unready, await self._client.not_ready()
            if self.unready and self.unready != previous:
                logger.info("rows wait for the NeMo-Gym servers: %s", self.unready)
            if self.unready:
                await self._sleep(READY_POLL_SECONDS)


def scored(answer: Mapping[str, Any]) -> ScoredRun:
    """Return what an answer says about its episode. An episode that its environment masks, or that has a `failure_kind`, has no reward.

    Raises GymProtocolFailure for an answer without episode, or with a reward that is no finite number.
    """
    response = answer.get("response")
    output = response.get("output") if isinstance(response, Mapping) else None
    if not isinstance(output, list) or not all(isinstance(item, Mapping) for item in output):
        raise GymProtocolFailure(f"an answer must have response.output, a list of objects, got {shown(response)}")
    generated = [item["generation_token_ids"] for item in output if isinstance(item.get("generation_token_ids"), list)]
    parts = answer.get("reward_components")
    if is_masked(answer) or answer.get("failure_kind"):
        return ScoredRun(reward=None, parts={}, generated=generated)
    reward = answer.get("reward")
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        raise GymProtocolFailure(
            f"an answer must have a finite reward, got {shown(reward)}; a verifier that cannot score a row sets mask_sample"
        )
    return ScoredRun(reward=float(reward), parts=parts if isinstance(parts, Mapping) else {}, generated=generated)
