"""The groups of the training steps, as the training loop and its checkpoints use them. Each call holds the dispatcher's lock."""

from typing import Any

from rl_core.api.algorithm import AlgorithmSpec
from rl_core.runner.dispatcher import Dispatcher
from rl_core.runner.ledger import HeldGroup
from rl_core.runner.step_state import StepState, TrainedGroup
from rl_core.runner.workload import Workload


class StepGroups:
    """Opens a step, closes it with the groups it admitted, and marks them as trained."""

    def __init__(self, dispatcher: Dispatcher, workload: Workload) -> None:
        self._dispatcher, self._workload = dispatcher, workload

    def open(self, step: int, version: int) -> None:
        """Begin training `step` at policy `version`; waiting rollouts that serve it are answered at once."""
        with self._dispatcher.changing() as accounts:
            accounts.training.open(step, version)

    def adopt(self, algorithm: AlgorithmSpec) -> None:
        """Lease and admit by another spec of the running job."""
        with self._dispatcher.changing() as accounts:
            accounts.training.adopt(algorithm)

    def cancel_rest(self) -> dict[str, list[str]]:
        """Take back the groups beyond those of the open step, which has its own (rollout.oversample).

        Returns the lease tokens that are being generated, by member name of the rollout.
        """
        by_rollout: dict[str, list[str]] = {}
        with self._dispatcher.changing() as accounts:
            for owner, token in accounts.training.cancel_rest():
                self._workload.ended(token)
                by_rollout.setdefault(owner.partition(" ")[0], []).append(token)
        return by_rollout

    def close(self) -> StepState:
        """End the step; return what it admitted."""
        with self._dispatcher.locked() as accounts:
            return accounts.training.close()

    def acknowledge(self, step: int) -> list[TrainedGroup]:
        """Mark the groups of `step` as trained; return them in ledger order."""
        with self._dispatcher.locked() as accounts:
            return accounts.training.acknowledge(step)

    def prompt(self, index: int) -> Any:
        """Return a training prompt by its index in the data set."""
        with self._dispatcher.locked() as accounts:
            return accounts.training.ledger.dataset[index]

    def held(self) -> list[HeldGroup]:
        """Return who holds which group since when, validation included."""
        with self._dispatcher.locked() as accounts:
            return accounts.held()

    def metrics(self) -> dict[str, float]:
        """Return `ledger/*`."""
        with self._dispatcher.locked() as accounts:
            return accounts.training.ledger.metrics()

    def state_dict(self) -> dict[str, Any]:
        """Return the ledger's state for a checkpoint."""
        with self._dispatcher.locked() as accounts:
            return accounts.training.ledger.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved ledger, before anything is given out."""
        with self._dispatcher.locked() as accounts:
            accounts.training.ledger.load_state_dict(state)
