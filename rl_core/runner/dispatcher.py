"""Gives prompt groups to rollouts and takes what comes of them: the runner's side of the lease calls.

    caller                    calls                                          thread
    rollouts                  lease_groups, renew, finish, give_back         the I/O thread, which they never block
    the hub (members)         owner_lost                                     its callback thread
    weight sync, joins        serves                                         the loop's, a join's
    housekeeping              tick, once a second                            its own
    validation                open_validation, take_scores, close_validation the loop's
    the training loop         see `step_groups`                              the loop's

`_lock` guards the accounts and the waiting polls: a lease, a decision and a loss happen one after another, so a group is never given
out twice. Answers, moves of records and the failure of the run leave after the lock is free: an answer takes locks of the transport, and
the I/O thread that carries it may itself wait for this lock.

The work for an event does not grow with the number of rollouts or groups: polls wait by the version that their rollouts serve, and only
those are looked at for which a group has become free.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from rl_core.api.errors import ConfigError, DataError, RLJobError
from rl_core.messages.groups import GroupEntry, PromptLease, RequeueReason, ValidationScores
from rl_core.messages.members import Incarnation
from rl_core.messages.rpc import Caller
from rl_core.plan.groups import ROLLOUT
from rl_core.runner.accounts import Accounts
from rl_core.runner.ledger import group_of
from rl_core.runner.roster import Identity
from rl_core.runner.training_account import RecordMoves, TrainingAccount
from rl_core.runner.validation_round import ValidationRound
from rl_core.runner.workload import Workload
from rl_core.transports.rpc import IncomingCall, current_caller, inline
from rl_core.workers.hub import Hub

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
    """Newest version that the rollout is known to serve."""
    until: float

    @property
    def rollout(self) -> Identity:
        return self.name, self.incarnation

    @property
    def owner(self) -> str:
        return owner_name(self.name, self.incarnation)


@dataclass(slots=True)
class _Effects:
    """What leaves this object once the lock is free."""

    moves: RecordMoves
    answers: list[tuple[_Poll, list[PromptLease]]] = field(default_factory=list)
    failure: RLJobError | None = None


class Dispatcher:
    """Serves rollouts from the training account and from the validation round that is open. Any thread may call it."""

    def __init__(
        self,
        training: TrainingAccount,
        workload: Workload,
        *,
        is_live: Callable[[str, Incarnation], bool],
        is_short: Callable[[], bool],
        move_records: Callable[[RecordMoves], None],
        fail: Callable[[RLJobError], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_live(member, incarnation)`: whether it may be given work; it is called under the lock and must not call back.

        `is_short()`: whether the cluster lacks members, which is no fault of a group. `move_records` changes the keys of records on the
        channel and must not block; `fail` ends the run.
        """
        self._accounts, self._workload = Accounts(training), workload
        self._is_live, self._is_short, self._move_records, self._fail_run = is_live, is_short, move_records, fail
        self._clock = clock
        self._lock = threading.Lock()
        """Guards the accounts and everything below."""
        self._polls: dict[str, _Poll] = {}
        """Waiting polls by member name."""
        self._waiting: dict[int, OrderedDict[str, _Poll]] = {}
        """The same polls by served version, in the order in which they came."""
        self._served: dict[str, int] = {}
        """Version by owner that its acknowledgement proved; newer than the version in a poll that was sent before it."""
        self._ticked = clock()
        self._most = MOST_IN_ONE_ANSWER
        self._failed = False

    @contextmanager
    def changing(self) -> Iterator[Accounts]:
        """Hold the lock while the block changes the accounts; then answer the polls that can be, and send what follows from the change."""
        with self._lock:
            yield self._accounts
            effects = self._settle()
        self._release(effects)

    @contextmanager
    def locked(self) -> Iterator[Accounts]:
        """Hold the lock while the block uses the accounts in a way from which nothing follows for others."""
        with self._lock:
            yield self._accounts

    # --- rollouts --------------------------------------------------------------------------------------------------

    def lease_groups(
        self, call: Call, name: str, incarnation: Incarnation, want: int, seconds: float, version: int
    ) -> None:
        """Answer `call` with up to `want` groups as soon as there are any for a rollout that serves `version`; with none after `seconds`."""
        poll = _Poll(call, name, incarnation, want, version, self._clock() + seconds)
        poll.served = max(version, self._served.get(poll.owner, -1))
        call.on_cancel = lambda: self._cancelled(poll)
        with self.changing():
            replaced = self._polls.get(name)  # a rollout has one poll, the newest
            if replaced is not None:
                self._remove(replaced)
            self._polls[name] = poll
            self._waiting.setdefault(poll.served, OrderedDict())[name] = poll
            if self._is_live(name, incarnation):
                self._workload.asks(poll.rollout, True)
        if replaced is not None:
            replaced.call.reply([])

    def renew(self, name: str, incarnation: Incarnation, tokens: list[str]) -> list[str]:
        """Let leases run anew; return the tokens that are not this process's current leases."""
        with self._lock:
            stale = self._accounts.renew(tokens, owner_name(name, incarnation))
            for token in stale:
                self._workload.ended(token)
            return stale

    def finish(self, name: str, incarnation: Incarnation, entry: GroupEntry) -> None:
        """Decide about a group that the rollout has finished and whose record it has stored. May be repeated."""
        with self.changing() as accounts:
            accounts.training.finish(entry, owner_name(name, incarnation), now=self._clock())
            self._workload.finished(entry.token)

    def give_back(self, name: str, incarnation: Incarnation, token: str, reason: RequeueReason, message: str) -> None:
        """Take back a group that a rollout cannot finish: given out again, or dropped when its attempts are used up.

        While the cluster lacks members, a failure of machinery or a deadline uses up no attempt.
        """
        excused = reason in ("infrastructure", "deadline") and self._is_short()
        with self.changing() as accounts:
            accounts.give_back(token, owner_name(name, incarnation), reason, message, counted=not excused)
            self._workload.ended(token)

    # --- members and time ------------------------------------------------------------------------------------------

    def serves(self, rollouts: Sequence[Identity], version: int) -> None:
        """Note that these rollouts proved `version`: a poll that one of them sent before counts as one for it.

        So the groups of the next step leave as the answer to the waiting poll, without another round trip.
        """
        with self.changing():
            for name, incarnation in rollouts:
                owner = owner_name(name, incarnation)
                self._served[owner] = version
                poll = self._polls.get(name)
                if poll is not None and poll.owner == owner and poll.served < version:
                    self._remove(poll)
                    poll.served = version
                    self._polls[name] = poll
                    self._waiting.setdefault(version, OrderedDict())[name] = poll
                    self._workload.asks(poll.rollout, self._is_live(name, incarnation))

    def owner_lost(self, name: str, incarnation: Incarnation) -> None:
        """Give out again at once what a lost process held."""
        owner = owner_name(name, incarnation)
        with self.changing() as accounts:
            self._served.pop(owner, None)
            self._workload.gone((name, incarnation))
            poll = self._polls.get(name)
            if poll is not None and poll.owner == owner:
                self._remove(poll)
            tokens = accounts.owner_lost(owner, f"{name} was lost")
            if tokens:
                groups = ", ".join(map(group_of, tokens))
                logger.warning("%s is lost with groups %s; they are given out again", name, groups)

    def tick(self) -> None:
        """Take back leases that were not renewed and groups that the trainer waited for too long; end polls whose time is up.

        Called once a second.
        """
        now = self._clock()
        with self.changing() as accounts:
            gap, self._ticked = now - self._ticked, now
            if gap > LONGEST_GAP:
                accounts.extend_leases(gap)
            for token in accounts.expire():
                logger.warning("group %s: its lease was not renewed; given out again", group_of(token))
                self._workload.ended(token)
            accounts.training.requeue_stragglers(now)
            overdue = [poll for poll in self._polls.values() if poll.until <= now]
            self._workload.tick(self._is_live)
            for poll in self._polls.values():
                self._workload.asks(poll.rollout, self._is_live(*poll.rollout))
        with self._lock:
            ended = [poll for poll in overdue if self._polls.get(poll.name) is poll]
            for poll in ended:
                self._remove(poll)
        self._answer([(poll, []) for poll in ended])

    # --- validation ------------------------------------------------------------------------------------------------

    def open_validation(self, validation: ValidationRound) -> None:
        """Give out the prompts of a validation round, before those of training."""
        with self.changing() as accounts:
            accounts.validation = validation

    def take_scores(self, scores: ValidationScores) -> None:
        """Count the scores of a validation prompt."""
        with self._lock:
            self._workload.ended(scores.token)
            self._accounts.take_scores(scores)

    def close_validation(self) -> None:
        """Give out no more prompts of the round."""
        with self._lock:
            self._accounts.validation = None

    # --- inside ----------------------------------------------------------------------------------------------------

    def _settle(self) -> _Effects:
        """Follow up on a change of the accounts. Under the lock."""
        training, now = self._accounts.training, self._clock()
        training.settle(now)
        effects = _Effects(training.take_moves())
        if training.failure is not None and not self._failed:
            self._failed, effects.failure = True, training.failure
        for version in list(self._waiting):
            self._serve(version, now, effects)
        self._workload.queues(backlog=training.room(), ready=training.num_deferred)
        return effects

    def _serve(self, version: int, now: float, effects: _Effects) -> None:
        """Lease groups to the polls of rollouts that serve `version`, the oldest poll first, while there are any."""
        while (polls := self._waiting.get(version)) and self._accounts.has_groups(version):
            poll = next((poll for poll in polls.values() if self._is_live(*poll.rollout)), None)
            if poll is None:
                return
            leases = self._accounts.lease(min(poll.want, self._most), poll.owner, served=version, now=now)
            if not leases:
                return
            self._remove(poll)
            for lease in leases:
                self._workload.begun(poll.rollout, lease.token)
            effects.answers.append((poll, leases))

    def _remove(self, poll: _Poll) -> None:
        """Let a poll wait no longer. Under the lock."""
        del self._polls[poll.name]
        polls = self._waiting[poll.served]
        del polls[poll.name]
        if not polls:
            del self._waiting[poll.served]
        self._workload.asks(poll.rollout, False)

    def _cancelled(self, poll: _Poll) -> None:
        with self._lock:
            if self._polls.get(poll.name) is poll:
                self._remove(poll)

    def _release(self, effects: _Effects) -> None:
        """Send what follows from a change. The lock is free."""
        if effects.moves:
            self._move_records(effects.moves)
        self._answer(effects.answers)
        if effects.failure is not None:
            self._fail_run(effects.failure)

    def _answer(self, answers: list[tuple[_Poll, list[PromptLease]]]) -> None:
        for poll, leases in answers:
            poll.call.on_cancel = None
            if not poll.call.reply(leases):
                self._take_back(leases)

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
                self._accounts.undo(lease)


