"""The value model of `algorithm.name: gae` in a process and on devices of its own, beside the actor.

groups:
- name: critic
  worker: rl_core.groups.critic:Critic
  lifecycle: gang
  callers: [actor]
algorithm: {name: gae, critic: {group: critic}}

The group is a gang of one process, because its state belongs to the same step as that of the actor: it is part of the checkpoints of the job,
and when one of them is lost, both start again from the last checkpoint.
"""

import time
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from rl_core.actors.backend import Scores
from rl_core.actors.forward import score
from rl_core.actors.fsdp.backend import FSDPBackend
from rl_core.actors.fsdp.manager import FSDPModelManager
from rl_core.actors.objective import ValueObjective
from rl_core.actors.reporting import StepMetrics
from rl_core.actors.rows import COLUMN_DTYPES, Columns, StepRows, natural_key
from rl_core.actors.step_plan import plan_pass
from rl_core.algorithms.aggregation import count_normalizers
from rl_core.api.base import Spec
from rl_core.api.critic import CriticSpec
from rl_core.api.errors import DataError, InfrastructureError
from rl_core.batching.microbatch import plan_microbatches
from rl_core.envs.base import parse_config
from rl_core.messages.critic import CriticRow
from rl_core.plan.critic_group import critic_spec
from rl_core.plan.groups import ACTOR
from rl_core.workers.worker import Worker

FOLDER = "critic"
"""Folder of the critic's files in a checkpoint."""
METRICS = {"grad_norm": "critic_grad_norm", "lr": "critic_lr"}
"""Metrics of the critic's steps that have another name here, because the actor's have the first one."""
SHARED_METRICS = ("value_loss", "values", "returns", "value_clip_ratio")
"""Metrics that have the name which they have where the actor holds the critic."""


class CriticConfig(Spec):
    """Options of `Critic`: it has none of its own."""


