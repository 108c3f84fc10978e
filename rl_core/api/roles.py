"""`spec.actor` and `spec.rollout`, and the fields that they share with `spec.env` (`env.py`)."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Field

from rl_core.api.backends import ENGINES, MOST_ENGINE_PROCESSES, TRAINERS
from rl_core.api.base import Spec, rule
from rl_core.api.bounds import listed, none_for_zero
from rl_core.api.cel import Cel, no_keys
from rl_core.api.egress import Egress
from rl_core.api.optimizer import OptimizerSpec
from rl_core.api.pods import PodSpec

if TYPE_CHECKING:
    TrainerName: TypeAlias = str
    EngineName: TypeAlias = str
else:  # the choices are those of the tables, which a type checker cannot read
    TrainerName, EngineName = Literal[tuple(TRAINERS)], Literal[tuple(ENGINES)]


class RoleSpec(PodSpec):
    """Fields of every role."""

    gpus: int = Field(0, ge=0, le=64)
    """Accelerators per pod; 0 = CPU. A process that does not see them ends with exit code 2."""
    threads: int = Field(1, ge=1, le=256)
    """Compute threads per process (OMP_NUM_THREADS)."""

    @rule(
        Cel(
            holds="$gpus == 0 || $gpuAllocation != 'dra' || has(self.deviceClass)",
            refusal="gpuAllocation dra needs deviceClass, got gpus %d without one; name a DeviceClass of the cluster",
            values=("$gpus",),
            field="gpuAllocation",
        )
    )
    def _claimed_class(self) -> Iterator[str]:
        if self.gpus and self.gpu_allocation == "dra" and self.device_class is None:
            yield f"gpuAllocation dra needs deviceClass, got gpus {self.gpus} without one; name a DeviceClass of the cluster"


class FabricRoleSpec(RoleSpec):
    """Fields of the roles that exchange weights or gradients."""

    host_network: bool = False
    """Use the node's network, for RDMA without a device plugin; only where the chart value policy.allowHostNetwork is true, and for
    actor and rollout alike. NetworkPolicies do not apply to such pods."""
    egress: Egress | None = None
    """Destinations that the pods may reach besides the job, DNS and the envs, on a cluster that enforces NetworkPolicies; null = all but
    link-local addresses and the cloud's metadata; [] = none."""


AttentionKernel = Literal["auto", "eager", "sdpa", "flash_attention_2"]


class ParallelSpec(Spec):
    """Model parallelism of the training processes; the remaining factor is data parallelism. FSDP shards over all processes without these fields."""

    tensor: int = Field(1, ge=1, le=64)
    """Tensor-parallel size; megatron only, as are pipeline, virtualPipeline and sequence."""
    pipeline: int = Field(1, ge=1, le=64)
    """Pipeline-parallel size: number of stages."""
    virtual_pipeline: int | None = Field(None, ge=2, le=64)
    """Model chunks per pipeline stage (interleaved schedule); null = one."""
    sequence: bool = False
    """Sequence parallelism: split activations between the tensor-parallel regions by token."""
    context: int = Field(1, ge=1, le=64)
    """Context-parallel size; only 1, as more needs the attention of Transformer Engine."""
    expert: int = Field(1, ge=1, le=64)
    """Expert-parallel size; only 1, as FSDP shards experts like other weights."""
    replicate: int = Field(1, ge=1, le=1024)
    """FSDP only: number of model replicas, each sharded over consecutive processes (hybrid sharding)."""

    @property
    def model(self) -> int:
        """Return how many processes share a model."""
        return self.tensor * self.pipeline

    @rule(
        Cel(
            holds="$context == 1",
            refusal="context must be 1, got %d: megatron-core cuts rows only with Transformer Engine, which is not there; use tensor and sequence",
            values=("$context",),
            field="context",
        ),
        Cel(
            holds="$expert == 1",
            refusal="expert must be 1, got %d: no model that megatron takes here has experts; fsdp2 shards them",
            values=("$expert",),
            field="expert",
        ),
    )
    def _not_there(self) -> Iterator[str]:
        if self.context > 1:
            yield f"context must be 1, got {self.context}: megatron-core cuts rows only with Transformer Engine, which is not there; use tensor and sequence"
        if self.expert > 1:
            yield f"expert must be 1, got {self.expert}: no model that megatron takes here has experts; fsdp2 shards them"


