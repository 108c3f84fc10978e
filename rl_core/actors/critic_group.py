"""The group `algorithm.critic.group`, which holds the critic, as an actor calls it.

The group predicts the values of a step's tokens, and is given the returns; the runner then has it train.
"""

from torch import Tensor

from rl_core.actors.preparation import PreparedBatch
from rl_core.actors.row_calls import RowCalls
from rl_core.batching.collate import TrainingBatch
from rl_core.messages.critic import CriticRow
from rl_core.workers.worker import Worker


class CriticGroup:
    """The critic of a job that has a group for it."""

    def __init__(self, worker: Worker, group: str, *, seconds: float) -> None:
        """`seconds` bounds the wait for the answers of a step."""
        self._calls, self._group = RowCalls(worker, seconds=seconds), group

    def values(self, batch: TrainingBatch, version: int) -> Tensor:
        """Return the values of the tokens of `batch`, [B, S] float32, zeros where nothing trains.

        `version` is that of the weights, at which the critic must be too. Raises InfrastructureError when the group does not answer in time.
        """
        return self._calls.token_values(self._group, batch, "values", version)

    def give_returns(self, prepared: PreparedBatch, version: int, data_rank: int) -> None:
        """Send the values and returns of the rows of `data_rank`, on which the critic trains in this step."""
        batch, values, returns = prepared.batch, prepared.values, prepared.returns
        assert values is not None and returns is not None
        rows = [
            CriticRow(
                group_id=batch.group_texts[group],
                **{
                    name: tensor[index, :length].numpy()
                    for name, tensor in {
                        "input_ids": batch.input_ids,
                        "loss_mask": batch.loss_mask,
                        "values": values,
                        "returns": returns,
                    }.items()
                },
            )
            for index, (group, length) in enumerate(zip(batch.group_ids.tolist(), batch.lengths.tolist(), strict=True))
        ]
        self._calls.call(self._group, "add_rows", version, data_rank, rows)
