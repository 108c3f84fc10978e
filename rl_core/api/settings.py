"""The smaller blocks of `spec`: model, validation, placement, weights, checkpoint, runtime, scheduling, trackers, samples."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from rl_core.api.base import Spec, rule
from rl_core.api.bounds import CheckpointStep, Name, Pattern, ShortName, none_for_zero
from rl_core.api.cel import Cel
from rl_core.api.groups import MOST_GROUPS
from rl_core.api.identity import ROLES
from rl_core.api.lora import LoraSpec

PodDeletion = Literal["KeepAll", "KeepActor", "DeletePods"]


class ModelSpec(Spec):
    """The model that training starts from."""

    path: str = Field(min_length=1)
    """Folder with config.json, safetensors files and tokenizer in the format of Hugging Face, or `hf://repo[@revision]`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the weights in training and generation."""
    lora: LoraSpec | None = None
    """Train low-rank adapters and freeze the model; null = train all weights."""
    float32_head: bool = False
    """Compute logits in float32, from the output layer's weight in dtype; trainer and rollouts alike."""


class ValidationSpec(Spec):
    """Evaluation on data.validation."""

    every_steps: int = Field(10, ge=1, lt=2**31)
    """Steps between evaluations; the last step is always evaluated."""
    before_training: bool = True
    """Also evaluate the model before training, as step 0."""
    samples_per_prompt: int = Field(1, ge=1, lt=2**31)
    """Completions per prompt (pass@k with k of this)."""
    temperature: float = Field(0.0, ge=0)
    """Softmax temperature; 0 = greedy."""
    max_prompts: int | None = Field(None, ge=1, lt=2**31)
    """Number of prompts to use, from the first; null = all."""

    @rule(
        Cel(
            holds="$samplesPerPrompt == 1 || $temperature > 0.0",
            refusal="samplesPerPrompt must be 1 with greedy validation, got %d; set temperature above 0",
            values=("$samplesPerPrompt",),
            field="samplesPerPrompt",
        )
    )
    def _greedy_once(self) -> Iterator[str]:
        if self.samples_per_prompt > 1 and self.temperature == 0:
            yield (
                f"samplesPerPrompt must be 1 with greedy validation, got {self.samples_per_prompt}; set temperature above 0"
            )


_RANKS = r"[0-9]+( *- *[0-9]+)?"
_PART = rf"(all|{_RANKS})( *: *{_RANKS})?"
PlacementMap = Annotated[
    int | Annotated[str, Field(max_length=256)],
    Pattern(
        regex=rf" *{_PART}( *, *({_PART})?)* *",
        rule="ranks[:processes], joined by commas, such as 0-3 or 4-7:0-1",
        way_out="write it so, in quotes",
    ),
]
"""Which resources the processes of a role get."""


class PlacementSpec(Spec):
    """Which processes share accelerators."""

    mode: Literal["disaggregated", "colocated", "hybrid"] = "disaggregated"
    """disaggregated: each role has its own devices. colocated: each rollout runs in an actor pod and uses its devices while the actor does not.
    hybrid: as colocated, and further rollouts have their own devices."""
    component_placement: Annotated[
        dict[Annotated[str, Field(max_length=64)], PlacementMap], Field(max_length=len(ROLES) + MOST_GROUPS)
    ] = {}
    """Accelerators (on CPU: processes) of each group, numbered over the groups named: `{actor: "0-3", rollout: "4-7"}`; {} = actor, rollout, env
    and declared groups in turn."""


