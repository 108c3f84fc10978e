"""The messages about prompt groups between the runner's ledger, the rollouts and the data ranks.

rollout -> runner    lease_groups(max_groups, timeout, version) -> [PromptLease]     renew(tokens) -> [tokens that are no current leases]
rollout -> channel   PromptGroupRecord on the channel `trajectories`, under its lease token as key
rollout -> runner    finish(GroupEntry): the record is stored; the runner decides at once what becomes of the group
rollout -> runner    return_group(token, reason, message, failed): the group is returned unfinished, with the sample that failed
runner  -> channel   moves the record of an admitted group to the key of a data rank, discards that of a refused one
channel -> data rank the records under `rank_key(step, rank)`; the runner closes the key of a step that became smaller than planned
rollout -> runner    ValidationScores on the channel `validation`
"""

from typing import Literal

from rl_core.api.records import DatumSpec, GroupTimes
from rl_core.messages.registry import record
from rl_core.messages.samples import KeptSample

LeaseMode = Literal["train", "validate"]
RequeueReason = Literal["worker_lost", "infrastructure", "deadline", "data", "config", "stale", "epoch"]
"""Why a prompt group is generated again.

worker_lost: its rollout process was lost, or its lease expired. infrastructure: an engine, environment or channel failed. deadline: it took
too long. data: the sample itself failed. config: the job is wrong, which ends the run. stale: its policy
version is too old, or the trainer stopped waiting for it. epoch: it was leased before the last gang restart of the job.
"""


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
    resumed: bool = False
    """Whether the group was leased before."""


@record
class GroupEntry:
    """What the runner needs to know of a finished group to decide whether it trains."""

    group_id: str
    token: str
    """Token of its lease, under which the record is stored."""
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
    times: GroupTimes | None = None
    """Times of the group; None if they were not recorded."""


@record
class ValidationScores:
    """The scores of one validation group, or the error that it ended with."""

    group_id: str
    token: str
    rewards: tuple[float | None, ...]
    """Reward by completion; None for a masked sample."""
    lengths: tuple[int, ...]
    """Generated tokens by completion."""
    truncated: tuple[bool, ...]
    samples: tuple[KeptSample, ...] = ()
    """The completions, for the prompts that are kept (`samples.validationGroups`)."""


@record
class ProbeAnswer:
    """The completion that a rollout generated for the fixed prompt of the content check."""

    ids: tuple[int, ...]
    """Generated token ids."""
    logprobs: tuple[float, ...]
    """Log-probability of each, at the training temperature."""
    version: int
    """Policy version that generated them; -1 when the rollout serves none."""


def rank_key(step: int, rank: int) -> str:
    """Return the key of the channel `trajectories` under which data rank `rank` finds its records of `step`."""
    return f"step {step} rank {rank}"
