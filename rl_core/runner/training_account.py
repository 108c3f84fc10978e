"""What one training step asks of the ledger, what it has taken, and what a dropped group means for it.

Its only caller is the dispatcher, which serialises calls. Nothing here blocks or talks to another process: what others must hear
(a failure of the run, the end of a step that was cut) waits until the dispatcher takes it.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rl_core.api.algorithm import AlgorithmSpec
from rl_core.api.errors import DataError, InfrastructureError, RLJobError, SamplingExhausted
from rl_core.api.records import GroupTimes
from rl_core.messages.groups import GroupEntry, PromptLease, RequeueReason
from rl_core.runner.admission import Admission, Standing
from rl_core.runner.ledger import Drop, GroupState, PromptLedger

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSpan:
    """A group that a step decided about, for the trace."""

    group_id: str
    rank: int
    """Data rank that asked."""
    trains: bool
    decided: float
    """Runner's clock: when it was admitted or refused."""
    times: GroupTimes


@dataclass(slots=True)
class StepState:
    """What one step has asked for and taken."""

    step: int
    version: int
    target: int
    """Groups to train; falls when onDrop is shrink."""
    issued: int = 0
    dropped: int = 0
    """Dropped groups that the step does without."""
    admitted: dict[str, GroupEntry] = field(default_factory=dict)
    """Entries of the admitted groups by group id."""
    filtered: int = 0
    surplus: int = 0
    """Finished groups that came when the step had all it wanted."""
    stale: int = 0
    cancelled: int = 0
    """Groups that were out when the step had its own; their prompts are the first of the next step."""
    put_off: GroupEntry | None = None
    """The group that waits for older ones that still run, while one does."""
    put_off_at: float | None = None
    """When the trainer began to wait for them, as `tick` saw it."""
    ended: bool = False
    """Whether the data ranks were told that no more groups come."""
    spans: list[GroupSpan] = field(default_factory=list)
    """Groups that were admitted or refused, in that order."""

    @property
    def complete(self) -> bool:
        """Return whether the step holds its groups."""
        return len(self.admitted) >= self.target

    def sampling_metrics(self, prompts_per_step: int) -> dict[str, float]:
        """Return the metrics of dynamic sampling: generation batches asked for, and what became of their groups."""
        rewards = reward_metrics(list(self.admitted.values()))
        found = {"batches": self.issued / prompts_per_step, "kept_groups": len(self.admitted)}
        found |= {"dropped_groups": self.filtered, "surplus_groups": self.surplus}
        metrics = {f"dynamic_sampling/{name}": float(value) for name, value in found.items()}
        return metrics | ({"filtered_reward": rewards["reward/mean"]} if rewards else {})


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedGroup:
    """One group of a step that is acknowledged."""

    group_id: str
    prompt_index: int
    """Index in the data set."""
    attempt: int


