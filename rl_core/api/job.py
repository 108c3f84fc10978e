"""The RLJob schema. These pydantic models validate jobs, generate the CRD, and are the configuration that every worker receives."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, ValidationError, model_validator

from rl_core.api.algorithm import AlgorithmSpec, is_named
from rl_core.api.backends import EMBODIED_PROGRAMS
from rl_core.api.base import Spec, rule
from rl_core.api.bounds import FUNCTION, Name, Pattern, Seconds, listed
from rl_core.api.cel import Cel, literal, unique
from rl_core.api.critic import (
    CRITIC_HAS_NO_WARM_UP,
    CRITIC_IS_A_GANG_OF_ONE,
    CRITIC_IS_OF_TEXT,
    IS_EMBODIED,
    wrong_critic,
)
from rl_core.api.data import DataSpec
from rl_core.api.distillation import TEACHERS_ARE_GROUPS, unknown_teachers
from rl_core.api.env import TYPE_IS_KNOWN, EnvSpec, unknown_type
from rl_core.api.failure import FailurePolicySpec
from rl_core.api.groups import INFERENCE_HOLDS_THE_POLICY, MOST_GROUPS, WEIGHTS_ARE_WHOLE, GroupSpec, wrong_pulls
from rl_core.api.identity import ROLES
from rl_core.api.lora import DROPOUT_IS_ON, idle_dropout
from rl_core.api.metadata import Metadata
from rl_core.api.placed_groups import NUMBERED, PLACED_ARE_GROUPS, placed_groups, unknown_placed
from rl_core.api.problems import explained
from rl_core.api.roles import BIASING, ActorSpec, RolloutSpec
from rl_core.api.settings import (
    CheckpointSpec,
    CodeSpec,
    DeletionPolicySpec,
    ModelSpec,
    PlacementSpec,
    RuntimeSpec,
    SamplesSpec,
    SchedulingSpec,
    TrackerSpec,
    ValidationSpec,
    WeightsSpec,
)

API_VERSION = "rljob.dev/v1alpha1"
MANAGER = "rljob.dev/operator"
"""`managedBy` of this operator."""
MUTABLE_FIELDS = (
    "rollout.replicas",
    "rollout.minReplicas",
    "rollout.maxReplicas",
    "rollout.autoscale",
    "env.replicas",
    "algorithm.steps",
    "algorithm.maxStaleness",
    "actor.optimizer.learningRate",
    "checkpoint",
)
"""Paths below spec that the runner takes while it runs (`PUT /control`), at a step boundary."""
OPERATOR_FIELDS = (
    "suspend",
    "managedBy",
    "ttlSecondsAfterFinished",
    "activeDeadlineSeconds",
    "startDeadlineSeconds",
    "deletionPolicy",
    "scheduling",
    "failurePolicy",
)
"""Paths below spec that only the operator (in a local run: the launcher) reads. The pod fields (pods.PodSpec) take effect at a pod's
next start. Everything else is fixed while a job is not suspended."""
ON_DEVICE = (
    "weights.transport must be auto unless roles take turns on GPUs, got ipc; on one host auto takes shared memory"
)
SHARES = "$placement.mode != 'disaggregated'"
TEXT_PROGRAMS = ("reasoning", "asynchronous")
"""The programs of text; algorithm.maxStaleness determines which of the two runs a job."""
BUILT_IN_PROGRAMS = (*TEXT_PROGRAMS, *EMBODIED_PROGRAMS)
PROCESSES = "[self.?actor.?processesPerPod.or(self.?actor.?gpus).orValue(1), 1].max()"
RANKS = f"($actor.replicas * {PROCESSES} / ($actor.parallel.tensor * $actor.parallel.pipeline))"
ROWS = "($algorithm.promptsPerStep * $algorithm.groupSize)"
PARTS = f"({RANKS} * $algorithm.optimizerStepsPerBatch)"
"""CEL of the actor's processes in a pod, its data-parallel size, of the rows of a step, and of what they are divided into."""
HAS_CRITIC = is_named(["gae"], "$algorithm.name")
OF_CRITIC = (
    "((self.?actor.?optimizer.?valueLearningRate.hasValue() ? ['actor.optimizer.valueLearningRate'] : [])"
    " + ($actor.criticWarmupSteps > 0 ? ['actor.criticWarmupSteps'] : []))"
)
"""CEL of whether there is a critic, and of the settings given that need one."""
KNOWN_CALLER = f"c in {literal(list(ROLES))} || self.groups.exists(o, o.name == c)"
"""CEL of whether the caller `c` is a group of the job."""


