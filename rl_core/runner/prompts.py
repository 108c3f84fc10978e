"""The parts of a text program that handle prompt groups: dispatcher, record channel, ledger file and validation."""

from dataclasses import dataclass
from typing import Any

from rl_core.channel import Channel
from rl_core.runner.dispatcher import Dispatcher
from rl_core.runner.history import LedgerFile
from rl_core.runner.ledger import HeldGroup
from rl_core.runner.record_mover import RecordMover
from rl_core.runner.samples import Samples
from rl_core.runner.step_groups import StepGroups
from rl_core.runner.validation import Validation
from rl_core.runner.workload import Workload

MOST_GROUPS = 256
"""Number of groups that `/status` shows, the first ones in the ledger's order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompts:
    """The parts that lease prompt groups, move their records and record their training."""

    dispatcher: Dispatcher
    """Leases prompt groups to rollouts and accepts their results."""
    steps: StepGroups
    """The same groups as the training loop uses them, step by step."""
    workload: Workload
    """Busy and starved times of rollouts and trainer."""
    mover: RecordMover
    """Moves records to the data ranks."""
    trajectories: Channel
    """PromptGroupRecords on their way from the rollouts to the data ranks."""
    ledger_file: LedgerFile
    """`ledger.jsonl`: one line per trained group."""
    samples: Samples
    """Keeps some of the groups for people to look at."""
    validation: Validation | None = None
    """None without a validation split."""
    dropped_overlong: int = 0
    """Number of training prompts that were left out because they are too long."""

    def status(self) -> dict[str, Any]:
        """Return `ledger` and `workload` of `/status`."""
        groups = [_group(group) for group in self.steps.held()[:MOST_GROUPS]]
        return {"ledger": {**self.steps.metrics(), "groups": groups}, "workload": self.workload.snapshot()}


def _group(group: HeldGroup) -> dict[str, Any]:
    """Return a group as `/status` shows it. It has an owner until its record is moved to the data rank that trains it."""
    return {
        "id": group.group_id,
        "state": group.state.value,
        "owner": group.owner or None,
        "seconds": round(group.seconds, 1),
        "attempt": group.attempt,
    }