class TrainingAccount:
    """The ledger of training prompts and the step that is open over it."""

    def __init__(
        self,
        ledger: PromptLedger,
        algorithm: AlgorithmSpec,
        admission: Admission,
        *,
        data_ranks: int,
        lease_seconds: float,
    ) -> None:
        """`data_ranks`: a step that shrinks is cut to a multiple of it."""
        self.ledger = ledger
        self._algorithm, self._admission = algorithm, admission
        self._data_ranks, self._lease_seconds = data_ranks, lease_seconds
        self._step: StepState | None = None
        self.failure: RLJobError | None = None
        """What ends the run; nothing is given out any more."""
        self._ended_step: int | None = None

    # --- the step, for the loop ------------------------------------------------------------------------------------

    def open(self, step: int, version: int) -> None:
        """Begin `step` at policy `version`: its groups may be given out from here on."""
        self._step = StepState(step=step, version=version, target=self._algorithm.prompts_per_step)

    def adopt(self, algorithm: AlgorithmSpec) -> None:
        """Go by the admission of another spec of the running job."""
        self._admission.adopt(algorithm)

    def close(self) -> StepState:
        """End the step: nothing more is admitted to it. Returns what was."""
        if self._step is None:
            raise RuntimeError("no step is open; this is a bug of the runner")
        state, self._step = self._step, None
        return state

    def acknowledge(self, step: int) -> list[TrainedGroup]:
        """Mark the groups of `step` as trained; return them in ledger order."""
        facts = {group_id: self.ledger.describe(group_id) for group_id in self.ledger.outstanding()}
        return [
            TrainedGroup(group_id=group_id, prompt_index=facts[group_id][0], attempt=facts[group_id][1])
            for group_id in self.ledger.acknowledge(step)
        ]

    def take_ended_step(self) -> int | None:
        """Return the step of which the data ranks must hear that no more groups come, once."""
        ended, self._ended_step = self._ended_step, None
        return ended

    # --- giving out ------------------------------------------------------------------------------------------------

    def lease(self, want: int, owner: str, *, served: int, now: float = 0.0) -> list[PromptLease]:
        """Return up to `want` groups for the rollout `owner`, which serves version `served`; `now` is the runner's clock, for the trace."""
        state = self._step
        if state is None or self.failure is not None:
            return []
        room = self._admission.room(self._standing(state), served=served)
        leases = self.ledger.lease(max(min(want, room), 0), owner, policy_version=served)
        state.issued += len(leases)
        return [
            PromptLease(
                mode="train",
                group_id=lease.group_id,
                token=lease.token,
                sample=lease.sample,
                num_generations=self._algorithm.group_size,
                attempt=lease.seed_attempt,
                policy_version=lease.policy_version,
                temperature=None,
                lease_seconds=self._lease_seconds,
                given=now,
                order=lease.order,
            )
            for lease in leases
        ]

    def backlog(self) -> int:
        """Return how many more groups a rollout that serves the step's version could be given."""
        state = self._step
        if state is None or self.failure is not None:
            return 0
        return max(self._admission.room(self._standing(state), served=state.version), 0)

    def undo(self, lease: PromptLease) -> None:
        """Take back a lease that did not reach its owner."""
        self.ledger.undo(lease.token)
        if self._step is not None:
            self._step.issued -= 1

    def _standing(self, state: StepState) -> Standing:
        admitted, out = len(state.admitted), self.ledger.out()
        return Standing(version=state.version, target=state.target, admitted=admitted, out=out)

    # --- taking in -------------------------------------------------------------------------------------------------

    def admit(self, entry: GroupEntry, *, now: float = 0.0) -> bool | None:
        """Return whether a finished group trains in the open step; None = in a later one, as long as it is kept.

        Refused: an old token, a version the policy does not let train, surplus, a group without differing rewards under dynamic sampling.
        `now` is the runner's clock, for the trace.
        """
        state, trains = self._step, self._admit(entry)
        if state is not None and trains is not None and entry.times is not None:
            span = GroupSpan(group_id=entry.group_id, rank=entry.rank, trains=trains, decided=now, times=entry.times)
            state.spans.append(span)
        return trains

    def _admit(self, entry: GroupEntry) -> bool | None:
        state = self._step
        if self._admission.waits and not self.ledger.awaits(entry.token):
            return self.ledger.complete(entry.token, entry)  # refused and counted, in whichever step it comes
        if state is None or state.complete:
            return None if self._admission.waits else self._surplus(entry)
        trains = self._admission.may_train(entry, self._standing_without(entry, state))
        if trains is None:
            state.put_off = entry
            return None
        if not trains:
            state.stale += 1
            versions = f"versions {entry.v_min}..{entry.v_max}, the step trains {state.version}"
            logger.warning("group %s: %s", entry.group_id, versions)
            self.give_back(entry.token, "stale", versions)
            return False
        if not self.ledger.complete(entry.token, entry):
            return False
        if self._algorithm.dynamic_sampling.enabled and not entry.informative:
            state.filtered += 1
            self.ledger.discard([entry.group_id], "filtered")
            return False
        self.ledger.consume([entry.group_id], state.step)
        state.admitted[entry.group_id] = entry
        state.put_off = state.put_off_at = None
        return True

    def _standing_without(self, entry: GroupEntry, state: StepState) -> Standing:
        standing = self._standing(state)
        if not self._admission.waits:
            return standing
        version = self.ledger.version(entry.group_id)
        left = {**standing.out, version: standing.out[version] - 1}
        return replace(standing, out=left, ahead=self.ledger.ahead(entry.group_id))

    def _surplus(self, entry: GroupEntry) -> bool:
        """Refuse a group that came when the step had all it wanted; of a step that was cut it is for a later one."""
        if self._step is not None:
            self._step.surplus += 1
        if self.ledger.outstanding().get(entry.group_id) is GroupState.LEASED:
            self.give_back(entry.token, "stale", "the step has its groups")
        return False

    def cancel_rest(self) -> list[tuple[str, str]]:
        """Take back what is still out of a step that has its groups, as if it had not been given out: (owner, token) of what is generated.

        Nothing where groups run ahead for later steps.
        """
        state = self._step
        if state is None or not state.complete or self._admission.runs_ahead:
            return []
        left_over = self.ledger.left_over()
        for _, token in left_over:
            self.ledger.undo(token)
        state.cancelled += len(left_over)
        return [(owner, token) for owner, token in left_over if owner]

    def give_back(self, token: str, reason: RequeueReason, message: str) -> None:
        """Take back a group: pending again, or dropped when its attempts are used up."""
        group_id = token.split(".", 2)[-1]
        if self.ledger.outstanding().get(group_id) is GroupState.CONSUMED:
            logger.info("group %s given back (%s) after its record was admitted: nothing to do", group_id, reason)
            return
        try:
            self.ledger.requeue(token, reason, message)
        except (KeyError, ValueError) as error:  # a token of an earlier run, or a record that arrived meanwhile
            logger.warning("group %s is not given out again: %s", group_id, error)

    def tick(self, now: float) -> None:
        """Make groups again for which the trainer has waited longer than algorithm.stragglerSeconds: the oldest, until a younger one may train."""
        state, limit = self._step, self._algorithm.straggler_seconds
        if limit is None or state is None or (young := state.put_off) is None or not self.ledger.awaits(young.token):
            return
        if state.put_off_at is None:
            state.put_off_at = now
        if now - state.put_off_at <= limit:
            return
        for group_id, token in self.ledger.running():
            if self._admission.may_train(young, self._standing_without(young, state)) is not None:
                break
            logger.warning("group %s: the trainer has waited more than %s s for it; it is made again", group_id, limit)
            state.stale += 1
            self.give_back(token, "stale", f"the trainer waited more than algorithm.stragglerSeconds {limit:g} for it")

    # --- what follows from it --------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Account for what was dropped and filtered, whichever call brought it about. The dispatcher calls it after each."""
        for drop in self.ledger.take_drops():
            self._dropped(drop)
        self._check_rounds()
        self._end_if_cut()

    def _dropped(self, drop: Drop) -> None:
        """Count a drop against the budgets; shrink the step when the job says so."""
        algorithm, dropped = self._algorithm, self.ledger.counts["dropped"]
        kind = DataError if drop.reason in ("data", "deadline") else InfrastructureError
        last = f"the last: group {drop.group_id}, {drop.reason}: {drop.message or 'no further message'}"
        logger.warning("group %s is dropped (%s): %s", drop.group_id, drop.reason, drop.message)
        if dropped > algorithm.max_dropped_groups:
            self._fail(
                kind(
                    f"algorithm.maxDroppedGroups allows {algorithm.max_dropped_groups} dropped groups, got {dropped}; {last}; "
                    "mend the cause or raise the budget"
                )
            )
        elif 0 < algorithm.max_consecutive_drops <= self.ledger.consecutive_drops:
            self._fail(
                kind(
                    f"algorithm.maxConsecutiveDrops allows fewer than {algorithm.max_consecutive_drops} drops in a row, "
                    f"got {self.ledger.consecutive_drops}; {last}"
                )
            )
        elif algorithm.on_drop == "shrink" and self._step is not None:
            self._shrink(self._step)

    def _shrink(self, state: StepState) -> None:
        """Do without the dropped group, else leave it to the next prompt."""
        left = self._algorithm.prompts_per_step - state.dropped - 1
        smaller = left // self._data_ranks * self._data_ranks
        floor = self._algorithm.min_batch_fraction * self._algorithm.prompts_per_step
        if smaller < state.target and smaller < max(floor, self._data_ranks):
            logger.warning("step %s stays at %s groups: minBatchFraction forbids %s", state.step, state.target, smaller)
            return
        if smaller < len(state.admitted):
            return  # data ranks cannot give back a group: the dropped one is replaced
        state.dropped += 1
        state.target = min(state.target, smaller)

    def _end_if_cut(self) -> None:
        """Note that the data ranks must hear of a cut step that has its groups: each waits for its share of the whole step."""
        state = self._step
        if state is None or state.ended or not state.complete or state.target == self._algorithm.prompts_per_step:
            return
        state.ended, self._ended_step = True, state.step

    def _check_rounds(self) -> None:
        """Fail the run when dynamic sampling needs more groups for the step than its rounds allow."""
        state, rounds = self._step, self._algorithm.max_generation_batches
        if state is None or not state.filtered:
            return
        allowed = rounds * self._algorithm.prompts_per_step
        if state.target + state.filtered > allowed:
            self._fail(
                SamplingExhausted(
                    f"algorithm.maxGenerationBatches allows {rounds} rounds of {self._algorithm.prompts_per_step} groups, got "
                    f"{len(state.admitted)} of {state.target} informative groups in step {state.step} ({state.filtered} without differing "
                    "rewards); raise it, or make the task easier or harder"
                )
            )

    def _fail(self, error: RLJobError) -> None:
        if self.failure is None:
            self.failure = error


def reward_metrics(entries: Sequence[GroupEntry]) -> dict[str, float]:
    """Return `reward/{mean,std,min,max}` over the finite raw rewards of admitted groups, float64."""
    rewards = np.asarray([reward for entry in entries for reward in entry.rewards], dtype=np.float64)
    rewards = rewards[np.isfinite(rewards)]
    if not rewards.size:
        return {}
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
    }
