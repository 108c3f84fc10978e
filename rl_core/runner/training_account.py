"""The account of the training steps: what the open step leases, what becomes of each finished group, what a dropped group means.

A finished group is decided once, when its rollout reports it: admitted to the open step, deferred, or refused. A deferred group is
looked at again when a step opens or an older group ends.

The dispatcher is the only caller and serialises the calls. Nothing here blocks or calls another process: record moves and a failure of
the run are kept until the dispatcher takes them.
"""

import heapq
import itertools
import logging
from dataclasses import dataclass, field

from rl_core.api.algorithm import AlgorithmSpec
from rl_core.api.errors import DataError, InfrastructureError, RLJobError, SamplingExhausted
from rl_core.messages.groups import GroupEntry, PromptLease, RequeueReason, rank_key
from rl_core.runner.admission import Admission, StepCapacity, Verdict
from rl_core.runner.group_table import Group, GroupState
from rl_core.runner.ledger import Drop, PromptLedger, group_of
from rl_core.runner.step_state import GroupSpan, StepState, TrainedGroup

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RecordMoves:
    """What is to happen to records on the channel, in this order."""

    moves: list[tuple[str, str | None]] = field(default_factory=list)
    """(lease token, key of a data rank) for admitted groups, (lease token, None) for records that nobody will train."""
    closed: list[str] = field(default_factory=list)
    """Keys of data ranks that receive no more groups, because their step is smaller than planned."""

    def __bool__(self) -> bool:
        return bool(self.moves or self.closed)


