"""The training account: leases groups for the open training step, decides about finished groups, and reacts to dropped ones.

When a rollout reports a finished group, it is admitted to the open step, deferred, or refused. A deferred group is decided again when a
step opens or a group before it ends.

The dispatcher is the only caller and serialises the calls. Nothing here blocks or calls another process: moves of records and a failure of
the run are stored until the dispatcher takes them.
"""

import heapq
import itertools
import logging
import math
from dataclasses import dataclass, field

from rl_core.api.algorithm import AlgorithmSpec
from rl_core.api.errors import ConfigError, DataError, InfrastructureError, RLJobError, SamplingExhausted
from rl_core.messages.groups import GroupEntry, PromptLease, RequeueReason, rank_key
from rl_core.messages.samples import KeptSample
from rl_core.runner.admission import Admission, GroupVerdict, StepCapacity
from rl_core.runner.group_table import Group, GroupState
from rl_core.runner.ledger import Drop, PromptLedger, group_of
from rl_core.runner.prompt_order import index_of
from rl_core.runner.step_state import FilteredGroup, GroupSpan, StepState, TrainedGroup, explain_filtered

logger = logging.getLogger(__name__)
MAX_FAILED_SAMPLES = 16
"""Failed samples that are stored until the loop takes them."""


@dataclass(slots=True)
class RecordMoves:
    """Operations on the records of the channel `trajectories`: first all `moves`, then all `closed`."""

    moves: list[tuple[str, str | None]] = field(default_factory=list)
    """(lease token, key of a data rank) moves the record of an admitted group; (lease token, None) deletes a record."""
    closed: list[str] = field(default_factory=list)
    """Keys of data ranks that receive no more groups, because their step became smaller than planned."""

    def __bool__(self) -> bool:
        return bool(self.moves or self.closed)