class WeightsSpec(Spec):
    """Transfer of weights from the actors to the rollouts."""

    syncer: Literal["bucket", "patch"] = "bucket"
    """bucket: send all weights. patch: send what changed where that is smaller, over zmq."""
    verify_every: int = Field(10, ge=1, lt=2**31)
    """syncer patch: each tensor is compared as a whole once in this many patches; 1 = in every patch."""
    transport: Literal["auto", "zmq", "gloo", "nccl", "ipc"] = "auto"
    """auto: nccl between GPUs, CUDA IPC on a shared GPU, else zmq (shared memory on one host, TCP between hosts)."""
    bucket_bytes: int = Field(128 * 1024 * 1024, ge=4096, lt=2**40)
    """Size of a bucket, bytes."""
    fanout: Annotated[int | None, AfterValidator(none_for_zero)] = Field(None, ge=0, le=64)
    """Receivers that a sender serves at the same time; each receiver passes the weights on to others. 0 or null = the actor serves all of them."""
    encrypt: bool = False
    """Encrypt the weights on the network (CURVE); false: they are authenticated only. transport auto then sends them over zmq to other GPUs."""
    on_update: Literal["wait", "abort_resume", "keep_kv"] = "wait"
    """What happens to running generations when new weights arrive. wait: they end first. abort_resume: they are interrupted and continue from
    their tokens with the new weights. keep_kv: as abort_resume, but their KV cache is kept. The last two need algorithm.maxStaleness above 0."""
    content_check: bool = True
    """After each weight sync every rollout continues a fixed prompt with a fixed seed; the trainer scores the same tokens, and their
    log-probabilities must agree."""
    content_check_tolerance: float = Field(1e-3, gt=0)
    """Largest accepted difference of a log-probability in float32. In bfloat16 the median of 5 checks must be below 4 times the usual
    difference of that rollout, and may always be 50 times this."""

    @rule(
        Cel(
            holds="!has(self.transport) || self.transport in ['auto', 'zmq'] || $syncer == 'bucket'",
            refusal="transport must be auto or zmq with syncer patch, got %s; remove it",
            values=("self.transport",),
            field="transport",
        )
    )
    def _patches_go_over_zmq(self) -> Iterator[str]:
        if self.syncer == "patch" and self.transport not in ("auto", "zmq"):
            yield f"transport must be auto or zmq with syncer patch, got {self.transport}; remove it"

    @rule(
        Cel(
            holds="!has(self.transport) || !(self.transport in ['gloo', 'nccl']) || !$encrypt",
            refusal="transport must be auto, zmq or ipc with encrypt, as a broadcast is not encrypted, got %s; remove it",
            values=("self.transport",),
            field="transport",
        )
    )
    def _broadcasts_are_not_encrypted(self) -> Iterator[str]:
        if self.encrypt and self.transport in ("gloo", "nccl"):
            yield f"transport must be auto, zmq or ipc with encrypt, as a broadcast is not encrypted, got {self.transport}; remove it"


class ResumeFromSpec(Spec):
    """The checkpoint of another run that a job without a checkpoint starts from."""

    job: Annotated[str, Field(min_length=1, max_length=40)] | None = None
    """Name of the run. Its folder must be next to the output folder, on a cluster below `checkpoint.path`. Of several runs of that name the
    one that saved last is used."""
    path: Annotated[str, Field(min_length=1)] | None = None
    """Folder of a checkpoint, or of the run that wrote it; on a cluster below a volume mount of the actor, on one machine beside the output
    folder or below `checkpoint.path`."""
    step: CheckpointStep = "latest"
    """latest; best, by reward, of those that were kept (keepBest); or the number of a step."""

    @rule(
        Cel(
            holds="has(self.job) != has(self.path)",
            refusal="resumeFrom must have either job or path, got %s; give one of them",
            values=("has(self.job) ? 'both' : 'neither'",),
        )
    )
    def _one_run(self) -> Iterator[str]:
        if (self.job is None) == (self.path is None):
            yield f"resumeFrom must have either job or path, got {'neither' if self.job is None else 'both'}; give one of them"


class CheckpointSpec(Spec):
    """Checkpoints."""

    every_steps: Annotated[int | None, AfterValidator(none_for_zero)] = Field(50, ge=0, lt=2**31)
    """Steps between checkpoints; 0 or null = only at the end and on a stop, none of `everySeconds` either (0 on a cluster: plain
    `kubectl apply` drops nulls)."""
    every_seconds: Annotated[float | None, AfterValidator(none_for_zero)] = Field(60, ge=0)
    """Least seconds until the next checkpoint between those of `everySteps`, made only while saving takes less than 2 % of this time and no
    rule of failurePolicy counts steps; the next checkpoint replaces it. 0 or null = none (0 on a cluster: plain `kubectl apply` drops nulls)."""
    asynchronous: bool = False
    """Write checkpoints while training continues, from a copy of the trainer's state in host memory; a failure is reported at the next step."""
    keep: int = Field(3, ge=1, lt=2**31)
    """Number of newest checkpoints to keep, besides the one of `everySeconds`; fewer when the storage would have no room for the next one."""
    keep_best: int = Field(0, ge=0, lt=2**31)
    """Number of checkpoints with the best reward to keep in addition."""
    path: str | None = None
    """Folder; null = `checkpoints` in the output folder."""
    allow_spec_change: bool = False
    """Resume although a field that changes the training was changed."""
    resume_from: ResumeFromSpec | None = None
    """Start from the checkpoint of another run, with its weights, position in the data and history; null = from the model. Ignored when the
    job has a checkpoint of its own."""


