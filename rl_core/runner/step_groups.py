"""The prompt groups of the training steps, for the training loop and its checkpoints. Each call holds the dispatcher's lock."""

from typing import Any

from rl_core.api.algorithm import AlgorithmSpec
from rl_core.messages.samples import KeptSample
from rl_core.runner.dispatcher import Dispatcher
from rl_core.runner.ledger import HeldGroup
from rl_core.runner.step_state import FilteredGroup, StepState, TrainedGroup
from rl_core.runner.workload import Workload


class StepGroups:
    """Opens a step, closes it with the groups it admitted, and marks them as trained."""

    def __init__(self, dispatcher: Dispatcher, workload: Workload) -> None:
        self._dispatcher, self._workload = dispatcher, workload

    def open(self, step: int, version: int) -> None:
        """Open training `step` at policy `version`. Open polls of rollouts that have this version are answered at once."""
        with self._dispatcher.update_accounts() as accounts:
            accounts.training.open(step, version)

    def adopt(self, algorithm: AlgorithmSpec) -> None:
        """Apply the changed algorithm settings of the running job."""
        with self._dispatcher.update_accounts() as accounts:
            accounts.training.adopt(algorithm)

    def cancel_rest(self) -> dict[str, list[str]]:
        """Cancel the surplus groups of rollout.oversample once the open step has all its groups.

        Returns the lease tokens that are being generated, by member name of the rollout; these rollouts have to stop them.
        """
        by_rollout: dict[str, list[str]] = {}
        with self._dispatcher.update_accounts() as accounts:
            for owner, token in accounts.training.cancel_rest():
                self._workload.ended(token)
                by_rollout.setdefault(owner.partition(" ")[0], []).append(token)
        return by_rollout

    def close(self) -> StepState:
        """Close the open step; return it with the groups that it admitted."""
        with self._dispatcher.lock_accounts() as accounts:
            return accounts.training.close()

    def acknowledge(self, step: int) -> list[TrainedGroup]:
        """Mark the groups of `step` as trained; return them in the ledger's order."""
        with self._dispatcher.lock_accounts() as accounts:
            return accounts.training.acknowledge(step)

    def take_failed(self) -> list[KeptSample]:
        """Return the samples that failed the groups dropped since the last call."""
        with self._dispatcher.lock_accounts() as accounts:
            return accounts.training.take_failed()

    def take_filtered(self, step: int) -> list[FilteredGroup]:
        """Return the filtered groups up to `step` whose records the caller has to take off the channel, each once."""
        with self._dispatcher.lock_accounts() as accounts:
            return accounts.training.take_filtered(step)

    def prompt(self, index: int) -> Any:
        """Return a training prompt by its index in the data set."""
        with self._dispatcher.lock_accounts() as accounts:
            return accounts.training.ledger.dataset[index]

    def held(self) -> list[HeldGroup]:
        """Return the groups that are leased, generated or admitted, with their owners; prompts of an open validation round included."""
        with self._dispatcher.lock_accounts() as accounts:
            return accounts.held()

    def metrics(self) -> dict[str, float]:
        """Return `ledger/*`."""
        with self._dispatcher.lock_accounts() as accounts:
            return accounts.training.ledger.metrics()

    def state_dict(self) -> dict[str, Any]:
        """Return the ledger's state for a checkpoint."""
        with self._dispatcher.lock_accounts() as accounts:
            return accounts.training.ledger.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the saved state of the ledger. Call it before the first group is leased."""
        with self._dispatcher.lock_accounts() as accounts:
            accounts.training.ledger.load_state_dict(state)