Program = Annotated[
    str,
    Field(max_length=253),
    Pattern(
        regex=f"{'|'.join(BUILT_IN_PROGRAMS)}|{FUNCTION}",
        rule=f"one of {', '.join(BUILT_IN_PROGRAMS)} or module:Class",
        way_out="correct it",
        names=BUILT_IN_PROGRAMS,
    ),
]
"""A program by its name, or a class of the user."""


class RLJobSpec(Spec):
    """The desired state of the job."""

    model: ModelSpec
    """The model that training starts from."""
    data: DataSpec
    """Prompts."""
    algorithm: AlgorithmSpec = AlgorithmSpec()
    """The algorithm."""
    actor: ActorSpec = ActorSpec()
    """The training processes."""
    rollout: RolloutSpec = RolloutSpec()
    """The generation processes."""
    env: EnvSpec = EnvSpec()
    """The environments."""
    groups: Annotated[list[GroupSpec], Field(max_length=MOST_GROUPS)] = []
    """Further groups of worker processes, for a program of one's own."""
    program: Program | None = None
    """The loop of the run: reasoning, asynchronous, embodied, embodied_async or module:Class of the user; null = asynchronous where
    algorithm.maxStaleness is above 0, else reasoning."""
    placement: PlacementSpec = PlacementSpec()
    """Which processes share accelerators."""
    weights: WeightsSpec = WeightsSpec()
    """Transfer of weights to the rollouts."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """Checkpoints."""
    validation: ValidationSpec = ValidationSpec()
    """Evaluation on data.validation."""
    runtime: RuntimeSpec = RuntimeSpec()
    """Timeouts and draining."""
    failure_policy: FailurePolicySpec = FailurePolicySpec()
    """Which failures restart the job, and which end it."""
    trackers: Annotated[list[TrackerSpec], Field(max_length=8)] = [TrackerSpec(name="tensorboard")]
    """Metrics trackers besides metrics.jsonl. A list replaces the default, so name tensorboard in it to keep it."""
    samples: SamplesSpec = SamplesSpec()
    """Completions that are kept."""
    extensions: Annotated[list[Name], Field(max_length=32)] = []
    """Python modules that every worker imports and whose register() it calls."""
    code: CodeSpec | None = None
    """Python modules of the user that are not in the image, on a cluster; null = none."""
    suspend: bool = False
    """true: save a checkpoint, then delete all pods; false: resume from the checkpoint. Cluster only."""
    managed_by: Name | None = None
    """Controller of the job; null or rljob.dev/operator = this operator. Cannot be changed. Cluster only."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Seconds after the end until the job is deleted; null = never. Cluster only."""
    active_deadline_seconds: Seconds | None = None
    """Seconds that the job may run, without suspended time; null = unlimited. Cluster only."""
    start_deadline_seconds: Seconds | None = None
    """Seconds until the first step must have finished; null = unlimited. Cluster only."""
    deletion_policy: DeletionPolicySpec = DeletionPolicySpec()
    """Which pods are kept when the job has ended. Cluster only."""
    scheduling: SchedulingSpec = SchedulingSpec()
    """Gang scheduling, queue and evictions. Cluster only."""

    @rule(
        Cel(
            holds=f"{IS_EMBODIED} || {RANKS} < 1 || $algorithm.promptsPerStep % {RANKS} == 0",
            refusal="algorithm.promptsPerStep must be divisible by the actor's data-parallel size %d, got %d; change promptsPerStep or actor.replicas",
            values=(RANKS, "$algorithm.promptsPerStep"),
            field="algorithm.promptsPerStep",
        ),
        Cel(
            holds=f"{IS_EMBODIED} || {PARTS} < 1 || {ROWS} % {PARTS} == 0",
            refusal=(
                "algorithm.promptsPerStep x groupSize must be divisible by data-parallel size x optimizerStepsPerBatch = %d, got %d"
                "; change optimizerStepsPerBatch"
            ),
            values=(PARTS, ROWS),
            field="algorithm.optimizerStepsPerBatch",
        ),
    )
    def _batch_divides(self) -> Iterator[str]:
        if self.program in EMBODIED_PROGRAMS:  # their batches have no prompts: `embodied.check_sizes`
            return
        ranks, prompts = self.actor.data_parallel, self.algorithm.prompts_per_step
        if prompts % ranks:
            yield (
                f"algorithm.promptsPerStep must be divisible by the actor's data-parallel size {ranks}, got {prompts}; change promptsPerStep or actor.replicas"
            )
        rows, parts = prompts * self.algorithm.group_size, ranks * self.algorithm.optimizer_steps_per_batch
        if rows % parts:
            yield (
                f"algorithm.promptsPerStep x groupSize must be divisible by data-parallel size x optimizerStepsPerBatch = {parts}, got {rows}; change optimizerStepsPerBatch"
            )

    @rule(
        Cel(
            holds=f"{HAS_CRITIC} || {OF_CRITIC}.size() == 0",
            refusal="%s needs algorithm.name gae, got %s; choose it or remove the field",
            values=(OF_CRITIC, "$algorithm.name"),
            field="actor",
        ),
        DROPOUT_IS_ON,
    )
    def _settings_are_used(self) -> Iterator[str]:
        name, actor = self.algorithm.name, self.actor
        is_set = {
            "actor.optimizer.valueLearningRate": actor.optimizer.value_learning_rate is not None,
            "actor.criticWarmupSteps": actor.critic_warmup_steps > 0,
        }
        idle = [field for field, used in is_set.items() if used]
        if idle and name != "gae":
            yield f"{listed(idle)} needs algorithm.name gae, got {name}; choose it or remove the field"
        yield from idle_dropout(self.model.lora, dropout=actor.dropout)

    @rule(TYPE_IS_KNOWN)
    def _env_is_known(self) -> Iterator[str]:
        yield from unknown_type(self.env, self.extensions)

    @rule(
        unique("groups", "name"),
        Cel(
            holds=f"!has(self.groups) || self.groups.all(g, !has(g.callers) || g.callers.all(c, {KNOWN_CALLER}))",
            refusal="groups must name groups of the job in callers, got %s; correct it",
            values=(f"self.groups.map(g, has(g.callers) ? g.callers.filter(c, !({KNOWN_CALLER})) : [])",),
            field="groups",
        ),
        TEACHERS_ARE_GROUPS,
        INFERENCE_HOLDS_THE_POLICY,
        CRITIC_IS_A_GANG_OF_ONE,
        CRITIC_IS_OF_TEXT,
        CRITIC_HAS_NO_WARM_UP,
        WEIGHTS_ARE_WHOLE,
    )
    def _groups_are_known(self) -> Iterator[str]:
        names = [group.name for group in self.groups]
        if repeated := next((name for name in names if names.count(name) > 1), None):
            yield f"groups must have unique names, got {repeated} more than once; change one"
        unknown = [[caller for caller in group.callers if caller not in (*ROLES, *names)] for group in self.groups]
        if any(unknown):
            yield f"groups must name groups of the job in callers, got {json.dumps(unknown)}; correct it"
        yield from unknown_teachers(self.algorithm.distillation, self.groups)
        simulators, warm_up = self.program in EMBODIED_PROGRAMS, self.actor.critic_warmup_steps
        yield from wrong_critic(self.algorithm.critic, self.groups, embodied=simulators, warmup_steps=warm_up)
        yield from wrong_pulls(self.groups, inference=self.algorithm.inference, lora=self.model.lora is not None)

    @rule(
        Cel(
            holds=(
                f"!(self.?program.orValue('') in {literal(list(TEXT_PROGRAMS))})"
                " || (self.program == 'asynchronous') == ($algorithm.maxStaleness > 0)"
            ),
            refusal="program %s does not fit algorithm.maxStaleness %d: asynchronous needs more than 0, reasoning 0; remove program",
            values=("self.program", "$algorithm.maxStaleness"),
            field="program",
        ),
        Cel(
            holds="($rollout.replicas > 0 && $env.replicas > 0) || (has(self.program) && self.program.contains(':'))",
            refusal="rollout.replicas and env.replicas must be at least 1 for the program of rljob, got %d and %d; raise them or name a program",
            values=("$rollout.replicas", "$env.replicas"),
            field="program",
        ),
    )
    def _program_fits(self) -> Iterator[str]:
        staleness = self.algorithm.max_staleness
        if self.program in TEXT_PROGRAMS and (self.program == "asynchronous") != (staleness > 0):
            yield (
                f"program {self.program} does not fit algorithm.maxStaleness {staleness}: asynchronous needs more than 0, reasoning 0; "
                "remove program"
            )
        rollouts, envs = self.rollout.replicas, self.env.replicas
        if not (rollouts and envs) and ":" not in (self.program or ""):
            yield (
                f"rollout.replicas and env.replicas must be at least 1 for the program of rljob, got {rollouts} and {envs}; "
                "raise them or name a program"
            )

    @rule(
        Cel(
            holds="$weights.onUpdate == 'wait' || $algorithm.maxStaleness > 0",
            refusal="weights.onUpdate must be wait on policy, got %s and maxStaleness 0; raise algorithm.maxStaleness or remove it",
            values=("$weights.onUpdate",),
            field="weights.onUpdate",
        ),
        Cel(
            holds="$weights.onUpdate != 'keep_kv' || self.?algorithm.?importance.hasValue() || $algorithm.loss.name == 'decoupled_ppo'",
            refusal="weights.onUpdate keep_kv needs algorithm.importance or loss decoupled_ppo, got neither; set one or take abort_resume",
            field="weights.onUpdate",
        ),
    )
    def _updates_in_flight(self) -> Iterator[str]:
        corrected = self.algorithm.importance is not None or self.algorithm.loss.name == "decoupled_ppo"
        if self.weights.on_update == "keep_kv" and not corrected:
            yield "weights.onUpdate keep_kv needs algorithm.importance or loss decoupled_ppo, got neither; set one or take abort_resume"
        if self.weights.on_update != "wait" and not self.algorithm.max_staleness:
            yield f"weights.onUpdate must be wait on policy, got {self.weights.on_update} and maxStaleness 0; raise algorithm.maxStaleness or remove it"

    @rule(
        Cel(
            holds="$rollout.oversample == 1.0 || $algorithm.maxStaleness == 0",
            refusal="rollout.oversample needs maxStaleness 0, got %d, with which rollouts run ahead anyway; remove it",
            values=("$algorithm.maxStaleness",),
            field="rollout.oversample",
        ),
    )
    def _issues_more_on_policy(self) -> Iterator[str]:
        staleness = self.algorithm.max_staleness
        if self.rollout.oversample > 1 and staleness:
            yield f"rollout.oversample needs maxStaleness 0, got {staleness}, with which rollouts run ahead anyway; remove it"

    @rule(
        Cel(
            holds=f"!({SHARES}) || $algorithm.maxStaleness == 0",
            refusal=(
                "algorithm.maxStaleness must be 0 with placement.mode %s, where trainer and rollouts take turns, got %d; "
                "write maxStaleness: 0 or placement.mode: disaggregated"
            ),
            values=("$placement.mode", "$algorithm.maxStaleness"),
            field="algorithm.maxStaleness",
        ),
        Cel(
            holds=f"!({SHARES}) || $algorithm.maxStaleness != 0 || $rollout.gpus == $actor.gpus",
            refusal=(
                "rollout.gpus must equal actor.gpus with placement.mode %s, which puts both on the same devices, got %d beside %d; "
                "write the same number"
            ),
            values=("$placement.mode", "$rollout.gpus", "$actor.gpus"),
            field="rollout.gpus",
        ),
        Cel(
            holds=(
                f"!({SHARES}) || [$algorithm.maxStaleness, $rollout.gpus] != [0, $actor.gpus]"
                " || ($placement.mode == 'hybrid' ? $rollout.replicas >= $actor.replicas : $rollout.replicas == $actor.replicas)"
            ),
            refusal=(
                "rollout.replicas must be actor.replicas with placement.mode colocated, and no fewer with hybrid, got %s with %d beside %d; "
                "change rollout.replicas"
            ),
            values=("$placement.mode", "$rollout.replicas", "$actor.replicas"),
            field="rollout.replicas",
        ),
    )
    def _turns_can_be_taken(self) -> Iterator[str]:
        mode = self.placement.mode
        if mode == "disaggregated":
            return
        actor, rollout, staleness = self.actor, self.rollout, self.algorithm.max_staleness
        paired = rollout.replicas >= actor.replicas if mode == "hybrid" else rollout.replicas == actor.replicas
        if staleness:
            yield (
                f"algorithm.maxStaleness must be 0 with placement.mode {mode}, where trainer and rollouts take turns, got {staleness}; "
                "write maxStaleness: 0 or placement.mode: disaggregated"
            )
        elif rollout.gpus != actor.gpus:
            yield (
                f"rollout.gpus must equal actor.gpus with placement.mode {mode}, which puts both on the same devices, got {rollout.gpus} beside "
                f"{actor.gpus}; write the same number"
            )
        elif not paired:
            yield (
                f"rollout.replicas must be actor.replicas with placement.mode colocated, and no fewer with hybrid, got {mode} with "
                f"{rollout.replicas} beside {actor.replicas}; change rollout.replicas"
            )
        if self.weights.transport == "nccl":
            yield f"weights.transport must not be nccl with placement.mode {mode}, as NCCL takes no device twice, got nccl; write auto"

    @rule(PLACED_ARE_GROUPS)
    def _placed_groups_are_known(self) -> Iterator[str]:
        yield from unknown_placed(self.placement, self.groups)

    @rule(
        Cel(
            holds=f"!self.?rollout.?autoscale.hasValue() || ($placement.mode == 'disaggregated' && !({NUMBERED.format('rollout')}))",
            refusal="rollout.autoscale needs rollouts that placement neither pairs nor numbers, got mode %s; remove it or the placement",
            values=("$placement.mode",),
            field="rollout.autoscale",
        )
    )
    def _rollouts_scale_alone(self) -> Iterator[str]:
        numbered = any("rollout" in placed_groups(key) for key in self.placement.component_placement)
        if self.rollout.autoscale is not None and (numbered or self.placement.mode != "disaggregated"):
            yield f"rollout.autoscale needs rollouts that placement neither pairs nor numbers, got mode {self.placement.mode}; remove it or the placement"

    @rule(
        Cel(
            holds="$weights.transport != 'ipc' || ($actor.gpus > 0 && $placement.mode != 'disaggregated')",
            refusal=ON_DEVICE,
            field="weights.transport",
        )
    )
    def _a_device_is_shared(self) -> Iterator[str]:
        if self.weights.transport == "ipc" and (not self.actor.gpus or self.placement.mode == "disaggregated"):
            yield ON_DEVICE

    @rule(
        Cel(
            holds="$algorithm.loss.name != 'reinforce' || !self.?failurePolicy.?klBlowUp.hasValue()",
            refusal="failurePolicy.klBlowUp needs a loss with a policy ratio, got reinforce; remove it or choose ppo_clip",
            field="failurePolicy.klBlowUp",
        )
    )
    def _kl_is_measured(self) -> Iterator[str]:
        if self.failure_policy.kl_blow_up is not None and self.algorithm.loss.name == "reinforce":
            yield "failurePolicy.klBlowUp needs a loss with a policy ratio, got reinforce; remove it or choose ppo_clip"

    @rule(
        Cel(
            holds=f"$algorithm.allowTruncatedSampling || {BIASING}.size() == 0",
            refusal=(
                "rollout.sampling biases the policy ratio by %s; remove it or set algorithm.allowTruncatedSampling and recomputeLogProbs"
            ),
            values=(BIASING,),
            field="rollout.sampling",
        )
    )
    def _sampling_is_exact(self) -> Iterator[str]:
        biasing = self.rollout.sampling.biasing
        if biasing and not self.algorithm.allow_truncated_sampling:
            yield f"rollout.sampling biases the policy ratio by {listed(biasing)}; remove it or set algorithm.allowTruncatedSampling and recomputeLogProbs"

    @rule(
        Cel(
            holds=(
                "!self.?rollout.?maxSequenceLength.hasValue()"
                " || $rollout.sampling.maxNewTokens < self.rollout.maxSequenceLength"
            ),
            refusal="rollout.sampling.maxNewTokens must be below rollout.maxSequenceLength %d, got %d; lower maxNewTokens",
            values=("self.rollout.maxSequenceLength", "$rollout.sampling.maxNewTokens"),
            field="rollout.sampling",
        ),
        Cel(
            holds=(
                "!self.?rollout.?maxSequenceLength.hasValue()"
                " || $actor.microBatchTokens >= self.rollout.maxSequenceLength"
            ),
            refusal=(
                "actor.microBatchTokens must hold the longest row of rollout.maxSequenceLength %d tokens, got %d"
                "; raise it"
            ),
            values=("self.rollout.maxSequenceLength", "$actor.microBatchTokens"),
            field="actor",
        ),
    )
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

    @rule(
        *(
            Cel(
                holds=f"$rollout.batching != 'perGroup' || $rollout.maxBatch >= ${rows}",
                refusal=f"rollout.maxBatch must hold the %d rows of {rows} with batching perGroup, got %d; raise maxBatch",
                values=(f"${rows}", "$rollout.maxBatch"),
                field="rollout.maxBatch",
            )
            for rows in ("algorithm.groupSize", "validation.samplesPerPrompt")
        )
    )
    def _groups_fit(self) -> Iterator[str]:
        limit, validation = self.rollout.max_batch, self.validation.samples_per_prompt
        for name, rows in (
            ("algorithm.groupSize", self.algorithm.group_size),
            ("validation.samplesPerPrompt", validation),
        ):
            if self.rollout.batching == "perGroup" and rows > limit:
                yield (
                    f"rollout.maxBatch must hold the {rows} rows of {name} with batching perGroup, got {limit}; raise maxBatch"
                )


class RLJob(Spec):
    """The whole object as written in YAML."""

    api_version: Literal["rljob.dev/v1alpha1"]
    """rljob.dev/v1alpha1."""
    kind: Literal["RLJob"]
    """RLJob."""
    metadata: Metadata
    """Name, labels."""
    spec: RLJobSpec
    """The desired state of the job."""
    status: dict[str, Any] | None = Field(None, exclude=True)
    """The status that the operator writes (RLJobStatus). It is not parsed here, so that a status of another version cannot make a job invalid."""

    @model_validator(mode="wrap")
    @classmethod
    def _explain(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Raise errors that say the rule, the value and the way out."""
        try:
            return handler(data)
        except ValidationError as error:
            raise explained(error, cls) from error