class TrainingAccount:
    """The ledger of the training prompts and the open training step."""

    def __init__(
        self,
        ledger: PromptLedger,
        algorithm: AlgorithmSpec,
        admission: Admission,
        *,
        data_ranks: int,
        kept_filtered: int = 0,
    ) -> None:
        """`data_ranks` is the number of data-parallel ranks.

        A step that becomes smaller by drops keeps a number of groups that is a multiple of it. `kept_filtered` is the number of filtered
        groups of a step whose records are left on the channel for `take_filtered`; those of further ones are deleted.
        """
        self.ledger = ledger
        self._algorithm, self._admission, self._data_ranks = algorithm, admission, data_ranks
        self._step: StepState | None = None
        self._deferred: list[tuple[int, int, int, GroupEntry]] = []
        """Heap of the deferred groups: (version of the oldest token, position, a running number, entry). A group that was requeued or
        cancelled since then is removed when it comes to the front.
        """
        self._numbers = itertools.count()
        self._moves = RecordMoves()
        self._kept_filtered = kept_filtered
        self._filtered: list[FilteredGroup] = []
        """Filtered groups whose records are on the channel, until `take_filtered`."""
        self._failed: list[KeptSample] = []
        """The sample that failed each dropped group, until `take_failed`; at most MAX_FAILED_SAMPLES."""
        self.failure: RLJobError | None = None
        """The error that ends the run; no group is leased once it is set. None while the run is healthy."""

    # --- the step, for the loop ------------------------------------------------------------------------------------

    def open(self, step: int, version: int) -> None:
        """Open training `step` at policy `version`: from now on its groups are leased, and finished groups are admitted to it."""
        self._step = StepState(
            step=step, version=version, target=self._algorithm.prompts_per_step, rank_sizes=[0] * self._data_ranks
        )

    def adopt(self, algorithm: AlgorithmSpec) -> None:
        """Apply the changed algorithm settings of the running job to the admission policy."""
        self._admission.adopt(algorithm)

    def close(self) -> StepState:
        """Close the open step and return it. Raises RuntimeError, a bug of the runner, if none is open."""
        if self._step is None:
            raise RuntimeError("no step is open; this is a bug of the runner")
        state, self._step = self._step, None
        return state

    def acknowledge(self, step: int) -> list[TrainedGroup]:
        """Mark the groups of `step` as trained; return them in the ledger's order."""
        return [
            TrainedGroup(group_id=group.group_id, prompt_index=group.index, attempt=group.leases)
            for group in self.ledger.acknowledge(step)
        ]

    def cancel_rest(self) -> list[tuple[str, str]]:
        """Cancel all groups that are leased or deferred once the open step is complete; no attempt is counted.

        Returns (owner, lease token) of the groups that are being generated, whose rollouts have to stop. Does nothing while the step lacks
        groups, and in asynchronous training, where such groups are kept for later steps.
        """
        state = self._step
        if state is None or not state.complete or self._admission.runs_ahead:
            return []
        running = []
        for group in self.ledger.groups_out():
            if group.state is GroupState.LEASED:
                running.append((group.owner, group.token))
            else:
                state.surplus += 1
            self._moves.moves.append((group.token, None))
            self.ledger.revert_lease(group.token)
            state.cancelled += 1
        return running

    def take_moves(self) -> RecordMoves:
        """Return the operations on records that were collected since the last call."""
        moves, self._moves = self._moves, RecordMoves()
        return moves

    # --- leases ----------------------------------------------------------------------------------------------------

    def lease(self, max_groups: int, owner: str, *, served: int, now: float = 0.0) -> list[PromptLease]:
        """Lease up to `max_groups` groups to the rollout process `owner`, which has weights of version `served`.

        `now` is the runner's clock in seconds, for the trace.
        """
        state = self._step
        count = min(max_groups, self.num_leasable(served))
        if state is None or count < 1:
            return []
        leases = self.ledger.lease(count, owner, policy_version=served)
        state.issued += len(leases)
        size = self._algorithm.group_size
        return [lease.message("train", num_generations=size, given=now) for lease in leases]

    def num_leasable(self, served: int | None = None) -> int:
        """Return how many more groups could be leased to a rollout with weights of version `served`; None means the open step's version."""
        state = self._step
        if state is None or self.failure is not None:
            return 0
        num_places = self._admission.num_leasable(
            self._capacity(state), served=state.version if served is None else served
        )
        return max(num_places, 0)

    def revert_lease(self, lease: PromptLease) -> None:
        """Make a group pending again whose lease did not reach its owner; no attempt is counted."""
        self.ledger.revert_lease(lease.token)
        if self._step is not None:
            self._step.issued -= 1

    def _capacity(self, state: StepState) -> StepCapacity:
        return StepCapacity(
            version=state.version,
            target=state.target,
            admitted=len(state.admitted),
            out_by_version=self.ledger.num_out_by_version(),
        )

    # --- finished groups -------------------------------------------------------------------------------------------

    def finish(self, entry: GroupEntry, owner: str, *, now: float = 0.0) -> GroupVerdict:
        """Decide about a group that `owner` has finished and whose record is stored on the channel under its lease token.

        REFUSE has one of three causes: the token is not a current lease of `owner`, and its record is deleted; the group is too old for the
        admission policy, and it is generated again; or dynamic sampling is on and its rewards do not differ, and it is discarded for good.
        A repeated call for the same token changes nothing. `now` is the runner's clock in seconds.
        """
        group = self.ledger.group_by_token(entry.token)
        if group is not None and group.owner == owner and group.state is not GroupState.LEASED:
            return GroupVerdict.ADMIT if group.state is GroupState.CONSUMED else GroupVerdict.DEFER
        if group is None or group.owner != owner:
            if self._step is not None and self._step.complete:
                self._step.surplus += 1
            self.ledger.counts["late"] += 1
            self._moves.moves.append((entry.token, None))
            return GroupVerdict.REFUSE
        self.ledger.finish(entry.token, version=entry.v_min)
        verdict = self._decide(group, entry, now)
        if verdict is GroupVerdict.DEFER:
            heapq.heappush(self._deferred, (entry.v_min, group.position, next(self._numbers), entry))
        return verdict

    def _decide(self, group: Group, entry: GroupEntry, now: float) -> GroupVerdict:
        """Decide about a generated group, and carry out the decision if it is ADMIT or REFUSE."""
        state = self._step
        if state is None or state.complete:
            return GroupVerdict.DEFER
        num_ahead = self.ledger.num_ahead(group)
        verdict = self._admission.decide(entry, self._capacity(state), num_ahead=num_ahead)
        if verdict is GroupVerdict.DEFER:
            return verdict
        rank = None
        if verdict is GroupVerdict.REFUSE:
            state.stale += 1
            versions = f"versions {entry.v_min}..{entry.v_max}, the step trains {state.version}"
            logger.warning("group %s: %s", entry.group_id, versions)
            self._requeue(group, "stale", versions)
        elif self._algorithm.dynamic_sampling.enabled and not entry.informative:
            state.filtered += 1
            state.filtered_rewards += [reward for reward in entry.rewards if math.isfinite(reward)]
            self.ledger.discard([entry.group_id], "filtered")
            self._keep_filtered(entry, state)
            verdict = GroupVerdict.REFUSE
        else:
            rank = state.assign(group.position)
            self.ledger.consume([entry.group_id], state.step)
            state.admitted[entry.group_id] = entry
            state.waiting_since = None
            self._moves.moves.append((entry.token, rank_key(state.step, rank)))
        if entry.times is not None:
            trains = verdict is GroupVerdict.ADMIT
            span = GroupSpan(group_id=entry.group_id, rank=rank, trains=trains, decided=now, times=entry.times)
            state.spans.append(span)
        return verdict

    def _keep_filtered(self, entry: GroupEntry, state: StepState) -> None:
        """Leave the record of a filtered group on the channel for `take_filtered`, or delete it where the step has enough of them."""
        if sum(group.step == state.step for group in self._filtered) >= self._kept_filtered:
            self._moves.moves.append((entry.token, None))
            return
        reason = explain_filtered(entry.rewards, self._algorithm.dynamic_sampling.min_std)
        self._filtered.append(
            FilteredGroup(
                group_id=entry.group_id, token=entry.token, step=state.step, version=state.version, why=reason
            )
        )

    def _front(self) -> tuple[Group, GroupEntry] | None:
        """Return the deferred group that is to be decided next; None when no group is deferred."""
        while self._deferred:
            entry = self._deferred[0][-1]
            group = self.ledger.group_by_token(entry.token)
            if group is not None and group.state is GroupState.GENERATED:
                return group, entry
            heapq.heappop(self._deferred)  # The group was returned or cancelled meanwhile.
        return None

    def _decide_deferred(self, now: float) -> None:
        """Decide deferred groups in order until one of them has to be deferred again; those after it would be deferred too."""
        while (oldest := self._front()) is not None:
            if self._decide(*oldest, now) is GroupVerdict.DEFER:
                return
            heapq.heappop(self._deferred)

    # --- groups that are generated again ---------------------------------------------------------------------------

    def return_group(
        self,
        token: str,
        owner: str,
        reason: RequeueReason,
        message: str,
        *,
        counted: bool = True,
        failed: KeptSample | None = None,
    ) -> None:
        """Accept a group that `owner` returns unfinished: it becomes pending, or is dropped once its attempts for `reason` are used up.

        `counted` False uses up no attempt. `failed` is the sample that failed, which is kept if the group is dropped. Does nothing for a
        group that is finished or that another process holds.
        """
        group = self.ledger.group_by_token(token)
        if group is None or group.owner != owner or group.state is not GroupState.LEASED:
            logger.info(
                "group %s given back (%s) by %s, which does not hold it: nothing to do", group_of(token), reason, owner
            )
            return
        logger.warning("group %s given back (%s): %s", group.group_id, reason, message)
        requeued = self._requeue(group, reason, message, counted=counted)
        if not requeued and failed is not None and len(self._failed) < MAX_FAILED_SAMPLES:
            self._failed.append(failed)

    def _requeue(self, group: Group, reason: RequeueReason, message: str, *, counted: bool = True) -> bool:
        """Requeue a leased group and delete its record; return False if the group is dropped instead."""
        self._moves.moves.append((group.token, None))
        return self.ledger.requeue(group.token, reason, message, counted=counted)

    def take_failed(self) -> list[KeptSample]:
        """Return the samples that failed the groups dropped since the last call."""
        failed, self._failed = self._failed, []
        return failed

    def take_filtered(self, step: int) -> list[FilteredGroup]:
        """Return the filtered groups up to `step` whose records the caller has to take off the channel, each once."""
        groups = [group for group in self._filtered if group.step <= step]
        self._filtered = [group for group in self._filtered if group.step > step]
        return groups

    def owner_lost(self, owner: str, message: str) -> list[str]:
        """Requeue the groups that a lost process held; return the tokens of its leases."""
        tokens = self.ledger.requeue_owner(owner, "worker_lost", message)
        self._moves.moves += [(token, None) for token in tokens]
        return tokens

    @property
    def num_deferred(self) -> int:
        """Number of deferred groups."""
        return self.ledger.num_in(GroupState.GENERATED)

    def expire(self) -> list[str]:
        """Requeue the groups whose leases have expired; return the tokens of these leases."""
        tokens = self.ledger.expire()
        self._moves.moves += [(token, None) for token in tokens]
        return tokens

    def requeue_stragglers(self, now: float) -> None:
        """Requeue stragglers: leased groups that keep a finished group from being admitted for longer than algorithm.stragglerSeconds.

        The wait begins when a finished group is deferred because of older leased ones. After the limit the leased groups are requeued, the
        oldest version first, until the finished group can be admitted. `now` is the runner's clock in seconds.
        """
        state, limit = self._step, self._algorithm.straggler_seconds
        if limit is None or state is None or state.complete or (oldest := self._front()) is None:
            return
        if state.waiting_since is None:
            state.waiting_since = now
        if now - state.waiting_since <= limit:
            return
        group, entry = oldest
        for straggler in self.ledger.leased():
            num_ahead = self.ledger.num_ahead(group)
            if self._admission.decide(entry, self._capacity(state), num_ahead=num_ahead) is not GroupVerdict.DEFER:
                break
            logger.warning(
                "group %s: the trainer has waited more than %s s for it; it is generated again",
                straggler.group_id,
                limit,
            )
            state.stale += 1
            self._requeue(
                straggler, "stale", f"the trainer waited more than algorithm.stragglerSeconds {limit:g} for it"
            )

    # --- what follows from a change --------------------------------------------------------------------------------

    def settle(self, now: float = 0.0) -> None:
        """Act on what the last change led to; the dispatcher calls it after each one.

        Counts new drops against their limits, decides deferred groups, checks the limit of dynamic sampling, and closes a step that became
        smaller. Limits that are exceeded set `failure`. `now` is the runner's clock in seconds.
        """
        for drop in self.ledger.take_drops():
            self._dropped(drop)
        self._decide_deferred(now)
        self._check_rounds()
        self._close_if_cut()

    def _dropped(self, drop: Drop) -> None:
        """Count a drop against the limits of the job; shrink the step if `algorithm.onDrop` is shrink."""
        algorithm, dropped = self._algorithm, self.ledger.counts["dropped"]
        if drop.reason == "config":
            self._fail(ConfigError(drop.message))
            return
        kind = DataError if drop.reason in ("data", "deadline") else InfrastructureError
        source = self.ledger.dataset[index_of(drop.group_id)].get("source")
        name = f"{drop.group_id} ({source})" if source else drop.group_id
        last_drop = f"the last: group {name}, {drop.reason}: {drop.message or 'no further message'}"
        logger.warning("group %s is dropped (%s): %s", drop.group_id, drop.reason, drop.message)
        if dropped > algorithm.max_dropped_groups:
            self._fail(
                kind(
                    f"algorithm.maxDroppedGroups allows {algorithm.max_dropped_groups} dropped groups, got {dropped}; {last_drop}; "
                    "mend the cause or raise the budget"
                )
            )
        elif 0 < algorithm.max_consecutive_drops <= self.ledger.consecutive_drops:
            self._fail(
                kind(
                    f"algorithm.maxConsecutiveDrops allows fewer than {algorithm.max_consecutive_drops} drops in a row, "
                    f"got {self.ledger.consecutive_drops}; {last_drop}"
                )
            )
        elif algorithm.on_drop == "shrink" and self._step is not None:
            self._shrink(self._step)

    def _shrink(self, state: StepState) -> None:
        """Make the step smaller if `algorithm.minBatchFraction` allows it; otherwise the next prompt replaces the dropped group."""
        remaining = self._algorithm.prompts_per_step - state.dropped - 1
        smaller = remaining // self._data_ranks * self._data_ranks
        floor = self._algorithm.min_batch_fraction * self._algorithm.prompts_per_step
        if smaller < state.target and smaller < max(floor, self._data_ranks):
            logger.warning("step %s stays at %s groups: minBatchFraction forbids %s", state.step, state.target, smaller)
            return
        if smaller < len(state.admitted):
            return  # a data rank cannot give back a group, so the dropped one is replaced
        state.dropped += 1
        state.target = min(state.target, smaller)

    def _close_if_cut(self) -> None:
        """Close the data ranks' keys of a complete step that became smaller.

        Otherwise each rank would wait for its share of the planned size.
        """
        state = self._step
        if state is None or state.ended or not state.complete or state.target == self._algorithm.prompts_per_step:
            return
        state.ended = True
        self._moves.closed += [rank_key(state.step, rank) for rank in range(self._data_ranks)]

    def _check_rounds(self) -> None:
        """Fail the run if the step would need more groups than algorithm.maxGenerationBatches times algorithm.promptsPerStep."""
        state, rounds = self._step, self._algorithm.max_generation_batches
        if state is None or not state.filtered:
            return
        allowed = rounds * self._algorithm.prompts_per_step
        if state.target + state.filtered > allowed:
            rewards = state.filtered_rewards
            between = f", which were between {min(rewards):g} and {max(rewards):g}" if rewards else ""
            self._fail(
                SamplingExhausted(
                    f"algorithm.maxGenerationBatches allows {rounds} rounds of {self._algorithm.prompts_per_step} groups, got "
                    f"{len(state.admitted)} of {state.target} informative groups in step {state.step} ({state.filtered} without differing "
                    f"rewards{between}); raise it, or make the task easier or harder"
                )
            )

    def _fail(self, error: RLJobError) -> None:
        if self.failure is None:
            self.failure = error
