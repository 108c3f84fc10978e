"""The records that rollouts, envs, the runner and the actors exchange. Torch is not imported; annotations name tensors as text.

Legend: T tokens of one message, B rows of a batch, N completions of a group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, NotRequired, TypedDict, TypeVar

from rl_core.api.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor


class FinishReason(StrEnum):
    """Why a completion ended; where several apply, the first in this order."""

    ERROR = "error"
    """The sample failed; it is kept for diagnosis only and its reward is NaN."""
    LENGTH = "length"
    """The last generation hit max_new_tokens."""
    SEQ_LIMIT = "seq_limit"
    """The sequence reached max_seq_len."""
    TERMINATED = "terminated"
    """The environment ended the episode."""
    MAX_TURNS = "max_turns"
    """The episode reached its largest number of turns."""
    STOP = "stop"
    """The model ended its completion, and the environment did not end the episode."""

    @property
    def truncated(self) -> bool:
        """Return whether the generation was truncated."""
        return self in (FinishReason.LENGTH, FinishReason.SEQ_LIMIT)


class Message(TypedDict):
    """One message of a log; the concatenated `token_ids` of a log are the model's input."""

    role: str
    """system, user, assistant, environment or tool."""
    content: str
    token_ids: NotRequired[Tensor]
    """[T] int64, exactly this message's slice of the input, template tokens included."""
    generation_logprobs: NotRequired[Tensor]
    """[T] float32, only on assistant messages made by the policy."""
    policy_versions: NotRequired[list[tuple[int, int, int]]]
    """(start, end, version) ranges, contiguous from 0, covering the slice."""
    token_loss_mask: NotRequired[Tensor]
    """[T], 1 where a token may train."""


class DatumSpec(TypedDict):
    """One prompt as read from the data set; further keys are passed on unchanged."""

    message_log: list[Message]
    length: int
    """Prompt tokens."""
    extra_env_info: dict[str, Any] | None
    loss_multiplier: float
    """0 = excluded from the loss."""
    idx: int
    """Index in the data set."""
    task_name: NotRequired[str]
    stop_strings: NotRequired[list[str] | None]
    group_id: NotRequired[str]
    source: NotRequired[str]
    """File and row that it was read from, such as `train.jsonl row 256`."""
    chat: NotRequired[bool]
    """Whether the chat template rendered the prompt, so that what an environment says becomes a message too."""
    data_set: NotRequired[str]
    """Name of the data set, where the job has several."""


@dataclass(kw_only=True, slots=True)
class Completion:
    """One generated sample of a group."""

    message_log: list[Message]
    env_extras: dict[str, Any] | None = None
    """Last metadata of the environment."""
    truncated: bool = False
    reward: float = float("nan")
    """Sum of the rewards of all turns; NaN for a failed sample."""
    finish_reason: str = FinishReason.STOP.value
    policy_versions: tuple[int, int] = (0, 0)
    """Lowest and highest policy version of its tokens."""
    loss_multiplier: float = 1.0
    metrics: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None
    """Sampling seed; None where the backend cannot be seeded per sample."""


@dataclass(kw_only=True, slots=True)
class GroupTimes:
    """Times in the life of a group, for the trace: seconds of the monotonic clock of the process that recorded each."""

    samples: list[list[float]]
    """Rollout, by generation index: when the sample began, then in turns the end of each generation and of each environment step."""
    rollout: str = ""
    """Member that generated the group."""
    given: float = 0.0
    """Runner: when it granted the lease."""
    began: float = 0.0
    """Rollout: when it received the lease."""
    sent: float = 0.0
    """Rollout: when the record was complete and sent."""
    stored: float = 0.0
    """Rollout: when the channel had accepted the record."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """By generation index: lowest and highest policy version of the sample's tokens."""


@dataclass(kw_only=True, slots=True)
class PromptGroupRecord:
    """A prompt with its N completions. Groups are trained on as a whole."""

    prompt_idx: int
    prompt: list[Message]
    """The input message log."""
    extra_env_info: dict[str, Any] | None
    metadata: dict[str, Any]
    """`{"task_name": ...}`."""
    completions: list[Completion]
    """Length N, in the order of the generation index."""
    rollout_metrics: dict[str, Any] = field(default_factory=dict)
    group_id: str = ""
    lease_token: str = ""
    """Token of the ledger's lease, under which the record is stored; only the current lease of a group counts."""
    attempt: int = 1
    start_version: int = 0
    """Policy version when generation began."""
    end_version: int = 0
    order: int = 0
    """Position of its prompt in the order of the ledger."""
    times: GroupTimes | None = None
    """None where they were not recorded."""


class EnvironmentReturn(NamedTuple):
    """Result of an environment step for a batch of B message logs."""

    observations: list[dict[str, str]]
    """[B] of {role, content}."""
    metadata: list[dict[str, Any] | None]
    next_stop_strings: list[list[str] | None] | None
    rewards: Any
    """[B] float tensor, or dict name -> [B]."""
    terminateds: Any
    """[B] bool tensor."""
    answers: list[str | None] | None