class TrainingAccount:
    """The ledger of training prompts and the step that is open over it."""

    def __init__(
        self, ledger: PromptLedger, algorithm: AlgorithmSpec, admission: Admission, *, data_ranks: int
    ) -> None:
        """`data_ranks`: a step that shrinks is cut to a multiple of it."""
        self.ledger = ledger
        self._algorithm, self._admission, self._data_ranks = algorithm, admission, data_ranks
        self._step: StepState | None = None
        self._deferred: list[tuple[int, int, int, GroupEntry]] = []
        """Heap of the finished groups that wait: (lowest version of the tokens, position, a running number, entry). A group that is taken
        back meanwhile stays in it until it comes to the front."""
        self._numbers = itertools.count()
        self._moves = RecordMoves()
        self.failure: RLJobError | None = None
        """What ends the run; nothing is given out any more."""

    # --- the step, for the loop ------------------------------------------------------------------------------------

    def open(self, step: int, version: int) -> None:
        """Begin `step` at policy `version`: its groups may be leased from here on."""
        self._step = StepState(
            step=step, version=version, target=self._algorithm.prompts_per_step, rank_sizes=[0] * self._data_ranks
        )

    def adopt(self, algorithm: AlgorithmSpec) -> None:
        """Apply the admission of another spec of the running job."""
        self._admission.adopt(algorithm)

    def close(self) -> StepState:
        """End the step and return it: nothing more is admitted to it."""
        if self._step is None:
            raise RuntimeError("no step is open; this is a bug of the runner")
        state, self._step = self._step, None
        return state

    def acknowledge(self, step: int) -> list[TrainedGroup]:
        """Mark the groups of `step` as trained; return them in ledger order."""
        return [
            TrainedGroup(group_id=group.group_id, prompt_index=group.index, attempt=group.leases)
            for group in self.ledger.acknowledge(step)
        ]

    def cancel_rest(self) -> list[tuple[str, str]]:
        """Take back the groups that are still out of a step that has all its groups, as if they had not been given out.

        Returns (owner, token) of those that are being generated. Does nothing where groups run ahead for later steps.
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
            self.ledger.undo(group.token)
            state.cancelled += 1
        return running

    def take_moves(self) -> RecordMoves:
        """Return what is to happen to records since the last call."""
        moves, self._moves = self._moves, RecordMoves()
        return moves

    # --- leases ----------------------------------------------------------------------------------------------------

    def lease(self, want: int, owner: str, *, served: int, now: float = 0.0) -> list[PromptLease]:
        """Return up to `want` groups for the rollout `owner`, which serves version `served`; `now` is the runner's clock, for the trace."""
        state = self._step
        count = min(want, self.room(served))
        if state is None or count < 1:
            return []
        leases = self.ledger.lease(count, owner, policy_version=served)
        state.issued += len(leases)
        size = self._algorithm.group_size
        return [lease.message("train", num_generations=size, given=now) for lease in leases]

    def room(self, served: int | None = None) -> int:
        """Return how many more groups a rollout could be given that serves version `served` (None: that of the open step)."""
        state = self._step
        if state is None or self.failure is not None:
            return 0
        room = self._admission.room(self._capacity(state), served=state.version if served is None else served)
        return max(room, 0)

    def undo(self, lease: PromptLease) -> None:
        """Take back a lease that did not reach its owner."""
        self.ledger.undo(lease.token)
        if self._step is not None:
            self._step.issued -= 1

    def _capacity(self, state: StepState) -> StepCapacity:
        return StepCapacity(
            version=state.version, target=state.target, admitted=len(state.admitted), out=self.ledger.out()
        )

    # --- finished groups -------------------------------------------------------------------------------------------

    def finish(self, entry: GroupEntry, owner: str, *, now: float = 0.0) -> Verdict:
        """Decide about a group that `owner` has finished and whose record is stored under its lease token.

        Refuses a token that is not a current lease of `owner`, versions that the admission policy does not let train, and groups without
        differing rewards under dynamic sampling. A call that is repeated for the same token changes nothing. `now` is the runner's clock.
        """
        group = self.ledger.current(entry.token)
        if group is not None and group.owner == owner and group.state is not GroupState.LEASED:
            return Verdict.ADMIT if group.state is GroupState.CONSUMED else Verdict.DEFER
        if group is None or group.owner != owner:
            if self._step is not None and self._step.complete:
                self._step.surplus += 1
            self.ledger.counts["late"] += 1
            self._moves.moves.append((entry.token, None))
            return Verdict.REFUSE
        self.ledger.finish(entry.token, version=entry.v_min)
        verdict = self._decide(group, entry, now)
        if verdict is Verdict.DEFER:
            heapq.heappush(self._deferred, (entry.v_min, group.position, next(self._numbers), entry))
        return verdict

    def _decide(self, group: Group, entry: GroupEntry, now: float) -> Verdict:
        """Decide about a generated group, and carry the decision out unless it is deferred."""
        state = self._step
        if state is None or state.complete:
            return Verdict.DEFER
        num_ahead = self.ledger.num_ahead(group)
        verdict = self._admission.decide(entry, self._capacity(state), num_ahead=num_ahead)
        if verdict is Verdict.DEFER:
            return verdict
        rank = None
        if verdict is Verdict.REFUSE:
            state.stale += 1
            versions = f"versions {entry.v_min}..{entry.v_max}, the step trains {state.version}"
            logger.warning("group %s: %s", entry.group_id, versions)
            self._requeue(group, "stale", versions)
        elif self._algorithm.dynamic_sampling.enabled and not entry.informative:
            state.filtered += 1
            self.ledger.discard([entry.group_id], "filtered")
            self._moves.moves.append((entry.token, None))
            verdict = Verdict.REFUSE
        else:
            rank = state.assign(group.position)
            self.ledger.consume([entry.group_id], state.step)
            state.admitted[entry.group_id] = entry
            state.waiting_since = None
            self._moves.moves.append((entry.token, rank_key(state.step, rank)))
        if entry.times is not None:
            trains = verdict is Verdict.ADMIT
            span = GroupSpan(group_id=entry.group_id, rank=rank, trains=trains, decided=now, times=entry.times)
            state.spans.append(span)
        return verdict

    def _front(self) -> tuple[Group, GroupEntry] | None:
        """Return the deferred group that is decided first; None when no group is deferred."""
        while self._deferred:
            entry = self._deferred[0][-1]
            group = self.ledger.current(entry.token)
            if group is not None and group.state is GroupState.GENERATED:
                return group, entry
            heapq.heappop(self._deferred)  # given back or cancelled meanwhile
        return None

    def _decide_deferred(self, now: float) -> None:
        """Decide about deferred groups as far as the open step allows. While the first of them waits, so do all others."""
        while (front := self._front()) is not None:
            if self._decide(*front, now) is Verdict.DEFER:
                return
            heapq.heappop(self._deferred)

    # --- groups that are generated again ---------------------------------------------------------------------------

    def give_back(self, token: str, owner: str, reason: RequeueReason, message: str, *, counted: bool = True) -> None:
        """Take back a group that `owner` cannot finish: pending again, or dropped when its attempts are used up.

        `counted` False uses up none. Does nothing for a group that is finished or that somebody else holds.
        """
        group = self.ledger.current(token)
        if group is None or group.owner != owner or group.state is not GroupState.LEASED:
            logger.info(
                "group %s given back (%s) by %s, which does not hold it: nothing to do", group_of(token), reason, owner
            )
            return
        logger.warning("group %s given back (%s): %s", group.group_id, reason, message)
        self._requeue(group, reason, message, counted=counted)

    def _requeue(self, group: Group, reason: RequeueReason, message: str, *, counted: bool = True) -> None:
        self._moves.moves.append((group.token, None))
        self.ledger.requeue(group.token, reason, message, counted=counted)

    def owner_lost(self, owner: str, message: str) -> list[str]:
        """Take back what a lost process held; return the tokens of its leases."""
        tokens = self.ledger.requeue_owner(owner, "worker_lost", message)
        self._moves.moves += [(token, None) for token in tokens]
        return tokens

    @property
    def num_deferred(self) -> int:
        """Number of finished groups that wait for a step."""
        return self.ledger.num_in(GroupState.GENERATED)

    def expire(self) -> list[str]:
        """Take back groups whose leases were not renewed; return the tokens of the leases."""
        tokens = self.ledger.expire()
        self._moves.moves += [(token, None) for token in tokens]
        return tokens

    def requeue_stragglers(self, now: float) -> None:
        """Requeue groups for which the trainer has waited longer than algorithm.stragglerSeconds: the oldest, until a younger one may train."""
        state, limit = self._step, self._algorithm.straggler_seconds
        if limit is None or state is None or state.complete or (front := self._front()) is None:
            return
        if state.waiting_since is None:
            state.waiting_since = now
        if now - state.waiting_since <= limit:
            return
        group, entry = front
        for straggler in self.ledger.running():
            num_ahead = self.ledger.num_ahead(group)
            if self._admission.decide(entry, self._capacity(state), num_ahead=num_ahead) is not Verdict.DEFER:
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
        """Account for what was dropped and filtered, and decide about deferred groups. The dispatcher calls it after each change."""
        for drop in self.ledger.take_drops():
            self._dropped(drop)
        self._decide_deferred(now)
        self._check_rounds()
        self._close_if_cut()

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
        """Train the step without the dropped group where the job's limits allow it; otherwise the next prompt replaces the group."""
        left = self._algorithm.prompts_per_step - state.dropped - 1
        smaller = left // self._data_ranks * self._data_ranks
        floor = self._algorithm.min_batch_fraction * self._algorithm.prompts_per_step
        if smaller < state.target and smaller < max(floor, self._data_ranks):
            logger.warning("step %s stays at %s groups: minBatchFraction forbids %s", state.step, state.target, smaller)
            return
        if smaller < len(state.admitted):
            return  # a data rank cannot give back a group, so the dropped one is replaced
        state.dropped += 1
        state.target = min(state.target, smaller)

    def _close_if_cut(self) -> None:
        """Close the data ranks' keys of a cut step that has its groups: each rank waits for its share of the whole step."""
        state = self._step
        if state is None or state.ended or not state.complete or state.target == self._algorithm.prompts_per_step:
            return
        state.ended = True
        self._moves.closed += [rank_key(state.step, rank) for rank in range(self._data_ranks)]

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
