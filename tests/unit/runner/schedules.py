"""A run of the asynchronous program in simulated time: the real account, ledger and admission; rollouts, channel and trainer as events.

    fill: lease -> store the record -> finish: decided by the account -> records moved to the ranks -> trained -> published: next step, fill

Rollouts may die, also between storing a record and reporting it, and may miss a version. Used by the unit tests and by
benchmarks/asynchronous.py.
"""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from rl_core.api.algorithm import AlgorithmSpec
from rl_core.messages.groups import GroupEntry, PromptLease, rank_key
from rl_core.runner.admission import Bounded, OnPolicy
from rl_core.runner.ledger import PromptLedger
from rl_core.runner.training_account import TrainingAccount

LEASE_SECONDS = 50.0


@dataclass
class Rollout:
    """One rollout: what it serves and what it generates."""

    name: str
    slots: int
    version: int = 0
    alive: bool = True
    life: int = 0
    running: dict[str, PromptLease] = field(default_factory=dict)
    updating: bool = False
    """Whether it leases nothing, because it takes the next version once the groups that it runs have ended."""

    @property
    def owner(self) -> str:
        return f"{self.name}.{self.life}"


class Schedule:
    """One run. `trained` maps each trained group to its age; `finished` tells whether every step was trained."""

    def __init__(
        self,
        rng: Random,
        *,
        staleness: int,
        prompts: int,
        steps: int,
        rollouts: int = 2,
        slots: int = 2,
        ranks: int = 1,
        seconds: Callable[[], float],
        train_seconds: Callable[[], float],
        publish_seconds: float = 0.0,
        drain: bool = True,
        faults: float = 0.0,
    ) -> None:
        """`seconds()`: of a group. `publish_seconds`: from the first rollout that has the version to its commit.

        `drain`: a rollout takes a version when its groups in flight have ended (weights.onUpdate wait), else they go on under it. The step
        waits for the rollouts that have it at the commit, and not for those that are late.
        `faults`: chance that a rollout dies before it reports a stored record, that a finished group is followed by the death of a rollout,
        that a rollout misses a version.
        """
        self.now, self.rng, self.faults = 0.0, rng, faults
        spec = AlgorithmSpec(prompts_per_step=prompts, group_size=2, max_staleness=staleness)
        self.ledger = PromptLedger(
            range(1_000_000),
            seed=0,
            shuffle=False,
            lease_seconds=LEASE_SECONDS,
            max_attempts=1000,
            clock=lambda: self.now,
        )
        admission = Bounded(staleness, prompts) if staleness else OnPolicy()
        self.account = TrainingAccount(self.ledger, spec, admission, data_ranks=ranks)
        self.staleness, self.prompts, self.steps = staleness, prompts, steps
        self.rollouts = [Rollout(f"r{number}", slots) for number in range(rollouts)]
        self.num_ranks = ranks
        self.seconds, self.train_seconds = seconds, train_seconds
        self.publish_seconds, self.drain = publish_seconds, drain
        self.channel: dict[str, list[tuple[PromptLease, int]]] = {}
        """Records (lease, version of the oldest token) by key."""
        self.version, self.step, self.phase = 0, 1, "receiving"
        self.trained: dict[str, int] = {}
        self.stale, self._committing = 0, False
        self.generated, self.trainer_busy, self.rollout_busy = 0, 0.0, 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def run(self) -> "Schedule":
        """Run until every step is trained, or nothing can happen any more."""
        self.account.open(1, 0)
        self._go_on()
        quiet = 0
        while self.step <= self.steps and quiet < 3:
            if self._events:
                self.now, _, event = heapq.heappop(self._events)
                event()
                quiet = 0
            else:  # all that is left to happen is that a lease ends
                self.now += LEASE_SECONDS + 1
                quiet += 1
            self.account.expire()
            self._go_on()
        return self

    @property
    def finished(self) -> bool:
        return self.step > self.steps

    def _at(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), event))

    def _faulty(self) -> bool:
        return self.faults > 0 and self.rng.random() < self.faults

    # --- rollouts ----------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        for rollout in self.rollouts:
            free = rollout.slots - len(rollout.running)
            if not rollout.alive or rollout.updating or free < 1:
                continue
            for lease in self.account.lease(free, rollout.owner, served=rollout.version):
                rollout.running[lease.token] = lease
                seconds = self.seconds()
                self._at(seconds, lambda r=rollout, t=lease.token, s=seconds: self._ends(r, t, s))

    def _ends(self, rollout: Rollout, token: str, seconds: float) -> None:
        lease = rollout.running.pop(token, None)
        if lease is None:
            return  # of a life before
        self.generated += 1
        self.rollout_busy += seconds
        self.channel[token] = [(lease, lease.policy_version)]
        if self._faulty():
            self._die(rollout)
            return
        entry = GroupEntry(
            group_id=lease.group_id, token=token, v_min=lease.policy_version, v_max=rollout.version, rewards=(0.0, 1.0), tokens=1,
            informative=True,
        )  # fmt: skip
        self.account.finish(entry, rollout.owner, now=self.now)
        if self._faulty():
            self._die(self.rng.choice(self.rollouts))

    def _die(self, rollout: Rollout) -> None:
        if not rollout.alive:
            return
        rollout.alive = False
        rollout.running.clear()  # what it generates is lost; its records are not
        self.account.owner_lost(rollout.owner, "died")
        self._at(self.rng.random() * 20, lambda: self._returns(rollout))

    def _returns(self, rollout: Rollout) -> None:
        rollout.alive, rollout.life, rollout.version = True, rollout.life + 1, self.version
        rollout.updating = self.drain and self.phase == "publishing"

    # --- data ranks and trainer --------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        if self.phase == "publishing":
            self._commit_when_applied()
        else:
            for rollout in self.rollouts:  # those that were late
                if rollout.updating and not rollout.running:
                    self._takes(rollout)
        self._fill()
        self.account.settle(self.now)
        self._move_records()
        if self.phase == "receiving":
            self._receive()

    def _move_records(self) -> None:
        for token, target in self.account.take_moves().moves:
            records = self.channel.pop(token, [])
            if target is not None:
                assert len(records) == 1, "the record of an admitted group is stored, once"
                self.channel.setdefault(target, []).extend(records)

    def _receive(self) -> None:
        share = self.prompts // self.num_ranks
        keys = [rank_key(self.step, rank) for rank in range(self.num_ranks)]
        if any(len(self.channel.get(key, [])) < share for key in keys):
            return
        for lease, v_min in [record for key in keys for record in self.channel.pop(key)]:
            assert lease.group_id not in self.trained, "trained twice"
            self.trained[lease.group_id] = self.version - v_min
        self.phase = "training"
        seconds = self.train_seconds()
        self.trainer_busy += seconds
        self._at(seconds, self._train_ends)

    def _train_ends(self) -> None:
        self.stale += self.account.close().stale
        assert len(self.account.acknowledge(self.step)) == self.prompts
        self.phase, self._committing = "publishing", False
        for rollout in self.rollouts:
            rollout.updating = self.drain

    def _commit_when_applied(self) -> None:
        living = [rollout for rollout in self.rollouts if rollout.alive]
        if not self._committing and (not self.drain or not living or any(not rollout.running for rollout in living)):
            self._committing = True
            self._at(self.publish_seconds, self._published)

    def _published(self) -> None:
        self.version, self.step, self.phase = self.version + 1, self.step + 1, "receiving"
        for rollout in self.rollouts:
            if not (rollout.alive and rollout.updating and rollout.running):
                self._takes(rollout)
        if self.step <= self.steps:
            self.account.open(self.step, self.version)

    def _takes(self, rollout: Rollout) -> None:
        rollout.updating = False
        if rollout.alive and not self._faulty():
            rollout.version = self.version
        else:  # it pulls what it missed a little later
            self._at(self.rng.random() * 5, lambda r=rollout: self._catches_up(r))

    def _catches_up(self, rollout: Rollout) -> None:
        if rollout.alive:
            rollout.version = self.version