class EnvironmentInterface(ABC):
    """Answers and scores message logs. Implemented by rl_core.envs (in env processes) and by user code."""

    max_turns: int | None = None
    """Turns that an episode may take. `rljob validate` refuses a job whose env.maxTurns is lower. None = not declared."""

    @abstractmethod
    def step(self, message_log_batch: list[list[dict[str, Any]]], metadata_batch: list[dict[str, Any] | None]) -> Any:
        """Return (or resolve to) an EnvironmentReturn of B rows; sees only role and content of messages."""

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Return the batch, changed where the task asks for it, and metrics over it."""
        return batch, {}

    def seed(self, n: int) -> None:  # noqa: B027 - optional hook
        """Seed the environment's own randomness."""

    def close(self) -> None:  # noqa: B027 - optional hook
        """Release what the environment holds."""

    def health(self) -> bool:
        """Return whether the environment can serve."""
        return True


@dataclass(kw_only=True, slots=True)
class EnvOutput:
    """What B simulators answer to a chunk of C actions. Arrays are of numpy or torch, of which only the receiver decides.

    Fields can also be read as those of a dict: `output["obs"]`, `output.get("rewards")`, `dict(output)`.
    """

    obs: Any
    """Name -> [B, ...]: the observations to act on. Under auto-reset, those of the new episode where one has begun."""
    final_obs: Any = None
    """Name -> [B, ...]: the last observations of episodes that ended, and `obs` of the others; None where no episode has ended."""
    rewards: Any = None
    """[B, C] float32; None before the first action."""
    terminations: Any = None
    """[B, C] bool: the task ended. Under auto-reset an end is in the last column, whichever action caused it."""
    truncations: Any = None
    """[B, C] bool: the episode was cut, as by a time limit."""
    dones: Any = None
    """[B, C] bool: either of them."""
    final_info: list[dict[str, Any]] | None = None
    """One entry per episode that ended: slot, return, length, success_once, success_at_end."""
    sub_steps: Any = None
    """[B] int64: actions of the chunk that were made, at most C."""
    lost: Any = None
    """[B] bool: the simulator failed and was replaced, so its open episode is lost; None where none did."""
    env_ids: Any = None
    """[B] int64: numbers of the simulators in the job."""
    intervene_actions: Any = None
    """[B, C, ...]: actions that a person took in place of the policy's; None without."""
    intervene_flags: Any = None
    """[B, C] bool: where a person did."""

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        return getattr(self, name)

    def __contains__(self, name: object) -> bool:
        return name in self.__dataclass_fields__

    def keys(self) -> tuple[str, ...]:
        """Return the names of the fields."""
        return tuple(self.__dataclass_fields__)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of the field `name`, or `default` if there is no such field, as `dict.get` does."""
        return getattr(self, name) if name in self else default


@dataclass(kw_only=True, slots=True)
class ChunkStepResult:
    """What a rollout keeps of one decision for B simulators: see `Trajectory` for the fields."""

    actions: Any
    prev_logprobs: Any
    prev_values: Any
    forward_inputs: dict[str, Any]
    dones: Any = None
    terminations: Any = None
    truncations: Any = None
    rewards: Any = None
    """[B, C], of the chunk before; None for the first decision."""
    versions: int = 0


@dataclass(kw_only=True, slots=True)
class Trajectory:
    """T decisions for B simulators, time first. Rewards, dones and values have the meaning of `EnvOutput`.

    With E rollout epochs, T + 1 below stands for E * (N + 1), and T for E * N: what the epochs have follows on each other.
    """

    actions: Tensor
    """[T, B, C, ...]"""
    prev_logprobs: Tensor
    """[T, B, C, D] float32: of each token or dimension of each action."""
    prev_values: Tensor
    """[T + 1, B, 1] float32; the last row is the value of the observations after the last chunk. Zeros without a value head."""
    rewards: Tensor
    """[T, B, C] float32, bootstraps of ended episodes added."""
    dones: Tensor
    """[T + 1, B, C] bool; row 0 is the state before the first chunk."""
    terminations: Tensor
    """[T + 1, B, C] bool."""
    truncations: Tensor
    """[T + 1, B, C] bool."""
    forward_inputs: dict[str, Tensor]
    """Name -> [T, B, ...]: what `forward_train` of the policy takes."""
    env_ids: Tensor
    """[B] int64: numbers of the simulators in the job."""
    versions: Tensor
    """[T] int64: policy version of each decision."""
    sub_steps: Tensor = None
    """[T, B] int64: actions of the chunk that were made. None becomes C everywhere."""
    valid: Tensor = None
    """[T, B] bool: false where the episode was lost with its simulator. None becomes true everywhere."""
    sender: int = 0
    """Place of the rollout in the collection."""
    stage: int = 0
    part: int = 0
    """Place among the parts into which the trajectory of a stage was cut for the data ranks."""
    intervene_flags: Tensor | None = None
    """[T, B, C] bool; None where no person took part."""

    def __post_init__(self) -> None:
        shape = self.rewards.shape
        if self.sub_steps is None:
            self.sub_steps = self.rewards.new_full(shape[:2], shape[-1]).long()
        if self.valid is None:
            self.valid = self.rewards.new_ones(shape[:2]).bool()


R = TypeVar("R", "EnvOutput", "Trajectory")


def record_of(kind: type[R], given: R | Mapping[str, Any]) -> R:
    """Return `given` as a record of the class `kind`; a mapping must have its fields. Raises DataError for unknown and for missing fields."""
    if not isinstance(given, Mapping):
        return given
    try:
        return kind(**given)
    except TypeError as error:
        raise DataError(
            f"{kind.__name__} must have the fields {[one.name for one in fields(kind)]}, got {sorted(given)}: {error}; correct its sender"
        ) from error
