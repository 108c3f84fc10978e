"""The runner's side of the account of a group: gives prompt groups out and takes what comes of them.

    who                       calls                                     on which thread
    the loop                  open, close, acknowledge, open_validation the loop's
    rollouts                  lease_groups, renew, delivered            the I/O thread (never blocks it)
    rollouts, data ranks      give_back, admit                          handler threads
    the hub (members)         owner_lost, serves                        its callback thread, the loop's
    housekeeping              tick, once a second                       its own

`_lock` guards the accounts and the polls that wait; with it a lease, an admission and a loss happen one after another, so a group is
never given twice. Answers, the end of a cut step and the failure of the run leave after the lock is free: an answer takes locks of
the transport, and the I/O thread that carries it may itself wait for this lock.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from rl_core.api.algorithm import AlgorithmSpec
from rl_core.api.errors import DataError, RLJobError
from rl_core.messages.groups import GroupEntry, PromptLease, RequeueReason, ValidationScores
from rl_core.messages.members import Incarnation
from rl_core.runner.ledger import HeldGroup
from rl_core.runner.roster import Identity
from rl_core.runner.training_account import StepState, TrainedGroup, TrainingAccount
from rl_core.runner.validation import ValidationRound
from rl_core.runner.workload import Workload

logger = logging.getLogger(__name__)
MOST_IN_ONE_ANSWER = 256
"""Groups given out in one message at most."""
LONGEST_GAP = 5.0
"""Seconds between two ticks after which this process itself stood still."""


class Call(Protocol):
    """One `lease_groups` request, answered at once or later. Implemented by `rpc.IncomingCall`."""

    on_cancel: Callable[[], None] | None

    def reply(self, value: Any) -> bool:
        """Answer; False when the value cannot travel."""
        ...


@dataclass(slots=True, eq=False)
class _Poll:
    """A rollout that waits for groups."""

    call: Call
    name: str
    incarnation: Incarnation
    want: int
    served: int
    """Version that the rollout served when it asked."""
    until: float

    @property
    def rollout(self) -> Identity:
        return self.name, self.incarnation

    @property
    def owner(self) -> str:
        return owner_name(self.name, self.incarnation)


@dataclass(slots=True)
class _Effects:
    """What others are to hear once the lock is free."""

    answers: list[tuple[_Poll, list[PromptLease]]] = field(default_factory=list)
    ended_step: int | None = None
    failure: RLJobError | None = None


class Dispatcher:
    """Serves the rollouts from the training account and from the validation round that is open. Any thread."""

    def __init__(
        self,
        account: TrainingAccount,
        *,
        is_live: Callable[[str, Incarnation], bool],
        is_short: Callable[[], bool],
        end_step: Callable[[int], None],
        fail: Callable[[RLJobError], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_live(member, incarnation)`: whether it may be given work; asked under the lock, it must not call back.

        `is_short()`: whether the cluster lacks members, which is no fault of a group. `end_step(step)` tells the data ranks that no more
        groups come; `fail` ends the run.
        """
        self._account = account
        self._is_live, self._is_short, self._end_step, self._fail_run = is_live, is_short, end_step, fail
        self._clock = clock
        self._lock = threading.Lock()
        self._polls: list[_Poll] = []
        self._validation: ValidationRound | None = None
        self._served: dict[str, int] = {}
        """Version by owner that its acknowledgement proved: newer than what its waiting poll says."""
        self._workload = Workload(clock)
        self._ticked = clock()
        self._most = MOST_IN_ONE_ANSWER
        self._failed = False

    # --- the loop --------------------------------------------------------------------------------------------------

    def open(self, step: int, version: int) -> None:
        """Begin training `step` at policy `version`; whoever waits and serves it is answered at once."""
        self._carry_out(lambda: self._account.open(step, version))

    def adopt(self, algorithm: AlgorithmSpec) -> None:
        """Give out and admit by another spec of the running job."""
        self._carry_out(lambda: self._account.adopt(algorithm))

    def close(self) -> StepState:
        """End the step; return what was admitted to it."""
        with self._lock:
            return self._account.close()

    def cancel_rest(self) -> dict[str, list[str]]:
        """Take back the groups beyond those of the open step, which has its own (rollout.oversample); return tokens by rollout."""
        with self._lock:
            found: dict[str, list[str]] = {}
            for owner, token in self._account.cancel_rest():
                self._workload.ended(token)
                found.setdefault(owner.partition(" ")[0], []).append(token)
            return found

    def acknowledge(self, step: int) -> list[TrainedGroup]:
        """Mark the groups of `step` as trained; return them in ledger order."""
        with self._lock:
            return self._account.acknowledge(step)

    def open_validation(self, validation: ValidationRound) -> None:
        """Give out the groups of a validation round, before those of training."""

        def open_round() -> None:
            self._validation = validation

        self._carry_out(open_round)

    def take_scores(self, scores: ValidationScores) -> None:
        """Count a validation answer; one of a round that was left, or of a lease that was lost, changes nothing."""
        with self._lock:
            self._workload.ended(scores.token)
            if self._validation is not None and self._validation.gave(scores.token):
                self._validation.take(scores)

    def close_validation(self) -> None:
        """Give out no more of the round."""
        with self._lock:
            self._validation = None

    def serves(self, processes: Sequence[tuple[str, Incarnation]], version: int) -> None:
        """Note that these rollouts proved `version`: a poll that waits since before they did is for it.

        So the groups of the next step leave as its answer, without another round trip.
        """
        with self._lock:
            self._served |= {owner_name(*process): version for process in processes}

    def state_dict(self) -> dict[str, Any]:
        """Return the ledger's state."""
        with self._lock:
            return self._account.ledger.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved ledger, before anything is given out."""
        with self._lock:
            self._account.ledger.load_state_dict(state)

    def prompt(self, index: int) -> Any:
        """Return a training prompt by its index."""
        return self._account.ledger.dataset[index]

    def metrics(self) -> dict[str, float]:
        """Return `ledger/*`."""
        with self._lock:
            return self._account.ledger.metrics()

    def held(self) -> list[HeldGroup]:
        """Return who holds which group since when, validation included."""
        with self._lock:
            validation = self._validation.held() if self._validation is not None else []
            return [*self._account.ledger.held(), *validation]

    # --- who works and who waits -----------------------------------------------------------------------------------

    def begin_usage(self) -> None:
        """Count from here what `usage` tells."""
        with self._lock:
            self._workload.begin_step()

    def usage(self) -> dict[str, float]:
        """Return the seconds that rollouts and trainer had nothing to do since `begin_usage`, and the queues' mean lengths."""
        with self._lock:
            return self._workload.of_step().metrics()

    def workload(self) -> dict[str, Any]:
        """Return `/status.workload`."""
        with self._lock:
            return self._workload.snapshot()

    @contextmanager
    def trainer_waits(self) -> Iterator[None]:
        """Count the block as the trainer's wait for groups."""
        with self._lock:
            self._workload.trainer_waits(True)
        try:
            yield
        finally:
            with self._lock:
                self._workload.trainer_waits(False)

    @contextmanager
    def weights_travel(self) -> Iterator[None]:
        """Count nobody's wait in the block as one for groups: a version is on its way."""
        with self._lock:
            self._workload.weights_travel(True)
        try:
            yield
        finally:
            with self._lock:
                self._workload.weights_travel(False)

    # --- rollouts --------------------------------------------------------------------------------------------------

    def lease_groups(
        self, call: Call, name: str, incarnation: Incarnation, want: int, seconds: float, version: int
    ) -> None:
        """Answer `call` with up to `want` groups as soon as there are any for a rollout that serves `version`; with none after `seconds`."""
        poll = _Poll(call, name, incarnation, want, version, self._clock() + seconds)

        replaced: list[_Poll] = []

        def wait() -> None:
            replaced.extend(old for old in self._polls if old.name == name)  # a rollout has one poll, the newest
            self._polls = [old for old in self._polls if old.name != name]
            self._polls.append(poll)

        call.on_cancel = lambda: self._forget(poll)
        self._carry_out(wait)
        for old in replaced:
            old.call.reply([])

    def renew(self, name: str, incarnation: Incarnation, tokens: Sequence[str]) -> list[str]:
        """Let leases run on; return the tokens that are not this member's current leases."""
        owner = owner_name(name, incarnation)
        with self._lock:
            of_training = [token for token in tokens if self._account.ledger.gave(token)]
            stale = self._account.ledger.renew(of_training, owner)
            others = [token for token in tokens if token not in of_training]
            stale += self._validation.renew(others, owner) if self._validation is not None else others
            for token in stale:
                self._workload.ended(token)
            return stale

    def delivered(self, token: str) -> None:
        """Note that the record of a lease is on its way: however long it waits there, and whatever becomes of its rollout, it counts."""
        with self._lock:
            self._account.ledger.deliver(token)
            waits = self._account.ledger.awaits(token)  # a data rank may have had it admitted before this call came
            self._workload.came(token, waits=waits)

    def give_back(self, token: str, reason: RequeueReason, message: str) -> None:
        """Take back a group that a rollout cannot finish: given out again, or dropped when its attempts are used up."""
        if reason in ("infrastructure", "deadline") and self._is_short():
            reason = "epoch"  # the world's fault, not the group's: of all reasons the one that no shortage uses up

        def take_back() -> None:
            self._workload.ended(token)
            if self._validation is not None and self._validation.gave(token):
                self._validation.give_back(token, reason, message)
            else:
                logger.warning("group %s given back (%s): %s", token.split(".", 2)[-1], reason, message)
                self._account.give_back(token, reason, message)

        self._carry_out(take_back)

    # --- data ranks ------------------------------------------------------------------------------------------------

    def admit(self, entries: Sequence[GroupEntry]) -> list[bool | None]:
        """Return for each finished group whether it trains in the open step: False = it is replaced, None = it waits for a later step."""
        answers: list[bool | None] = []
        now = self._clock()

        def look() -> None:
            for entry in entries:
                answers.append(self._account.admit(entry, now=now))
                self._workload.came(entry.token, waits=answers[-1] is None)

        self._carry_out(look)
        return answers

    # --- members and time ------------------------------------------------------------------------------------------

    def owner_lost(self, name: str, incarnation: Incarnation) -> None:
        """Give out again at once what a lost member held."""
        owner = owner_name(name, incarnation)

        def lost() -> None:
            self._served.pop(owner, None)
            self._workload.gone((name, incarnation))
            self._polls = [poll for poll in self._polls if poll.owner != owner]
            again = self._account.ledger.requeue_owner(owner, "worker_lost", f"{name} was lost")
            if self._validation is not None:
                again += self._validation.owner_lost(owner)
            if again:
                logger.warning("%s is lost with groups %s; they are given out again", name, ", ".join(again))

        self._carry_out(lost)

    def tick(self) -> None:
        """Give out again leases that were not renewed, or for which the trainer waited too long; answer polls whose time is up with nothing.

        Once a second.
        """

        def expire() -> None:
            gap, self._ticked = self._clock() - self._ticked, self._clock()
            if gap > LONGEST_GAP:
                self._account.ledger.extend_deadlines(gap)
                if self._validation is not None:
                    self._validation.ledger.extend_deadlines(gap)
            late = self._account.ledger.expire()
            if self._validation is not None:
                late += self._validation.expire()
            for group_id in late:
                logger.warning("group %s: its lease was not renewed; given out again", group_id)
            self._workload.expired(late)
            self._workload.tick(self._is_live)
            self._account.tick(self._clock())

        self._carry_out(expire)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _carry_out(self, change: Callable[[], None]) -> None:
        """Make a change of the accounts, then answer whom it concerns."""
        with self._lock:
            change()
            effects = self._settle()
        self._release(effects)

    def _settle(self) -> _Effects:
        self._account.settle()
        effects = _Effects(ended_step=self._account.take_ended_step())
        if self._account.failure is not None and not self._failed:
            self._failed, effects.failure = True, self._account.failure
        now, waiting, asking = self._clock(), [], []
        for poll in self._polls:
            live = self._is_live(*poll.rollout)
            leases = self._lease(poll) if live else []
            for lease in leases:
                self._workload.begun(poll.rollout, lease.token)
            if leases or poll.until <= now:
                effects.answers.append((poll, leases))
            else:
                waiting.append(poll)
                asking += [poll.rollout] if live else []
        self._polls = waiting
        self._workload.asking(asking, backlog=self._account.backlog())
        return effects

    def _lease(self, poll: _Poll) -> list[PromptLease]:
        served, want = max(poll.served, self._served.get(poll.owner, -1)), min(poll.want, self._most)
        leases: list[PromptLease] = []
        if self._validation is not None:
            leases = self._validation.lease(want, poll.owner, served=served)
        return leases + self._account.lease(want - len(leases), poll.owner, served=served, now=self._clock())

    def _release(self, effects: _Effects) -> None:
        for poll, leases in effects.answers:
            poll.call.on_cancel = None
            if not poll.call.reply(leases):
                self._take_back(leases)
        if effects.failure is not None:
            self._fail_run(effects.failure)
        if effects.ended_step is not None:
            self._end_step(effects.ended_step)

    def _take_back(self, leases: list[PromptLease]) -> None:
        """Undo leases that are larger than one message; the next answers carry fewer, and a single one that is too large ends the run."""
        if len(leases) == 1:
            self._fail_run(
                DataError(
                    f"the prompt of group {leases[0].group_id} must fit a message, got one that is larger; remove it from the data set"
                )
            )
            return
        with self._lock:
            self._most = max(len(leases) // 2, 1)
            for lease in leases:
                self._workload.ended(lease.token)
                if lease.mode == "train":
                    self._account.undo(lease)
                elif self._validation is not None:
                    self._validation.undo(lease)

    def _forget(self, poll: _Poll) -> None:
        with self._lock:
            self._polls = [other for other in self._polls if other is not poll]


def owner_name(name: str, incarnation: Incarnation) -> str:
    """Return how the ledger knows a process: its member name and incarnation, as a restarted process holds nothing of the old one."""
    return f"{name} ({incarnation[0]}.{incarnation[1]})"
