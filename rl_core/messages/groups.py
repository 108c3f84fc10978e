"""A prompt group between the runner's ledger, the rollouts and the data ranks.

rollout -> runner   lease_groups(want, seconds, version) -> [PromptLease]     renew(tokens) -> [stale tokens]
rollout -> runner   give_back(token, reason, message)
rollout -> actor    PromptGroupRecord on the channel `trajectories`
rollout -> runner   delivered(token): the record is there; asynchronous runs only, in which it may wait longer than its lease runs
rollout -> runner   ValidationScores on the channel `validation`
actor   -> runner   admit([GroupEntry]) -> [bool | None]; None: in a later step, asynchronous runs only
runner  -> actor    EndOfStep on `trajectories`: no more groups come for a step that was cut
"""

from typing import Literal

from rl_core.api.records import DatumSpec, GroupTimes
from rl_core.messages.registry import record

LeaseMode = Literal["train", "validate"]
RequeueReason = Literal["worker_lost", "infrastructure", "deadline", "data", "stale", "epoch"]
"""Why a group goes back: its worker or the machinery failed, time ran out, the sample failed, its version or epoch is of the past."""


@record
class PromptLease:
    """One prompt group given to a rollout to generate and score."""

    mode: LeaseMode
    group_id: str
    token: str
    """Unique per lease: the group's record, renewals and returns carry it, and only the current one counts."""
    sample: DatumSpec
    num_generations: int
    """Completions of the group."""
    attempt: int
    """1 + failures of this sample itself (data, deadline): the attempt of `sample_seed`. A loss repeats the same sample."""
    policy_version: int
    """Version of the weights that the group is to be generated with."""
    temperature: float | None
    """Softmax temperature of a validation group, 0 = greedy; None = the job's training settings."""
    lease_seconds: float
    """How long the lease runs unless it is renewed."""
    given: float = 0.0
    """Runner's clock when it was given out."""
    order: int = 0
    """Place of its prompt in the ledger's order."""


@record
class GroupEntry:
    """What the runner needs to know of a finished group to admit it to the open step."""

    group_id: str
    token: str
    v_min: int
    """Lowest policy version of its tokens."""
    v_max: int
    """Highest policy version of its tokens."""
    rewards: tuple[float, ...]
    """Raw reward by completion; NaN where the sample is masked."""
    tokens: int
    """Trainable tokens."""
    informative: bool
    """Whether its rewards differ enough to teach (dynamic sampling)."""
    rank: int
    """Data rank that holds it."""
    times: GroupTimes | None = None
    """None where nobody noted them."""


@record
class ValidationScores:
    """What became of one validation group."""

    group_id: str
    token: str
    rewards: tuple[float | None, ...]
    """Reward by completion; None for a masked sample."""
    lengths: tuple[int, ...]
    """Generated tokens by completion."""
    truncated: tuple[bool, ...]


@record
class EndOfStep:
    """No more groups come for training step `step`: it was cut to those that were admitted."""

    step: int


@record
class ProbeAnswer:
    """How a rollout went on with the fixed prompt of the content check."""

    ids: tuple[int, ...]
    """Generated token ids."""
    logprobs: tuple[float, ...]
    """Log-probability of each, at the training temperature."""
    version: int
    """Policy version that generated them; -1 when the rollout serves none."""