class Critic(Worker):
    """Predicts the return from each token on, and trains on the returns that the actors compute.

    The order of a step: `values` and `add_rows` are called by each data rank of the actor, then `run_training` by the runner.
    """

    peer_methods: ClassVar[Mapping[str, frozenset[str]]] = {ACTOR: frozenset({"values", "add_rows"})}

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Check `config`. The model is built by `init_worker`, which the runner calls. Raises ConfigError for an option."""
        parse_config(CriticConfig, config, where="config")
        if self.job is None:
            raise InfrastructureError("a critic must be a member of a job, got none")
        self._spec = critic_spec(self.job.spec, group=self.group_name)
        algorithm = self._spec.algorithm
        response_limit = self._spec.rollout.sampling.max_new_tokens * self._spec.env.max_turns
        self._objective = ValueObjective(algorithm.critic or CriticSpec(), algorithm, max_tokens=response_limit)
        self._backend = ValueBackend(FSDPModelManager(self._spec, self.world_size, self.rank))
        self._rows: dict[int, Sequence[CriticRow]] = {}
        """The rows of the step by data rank of the actor."""

    @property
    def manager(self) -> FSDPModelManager:
        """The model with its optimizer."""
        return self._backend.manager

    def init_worker(self) -> None:
        """Build the model, which is that of `model.path` with a value head, and its optimizer."""
        self.manager.setup_model_and_optimizer()

    # What the actors call -------------------------------------------------------------------------------------------

    def values(self, rows: Sequence[np.ndarray], version: int) -> list[np.ndarray]:
        """Return the values of each row of token ids [T], float32 [T]; the first entry, before which there is no token, is 0.

        `version` is the number of the last step that the actors have trained. Raises InfrastructureError when the critic has not trained
        that step, or has trained a later one.
        """
        self._check_version(version)
        values_of_rows: list[np.ndarray] = [np.zeros(0, np.float32)] * len(rows)
        masks = [np.arange(len(row)) > 0 for row in rows]
        all_rows = step_rows([{"input_ids": row, "loss_mask": mask} for row, mask in zip(rows, masks, strict=True)])
        cuts = plan_microbatches(all_rows.lengths, token_budget=self._spec.actor.micro_batch_tokens)
        scored = self._backend.score_rows(
            [all_rows.take(indices) for indices in cuts], proceed=self._progress, log_probs=False, values=True
        )
        for indices, part in zip(cuts, scored, strict=True):
            assert part.values is not None
            for row_in_batch, index in enumerate(indices):
                values_of_rows[index] = part.values[row_in_batch, : all_rows.lengths[index]].numpy()
        return values_of_rows

    def add_rows(self, version: int, data_rank: int, rows: Sequence[CriticRow]) -> None:
        """Store the rows that a data rank of the actor sends for the next `run_training`; they replace those that it sent before."""
        self._check_version(version)
        self._rows[data_rank] = rows

    # What the runner calls ------------------------------------------------------------------------------------------

    def run_training(self, step: int, data_ranks: int) -> dict[str, float]:
        """Train on the rows of all `data_ranks` as step number `step`, in the mini-batches of the actor; return metrics `train/*`.

        Raises DataError when a data rank has sent no rows, and after too many gradients that were not finite.
        """
        self._check_version(step - 1)
        if missing := [rank for rank in range(data_ranks) if rank not in self._rows]:
            raise DataError(f"the critic must have the rows of {data_ranks} data ranks, got none of {missing}")
        start, algorithm, report = time.perf_counter(), self._spec.algorithm, StepMetrics(self.manager.counts)
        sent_rows = [row for rank in range(data_ranks) for row in self._rows[rank]]
        sent_rows.sort(key=lambda row: natural_key(row.group_id))  # the order by which the actors number the rows
        names = ("input_ids", "loss_mask", "values", "returns")
        rows = step_rows([{name: getattr(row, name) for name in names} for row in sent_rows])
        for epoch in range(algorithm.update_epochs):
            plan = plan_pass(
                rows.lengths,
                minibatches=algorithm.optimizer_steps_per_batch,
                ranks=1,
                hidden_size=self.manager.hidden_size,
                balance=False,
                seed=(algorithm.seed, step, epoch),
            )
            for (share,) in plan.minibatches:
                self._train_minibatch(rows.take(share), report)
        self._rows, self.manager.global_step = {}, step
        metrics = report.finish(self.manager.ranks, tokens=sum(rows.lengths), seconds=time.perf_counter() - start)
        renamed = METRICS | {name: name for name in SHARED_METRICS}
        return {
            f"train/{own_name}": metrics[f"actor/{name}"]
            for name, own_name in renamed.items()
            if f"actor/{name}" in metrics
        }

    def set_global_step(self, global_step: int) -> None:
        """Set the last trained step. Raises ValueError when it is smaller than the present one."""
        self.manager.set_global_step(global_step)

    def set_schedule(self, learning_rate: float, steps: int) -> None:
        """Continue with another peak learning rate and another total number of steps of the run. Raises ConfigError as a manager does."""
        self.manager.set_schedule(learning_rate, steps)

    async def save_checkpoint(self, save_path: str, step: int = 0, in_background: bool = False) -> dict[str, str]:
        """Write model and optimizer to the folder `critic` of a checkpoint; return path in the checkpoint -> digest.

        See `ModelManager.save_checkpoint`.
        """
        result = self.manager.save_checkpoint(str(Path(save_path) / FOLDER), step, in_background)
        digests = await result if isinstance(result, Awaitable) else result
        return {f"{FOLDER}/{name}": digest for name, digest in digests.items()}

    def load_checkpoint(self, load_path: str) -> None:
        """Load what `save_checkpoint` wrote. Raises as `ModelManager.load_checkpoint`."""
        self.manager.load_checkpoint(str(Path(load_path) / FOLDER))

    # --- inside ------------------------------------------------------------------------------------------------------

    def _check_version(self, version: int) -> None:
        if version != self.manager.global_step:
            raise InfrastructureError(
                f"the critic must be at step {version} as the actors are, got {self.manager.global_step}; "
                "the job starts again from its last checkpoint"
            )

    def _train_minibatch(self, rows: StepRows, report: StepMetrics) -> None:
        normalizers = count_normalizers(rows.columns.loss_mask)
        if normalizers.tokens == 0:
            self.manager.counts.empty += 1
            return
        cuts = plan_microbatches(rows.lengths, token_budget=self._spec.actor.micro_batch_tokens)
        parts = [rows.take(indices) for indices in cuts]
        stats = self._backend.forward_backward(parts, self._objective, normalizers, proceed=self._progress)
        norm, rates = self.manager.optimizer_step()
        report.add_step(stats, norm=norm, rate=rates[0])

    def _progress(self) -> None:
        self.record_progress("micro_steps")


class ValueBackend(FSDPBackend):
    """Runs the decoder and the value head; the head of the language model is not run."""

    def _scores(self, rows: StepRows) -> Scores:
        """Return the values of the rows, with gradient; log-probabilities and entropies are 0."""
        numbers = score(self.manager.model, self._pack(rows), temperature=1.0, log_probs=False, values=True)
        assert numbers.values is not None
        return Scores(torch.zeros_like(numbers.values), torch.zeros_like(numbers.values), numbers.values)


def step_rows(rows: Sequence[Mapping[str, np.ndarray]]) -> StepRows:
    """Return rows, each a mapping of column name to array [T], as StepRows with columns [B, T], padded with 0 to the longest row."""
    lengths = [len(row["input_ids"]) for row in rows]
    columns = {
        name: torch.zeros(len(rows), max(lengths, default=1), dtype=COLUMN_DTYPES[name])
        for name in (rows[0] if rows else ("input_ids", "loss_mask"))
    }
    for index, row in enumerate(rows):
        for name, values in row.items():
            columns[name][index, : lengths[index]] = torch.from_numpy(np.array(values))
    return StepRows(numbers=list(range(len(rows))), lengths=lengths, columns=Columns(**columns))