class DeadlinesSpec(Spec):
    """Timeouts, seconds."""

    heartbeat: float = Field(2, gt=0)
    """Interval of heartbeats."""
    suspect: float = Field(6, gt=0)
    """Time without a heartbeat after which a process gets no new work."""
    lost: float = Field(15, gt=0)
    """Time without a heartbeat after which a process is taken for lost."""
    hello: float = Field(60, gt=0)
    """Time until a process has registered with the runner."""
    wait_ready: float = Field(600, gt=0)
    """Time until all processes have been initialized. Ranks that load a model wait for each other for this long."""
    rpc: float = Field(60, gt=0)
    """One remote call."""
    engine_silence: float = Field(300, gt=0)
    """Time after which an SGLang engine that answers nothing is replaced, longer than it compiles kernels."""
    group_method: float = Field(3600, gt=0)
    """One method call on all processes of a group."""
    collective: float = Field(60, gt=0)
    """One collective operation, except where ranks load a model (waitReady) or read and write files (groupMethod)."""
    weight_sync: float = Field(300, gt=0)
    """One weight sync."""
    rollout: float = Field(1800, gt=0)
    """Generation of one group."""
    channel: float = Field(600, gt=0)
    """One channel put or get."""
    env_step: float = Field(120, gt=0)
    """One environment step (also one call of a reward function)."""
    env_reset: float = Field(300, gt=0)
    """Start of one environment process."""
    degraded: float = Field(900, gt=0)
    """Time that a local run waits for rollout.minReplicas, and time that a run waits at its end for disk space."""

    @rule(
        Cel(
            holds="$heartbeat < $suspect && $suspect < $lost",
            refusal="heartbeat < suspect < lost must hold, got %s, %s, %s; raise the later ones",
            values=("$heartbeat", "$suspect", "$lost"),
        )
    )
    def _order(self) -> Iterator[str]:
        if not self.heartbeat < self.suspect < self.lost:
            yield (
                f"heartbeat < suspect < lost must hold, got {self.heartbeat:g}, {self.suspect:g}, {self.lost:g}; raise the later ones"
            )


class RuntimeSpec(Spec):
    """Behaviour of processes outside of training."""

    deadlines: DeadlinesSpec = DeadlinesSpec()
    """Timeouts."""
    drain_seconds: float = Field(8, gt=0)
    """Seconds that a process has to finish or return its work after a request to stop."""
    lease_seconds: float = Field(120, gt=0)
    """Seconds for which a rollout leases a prompt group; it renews the lease every third of this time."""
    suspend_seconds: float = Field(120, gt=0)
    """Seconds the runner has to save when the job is suspended, by the user or by a rule; then the pods go. A job whose first step is not
    finished has nothing to save: its pods go at once. Cluster only."""


class DeletionPolicySpec(Spec):
    """Which pods stay when the job has ended.

    DeletePods: none. KeepActor: the actor's, and all that have ended, so that their logs can be read; running rollouts and envs go, which
    frees their accelerators. KeepAll: all, running ones too.
    """

    on_success: PodDeletion = "KeepActor"
    """After success."""
    on_failure: PodDeletion = "KeepActor"
    """After failure."""


class SchedulingSpec(Spec):
    """Gang scheduling, queue and evictions."""

    gang: Literal["auto", "required", "none"] = "auto"
    """auto: the actor's pods are scheduled together where the cluster serves an API for it; required: without one no pod is made, and
    the condition Accepted says so; none: pod by pod."""
    queue: ShortName | None = None
    """Queue of Volcano that the gangs are in, which makes Volcano a requirement; null = Volcano's default. Kueue's queue is the label
    kueue.x-k8s.io/queue-name of the job."""
    evictions: Literal["avoid", "allow"] = "avoid"
    """avoid: a PodDisruptionBudget keeps actor pods from being evicted, and autoscalers keep their nodes; allow: a node drain may end the actors."""

    @rule(
        Cel(
            holds="$gang != 'none' || !has(self.queue)",
            refusal="queue needs gangs, got %s with gang none; write gang auto or required, or remove queue",
            values=("self.queue",),
            field="queue",
        )
    )
    def _queues_hold_gangs(self) -> Iterator[str]:
        if self.gang == "none" and self.queue is not None:
            yield f"queue needs gangs, got {self.queue} with gang none; write gang auto or required, or remove queue"


class CodeSpec(Spec):
    """Python modules of the user, on a cluster; `rljob submit --code DIR` creates the ConfigMap."""

    config_map: Name
    """ConfigMap whose keys are the files; it is on the PYTHONPATH of all roles."""


class TrackerSpec(Spec):
    """One metrics tracker besides metrics.jsonl."""

    name: Literal["tensorboard", "wandb", "trackio", "mlflow"]
    """The tracker; all but tensorboard need the Python extra of that name."""
    project: str | None = None
    """Project, or experiment of mlflow; null = rljob."""
    uri: str | None = None
    """Tracking URI (mlflow) or base URL (wandb, trackio); null = the library's default."""
    offline: bool = False
    """wandb, trackio: write to the output folder only."""


class SamplesSpec(Spec):
    """Completions kept in `samples/` of the output folder, for `rljob samples` and `rljob view`."""

    groups: int = Field(4, ge=0, lt=2**16)
    """Prompt groups kept of each training step, each with all its completions; 0 = none."""
    validation_groups: int = Field(16, ge=0, lt=2**16)
    """Prompts kept of each validation, the first ones of data.validation; 0 = none."""
    megabytes: int = Field(512, ge=8, lt=2**24)
    """Largest size of the folder, in units of 10**6 bytes. The oldest samples are deleted first."""
