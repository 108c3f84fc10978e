"""A dispatcher over a real ledger with the calls of two rollouts; what it tells others is kept in lists."""

from rl_core.api.algorithm import AlgorithmSpec
from rl_core.messages.groups import GroupEntry
from rl_core.runner.admission import Bounded, OnPolicy
from rl_core.runner.dispatcher import Dispatcher
from rl_core.runner.ledger import PromptLedger
from rl_core.runner.training_account import TrainingAccount

BUDGETS = ("worker_lost", "infrastructure", "deadline", "data", "stale", "epoch")


class FakeClock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Poll:
    """Stands in for one `lease_groups` request."""

    def __init__(self, travels=lambda leases: True):
        self.on_cancel = None
        self.answers = []
        self._travels = travels

    def reply(self, value):
        self.answers.append(value)
        return self._travels(value)

    @property
    def leases(self):
        (answer,) = self.answers
        return answer

    @property
    def waits(self):
        return not self.answers


class Account:
    """`want` groups are leased by `lease`; `admit` is a data rank's call."""

    def __init__(self, *, size=50, data_ranks=1, attempts=2, lease_seconds=60.0, oversample=1.0, **algorithm):
        self.clock, self.ended, self.failures, self.gone, self.short = FakeClock(), [], [], set(), False
        spec = AlgorithmSpec.model_validate({"promptsPerStep": 4, "groupSize": 2, **algorithm})
        budgets = attempts if isinstance(attempts, dict) else dict.fromkeys(BUDGETS, attempts)
        prompts = [{"idx": number} for number in range(size)]
        self.ledger = PromptLedger(
            prompts, seed=0, shuffle=False, lease_seconds=lease_seconds, max_attempts=budgets, clock=self.clock
        )
        bound, per_step = spec.max_staleness, spec.prompts_per_step
        admission = Bounded(bound, per_step) if bound else OnPolicy(oversample)
        account = TrainingAccount(self.ledger, spec, admission, data_ranks=data_ranks, lease_seconds=lease_seconds)
        self.dispatcher = Dispatcher(
            account,
            is_live=lambda name, incarnation: (name, incarnation) not in self.gone,
            is_short=lambda: self.short,
            end_step=self.ended.append,
            fail=self.failures.append,
            clock=self.clock,
        )

    def poll(
        self, want=99, *, version=0, who="rollout:0", incarnation=(0, 0), seconds=20.0, travels=lambda leases: True
    ):
        poll = Poll(travels)
        self.dispatcher.lease_groups(poll, who, incarnation, want, seconds, version)
        return poll

    def lease(self, want=99, **options):
        return self.poll(want, **options).leases

    def entry(self, lease, *, version=0, informative=True, rewards=(0.0, 1.0)):
        return GroupEntry(
            group_id=lease.group_id,
            token=lease.token,
            v_min=version,
            v_max=version,
            rewards=rewards,
            tokens=8,
            informative=informative,
            rank=0,
        )

    def admit(self, *leases, **options):
        return self.dispatcher.admit([self.entry(lease, **options) for lease in leases])

    def give_back(self, lease, reason, message="no reason"):
        self.dispatcher.give_back(lease.token, reason, message)
