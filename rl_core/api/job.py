"""The RLJob schema: one pydantic family that validates `rljob run`, generates the CRD and is what every worker receives."""

import re
from collections.abc import Iterator
from typing import Literal

from pydantic import field_validator

from rl_core.api.algorithm import AlgorithmSpec
from rl_core.api.base import Spec, rule
from rl_core.api.roles import ActorSpec, EnvSpec, RolloutSpec
from rl_core.api.settings import (
    CheckpointSpec,
    DataSpec,
    FailurePolicySpec,
    ModelSpec,
    PlacementSpec,
    RuntimeSpec,
    TrackerSpec,
    ValidationSpec,
    WeightsSpec,
)

API_VERSION = "rljob.dev/v1alpha1"
NAME_PATTERN = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")


class RLJobSpec(Spec):
    """What the user asks for."""

    model: ModelSpec
    """The policy's starting point."""
    data: DataSpec
    """Prompts."""
    algorithm: AlgorithmSpec = AlgorithmSpec()
    """What is optimised."""
    actor: ActorSpec = ActorSpec()
    """The trainer."""
    rollout: RolloutSpec = RolloutSpec()
    """The generators."""
    env: EnvSpec = EnvSpec()
    """The environments."""
    placement: PlacementSpec = PlacementSpec()
    """Where processes run."""
    weights: WeightsSpec = WeightsSpec()
    """Weight sync."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """Checkpoints."""
    validation: ValidationSpec = ValidationSpec()
    """Validation."""
    runtime: RuntimeSpec = RuntimeSpec()
    """Deadlines and draining."""
    failure_policy: FailurePolicySpec = FailurePolicySpec()
    """Restarts."""
    trackers: list[TrackerSpec] = [TrackerSpec(name="tensorboard")]
    """Metrics sinks besides metrics.jsonl."""
    extensions: list[str] = []
    """Modules imported by every worker, whose register() is called."""

    @rule
    def _batch_divides(self) -> Iterator[str]:
        ranks, prompts = self.actor.world_size, self.algorithm.prompts_per_step
        if prompts % ranks:
            yield (
                f"algorithm.promptsPerStep must be divisible by the actor's data-parallel size {ranks}, got {prompts}; change promptsPerStep or actor.replicas"
            )
        rows, parts = prompts * self.algorithm.group_size, ranks * self.algorithm.optimizer_steps_per_batch
        if rows % parts:
            yield (
                f"algorithm.promptsPerStep x groupSize must be divisible by data-parallel size x optimizerStepsPerBatch = {parts}, got {rows}; change optimizerStepsPerBatch"
            )

    @rule
    def _sampling_is_exact(self) -> Iterator[str]:
        sampling = self.rollout.sampling
        truncated = sampling.top_p < 1 or sampling.top_k is not None
        if truncated and not self.algorithm.allow_truncated_sampling:
            yield (
                f"rollout.sampling.topP and topK bias the policy ratio, got topP {sampling.top_p}, topK {sampling.top_k}; remove them or set algorithm.allowTruncatedSampling and recomputeLogProbs"
            )

    @rule
    def _lengths_fit(self) -> Iterator[str]:
        limit, new = self.rollout.max_sequence_length, self.rollout.sampling.max_new_tokens
        if limit is not None and new >= limit:
            yield (
                f"rollout.sampling.maxNewTokens must be below rollout.maxSequenceLength {limit}, got {new}; lower maxNewTokens"
            )
        if self.actor.micro_batch_tokens < (limit or 0):
            yield (
                f"actor.microBatchTokens must hold the longest row of rollout.maxSequenceLength {limit} tokens, got {self.actor.micro_batch_tokens}; raise it"
            )


class Metadata(Spec):
    """Object metadata; on a cluster the API server adds more, which is ignored here."""

    model_config = Spec.model_config | {"extra": "ignore"}

    name: str
    """DNS-1123 label of at most 40 characters, so that pod names fit."""
    namespace: str | None = None
    """Namespace; local mode uses "default"."""
    uid: str | None = None
    """Unique id given by the API server; local mode makes one."""
    labels: dict[str, str] = {}
    """Labels."""
    annotations: dict[str, str] = {}
    """Annotations."""

    @field_validator("name")
    @classmethod
    def _dns_label(cls, name: str) -> str:
        if not NAME_PATTERN.fullmatch(name):
            raise ValueError(
                f"name must be a DNS-1123 label of at most 40 characters (a-z, 0-9, -; a letter first), got {name!r}; rename the job"
            )
        return name


class RLJob(Spec):
    """The whole object as written in YAML."""

    api_version: Literal["rljob.dev/v1alpha1"]
    """rljob.dev/v1alpha1."""
    kind: Literal["RLJob"]
    """RLJob."""
    metadata: Metadata
    """Name, labels."""
    spec: RLJobSpec
    """What the user asks for."""