class OffloadSpec(Spec):
    """What the trainer offloads to host memory while it is not needed; results do not change. With placement.mode colocated all of it is."""

    params: bool = False
    """Offload weights while rollouts generate."""
    grads: bool = False
    """Offload gradients outside of training."""
    optimizer: bool = False
    """Offload moments and float32 copies except during the optimizer step, so that they need no memory beside the activations."""

    @property
    def resident(self) -> frozenset[str]:
        """Return the parts that stay on the device: weights, gradients, optimizer."""
        is_offloaded = {"weights": self.params, "gradients": self.grads, "optimizer": self.optimizer}
        return frozenset(name for name, leaves in is_offloaded.items() if not leaves)


PROCESSES = "[self.?processesPerPod.or(self.?gpus).orValue(1), 1].max()"
"""CEL of `ActorSpec.processes`."""


class ActorSpec(FabricRoleSpec):
    """The trainer."""

    termination_grace_period_seconds: int = Field(120, ge=1, le=86400)
    """Seconds between the request to stop and the kill; a checkpoint is written in them."""
    backend: TrainerName = "fsdp2"
    """Training backend."""
    parallel: ParallelSpec = ParallelSpec()
    """Model parallelism."""
    replicas: int = Field(1, ge=1, le=1024)
    """Number of pods."""
    processes_per_pod: int | None = Field(None, ge=1, le=64)
    """Training processes per pod; each uses one accelerator. null = gpus, and 1 on CPU."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """The optimizer."""
    micro_batch_tokens: int = Field(16384, ge=1, lt=2**31)
    """Tokens per micro-batch, after packing; the longest row must fit."""
    grad_clip: Annotated[float | None, AfterValidator(none_for_zero)] = Field(1.0, ge=0)
    """Largest global gradient norm; 0 or null = not clipped (0 on a cluster: plain `kubectl apply` drops nulls)."""
    balance: bool = True
    """Distribute rows over the data-parallel ranks so that each has about the same computation."""
    accumulate_without_sync: bool = False
    """Reduce gradients only with the last micro-batch of an optimizer step: needs memory for all of them. megatron always does."""
    gradient_checkpointing: bool = False
    """Recompute activations in backward, per decoder layer."""
    gradient_checkpointing_mode: Literal["full", "selective"] = "full"
    """What gradientCheckpointing recomputes. full: whole layers. selective: all but attention and every second matrix product (megatron: the
    feed-forward part)."""
    compile: bool = False
    """torch.compile each decoder layer; fsdp2 only. Needs a C++ compiler in the image (the shipped images have none)."""
    attention: AttentionKernel = "auto"
    """How attention is computed; auto = flash_attention_2 on GPUs in bfloat16, else sdpa."""
    offload: OffloadSpec = OffloadSpec()
    """What is offloaded to host memory between phases."""
    dropout: bool = False
    """Enable the dropout of the model in training."""
    critic_warmup_steps: int = Field(0, ge=0, lt=2**31)
    """Optimizer steps at the start in which only the critic of gae is trained."""
    max_consecutive_skips: int = Field(10, ge=0, lt=2**31)
    """Consecutive optimizer steps that may be skipped for a non-finite gradient before the run fails."""
    profile_steps: Annotated[list[Annotated[int, Field(ge=1, lt=2**31)]], Field(max_length=64)] = []
    """Training steps that torch.profiler records on each process, to `profiles/` in the output folder."""

    @property
    def processes(self) -> int:
        """Return the number of training processes of a pod."""
        return self.processes_per_pod or max(1, self.gpus)

    @property
    def world_size(self) -> int:
        """Return the number of training processes."""
        return self.replicas * self.processes

    @property
    def data_parallel(self) -> int:
        """Return the number of data ranks, over which a batch is cut; of those that share a model, one receives groups."""
        return self.world_size // self.parallel.model

    @rule(
        Cel(
            holds="$backend == 'megatron' || ($parallel.tensor == 1 && $parallel.pipeline == 1 && !$parallel.sequence)",
            refusal="parallel needs backend megatron, got %s; choose it or remove parallel",
            values=("$backend",),
            field="parallel",
        ),
        Cel(
            holds=f"$replicas * {PROCESSES} % ($parallel.tensor * $parallel.pipeline) == 0",
            refusal="replicas x processesPerPod must be divisible by parallel.tensor x pipeline = %d, got %d; change replicas",
            values=("$parallel.tensor * $parallel.pipeline", f"$replicas * {PROCESSES}"),
            field="parallel",
        ),
        Cel(
            holds=(
                f"$parallel.replicate == 1 || ($backend != 'megatron' && $replicas * {PROCESSES} > $parallel.replicate"
                f" && $replicas * {PROCESSES} % $parallel.replicate == 0)"
            ),
            refusal="parallel.replicate needs an FSDP backend and processes that it divides, more than it, got %s with %d; change one",
            values=("$backend", f"$replicas * {PROCESSES}"),
            field="parallel",
        ),
    )
    def _layout(self) -> Iterator[str]:
        parallel = self.parallel
        if self.backend != "megatron" and (parallel.model != 1 or parallel.sequence):
            yield f"parallel needs backend megatron, got {self.backend}; choose it or remove parallel"
        if self.world_size % parallel.model:
            yield (
                f"replicas x processesPerPod must be divisible by parallel.tensor x pipeline = {parallel.model}, got {self.world_size}; change replicas"
            )
        copies, divides = parallel.replicate, self.world_size % parallel.replicate == 0
        if copies > 1 and (self.backend == "megatron" or not divides or self.world_size == copies):
            yield (
                f"parallel.replicate needs an FSDP backend and processes that it divides, more than it, got {self.backend} with {self.world_size}; change one"
            )

    @rule(
        Cel(
            holds="$gradientCheckpointing || $gradientCheckpointingMode == 'full'",
            refusal="gradientCheckpointingMode selective needs gradientCheckpointing true, got false; set it or remove the mode",
            field="gradientCheckpointingMode",
        )
    )
    def _checkpointing_mode_is_used(self) -> Iterator[str]:
        if self.gradient_checkpointing_mode != "full" and not self.gradient_checkpointing:
            yield "gradientCheckpointingMode selective needs gradientCheckpointing true, got false; set it or remove the mode"

    @rule(
        Cel(
            holds="$backend == 'megatron' || $optimizer.distributed",
            refusal="optimizer.distributed false needs backend megatron, got %s; choose it or remove distributed",
            values=("$backend",),
            field="optimizer",
        )
    )
    def _distributed(self) -> Iterator[str]:
        if self.backend != "megatron" and not self.optimizer.distributed:
            yield f"optimizer.distributed false needs backend megatron, got {self.backend}; choose it or remove distributed"


BIASING = (
    "(($rollout.sampling.topP < 1.0 ? ['topP'] : []) + (self.?rollout.?sampling.?topK.hasValue() ? ['topK'] : [])"
    " + ($rollout.sampling.minP > 0.0 ? ['minP'] : []) + ($rollout.sampling.presencePenalty != 0.0 ? ['presencePenalty'] : [])"
    " + ($rollout.sampling.frequencyPenalty != 0.0 ? ['frequencyPenalty'] : [])"
    " + ($rollout.sampling.repetitionPenalty != 1.0 ? ['repetitionPenalty'] : [])"
    " + (self.?rollout.?sampling.?logitBias.orValue({}).size() > 0 ? ['logitBias'] : []))"
)
"""CEL list of the fields that `SamplingSpec.biasing` returns, of a job."""


class SamplingSpec(Spec):
    """Sampling of tokens in training rollouts. Fields that need algorithm.allowTruncatedSampling bias the policy ratio."""

    temperature: float = Field(1.0, gt=0)
    """Softmax temperature; the trainer uses the same."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling; below 1 needs algorithm.allowTruncatedSampling."""
    top_k: int | None = Field(None, ge=1, lt=2**31)
    """Top-k sampling; null = off; a number needs algorithm.allowTruncatedSampling."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Smallest probability relative to that of the likeliest token. This and the next four need allowTruncatedSampling too."""
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    """Subtracted from logits of tokens generated before in this turn."""
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    """The same for each time they were generated."""
    repetition_penalty: float = Field(1.0, gt=0, le=2)
    """Reduces logits of tokens generated before by this factor."""
    logit_bias: Annotated[
        dict[Annotated[str, Field(max_length=10)], Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)
    ] = {}
    """Token id -> number added to its logit; -100 bans it."""
    max_new_tokens: int = Field(64, ge=1, lt=2**31)
    """Longest generation of one turn, tokens."""
    stop: Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=32)] = []
    """Strings that end a generation; they are kept in the text."""
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=256)] = []
    """Token ids that end a generation, besides the eos token of the tokenizer."""

    @property
    def penalised(self) -> bool:
        """Return whether logits depend on the tokens that were generated before."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def biasing(self) -> list[str]:
        """Return the fields by which tokens are not drawn from softmax(logits / temperature)."""
        used = {
            "topP": self.top_p < 1,
            "topK": self.top_k is not None,
            "minP": self.min_p > 0,
            "presencePenalty": self.presence_penalty != 0,
            "frequencyPenalty": self.frequency_penalty != 0,
            "repetitionPenalty": self.repetition_penalty != 1,
            "logitBias": bool(self.logit_bias),
        }
        return [name for name, is_set in used.items() if is_set]

    @rule(
        no_keys(
            "logitBias", "!k.matches('^[0-9]{1,9}$')", "logitBias must have token ids as keys, got %s; correct them"
        )
    )
    def _bias_of_ids(self) -> Iterator[str]:
        invalid = [key for key in self.logit_bias if not re.fullmatch("[0-9]{1,9}", key)]
        if invalid:
            yield f"logitBias must have token ids as keys, got {listed(invalid)}; correct them"


def _size(value: Any) -> int:
    """Return a size that engineArgs give, 0 for a value that is none."""
    return value if type(value) is int and 1 <= value <= MOST_ENGINE_PROCESSES else 0


class AutoscaleSpec(Spec):
    """Autoscaling of rollouts: more while the trainer waits for groups, fewer while rollouts wait for work."""

    min: int = Field(1, ge=1, le=1024)
    """Smallest number of rollouts; minReplicas is a bound too."""
    max: int = Field(ge=1, le=1024)
    """Largest number of rollouts; maxReplicas is a bound too."""
    target_idle: float = Field(0.2, gt=0, lt=1)
    """Largest share of time in which rollouts may have nothing to generate; above it their number is reduced."""


class EngineParallelSpec(Spec):
    """Model parallelism inside a rollout pod."""

    tensor: int | None = Field(None, ge=1, le=64)
    """Tensor-parallel size; null = gpus with engine sglang, 1 with hf. No other value is accepted."""


class RolloutSpec(FabricRoleSpec):
    """The generators."""

    engine: EngineName = "hf"
    """Generation engine. hf: transformers models with the decoder of rljob; sglang: SGLang."""
    parallel: EngineParallelSpec = EngineParallelSpec()
    """Model parallelism."""
    replicas: int = Field(1, ge=0, le=1024)
    """Number of pods; 0 only with a program of one's own."""
    min_replicas: int = Field(1, ge=0, le=1024)
    """Smallest number of serving pods; with fewer the run waits with the condition Degraded."""
    max_replicas: int | None = Field(None, ge=1, le=1024)
    """Upper bound of scaling; null = replicas."""
    autoscale: AutoscaleSpec | None = None
    """Let the operator, or the launcher of a local run, change replicas by the measured idle times; null = off."""
    sampling: SamplingSpec = SamplingSpec()
    """Sampling of training rollouts."""
    max_sequence_length: int | None = Field(None, ge=2, lt=2**31)
    """Longest prompt + completion, tokens; null = the model's limit."""
    max_batch: int = Field(128, ge=1, lt=2**31)
    """Sequences that one engine generates at the same time (rows of the KV cache)."""
    batching: Literal["continuous", "perGroup"] = "continuous"
    """continuous: sequences join and leave the batch at any token. perGroup: each prompt group is one batch, so that results do not depend on the
    load."""
    compile: bool = False
    """torch.compile the decode step; needs a C++ compiler in the image (the shipped images have none)."""
    engine_args: Annotated[dict[str, Any], Field(max_length=64)] = {}
    """Further arguments of SGLang (ServerArgs), by their Python names; those that rljob sets itself are refused. tp_size and dp_size divide a pod among
    engines."""
    oversample: float = Field(1.0, ge=1, le=8)
    """On policy only: generate this many times promptsPerStep groups per step. Those that finish and are not filtered train, in the order in which
    they were issued, until the step has enough."""

    @property
    def engines(self) -> int:
        """Return how many engines a pod has; each is a rollout of its own, with an equal share of the accelerators of the pod.

        Values that `plan.engine_arguments` refuses count as not given.
        """
        if self.engine != "sglang":
            return 1
        ranks, engines = (_size(self.engine_args.get(name)) for name in ("tp_size", "dp_size"))
        return engines or max(1, self.gpus // (ranks or max(1, self.gpus)))

    @property
    def tensor_parallel(self) -> int:
        """Return how many accelerators share each layer of the model."""
        return max(1, self.gpus // self.engines) if self.engine == "sglang" else 1

    @rule(
        Cel(
            holds="$minReplicas <= $replicas",
            refusal="minReplicas must not exceed replicas %d, got %d; lower minReplicas or raise replicas",
            values=("$replicas", "$minReplicas"),
            field="minReplicas",
        ),
        Cel(
            holds="!has(self.maxReplicas) || self.maxReplicas >= $replicas",
            refusal="maxReplicas must not be below replicas %d, got %d; raise maxReplicas",
            values=("$replicas", "self.maxReplicas"),
            field="maxReplicas",
        ),
    )
    def _bounds(self) -> Iterator[str]:
        if self.min_replicas > self.replicas:
            yield (
                f"minReplicas must not exceed replicas {self.replicas}, got {self.min_replicas}; lower minReplicas or raise replicas"
            )
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            yield (
                f"maxReplicas must not be below replicas {self.replicas}, got {self.max_replicas}; raise maxReplicas"
            )

    @rule(
        Cel(
            holds=(
                "!has(self.autoscale) || ($minReplicas <= self.autoscale.?min.orValue(1) && self.autoscale.?min.orValue(1) <= $replicas && $replicas <= self.autoscale.max"
                " && (!has(self.maxReplicas) || self.autoscale.max <= self.maxReplicas))"
            ),
            refusal="autoscale needs minReplicas <= min <= replicas <= max <= maxReplicas, got min %d, max %d beside replicas %d; change one",
            values=("self.autoscale.?min.orValue(1)", "self.autoscale.max", "$replicas"),
            field="autoscale",
        )
    )
    def _autoscale_fits(self) -> Iterator[str]:
        rule, max_replicas = self.autoscale, self.max_replicas
        if rule is None:
            return
        bounds = [
            self.min_replicas,
            rule.min,
            self.replicas,
            rule.max,
            rule.max if max_replicas is None else max_replicas,
        ]
        if bounds != sorted(bounds):
            yield (
                f"autoscale needs minReplicas <= min <= replicas <= max <= maxReplicas, got min {rule.min}, max {rule.max} beside replicas {self.replicas}; change one"
            )

    @rule(
        Cel(
            holds="$engine == 'hf' || ($batching == 'continuous' && !$compile)",
            refusal="batching perGroup and compile need engine hf, got %s; choose it or remove them",
            values=("$engine",),
            field="engine",
        )
    )
    def _engine_offers(self) -> Iterator[str]:
        if self.engine != "hf" and (self.batching == "perGroup" or self.compile):
            yield f"batching perGroup and compile need engine hf, got {self.engine}; choose it or remove them"

    @rule(
        Cel(
            holds="!has(self.parallel) || !has(self.parallel.tensor) || self.parallel.tensor == ($engine == 'sglang' && $gpus > 1 ? $gpus : 1)",
            refusal="parallel.tensor must be gpus with engine sglang and 1 else, got %d with engine %s and gpus %d; change gpus",
            values=("self.parallel.tensor", "$engine", "$gpus"),
            field="parallel",
        )
    )
    def _tensor_is_gpus(self) -> Iterator[str]:
        if self.parallel.tensor not in (None, max(1, self.gpus) if self.engine == "sglang" else 1):
            yield (
                f"parallel.tensor must be gpus with engine sglang and 1 else, got {self.parallel.tensor} with engine {self.engine} "
                f"and gpus {self.gpus}; change gpus"
            )