def owner_name(name: str, incarnation: Incarnation) -> str:
    """Return how the ledger names a process: a restarted process has another incarnation and holds nothing of the one before."""
    return f"{name} ({incarnation[0]}.{incarnation[1]})"


def serve_leases(hub: Hub, dispatcher: Dispatcher) -> None:
    """Serve the lease calls to rollouts on the hub's address. None of them blocks the I/O thread that they run on."""

    def lease_groups(call: IncomingCall, want: int, seconds: float, version: int) -> None:
        dispatcher.lease_groups(call, *_process(call.caller), want, seconds, version)

    def finish(call: IncomingCall, entry: GroupEntry) -> None:
        dispatcher.finish(*_process(call.caller), entry)
        call.reply(None)

    async def renew(tokens: list[str]) -> list[str]:
        return dispatcher.renew(*_process(current_caller()), tokens)

    def give_back(token: str, reason: RequeueReason, message: str) -> None:
        dispatcher.give_back(*_process(current_caller()), token, reason, message)

    calls: dict[str, Callable[..., Any]] = {
        "lease_groups": inline(lease_groups),
        "finish": inline(finish),
        "renew": renew,
        "give_back": give_back,
    }
    hub.add_handlers(calls, role=ROLLOUT)


def _process(caller: Caller | None) -> tuple[str, Incarnation]:
    """Return the member name and incarnation of a caller. Raises ConfigError for an anonymous one, which can hold no lease."""
    if caller is None:
        raise ConfigError("only a member of the job can hold leases, got an anonymous caller; connect with an identity")
    return caller.name, caller.incarnation
