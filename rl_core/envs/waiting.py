"""Rows that wait for a process of the pool, and the samples that made a process hang or die when they were called alone."""

import asyncio
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass

from rl_core.api.errors import InfrastructureError, RLJobError, RolloutDataFailure, RolloutTimeout
from rl_core.messages.envs import EnvAnswer, EnvFailure, EnvRow

REMEMBERED = 65_536
"""Most samples that a pool remembers; the oldest is forgotten first."""
TIMEOUTS_OF_A_SAMPLE = 2
DEATHS_OF_A_SAMPLE = 3
"""Number of timeouts and deaths after which a sample is considered bad data. A process may die once or twice for another reason."""


@dataclass(eq=False, slots=True)
class WaitingRow:
    """A row and the future of its answer: WAITING -> in a call -> (WAITING alone -> in a call) -> answered."""

    row: EnvRow
    alone: bool
    """Whether the row must be called alone, because a batch with it failed."""
    answer: asyncio.Future[EnvAnswer | EnvFailure]

    @property
    def key(self) -> str:
        """Id of the row's sample."""
        return self.row.key

    @property
    def is_open(self) -> bool:
        """Whether a caller still waits for the answer."""
        return not self.answer.done()

    def resolve(self, answer: EnvAnswer | EnvFailure) -> None:
        """Answer the row, unless it is answered or its caller has left."""
        if self.is_open:
            self.answer.set_result(answer)

    def fail(self, kind: type[RLJobError], message: str) -> None:
        """Answer the row with an error. The caller adds the name of the sample."""
        self.resolve(EnvFailure(type=kind.__name__, message=message))


def pop_batch(queue: deque[WaitingRow], limit: int) -> list[WaitingRow]:
    """Remove and return up to `limit` open rows of one task from the head of `queue`; a row that must be called alone is the only one."""
    batch: list[WaitingRow] = []
    while queue and len(batch) < limit:
        head = queue[0]
        if head.is_open and batch and (head.alone or batch[0].alone or head.row.task_name != batch[0].row.task_name):
            break
        queue.popleft()
        if head.is_open:
            batch.append(head)
    return batch


class Suspects:
    """Counts for each sample how often it made its process hang or die when it was called alone.

    Counts are kept per sample, over all its rows.
    """

    def __init__(self) -> None:
        self._strikes: OrderedDict[str, Counter[str]] = OrderedDict()

    def __contains__(self, key: str) -> bool:
        return key in self._strikes

    def clear(self, key: str) -> None:
        """Forget the sample with id `key`, because it succeeded."""
        self._strikes.pop(key, None)

    def timed_out(self, row: WaitingRow, message: str) -> None:
        """Count and answer a row that missed its deadline when it was called alone."""
        self._strike(row, message, "timeout", TIMEOUTS_OF_A_SAMPLE, RolloutTimeout)

    def died(self, row: WaitingRow, message: str) -> None:
        """Count and answer a row whose process ended when it was called alone."""
        self._strike(row, message, "death", DEATHS_OF_A_SAMPLE, InfrastructureError)

    def _strike(self, row: WaitingRow, message: str, cause: str, limit: int, kind: type[RLJobError]) -> None:
        count = 1
        if row.key:
            strikes = self._strikes.setdefault(row.key, Counter())
            strikes[cause] += 1
            count = strikes[cause]
            if len(self._strikes) > REMEMBERED:
                self._strikes.popitem(last=False)
        if count >= limit:
            row.fail(RolloutDataFailure, f"{message}; it did so {count} times with this sample")
        else:
            row.fail(kind, message)
