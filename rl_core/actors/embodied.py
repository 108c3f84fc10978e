"""`EmbodiedFSDPActor`: the trainer's worker for policies that act in simulators.

    recv_rollout_trajectories -> compute_advantages_and_returns -> run_training -> sync_model_to_rollout

It trains by the step engine of language models, with `forward_train` of the policy as the forward pass.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rl_core.actors.base import Actor
from rl_core.actors.fsdp.policy import PolicyBackend, PolicyModelManager
from rl_core.actors.preparation import PreparedBatch
from rl_core.actors.trajectories import prepare_rows
from rl_core.api.embodied import check_job, embodied_options, simulators_per_group
from rl_core.api.errors import DataError, DeadlineExceeded
from rl_core.api.job import RLJobSpec
from rl_core.api.records import Trajectory, record_of
from rl_core.batching.collate import TrainingBatch
from rl_core.batching.trajectories import fold_epochs, merge_trajectories, require_each_once
from rl_core.channel import Channel
from rl_core.channel.backend import DEFAULT_KEY
from rl_core.messages.channel import Key
from rl_core.messages.embodied import CollectionRequest
from rl_core.plan.groups import ACTOR, ROLLOUT
from rl_core.plan.routing import parts_of_rank


class EmbodiedFSDPActor(Actor):
    """One rank of a trainer with `actor.backend` fsdp1 or fsdp2 and a policy that acts in simulators."""

    keeps_samples = False

    def __init__(self, cfg: RLJobSpec | Mapping[str, Any], placement: Any = None, role: str = ACTOR) -> None:
        """Join the other ranks; no model is built yet. Raises ConfigError for settings that do not fit each other."""
        super().__init__(cfg, placement, role)
        self.options = embodied_options(self.cfg)
        check_job(self.cfg)
        self._rows: Callable[[], PreparedBatch] | None = None
        """Returns the rows of the trajectories that were received."""
        self._preparing = ThreadPoolExecutor(1, "advantages")
        self._inputs: dict[str, Tensor] = {}
        """What the policy saw in the rows of the step."""

    def _build_backend(self, cfg: RLJobSpec) -> PolicyBackend:
        """Return the backend of this rank; all ranks are data-parallel."""
        level = embodied_options(cfg).log_prob_level
        return PolicyBackend(PolicyModelManager(cfg, self.world_size, self.rank), level=level)

    def model_provider_func(self) -> Any:
        """Return the policy of `model.path`. Raises ConfigError when it has no `forward_train`."""
        return self.manager.model_provider_func()  # type: ignore[attr-defined]

    async def recv_rollout_trajectories(
        self, input_channel: Channel, request: CollectionRequest | None = None, seconds: float | None = None
    ) -> None:
        """Receive this rank's parts of the trajectories of a collection, and keep them for training. Not collective.

        `request` None: all workers of the job take part, and trajectories that were put without a key are received too. `seconds` bounds the
        whole call; None means deadlines.rollout. Raises DeadlineExceeded with the missing senders, numbered rollout index * stages + stage,
        and what `load_trajectories` raises.
        """
        keys: list[Key] = [] if request else [DEFAULT_KEY]
        request = request or CollectionRequest.of_job(self.cfg, step=self.global_step + 1)
        keys.append(request.trajectory_key(self.ranks.data_rank))
        senders = len(request.rollouts) * self.options.stages
        expected = parts_of_rank(self.ranks.data_rank, senders=senders, actors=request.actors)
        limit = self.cfg.runtime.deadlines.rollout if seconds is None else seconds
        deadline = time.monotonic() + limit
        received: list[Trajectory] = []
        with self.waiting("trajectories", ROLLOUT):
            while len(received) < len(expected):
                remaining = max(deadline - time.monotonic(), 0.001)
                try:
                    items = await _get_from_any(input_channel, keys, remaining)
                except DeadlineExceeded as error:
                    arrived = {(part.sender * self.options.stages + part.stage, part.part) for part in received}
                    missing = sorted({sender for sender, _ in set(expected) - arrived})
                    raise DeadlineExceeded(
                        f"{len(expected)} trajectories of collection {request.number} must come within {limit:.0f} s, got {len(received)}; "
                        f"senders {missing} are missing"
                    ) from error
                received += [record_of(Trajectory, item) for item in items]
                self.record_progress("trajectories")
        self.load_trajectories(received)

    def load_trajectories(self, trajectories: Sequence[Trajectory | Mapping[str, Any]]) -> None:
        """Set the trajectories on which this rank trains in the next step. Not collective.

        With one data rank, their advantages are computed in a background thread, whose errors `compute_advantages_and_returns` raises. Raises
        DataError for wrong fields, shapes that do not match, two trajectories of one sender, stage and part, and for a number of decisions
        other than that of a step.
        """
        received, options = [record_of(Trajectory, trajectory) for trajectory in trajectories], self.options
        require_each_once(received)
        merged = merge_trajectories(received)
        if len(merged.rewards) != (decisions := options.rollout_epochs * options.decisions):
            raise DataError(
                f"trajectories must have the {decisions} decisions of env.options.rolloutEpochs x horizon / chunk, got {len(merged.rewards)}; "
                "rollouts and actor must run the same job"
            )
        self.engine.begin()
        rows = partial(self._prepare, merged)
        self._rows = self._preparing.submit(rows).result if self.ranks.data_size == 1 else rows

    def compute_log_probs(self, batch: TrainingBatch | None = None) -> None:
        """Do nothing: the log-probabilities and values before the update are those of the rollout, with the same weights."""

    def compute_advantages_and_returns(self) -> dict[str, Tensor]:
        """Compute the advantages of the step's trajectories and, with a critic, the returns.

        Returns `advantages` and, with a critic, `returns`, both [E * B, N], for E rollout epochs of B simulators and N decisions, and this
        rank's metrics as tensors without dimensions. Raises RuntimeError when no trajectories were received.
        """
        if self._rows is None:
            raise RuntimeError("compute_advantages_and_returns needs trajectories, got none; receive them first")
        with self.ranks.guard("computing advantages"):
            prepared = self._rows()
        self._rows = None
        shape = (len(prepared.batch.group_texts), self.options.decisions)
        valid = prepared.batch.valid
        self._inputs = (
            prepared.inputs if valid.all() else {name: tensor[valid] for name, tensor in prepared.inputs.items()}
        )
        self.engine.load_prepared(prepared, version=self.global_step)
        columns = {"advantages": prepared.advantages, "returns": prepared.returns}
        rows = {name: tensor[:, 0].reshape(shape) for name, tensor in columns.items() if tensor is not None}
        return rows | {name: torch.tensor(float(stat)) for name, stat in prepared.metrics.items()}

    def _prepare(self, trajectory: Trajectory) -> PreparedBatch:
        """Return the rows of the step with their advantages. Collective if there are several data ranks."""
        return prepare_rows(
            fold_epochs(trajectory, self.options.rollout_epochs, group=simulators_per_group(self.cfg.algorithm)),
            self.cfg.algorithm,
            self.options,
            version=self.global_step,
            reduce=self.ranks.sum_over_data_ranks if self.ranks.data_size > 1 else None,
        )

    def run_training(self, step: int | None = None) -> dict[str, float] | None:
        """Train as `Actor.run_training` does, then let the policy update its statistics of observations where it has some."""
        if self._rows is not None:
            self.compute_advantages_and_returns()
        metrics = super().run_training(step)
        inputs, self._inputs = self._inputs, {}
        update = getattr(self.manager.model, "update_statistics", None)  # type: ignore[attr-defined]
        if metrics is not None and callable(update):
            reduce = self.ranks.sum_over_data_ranks if self.ranks.data_size > 1 else None
            with (
                self.ranks.guard("updating the statistics of observations"),
                self.manager.residency.loaded(moments=False),
            ):
                update(inputs, reduce)
        return metrics


async def _get_from_any(channel: Channel, keys: Sequence[Key], seconds: float) -> list[Any]:
    """Wait until an item of one of `keys` arrives; return the items received by then, at most one for each key.

    Raises DeadlineExceeded if none arrives within `seconds`.
    """
    gets = [asyncio.ensure_future(channel.get_async(key=key, timeout=seconds)) for key in keys]
    try:
        done, _ = await asyncio.wait(gets, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for get in gets:
            get.cancel()
    received = [get for get in done if get.exception() is None]
    return [get.result() for get in received or done]
