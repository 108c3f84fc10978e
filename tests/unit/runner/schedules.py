"""A run of the asynchronous program in simulated time: the real account, ledger and admission; rollouts, data ranks and trainer as events.

    fill: lease -> finish: record on the channel -> receive: admit or put off -> trained -> published: next step, fill

Rollouts may die, miss a version or lose their word of a delivered record. Used by the unit tests and by benchmarks/asynchronous.py.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from rl_core.api.algorithm import AlgorithmSpec
from rl_core.messages.groups import GroupEntry, PromptLease
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

    @property
    def owner(self) -> str:
        return f"{self.name}.{self.life}"


@dataclass
class Rank:
    """One data rank: how many groups it holds and what the runner put off."""

    admitted: int = 0
    later: list[tuple[PromptLease, int]] = field(default_factory=list)


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
        """`seconds()`: of a group. `drain`: a version waits for the groups in flight (weights.onUpdate wait), else they go on under it.

        `faults`: chance that a finished group is followed by the death of a rollout, that a rollout misses a version, that a word is lost.
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
        self.account = TrainingAccount(self.ledger, spec, admission, data_ranks=ranks, lease_seconds=LEASE_SECONDS)
        self.staleness, self.prompts, self.steps = staleness, prompts, steps
        self.rollouts = [Rollout(f"r{number}", slots) for number in range(rollouts)]
        self.ranks = [Rank() for _ in range(ranks)]
        self.seconds, self.train_seconds = seconds, train_seconds
        self.publish_seconds, self.drain = publish_seconds, drain
        self.channel: deque[tuple[PromptLease, int]] = deque()
        self.version, self.step, self.phase = 0, 1, "receiving"
        self.trained: dict[str, int] = {}
        self.stale = 0
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
            self.ledger.expire()
            self.account.settle()
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
        if self.phase == "draining":
            return
        for rollout in self.rollouts:
            free = rollout.slots - len(rollout.running)
            if not rollout.alive or free < 1:
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
        self.channel.append((lease, lease.policy_version))
        if not self._faulty():
            self.ledger.deliver(token)
        if self._faulty():
            self._die(self.rng.choice(self.rollouts))

    def _die(self, rollout: Rollout) -> None:
        if not rollout.alive:
            return
        rollout.alive = False
        rollout.running.clear()
        self.ledger.requeue_owner(rollout.owner, "worker_lost")
        self._at(self.rng.random() * 20, lambda: self._returns(rollout))

    def _returns(self, rollout: Rollout) -> None:
        rollout.alive, rollout.life, rollout.version = True, rollout.life + 1, self.version

    # --- data ranks and trainer --------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        if self.phase == "draining" and not any(rollout.running for rollout in self.rollouts):
            self._publish()
        self._fill()
        if self.phase == "receiving":
            self._receive()

    def _receive(self) -> None:
        share = self.prompts // len(self.ranks)
        for rank in self.ranks:  # what was put off first, the oldest first, for no more places than there are
            rank.later.sort(key=lambda item: item[1])
            asked, rank.later = rank.later[: share - rank.admitted], rank.later[share - rank.admitted :]
            for item in asked:
                self._ask(rank, item)
        while self.channel and (open_ranks := [rank for rank in self.ranks if rank.admitted < share]):
            self._ask(self.rng.choice(open_ranks), self.channel.popleft())
        for rank in self.ranks:
            if rank.admitted == share:
                self.channel.extend(rank.later)
                rank.later = []
        if all(rank.admitted == share for rank in self.ranks):
            self.phase = "training"
            seconds = self.train_seconds()
            self.trainer_busy += seconds
            self._at(seconds, self._train_ends)

    def _ask(self, rank: Rank, item: tuple[PromptLease, int]) -> None:
        lease, v_min = item
        entry = GroupEntry(
            group_id=lease.group_id, token=lease.token, v_min=v_min, v_max=self.version, rewards=(0.0, 1.0), tokens=1,
            informative=True, rank=0,
        )  # fmt: skip
        verdict = self.account.admit(entry)
        if verdict:
            rank.admitted += 1
            assert lease.group_id not in self.trained, "trained twice"
            self.trained[lease.group_id] = self.version - v_min
        elif verdict is None:
            rank.later.append(item)

    def _train_ends(self) -> None:
        self.stale += self.account.close().stale
        assert len(self.account.acknowledge(self.step)) == self.prompts
        self.phase = "draining"
        if not self.drain:
            self.phase = "publishing"
            self._at(self.publish_seconds, self._published)

    def _publish(self) -> None:
        self.phase = "publishing"
        self._at(self.publish_seconds, self._published)

    def _published(self) -> None:
        self.version, self.step, self.phase = self.version + 1, self.step + 1, "receiving"
        for rank in self.ranks:
            rank.admitted = 0
        for rollout in self.rollouts:
            if rollout.alive and not self._faulty():
                rollout.version = self.version
            else:  # it pulls what it missed a little later
                self._at(self.rng.random() * 5, lambda r=rollout: self._catches_up(r))
        if self.step <= self.steps:
            self.account.open(self.step, self.version)

    def _catches_up(self, rollout: Rollout) -> None:
        if rollout.alive:
            rollout.version = self.version
