"""The dispatcher: leases prompt groups to rollouts and accepts their results. It is the runner's side of the lease calls.

    caller                    calls                                          thread
    rollouts                  lease_groups, renew, finish, return_group      the I/O thread, which they never block
    the hub (members)         owner_lost                                     its callback thread
    weight sync, joins        record_served                                     the loop's, a join's
    periodic tasks            tick, once a second                            its own
    validation                open_validation, take_scores, close_validation the loop's
    the training loop         see `step_groups`                              the loop's

A rollout asks for groups by a long poll: a `lease_groups` call that is answered when groups are available, or at its timeout.

`_lock` guards the accounts and the open polls: leases, decisions and losses are handled one after another, so a group is never leased
twice. Answers to polls, moves of records on the channel, and the failure of the run are sent after the lock is released: sending takes
locks of the transport, and the I/O thread that holds those may be waiting for this lock.

The cost of an event does not grow with the number of rollouts or groups: open polls are indexed by the weights version of their rollout,
and only those are visited for which a group is available.
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
from rl_core.messages.samples import KeptSample
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
"""Largest number of prompt groups in one answer."""
LONGEST_GAP = 5.0
"""Seconds. If the time between two ticks is longer, this process was frozen, and rollouts could not renew their leases meanwhile."""


class Call(Protocol):
    """One `lease_groups` request, answered at once or later. Implemented by `rpc.IncomingCall`."""

    on_cancel: Callable[[], None] | None

    def reply(self, value: Any) -> bool:
        """Send the answer; return False if the value is too large for one message."""
        ...


@dataclass(slots=True, eq=False)
class _Poll:
    """An open `lease_groups` call."""

    call: Call
    name: str
    incarnation: Incarnation
    max_groups: int
    served: int
    """Newest version of the weights that the rollout is known to have."""
    until: float

    @property
    def rollout(self) -> Identity:
        return self.name, self.incarnation

    @property
    def owner(self) -> str:
        return owner_name(self.name, self.incarnation)


@dataclass(slots=True)
class _Effects:
    """Messages and calls that a change requires; they are sent after the lock is released."""

    moves: RecordMoves
    answers: list[tuple[_Poll, list[PromptLease]]] = field(default_factory=list)
    failure: RLJobError | None = None


class Dispatcher:
    """Leases training groups and validation prompts to rollouts, and passes finished groups to the training account. Thread-safe."""

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
        """Serve the prompts of `training`; `workload` measures who is busy.

        `is_live(member, incarnation)` says whether a process may get work. It is called with the lock held and must not call the
        dispatcher. `is_short()` says whether too few members are present; failures of infrastructure during that time use up no attempt of
        a group. `move_records` moves or deletes records on the channel and must not block. `fail` ends the run with an error.
        """
        self._accounts, self._workload = Accounts(training), workload
        self._is_live, self._is_short, self._move_records, self._fail_run = is_live, is_short, move_records, fail
        self._clock = clock
        self._lock = threading.Lock()
        """Guards the accounts and everything below."""
        self._polls: dict[str, _Poll] = {}
        """Open polls by member name."""
        self._waiting: dict[int, OrderedDict[str, _Poll]] = {}
        """The same polls by weights version, in order of arrival."""
        self._acknowledged: dict[str, int] = {}
        """Newest version that each process has acknowledged. It may be newer than the version in a poll that was sent earlier."""
        self._last_tick = clock()
        self._max_leases = MOST_IN_ONE_ANSWER
        self._failed = False

    @contextmanager
    def update_accounts(self) -> Iterator[Accounts]:
        """Hold the lock while the block changes the accounts, then act on the consequences of the change.

        After the block, deferred groups are decided and polls are answered for which groups are available now. Then moves of records and a
        failure of the run are sent, without the lock.
        """
        with self._lock:
            yield self._accounts
            effects = self._settle()
        self._release(effects)

    @contextmanager
    def lock_accounts(self) -> Iterator[Accounts]:
        """Hold the lock while the block reads the accounts, or changes them without making a group available.

        No poll is answered afterwards.
        """
        with self._lock:
            yield self._accounts

    # --- rollouts --------------------------------------------------------------------------------------------------

    def lease_groups(
        self, call: Call, name: str, incarnation: Incarnation, max_groups: int, timeout: float, version: int
    ) -> None:
        """Answer `call` with up to `max_groups` leases once groups are available for weights of `version`.

        After `timeout` seconds without a group the answer is an empty list. A rollout has one open poll: a newer call ends the older one,
        which is answered with an empty list.
        """
        poll = _Poll(call, name, incarnation, max_groups, version, self._clock() + timeout)
        poll.served = max(version, self._acknowledged.get(poll.owner, -1))
        call.on_cancel = lambda: self._cancelled(poll)
        with self.update_accounts():
            replaced = self._polls.get(name)  # a rollout has one poll, the newest
            if replaced is not None:
                self._remove(replaced)
            self._polls[name] = poll
            self._waiting.setdefault(poll.served, OrderedDict())[name] = poll
            if self._is_live(name, incarnation):
                self._workload.set_polling(poll.rollout, True)
        if replaced is not None:
            replaced.call.reply([])

    def renew(self, name: str, incarnation: Incarnation, tokens: list[str]) -> list[str]:
        """Extend the leases of a process; return the tokens of leases that it does not hold (any more)."""
        with self._lock:
            stale = self._accounts.renew(tokens, owner_name(name, incarnation))
            for token in stale:
                self._workload.ended(token)
            return stale

    def finish(self, name: str, incarnation: Incarnation, entry: GroupEntry) -> None:
        """Decide about a finished group whose record is stored on the channel: admit, defer or refuse it. Idempotent."""
        with self.update_accounts() as accounts:
            accounts.training.finish(entry, owner_name(name, incarnation), now=self._clock())
            self._workload.finished(entry.token)

    def return_group(
        self,
        name: str,
        incarnation: Incarnation,
        token: str,
        reason: RequeueReason,
        message: str,
        failed: KeptSample | None = None,
    ) -> None:
        """Accept a prompt group that a rollout returns unfinished: it is leased again, or dropped once its attempts are used up.

        The `failed` sample of a dropped group is kept for people to look at.
        While too few members are present, the reasons `infrastructure` and `deadline` use up no attempt.
        """
        excused = reason in ("infrastructure", "deadline") and self._is_short()
        with self.update_accounts() as accounts:
            owner = owner_name(name, incarnation)
            accounts.return_group(token, owner, reason, message, counted=not excused, failed=failed)
            self._workload.ended(token)

    # --- members and time ------------------------------------------------------------------------------------------

    def record_served(self, rollouts: Sequence[Identity], version: int) -> None:
        """Record that these rollouts have loaded weights of `version`. Their open polls now ask for groups of that version.

        The next step's groups are therefore sent as the answer to a poll that is open already, without another round trip.
        """
        with self.update_accounts():
            for name, incarnation in rollouts:
                owner = owner_name(name, incarnation)
                self._acknowledged[owner] = version
                poll = self._polls.get(name)
                if poll is not None and poll.owner == owner and poll.served < version:
                    self._remove(poll)
                    poll.served = version
                    self._polls[name] = poll
                    self._waiting.setdefault(version, OrderedDict())[name] = poll
                    self._workload.set_polling(poll.rollout, self._is_live(name, incarnation))

    def owner_lost(self, name: str, incarnation: Incarnation) -> None:
        """Requeue the prompt groups of a lost process at once, and end its poll."""
        owner = owner_name(name, incarnation)
        with self.update_accounts() as accounts:
            self._acknowledged.pop(owner, None)
            self._workload.forget((name, incarnation))
            poll = self._polls.get(name)
            if poll is not None and poll.owner == owner:
                self._remove(poll)
            tokens = accounts.owner_lost(owner, f"{name} was lost")
            if tokens:
                groups = ", ".join(map(group_of, tokens))
                logger.warning("%s is lost with groups %s; they are given out again", name, groups)

    def tick(self) -> None:
        """Requeue expired leases and stragglers, and answer the polls whose timeout has passed.

        Called once a second.
        """
        now = self._clock()
        with self.update_accounts() as accounts:
            gap, self._last_tick = now - self._last_tick, now
            if gap > LONGEST_GAP:
                accounts.extend_leases(gap)
            for token in accounts.expire():
                logger.warning("group %s: its lease was not renewed; given out again", group_of(token))
                self._workload.ended(token)
            accounts.training.requeue_stragglers(now)
            overdue = [poll for poll in self._polls.values() if poll.until <= now]
            self._workload.tick(self._is_live)
            for poll in self._polls.values():
                self._workload.set_polling(poll.rollout, self._is_live(*poll.rollout))
        with self._lock:
            expired = [poll for poll in overdue if self._polls.get(poll.name) is poll]
            for poll in expired:
                self._remove(poll)
        self._answer([(poll, []) for poll in expired])

    # --- validation ------------------------------------------------------------------------------------------------

    def open_validation(self, validation: ValidationRound) -> None:
        """Begin to lease the prompts of a validation round; they are leased before those of training."""
        with self.update_accounts() as accounts:
            accounts.validation = validation

    def take_scores(self, scores: ValidationScores) -> None:
        """Record the scores of a validation prompt."""
        with self._lock:
            self._workload.ended(scores.token)
            self._accounts.take_scores(scores)

    def close_validation(self) -> None:
        """Stop leasing the prompts of the validation round."""
        with self._lock:
            self._accounts.validation = None

    # --- inside ----------------------------------------------------------------------------------------------------

    def _settle(self) -> _Effects:
        """Decide deferred groups, lease available groups to open polls, and return what is to be sent. The lock is held."""
        training, now = self._accounts.training, self._clock()
        training.settle(now)
        effects = _Effects(training.take_moves())
        if training.failure is not None and not self._failed:
            self._failed, effects.failure = True, training.failure
        for version in list(self._waiting):
            self._serve(version, now, effects)
        self._workload.queues(backlog=training.num_leasable(), ready=training.num_deferred)
        return effects

    def _serve(self, version: int, now: float, effects: _Effects) -> None:
        """Lease groups to the polls for `version`, the oldest poll first, until no group is available."""
        while (polls := self._waiting.get(version)) and self._accounts.has_groups(version):
            poll = next((poll for poll in polls.values() if self._is_live(*poll.rollout)), None)
            if poll is None:
                return
            leases = self._accounts.lease(min(poll.max_groups, self._max_leases), poll.owner, served=version, now=now)
            if not leases:
                return
            self._remove(poll)
            for lease in leases:
                self._workload.begun(poll.rollout, lease.token)
            effects.answers.append((poll, leases))

    def _remove(self, poll: _Poll) -> None:
        """Remove a poll. The lock is held."""
        del self._polls[poll.name]
        polls = self._waiting[poll.served]
        del polls[poll.name]
        if not polls:
            del self._waiting[poll.served]
        self._workload.set_polling(poll.rollout, False)

    def _cancelled(self, poll: _Poll) -> None:
        with self._lock:
            if self._polls.get(poll.name) is poll:
                self._remove(poll)

    def _release(self, effects: _Effects) -> None:
        """Send the effects of a change. The lock is not held."""
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
        """Revert leases whose answer is larger than one message and send fewer at a time. A single lease that is too large ends the run."""
        if len(leases) == 1:
            self._fail_run(
                DataError(
                    f"the prompt of group {leases[0].group_id} must fit a message, got one that is larger; remove it from the data set"
                )
            )
            return
        with self._lock:
            self._max_leases = max(len(leases) // 2, 1)
            for lease in leases:
                self._workload.ended(lease.token)
                self._accounts.revert_lease(lease)


def owner_name(name: str, incarnation: Incarnation) -> str:
    """Return the owner name of a process in the ledger. It contains the incarnation, so a restarted process does not inherit leases."""
    return f"{name} ({incarnation[0]}.{incarnation[1]})"


def serve_leases(hub: Hub, dispatcher: Dispatcher) -> None:
    """Register the lease calls of rollouts with the hub. They run on its I/O thread and do not block it."""

    def lease_groups(call: IncomingCall, max_groups: int, timeout: float, version: int) -> None:
        dispatcher.lease_groups(call, *_process(call.caller), max_groups, timeout, version)

    def finish(call: IncomingCall, entry: GroupEntry) -> None:
        dispatcher.finish(*_process(call.caller), entry)
        call.reply(None)

    async def renew(tokens: list[str]) -> list[str]:
        return dispatcher.renew(*_process(current_caller()), tokens)

    def return_group(token: str, reason: RequeueReason, message: str, failed: KeptSample | None = None) -> None:
        dispatcher.return_group(*_process(current_caller()), token, reason, message, failed)

    calls: dict[str, Callable[..., Any]] = {
        "lease_groups": inline(lease_groups),
        "finish": inline(finish),
        "renew": renew,
        "return_group": return_group,
    }
    hub.add_handlers(calls, role=ROLLOUT)


def _process(caller: Caller | None) -> tuple[str, Incarnation]:
    """Return the member name and incarnation of a caller. Raises ConfigError for an anonymous one, which can hold no lease."""
    if caller is None:
        raise ConfigError("only a member of the job can hold leases, got an anonymous caller; connect with an identity")
    return caller.name, caller.incarnation
