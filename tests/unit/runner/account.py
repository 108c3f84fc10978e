"""A dispatcher over a real ledger with the calls of two rollouts; what it tells others is kept in lists."""

from rl_core.api.algorithm import AlgorithmSpec
from rl_core.messages.groups import GroupEntry
from rl_core.runner.admission import Bounded, GroupVerdict, OnPolicy
from rl_core.runner.dispatcher import Dispatcher
from rl_core.runner.ledger import PromptLedger
from rl_core.runner.step_groups import StepGroups
from rl_core.runner.training_account import TrainingAccount
from rl_core.runner.workload import Workload

ADMIT, DEFER, REFUSE = GroupVerdict.ADMIT, GroupVerdict.DEFER, GroupVerdict.REFUSE

BUDGETS = ("worker_lost", "infrastructure", "deadline", "data", "config", "stale", "epoch")


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
    """`max_groups` groups are leased by `lease`; `finish` is a rollout's report of them."""

    def __init__(
        self, *, size=50, data_ranks=1, attempts=2, lease_seconds=60.0, oversample=1.0, kept_filtered=0, **algorithm
    ):
        self.clock, self.failures, self.gone, self.short = FakeClock(), [], set(), False
        self.moves, self.closed, self.data_ranks = [], [], data_ranks
        spec = AlgorithmSpec.model_validate({"promptsPerStep": 4, "groupSize": 2, **algorithm})
        budgets = attempts if isinstance(attempts, dict) else dict.fromkeys(BUDGETS, attempts)
        prompts = [{"idx": number, "source": f"train.jsonl row {number + 1}"} for number in range(size)]
        self.ledger = PromptLedger(
            prompts, seed=0, shuffle=False, lease_seconds=lease_seconds, max_attempts=budgets, clock=self.clock
        )
        bound, per_step = spec.max_staleness, spec.prompts_per_step
        admission = Bounded(bound, per_step) if bound else OnPolicy(oversample)
        self.training = TrainingAccount(
            self.ledger, spec, admission, data_ranks=data_ranks, kept_filtered=kept_filtered
        )
        self.workload = Workload(self.clock)
        self.dispatcher = Dispatcher(
            self.training,
            self.workload,
            is_live=lambda name, incarnation: (name, incarnation) not in self.gone,
            is_short=lambda: self.short,
            move_records=self.move,
            fail=self.failures.append,
            clock=self.clock,
        )
        self.steps = StepGroups(self.dispatcher, self.workload)
        self.polls = []

    def move(self, moves):
        self.moves += moves.moves
        self.closed += moves.closed

    def poll(
        self,
        max_groups=99,
        *,
        version=0,
        who="rollout:0",
        incarnation=(0, 0),
        seconds=20.0,
        travels=lambda leases: True,
    ):
        poll = Poll(travels)
        poll.rollout = (who, incarnation)
        self.polls.append(poll)
        self.dispatcher.lease_groups(poll, who, incarnation, max_groups, seconds, version)
        return poll

    def lease(self, max_groups=99, **options):
        return self.poll(max_groups, **options).leases

    def owner(self, lease):
        """Return the process that the lease was given to."""
        for poll in self.polls:
            if any(lease.token == one.token for answer in poll.answers for one in answer):
                return poll.rollout
        raise AssertionError(f"nobody holds {lease.token}")

    def entry(self, lease, *, version=0, informative=True, rewards=(0.0, 1.0)):
        return GroupEntry(
            group_id=lease.group_id,
            token=lease.token,
            v_min=version,
            v_max=version,
            rewards=rewards,
            tokens=8,
            informative=informative,
        )

    def finish(self, *leases, **options):
        """Report `leases` as finished, in this order; return by lease where its record is now: `state_of`."""
        for lease in leases:
            self.dispatcher.finish(*self.owner(lease), self.entry(lease, **options))
        return [self.state_of(lease) for lease in leases]

    def state_of(self, lease):
        """Return ADMIT when the record was moved to a data rank, REFUSE when it was deleted, else DEFER."""
        targets = [target for token, target in self.moves if token == lease.token]
        if not targets:
            return DEFER
        return REFUSE if targets[-1] is None else ADMIT

    def ranks(self, step):
        """Return the tokens by data rank of `step`."""
        found = {}
        for token, target in self.moves:
            if target is not None and target.startswith(f"step {step} "):
                found.setdefault(int(target.rpartition(" ")[2]), []).append(token)
        return found

    def return_group(self, lease, reason, message="no reason", failed=None):
        self.dispatcher.return_group(*self.owner(lease), lease.token, reason, message, failed)
