"""What a rollout and an env worker say about the run of an agent program, inside the metadata of an environment step (`EnvRow`, `EnvAnswer`).

The metadata of the request has the columns of the data row and, under REQUEST, where and how long the program may call. The metadata of the
answer has, under RESULT, which run was scored and why there is no reward if there is none.
"""

from typing import Literal, NotRequired, TypedDict

RECORD = "X-RLJob-Record"
"""Header by which an env worker asks the endpoint for the record of a call, and by which the endpoint says at which byte of a body it begins.

The record is what the policy sampled, as JSON: `[[ids, logprobs, finish_reason, versions, worker], ...]`, one entry per choice. A request
with a number in the header has a record behind its body: the endpoint enters these tokens into the session and generates none.
"""
RECORD_EVENT = "rljob_record"
"""Name of the server-sent event with the record of a streamed call."""

MODEL_NAME = "policy"
"""Name of the served model at the endpoint."""
REQUEST, RESULT = "rljob_agent", "rljob_agent_result"
Branches = Literal["whole", "equal", "last"]
"""How the reward of an episode is shared by the branches of its conversation."""
MAX_CALLS = 64
"""Default of env.options.maxCalls."""
BRANCHES: Branches = "whole"
"""Default of env.options.branches."""


class AgentRequest(TypedDict):
    """One run of the program to be made."""

    base_url: str
    """Of the endpoint, with `/v1`."""
    api_key: str
    """Key of the sample's session; the program gets it with `.RUN` behind it."""
    model: str
    seconds: float
    """Time of the run."""
    attempt: int
    """Attempt of the sample, on which its sampling seeds depend."""
    resumed: bool
    """Whether this attempt was begun before, on a rollout that was lost or returned its group. A program that still runs is continued."""
    oldest_version: int
    """Lowest policy version of the tokens that a run that is continued may have."""


class AgentResult(TypedDict):
    """What became of a run."""

    run: str
    """Name of the run, which stands behind the session's key."""
    error: str
    """Why the program has no reward; "" = it has one."""
    late: bool
    """Whether it had not ended in time."""
    parts: dict[str, float]
    """Parts of the reward by name, for metrics."""
    explanation: NotRequired[str]
    """Why the program got its reward, kept with the sample."""
    unavailable: bool
    """Whether the servers that run the program failed, and not the program."""
    generated: list[list[int]]
    """Sampled tokens of calls, as the program got them; [] = it did not say. Each must be those of a recorded call."""
